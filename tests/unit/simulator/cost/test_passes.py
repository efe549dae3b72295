"""Times of passes, and where they can be stopped."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost.operators import (
    LLAMA_3_8B,
    LLAMA_3_8B_A100,
    LLAMA_3_70B,
    LLAMA_3_70B_A100_TP4,
    OPERATORS,
    QWEN_2_5_14B,
    Line,
    Measured,
    OperatorTableError,
    read_operator_times,
    scaled,
)
from simulator.cost.passes import CostModel, Granularity
from simulator.study.presets import PRESETS
from simulator.study.tradeoff import tradeoff


def cost(granularity=Granularity.SUBLAYER, **about):
    return CostModel(LLAMA_3_8B, LLAMA_3_8B_A100, granularity=granularity, **about)


@pytest.mark.parametrize("granularity", [g for g in Granularity if g is not Granularity.SEGMENT])
def test_where_a_pass_can_stop_does_not_change_how_long_it_takes(granularity):
    assert cost(granularity).prefill_s(3000) == pytest.approx(cost(Granularity.NONE).prefill_s(3000))


@given(
    st.sampled_from(sorted(PRESETS)),
    st.lists(st.tuples(st.integers(1, 4096), st.integers(0, 8192)), min_size=1, max_size=8),
)
def test_prompts_that_share_a_pass_take_at_least_what_each_adds_to_a_large_one(preset, members):
    passes = PRESETS[preset].hardware.cost
    added_s = sum(passes.added_s(*member) for member in members)
    assert 0 < added_s <= passes.times(members).total_s * (1 + 1e-9)


def test_an_mlp_in_segments_reads_its_weights_for_each():
    assert cost(Granularity.SEGMENT).prefill_s(8192) > cost().prefill_s(8192)
    assert cost(Granularity.SEGMENT).prefill_s(256) == pytest.approx(cost().prefill_s(256)), (
        "too short to cut"
    )


@pytest.mark.parametrize("granularity", Granularity)
def test_an_eager_pass_takes_at_least_what_its_host_takes_to_launch_it(granularity):
    free, charged = cost(granularity), cost(granularity, launch_s=0.043)
    short = charged.times([(64, 0)])
    assert short.total_s == pytest.approx(0.043 + charged.step_s)
    parts = [free.times([(64, 0)]).at_s(boundary) - free.step_s for boundary in range(short.boundaries)]
    scale = 0.043 / (free.times([(64, 0)]).total_s - free.step_s)
    assert [short.at_s(boundary) - charged.step_s for boundary in range(short.boundaries)] == pytest.approx(
        [part * scale for part in parts]
    )
    assert charged.prefill_s(8192) == free.prefill_s(8192)


def test_where_a_host_launches_passes_their_floor_is_predicted():
    hardware = PRESETS["flowprefill-8b"].hardware
    hardware = replace(hardware, cost=replace(hardware.cost, launch_s=0.043, _by_tokens={}))
    predicted_s = hardware.predictor().prefill_s
    for tokens in (64, 512, 1024, 2048, 8192):
        assert predicted_s(tokens) == pytest.approx(hardware.cost.prefill_s(tokens), rel=0.06)


def test_attention_is_four_flops_per_element_of_a_head_and_pair():
    tokens, context = 1000, 5000
    fresh = cost(Granularity.OPERATOR).times([(tokens, 0)])
    later = cost(Granularity.OPERATOR).times([(tokens, context)])
    flops = 4 * tokens * context * LLAMA_3_8B.head_dim * LLAMA_3_8B.heads
    assert later.layer_s - fresh.layer_s == pytest.approx(flops / (312e12 * 0.5))


def test_a_prompt_in_chunks_takes_longer_than_whole():
    model = cost()
    chunks = sum(model.times([(512, start)]).total_s for start in range(0, 8192, 512))
    assert chunks > 1.1 * model.prefill_s(8192)


def test_tensor_parallel_ranks_exchange_their_results():
    single = CostModel(LLAMA_3_70B, LLAMA_3_70B_A100_TP4, tensor_parallel=1)
    four = CostModel(LLAMA_3_70B, LLAMA_3_70B_A100_TP4, tensor_parallel=4)
    moved = 2 * 3 / 4 * 2048 * 8192 * 2 / 235e9 + 20e-6
    attention_s = 4 * 2048 * 1024 * 128 * 64 / (312e12 * 0.5)
    difference = four.times([(2048, 0)]).layer_s - single.times([(2048, 0)]).layer_s
    assert difference == pytest.approx(2 * moved - attention_s * 3 / 4, rel=1e-6)


@given(
    st.sampled_from([g for g in Granularity if g is not Granularity.NONE]),
    st.integers(1, 20_000),
    st.floats(0, 1),
)
def test_boundaries_and_times_agree(granularity, tokens, part):
    times = cost(granularity).times([(tokens, 0)])
    at = [times.at_s(boundary) for boundary in range(times.boundaries + 1)]
    assert at[0] == times.head_s
    assert at[-1] == pytest.approx(times.total_s)
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise(at))
    elapsed_s = part * times.total_s
    reached = times.passed(elapsed_s)
    assert -1 <= reached < times.boundaries
    if reached >= 0:
        assert at[reached] <= elapsed_s + 1e-9
        assert elapsed_s <= at[reached + 1] + 1e-9


def test_another_models_operators_are_in_proportion_to_its_work():
    times = scaled(LLAMA_3_8B_A100, LLAMA_3_8B, QWEN_2_5_14B)
    ratio = (5120 * 13824) / (4096 * 14336)
    assert times["mlp_down_proj"](4096) == pytest.approx(ratio * LLAMA_3_8B_A100["mlp_down_proj"](4096))


def test_measured_operators_are_interpolated_and_extended():
    measured = Measured([(100, 1.0), (200, 3.0)])
    assert [measured(n) for n in (50, 100, 150, 200, 400)] == [1.0, 1.0, 2.0, 3.0, 6.0]


def test_a_line_has_a_floor():
    assert [Line(2.0, 1.0, 0.1)(n) for n in (0, 10, 20)] == [2.0, 2.0, 3.0]


def table(path, **row):
    columns = ["device", "model", "tensor_parallel", "num_tokens", *(f"{name}_ms" for name in OPERATORS)]
    cells = {"device": "a100", "model": "m", "tensor_parallel": 1, **row}
    lines = [",".join(columns)]
    lines += [
        ",".join(
            str(cells.get(column, tokens if column == "num_tokens" else tokens / 100)) for column in columns
        )
        for tokens in (100, 200)
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_a_table_of_measured_operators(tmp_path):
    times = read_operator_times(table(tmp_path / "t.csv"), "a100", "m", 1)
    assert times["mlp_act"](150) == pytest.approx(0.0015)


@pytest.mark.parametrize(
    ("row", "hint"), [({"model": "other"}, "it has a100 other tp1"), ({"num_tokens": "many"}, "line 2")]
)
def test_a_table_that_cannot_be_used_is_named(tmp_path, row, hint):
    path = table(tmp_path / "t.csv", **row)
    with pytest.raises(OperatorTableError) as caught:
        read_operator_times(path, "a100", "m", 1)
    assert str(path) in str(caught.value)
    assert hint in str(caught.value)


def test_a_table_that_is_not_there(tmp_path):
    with pytest.raises(OperatorTableError, match="there is no such file"):
        read_operator_times(tmp_path / "none.csv", "a100", "m", 1)


SERVERS = "operator as on the servers"


def test_the_finer_the_boundaries_the_sooner_a_prefill_stands_still():
    places = {place.label: place for place in tradeoff(PRESETS["flowprefill-8b"].hardware, 8192)}
    operator, half, layer = (places[f"{name}, 1 ahead"] for name in (SERVERS, "half layer", "layer"))
    assert operator.mean_ms < half.mean_ms < layer.mean_ms
    assert operator.mean_ms < 4.5
    assert operator.p99_ms < 10.0
    assert operator.cost_percent == pytest.approx(0.0, abs=1e-9)
    assert places["chunks of 512"].cost_percent > places["chunks of 4096"].cost_percent > 0
    for place in places.values():
        assert 0 < place.mean_ms < place.p99_ms


def test_the_servers_do_the_half_layer_again_in_which_they_stopped():
    times = cost(Granularity.REPLAYED).times([(3000, 0)])
    at_operators = cost(Granularity.OPERATOR).times([(3000, 0)])
    assert [times.resumes_at(boundary) for boundary in range(9)] == [0, 1, 1, 1, 4, 4, 4, 7, 8]
    behind_norms = [(1, 1), (4, 6), (7, 9)]
    for boundary, operator in behind_norms:
        assert times.at_s(boundary) == pytest.approx(at_operators.at_s(operator))
    assert [at_operators.resumes_at(boundary) for boundary in range(10)] == [*range(10)]


@pytest.mark.parametrize("granularity", [g for g in Granularity if g is not Granularity.NONE])
def test_what_is_done_at_a_boundary_is_the_time_until_there(granularity):
    """With the operators as they are for a reference length, and attention as the pass has it."""
    model = cost(granularity)
    shape = model.shape_of_passes()
    for members in ([(4096, 0)], [(4096, 60_000)]):
        times = model.times(members)
        alone = replace(model, accelerator=replace(model.accelerator, peak_flops=math.inf)).times(members)
        attention_s = times.layer_s - alone.layer_s
        work_s = [alone.layer_s * times.layers, attention_s * times.layers]
        done_s = [part.tokens * work_s[0] + part.pairs * work_s[1] for part in shape.done]
        assert done_s == pytest.approx(
            [times.at_s(boundary) - times.head_s for boundary in range(times.boundaries)]
        )
