"""What a load test offers: workload files, presets, lengths, extents, prompts."""

from types import SimpleNamespace

import pytest

from deployments.bench import BenchError
from deployments.bench.load import Prompts
from deployments.bench.mixes import load_workload, presets
from deployments.bench.stream import Extent, Shape, stream
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

VOCABULARY = range(100, 200)


def arrival(**changes):
    fields = {
        "number": 0,
        "at_s": 0.0,
        "kind": "chat",
        "tokens": 100,
        "output_tokens": 10,
        "ttft_s": 1.0,
        "tier": STANDARD,
    }
    return Arrival(**{**fields, **changes})


def written(tmp_path, text):
    path = tmp_path / "mix.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", [name for name in presets() if name != "trace"])
def test_every_preset_offers_all_its_kinds(name):
    workload = load_workload(name)
    arrivals = workload.mix(None).stream(2.0, 400, seed=1)
    assert {item.kind for item in arrivals} == {*workload.kinds}


def test_the_classes_of_a_trace_take_every_length():
    records = [(0.0, 10, 5, ()), (1.0, 2000, 5, ()), (2.0, 10**6, 5, ())]
    trace = load_workload("trace").trace(records)
    assert {item.kind for item in trace.stream(1.0, 3, seed=0)} == {"short", "medium", "long"}


def test_a_request_of_a_trace_has_the_objective_of_its_class_however_long_its_prompt_takes(tmp_path):
    classes = "[{kind: a, max_prompt_tokens: 50, ttft_ms: 250}, {kind: b, ttft_ms: 4000, tier: premium}]"
    records = [(0.0, 10, 5, ()), (1.0, 10**6, 5, ())]
    trace = load_workload(written(tmp_path, f"classes: {classes}")).trace(records)
    found = {(item.tokens, item.ttft_s, item.tier) for item in trace.stream(1.0, 2, seed=0)}
    assert found == {(10, 0.25, STANDARD), (10**6, 4.0, PREMIUM)}


def test_a_users_own_mix(tmp_path):
    text = "kinds: {mail: {share: 1, is_uniform: true, range_tokens: [5, 9], ttft_ms: 250, tier: premium}}"
    (first,) = load_workload(written(tmp_path, text)).mix(None).stream(1.0, 1, seed=0)
    assert (first.kind, first.tier, first.ttft_s) == ("mail", PREMIUM, 0.25)
    assert 5 <= first.tokens <= 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "at least one kind"),
        ("kinds: {}", "at least one kind"),
        (
            "kinds: {a: {share: 1, mean_tokens: 50}}\nclasses: [{kind: x, ttft_ms: 1, tier: premium}]",
            "or classes",
        ),
        ("kinds: {a: {share: 1, mean_token: 5}}", "unknown key 'mean_token'; did you mean 'mean_tokens'?"),
        ("kinds: {a: {share: 0, mean_tokens: 5}}", "kinds.a.share: Input should be greater than 0"),
        ("kinds: {a: {share: 1}}", "give mean_tokens, or range_tokens with is_uniform: true"),
        ("kinds: {a: {share: 1, mean_tokens: 5, range_tokens: [9, 5]}}", "the shortest prompt first"),
        ("kinds: {a: {share: 1, mean_tokens: 50, ttft_ms: 1, ttft_scale: [1, 2]}}", "not both"),
        ("kinds: {a: {share: 1, mean_tokens: 5, tier: Gold}}", "'Gold' is not a tier's name"),
        (
            "classes: [{kind: x, max_prompt_tokens: 5, ttft_ms: 1, tier: premium}]",
            "the last one has no max_prompt_tokens",
        ),
        ("kinds: [", "is not YAML"),
        ("- 1", "valid dictionary"),
    ],
)
def test_a_workload_file_that_cannot_be_used_is_refused_with_the_reason(tmp_path, text, message):
    with pytest.raises(BenchError, match=r"mix\.yaml") as raised:
        load_workload(written(tmp_path, text))
    assert message in str(raised.value)


def test_a_misspelt_preset_is_refused_with_the_nearest():
    with pytest.raises(BenchError, match="did you mean 'embedded'"):
        load_workload("embeded")


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(BenchError, match=r"none\.yaml cannot be read: No such file"):
        load_workload("none.yaml")


def test_objectives_relative_to_the_prefill_time_need_prefill_times(tmp_path):
    workload = load_workload(written(tmp_path, "kinds: {a: {share: 1, mean_tokens: 50, ttft_scale: [2, 2]}}"))
    with pytest.raises(BenchError, match=r"kinds\.a\.ttft_scale needs --profile"):
        workload.mix(None)
    (first,) = workload.mix(lambda tokens: 3.0).stream(1.0, 1, seed=0)
    assert first.ttft_s == 6.0


def test_a_mix_is_no_trace_and_a_trace_no_mix():
    with pytest.raises(BenchError, match="need a --trace"):
        load_workload("trace").mix(None)
    with pytest.raises(BenchError, match="needs one with classes"):
        load_workload("embedded").trace([(0.0, 1, 1, ()), (1.0, 1, 1, ())])


@pytest.mark.parametrize(
    ("shape", "tokens", "output"),
    [
        (Shape(), 100, 10),
        (Shape(scale=0.1), 10, 1),
        (Shape(scale=0.001), 1, 1),
        (Shape(max_tokens=50), 40, 10),
        (Shape(max_tokens=8), 4, 4),
        (Shape(max_tokens=50, max_output_tokens=2), 48, 2),
        (Shape(scale=2, max_tokens=150), 130, 20),
    ],
)
def test_lengths_are_made_to_fit(shape, tokens, output):
    fitted = shape.fit(arrival())
    assert (fitted.tokens, fitted.output_tokens) == (tokens, output)


