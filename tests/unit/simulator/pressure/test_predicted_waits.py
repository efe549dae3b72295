"""Predicted waits for decode's memory, beside what they are on an engine in virtual time."""

from random import Random
from statistics import fmean, median

import pytest

from simulator.cost.decode_steps import DecodeModel
from simulator.pressure.decoding import PressedRequest
from simulator.pressure.engine import PressedEngine, PressedSetup
from simulator.pressure.ours import Ours
from slo.decode.outlook import Outlook
from slo.tiers import DEFAULT_TIERS, STANDARD

PROMPT = 200
TOLD_S = 0.5


def waits(step_s, rate_rps, seed):
    """(predicted, real) seconds to the first token of those that were to wait, told every half second."""
    rng, asked, now_s = Random(seed), [], 0.0
    while (now_s := now_s + rng.expovariate(rate_rps)) < 90:
        answer = min(1000, round(200 * rng.lognormvariate(0.0, 0.5)))
        asked.append((now_s, answer, 1024 if rng.random() < 2 / 3 else answer))
    model = DecodeModel(0.6 * step_s, 0.07 * step_s, 0.0, 0.0, kv_tokens=23 * 128)
    way = Ours(DEFAULT_TIERS)
    engine = PressedEngine(PressedSetup(model, 5e-5, 23, 128), way, DEFAULT_TIERS)
    load, told_s, sent, found = way.load(engine), 0.0, {}, []
    due = list(reversed(asked))
    while due or engine.running or engine.waiting:
        if not engine.running and not engine.waiting:
            engine.now_s = max(engine.now_s, due[-1][0])
        if engine.now_s - told_s >= TOLD_S:
            load, told_s, sent = way.load(engine), engine.now_s, {}
        while due and due[-1][0] <= engine.now_s:
            _, answer, most = due.pop()
            newcomer = load.newcomer(STANDARD, DEFAULT_TIERS.rank(STANDARD), PROMPT, 1, most)
            age_s = engine.now_s - told_s
            outlook = Outlook(load, newcomer.rank, list(sent.values()))
            wait_s = outlook.wait_s(newcomer, is_top=False, age_s=age_s)
            if wait_s > 5.0:
                continue
            name = str(len(due))
            request = PressedRequest(name, STANDARD, engine.now_s, PROMPT, answer, most)
            found.append((wait_s, engine.arrives(request)))
            sent[name] = newcomer._replace(waits=True)
        engine.step()
    return [(wait_s, stream.ttft_s) for wait_s, stream in found if wait_s > 0]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("step_s", [0.008, 0.010])
def test_waits_of_a_full_engine_are_as_long_as_predicted(step_s, seed):
    found = waits(step_s, 6.0, seed)
    assert len(found) > 300
    assert median(predicted / real - 1 for predicted, real in found) == pytest.approx(0.0, abs=0.12)
    assert fmean(p for p, _ in found) == pytest.approx(fmean(real for _, real in found), rel=0.15)
