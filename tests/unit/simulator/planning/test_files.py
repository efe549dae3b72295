"""The file in which a user describes a fleet."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from deployments.calibrate.profile import Calibration, save_profile, sweep, with_handoffs
from deployments.config.degraded import DegradedConfig
from deployments.config.router import RouterSection
from simulator.arms.arms import ARMS
from simulator.cost.accelerators import A100, kv_tokens
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_70B
from simulator.fleet.fleet import simulate
from simulator.fleet.setup import Failure
from simulator.planning.files import load_fleet, parse_fleet
from simulator.planning.plan import Outage, plan
from simulator.workload.arrivals import Arrival
from slo.files.profile import read_profile
from slo.files.strict_yaml import FleetConfigError
from slo.predict.handoff import HandoffSample
from slo.predict.prefill_time import PrefillPredictor, Sample, fit
from slo.tiers import BACKGROUND, PREMIUM, STANDARD

CHAT = {"share": 1, "mean_tokens": 600, "ttft_ms": 500, "tier": "premium"}
LEAST = {"rate_rps": 2, "workload": {"kinds": {"chat": CHAT}}}


def complaint(**values):
    with pytest.raises(FleetConfigError) as caught:
        parse_fleet(LEAST | values, "fleet.yaml")
    return str(caught.value)


def test_the_least_that_can_be_said_is_a_rate_and_a_workload():
    config = parse_fleet(LEAST)
    setup, demand = config.setup(3, 2), config.demand()
    assert setup.arm.name == "slackserve"
    assert (setup.prefill_replicas, setup.decode_replicas) == (3, 2)
    assert setup.hardware.kv_tokens == kv_tokens(LLAMA_3_8B, A100, 1)
    assert (demand.rate_rps, demand.target, demand.requests) == (2, 0.95, 2000)


def test_what_the_documentation_shows_is_a_fleet(tmp_path):
    page = (Path(__file__).parents[4] / "docs" / "simulation.md").read_text()
    whole, traced = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    row = '{"timestamp": %d, "input_length": 10, "output_length": 5}\n'
    (tmp_path / "conversation.jsonl").write_text(row % 0 + row % 1000)
    for name, text in (("mix", whole), ("trace", f"rate_rps: 1\n{traced}")):
        path = tmp_path / f"{name}.yaml"
        path.write_text(text)
        assert load_fleet(path).demand().workload.stream(1.0, 2, 0)


def test_a_whole_file_can_be_planned(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(
        """
model: llama-3-70b
accelerator: h100
tensor_parallel: 4
arm: slackserve
link: {gb_ps: 50, latency_ms: 1}
decode: {accelerator: a100, tensor_parallel: 8, max_batch: 128}
handoff_ms: 40
tiers: {premium: {tpot_ms: 60, weight: 8}, standard: {sheddable: false}}
workload:
  burst: 2
  kinds:
    chat: {share: 3, mean_tokens: 500, ttft_ms: 600, tier: premium}
    documents: {share: 1, is_uniform: true, range_tokens: [2000, 8000], ttft_scale: [4, 8]}