@pytest.mark.parametrize("shape", [Shape(scale=0.1), Shape(max_tokens=60)])
def test_an_objective_of_the_prefill_time_is_of_the_prompt_that_is_sent(tmp_path, shape):
    text = "kinds: {a: {share: 1, mean_tokens: 500, ttft_scale: [3, 3]}}"
    mix = load_workload(written(tmp_path, text)).mix(float)
    sent = stream(mix, 1.0, Extent(requests=50), shape, seed=0)
    assert [item.ttft_s for item in sent] == [3.0 * item.tokens for item in sent]


@pytest.mark.parametrize("shape", [Shape(scale=0.1), Shape(max_tokens=60)])
def test_a_request_of_a_trace_keeps_the_class_of_its_recorded_length(shape):
    trace = load_workload("trace").trace([(0.0, 2000, 5, ()), (1.0, 9000, 5, ())])
    traced = stream(trace, 1.0, Extent(requests=4), shape, seed=0)
    assert {(item.kind, item.ttft_s) for item in traced} == {("medium", 4.0), ("long", 15.0)}
    assert all(item.tokens < 1000 for item in traced)


@pytest.mark.parametrize("duration_s", [5.0, 60.0])
def test_a_duration_takes_what_arrives_in_it(duration_s):
    mix = load_workload("embedded").mix(None)
    arrivals = stream(mix, 4.0, Extent(duration_s=duration_s), Shape(), seed=3)
    assert arrivals == stream(mix, 4.0, Extent(requests=len(arrivals)), Shape(), seed=3)
    following = stream(mix, 4.0, Extent(requests=len(arrivals) + 1), Shape(), seed=3)[-1]
    assert arrivals[-1].at_s < duration_s <= following.at_s


@pytest.mark.parametrize(("rate_rps", "is_longer"), [(0.1, True), (4.0, False)])
def test_a_duration_goes_on_until_as_many_have_arrived_as_are_needed(rate_rps, is_longer):
    mix = load_workload("embedded").mix(None)
    arrivals = stream(mix, rate_rps, Extent(duration_s=60.0, fewest=30), Shape(), seed=0)
    assert (arrivals == stream(mix, rate_rps, Extent(requests=30), Shape(), seed=0)) == is_longer
    assert (arrivals == stream(mix, rate_rps, Extent(duration_s=60.0), Shape(), seed=0)) != is_longer


def test_a_duration_in_which_nothing_arrives_is_refused():
    with pytest.raises(BenchError, match=r"no request arrives within 0\.1 s"):
        stream(load_workload("embedded").mix(None), 1e-6, Extent(duration_s=0.1), Shape(), seed=0)


@pytest.mark.parametrize(
    ("rate_rps", "extent"), [(1e12, Extent(duration_s=10.0)), (1.0, Extent(requests=10_000_001))]
)
def test_more_requests_than_this_machine_can_hold_are_refused_before_any_is_drawn(rate_rps, extent):
    workload = SimpleNamespace(stream=lambda *_: pytest.fail("requests are drawn"))
    with pytest.raises(BenchError, match="more than 10,000,000; give a lower rate, or a"):
        extent.of(workload, rate_rps, seed=0)


def test_the_most_requests_are_offered():
    drawn = []
    workload = SimpleNamespace(
        stream=lambda rate_rps, count, seed: drawn.append(count) or [arrival(at_s=9.9)]
    )
    Extent(requests=10_000_000).of(workload, 1.0, seed=0)
    assert drawn == [10_000_000]


def test_tiers_can_be_drawn_whatever_the_kind():
    mix = load_workload("embedded").mix(None)
    shape = Shape(tiers={PREMIUM: 1.0, BACKGROUND: 3.0})
    drawn = [item.tier for item in stream(mix, 1.0, Extent(requests=2000), shape, seed=0)]
    assert drawn.count(STANDARD) == 0
    assert drawn.count(PREMIUM) / 2000 == pytest.approx(0.25, abs=0.04)


def test_prompts_have_the_length_and_stay_in_the_vocabulary():
    prompt = Prompts(VOCABULARY).of(arrival(tokens=1234))
    assert len(prompt) == 1234
    assert {*prompt} <= {*VOCABULARY}


def test_nothing_is_said_twice():
    prompts = Prompts(VOCABULARY)
    first, second = prompts.of(arrival(number=1)), prompts.of(arrival(number=2))
    assert first[:16] != second[:16]
    assert Prompts(VOCABULARY).of(arrival(number=1))[:16] != first[:16]  # the next run


def test_equal_blocks_are_equal_tokens_up_to_where_the_requests_part():
    prompts = Prompts(VOCABULARY)
    one = prompts.of(arrival(number=1, tokens=50, blocks=(7, 8), block_tokens=20))
    two = prompts.of(arrival(number=2, tokens=50, blocks=(7, 9), block_tokens=20))
    assert one[:20] == two[:20]
    assert one[20:40] != two[20:40]
    assert one[40:] != two[40:]


def test_blocks_stay_shared_when_they_are_scaled():
    shape, prompts = Shape(scale=0.5), Prompts(VOCABULARY)
    one, two = (
        prompts.of(shape.fit(arrival(number=number, tokens=tokens, blocks=(1, 2), block_tokens=64)))
        for number, tokens in ((1, 128), (2, 100))
    )
    assert len(two) == 50
    assert one[:50] == two