rate_rps: 6
target: 0.9
requests: 150
seed: 7
"""
    )
    config = load_fleet(path)
    setup = config.setup()
    assert setup.hardware.cost.shape == LLAMA_3_70B
    assert setup.hardware.weights[PREMIUM] == 8
    assert setup.tiers[PREMIUM].tpot_s == 0.06
    assert setup.tiers[PREMIUM].ttft_s == 0.2, "what is not given stays"
    assert not setup.tiers[STANDARD].sheddable
    assert setup.decode.max_batch == 128
    assert setup.link.bytes_ps == 50e9
    found = plan(setup, config.demand())
    assert found.best.reaches(0.9)
    assert load_fleet(path).setup().handoff_s == 0.04


def test_own_numbers_stand_for_model_and_accelerator():
    config = parse_fleet(
        LEAST
        | {
            "model": {"layers": 32, "hidden": 4096, "intermediate": 14336, "heads": 32, "kv_heads": 8},
            "accelerator": {"peak_tflops": 312, "memory_gb_ps": 2039, "memory_gb": 80, "link_gb_ps": 235},
        }
    )
    known = parse_fleet(LEAST).setup().hardware.cost
    assert config.setup().hardware.cost.prefill_s(3000) == pytest.approx(known.prefill_s(3000))


def test_a_profile_gives_the_prefill_times(tmp_path):
    found = fit([Sample(100, 0.1), Sample(1000, 0.55), Sample(2000, 1.05)])
    save_profile(tmp_path / "p.json", Calibration((), found), {})
    (tmp_path / "fleet.yaml").write_text(json.dumps(LEAST | {"profile": "p.json", "model": "smollm2-135m"}))
    config = load_fleet(tmp_path / "fleet.yaml")
    assert asdict(read_profile(tmp_path / "p.json", FleetConfigError).predictor) == asdict(found.predictor)
    cost = config.setup().hardware.cost
    for tokens in (1, 500, 10_000):
        assert cost.prefill_s(tokens) == pytest.approx(found.predictor.prefill_s(tokens))
    assert simulate(config.setup(), config.demand().stream()[:50]).attainment > 0


def test_a_profile_gives_attention_and_the_link_too(tmp_path):
    curve = PrefillPredictor(0.0002, 0.01, per_pair_s=3e-8)
    lengths = [32, 512, 2048]
    found = sweep(curve.prefill_s, lengths, 1, [(64, 1024)])
    found = with_handoffs(found, [HandoffSample(n, 0.003, 0.01 + 2e-6 * n) for n in lengths])
    save_profile(tmp_path / "p.json", found, {}, kv_bytes_per_token=46_080)
    values = LEAST | {"profile": str(tmp_path / "p.json"), "model": "smollm2-135m"}
    setup = parse_fleet(values).setup()
    assert setup.hardware.cost.prefill_s(300, 5000) == pytest.approx(curve.prefill_s(300, 5000))
    size_bytes = 1000 * setup.hardware.cost.shape.kv_bytes_per_token
    assert setup.link.alone_s(size_bytes) == pytest.approx(0.01 + 0.002), "the seconds that were measured"
    given = parse_fleet(values | {"link": {"gb_ps": 50}}).setup()
    assert given.link.bytes_ps == 50e9, "what the file says goes before"


def test_a_profile_of_an_accelerator_gives_its_floor_and_the_handoff_too(tmp_path):
    curve = PrefillPredictor(3e-5, 0.0, handoff_s=0.02, per_pair_s=5e-10, floor_s=0.043)
    profile = {"format": 4, "about": {"accelerator": "cuda"}, "predictor": asdict(curve)}
    (tmp_path / "p.json").write_text(json.dumps(profile))
    values = LEAST | {"profile": str(tmp_path / "p.json")}
    setup = parse_fleet(values).setup()
    for tokens, context_tokens in ((1, 0), (64, 0), (8192, 0), (512, 16_000)):
        passes_s = setup.hardware.cost.prefill_s(tokens, context_tokens)
        assert passes_s == pytest.approx(curve.prefill_s(tokens, context_tokens))
    assert setup.hardware.predictor().floor_s == pytest.approx(0.043), "what the replicas reckon with"
    assert setup.handoff_s == 0.02
    assert parse_fleet(values | {"handoff_ms": 5}).setup().handoff_s == 0.005


def test_a_trace_lies_beside_the_file(tmp_path):
    rows = [{"timestamp": n * 1000, "input_length": 700, "output_length": 20} for n in range(20)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    workload = {"trace": "t.jsonl", "classes": [{"kind": "all", "ttft_ms": 900}]}
    (tmp_path / "fleet.yaml").write_text(json.dumps({"rate_rps": 2, "workload": workload}))
    arrivals = load_fleet(tmp_path / "fleet.yaml").demand().stream()
    assert {a.tokens for a in arrivals} == {700}
    (tmp_path / "t.jsonl").unlink()
    with pytest.raises(FleetConfigError, match=r"workload.trace: .* there is no such file"):
        load_fleet(tmp_path / "fleet.yaml").demand()


@pytest.mark.parametrize(
    ("values", "wanted"),
    [
        ({"acelerator": "a100"}, "unknown key 'acelerator'; did you mean 'accelerator'?"),
        (
            {"decode": {"max_bach": 3}},
            "fleet.yaml: decode: unknown key 'max_bach'; did you mean 'max_batch'?",
        ),
        ({"model": "llama-3-9b"}, "model: there is no model 'llama-3-9b'; did you mean 'llama-3-8b'?"),
        ({"accelerator": "tpu"}, "accelerator: there is no accelerator 'tpu'; known are a100, h100"),
        (
            {"decode": {"accelerator": "h10"}},
            "decode.accelerator: there is no accelerator 'h10'; did you mean",
        ),
        ({"arm": "slackserv"}, "did you mean 'slackserve'?"),
        ({"arm": "slackserve-admission"}, "arm: slackserve-admission is one replica that refuses requests"),
        ({"tiers": {"premum": {}}}, "there is no tier 'premum'; did you mean 'premium'?"),
        (
            {"tiers": {"premium": {"e2e_ms": 9000}}},
            "fleet.yaml: tiers.premium: unknown key 'e2e_ms'; known are rank, default, tpot_ms",
        ),
        ({"target": 1}, "target: Input should be less than 1 (given: 1)"),
        ({"rate_rps": 0}, "rate_rps: Input should be greater than 0 (given: 0)"),
        ({"workload": {}}, "give at least one kind under kinds, for a mix, or trace and classes"),
        (
            {"workload": {"kinds": {"a": {"share": 1, "mean_tokens": 60_000}}}},
            "workload.kinds.a: mean_tokens, 60000, lies outside of range_tokens, 16 to 32000",
        ),
        (
            {"workload": {"kinds": {"a": CHAT | {"output_tokens": 0.5}}}},
            "workload.kinds.a.output_tokens: Input should be greater than or equal to 1 (given: 0.5)",
        ),
        (
            {"model": "llama-3-70b", "tensor_parallel": 3},
            "tensor_parallel: 3 does not divide the model's 64 heads into equal parts",
        ),
        (
            {"model": "llama-3-70b", "tensor_parallel": 8, "decode": {"tensor_parallel": 5}},
            "decode.tensor_parallel: 5 does not divide the model's 64 heads",
        ),
        ({"workload": {"trace": "x.jsonl"}}, "trace and classes go together"),
        ({"workload": {"kinds": {"a": {"share": 1}}}}, "workload.kinds.a: give mean_tokens, or range_tokens"),
    ],
)
def test_what_cannot_be_used_is_named(values, wanted):
    assert wanted in complaint(**values)


@pytest.mark.parametrize("arm", sorted(ARMS.keys() - {"slackserve-admission"}))
def test_every_request_of_an_overloaded_fleet_ends_whatever_the_arm(arm):
    kinds = {"chat": CHAT | {"mean_tokens": 4000, "tier": "background", "output_tokens": 8}}
    fleet = parse_fleet({"arm": arm, "rate_rps": 30, "requests": 60, "workload": {"kinds": kinds}})
    result = simulate(fleet.setup(), fleet.demand().stream())
    assert None not in {passage.outcome for passage in result.passages}


def test_a_fleet_is_planned_with_what_it_loses():
    fleet = parse_fleet(LEAST | {"rate_rps": 10, "requests": 1000, "outage": {"at_s": 99, "for_s": 30}})
    assert fleet.demand().outage == Outage(replicas=1, at_s=99.0, for_s=30.0)
    late = parse_fleet(LEAST | {"rate_rps": 10, "requests": 1000, "outage": {"at_s": 100, "for_s": 30}})
    with pytest.raises(
        FleetConfigError, match=r"outage.at_s: 100 s is behind the load's end; 1000 requests at"
    ):
        late.demand()
    assert "outage.for_s: Field required" in complaint(outage={})


def test_the_router_of_a_fleet_treats_replicas_as_a_servers_does_by_default():
    """But for prompts that decode would compute, at a pace that nobody simulates."""
    assert parse_fleet(LEAST).setup().limits == RouterSection().limits(DegradedConfig(local_prefill=False))


def test_a_replica_that_is_lost_is_avoided_when_it_is_silent_and_what_it_had_is_placed_again_soon_after():
    arrivals = [Arrival(n, n / 10, "chat", 2000, 5, None, BACKGROUND) for n in range(100)]
    result = simulate(parse_fleet(LEAST).setup(prefill_replicas=2), arrivals, [Failure(0, 5.0, 99.0)])
    again = [passage for passage in result.passages if passage.placements > 1]
    assert max(passage.arrival.at_s for passage in again) < 5.0 + 1.6
    assert 0.0 < min(passage.job.prefilled_s for passage in again) - (5.0 + 2.5) < 2.0


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(
        FleetConfigError, match=r"does not fit into the 80 GB of the .* replicas; raise tensor"
    ):
        parse_fleet(LEAST | {"model": "llama-3-70b"}).setup()


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("a: [", "is not YAML"), ("- 1", "expected keys and values, found list"), (None, "cannot be read")],
)
def test_a_file_that_is_none_is_refused(tmp_path, text, wanted):
    path = tmp_path / "fleet.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(FleetConfigError, match=wanted):
        load_fleet(path)


@pytest.mark.parametrize("text", ["{}", "[1]", '{"format": 9}', '{"format": 1, "predictor": {"a": 1}}', "x"])
def test_what_is_no_profile_is_refused(tmp_path, text):
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(FleetConfigError, match=r"profile: .*(writes one|this version reads 1)"):
        read_profile(tmp_path / "p.json", FleetConfigError)


# Tiers of one's own

OWN_TIERS = {"fast": {"weight": 9, "tpot_ms": 40, "share": 0.6}, "slow": {"default": True}}


def test_a_fleet_has_tiers_of_its_own():
    kinds = {"chat": {**CHAT, "tier": "fast"}, "mail": {key: CHAT[key] for key in CHAT if key != "tier"}}
    config = parse_fleet({"workload": {"kinds": kinds}, "rate_rps": 3, "tiers": OWN_TIERS})
    setup = config.setup()
    assert setup.tiers.names == ("fast", "slow")
    assert (setup.tiers["fast"].tpot_s, setup.tiers["fast"].share) == (0.04, 0.6)
    assert setup.hardware.weights == {"fast": 9, "slow": 1, "system": 1}
    arrivals = config.demand().workload.stream(3.0, 200, 1)
    assert {(arrival.kind, arrival.tier) for arrival in arrivals} == {("chat", "fast"), ("mail", "slow")}


def test_a_kind_of_an_unknown_tier_is_refused():
    with pytest.raises(FleetConfigError, match="there is no tier 'premium'; known are fast, slow"):
        parse_fleet({"workload": {"kinds": {"chat": CHAT}}, "rate_rps": 3, "tiers": OWN_TIERS})


def test_the_router_of_our_servers_refuses_as_it_does_by_default():
    """A plan without it would count requests that are never admitted; stock servers have no such rules."""
    chat = CHAT | {"tier": "standard"}
    busy = {"rate_rps": 200, "workload": {"kinds": {"chat": chat}}, "requests": 4000}
    fleet = parse_fleet(busy)
    setup, arrivals = fleet.setup(), fleet.demand().stream()
    refused = [simulate(each, arrivals).refused for each in (setup, replace(setup, admission=None))]
    assert refused[0] > refused[1] + 0.01
    assert parse_fleet(busy | {"arm": "sedf-resume"}).setup().admission is None
