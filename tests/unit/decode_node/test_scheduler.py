"""Of a model with a sliding window decode reads its own KV only, whatever is pulled and whatever fails."""

import random

import pytest
from paired_schedulers import TOKEN, Pair, Pull
from real_schedulers import BLOCK
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from benchmarks.harness.tiny_models import build_tiny_llama
from kv_transfer.cache_groups import NULL_BLOCK

pytestmark = pytest.mark.slow

FULL, WINDOWED = 0, 1
WINDOWS = [BLOCK, 40, 4 * BLOCK]
SEEDS = [*range(6), *(pytest.param(seed, marks=pytest.mark.long) for seed in range(6, 30))]
AN_ANSWER = 2 * BLOCK + 3


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return build_tiny_llama(tmp_path_factory.mktemp("llama"), layers=1)


def prompt(length, own, shared=()):
    """One that begins with `shared` and has no other token with any other prompt in common."""
    first = 1000 * (own + 1)
    return [*shared, *range(first, first + length - len(shared))]


def check_answered(pair, name, tokens):
    assert pair.decode.ended[name].finish_reason is FinishReason.LENGTH
    assert pair.decode.answers[name] == [TOKEN] * tokens


@pytest.mark.parametrize("carried", [(), (TOKEN,), (TOKEN,) * 5, (TOKEN,) * 40])
@pytest.mark.parametrize("window", WINDOWS)
def test_a_prompt_of_any_length_is_gone_on_from(model, window, carried):
    """Without a carried token decode computes the prompt's last one again, with all that it attends to."""
    pair = Pair.of(model, window)
    for length in range(1, 6 * BLOCK + 2):
        pair.ask(f"{length}", prompt(length, length), len(carried) + AN_ANSWER, carried)
        pair.finish()
        check_answered(pair, f"{length}", AN_ANSWER)
    pair.check_rest()


@pytest.mark.parametrize("carried", [(), (TOKEN,)])
@pytest.mark.parametrize("window", WINDOWS)
def test_what_decode_has_of_a_prompt_is_not_pulled(model, window, carried):
    pair, long, hits = Pair.of(model, window), prompt(10 * BLOCK, 0), 0
    for shared in range(1, len(long) + 1):
        for name, asked in {
            f"up to {shared}": long[:shared],
            f"beyond {shared}": prompt(shared + 1 + 7 * shared % 50, shared, long[:shared]),
            f"again {shared}": prompt(shared + 1 + 7 * shared % 50, shared, long[:shared]),
        }.items():
            pair.ask(name, asked, AN_ANSWER, carried)
            pair.finish()
            check_answered(pair, name, AN_ANSWER - len(carried))
            hits += sum(pair.pulled[name][:1]) < -(-len(asked) // BLOCK)
    assert hits > len(long)
    pair.check_rest()


@pytest.mark.parametrize("carried", [(), (TOKEN,)])
@pytest.mark.parametrize("told_before", [0, 3])
@pytest.mark.parametrize("fails", [(FULL,), (WINDOWED,), (FULL, WINDOWED)])
@pytest.mark.parametrize("length", [BLOCK - 1, 40, 12 * BLOCK, 12 * BLOCK + 5])
def test_of_a_failed_pull_nothing_is_used_and_the_others_go_on(model, length, fails, told_before, carried):
    """The null block stands in the tables of all whose window has moved on; it is nobody's."""
    pair = Pair.of(model, 40)
    pair.ask("running", prompt(200, 1), 200, carried)
    for _ in range(5):
        pair.step()
    pair.also_invalid = frozenset({NULL_BLOCK})
    pair.pull = lambda asked: Pull(asked, told_before, fails)
    pair.ask("fails", prompt(length, 2), AN_ANSWER, carried)
    pair.step()
    pair.pull = lambda asked: Pull(asked, 9)
    pair.ask("pulling", prompt(300, 3), AN_ANSWER, carried)
    assert pair.decode.ended["fails"].finish_reason is FinishReason.ERROR
    assert ("fails" in pair.pulls) == bool(told_before)
    while "fails" in pair.pulls:
        assert any(pair.decode.scheduler.kv_cache_manager.get_block_ids("fails")), "it is read into these"
        pair.step()
    assert "fails" not in pair.decode.scheduler.requests
    assert pair.decode.answers["fails"] == []
    assert set(pair.decode.ended) == {"fails"}
    pair.pull = Pull
    pair.ask("again", prompt(length, 2), AN_ANSWER, carried)
    pair.finish()
    assert pair.pulled["again"] == pair.pulled["fails"], "nothing of it is in the prefix cache"
    for name, tokens in {"running": 200, "pulling": AN_ANSWER, "again": AN_ANSWER}.items():
        check_answered(pair, name, tokens - len(carried))
    pair.check_rest()


@pytest.mark.parametrize("told_before", [0, 3])
def test_pulls_that_are_done_are_told_once_and_those_that_have_failed_are_not(model, told_before):
    pair = Pair.of(model, 40)
    for number, fails in enumerate([(FULL,), (), (WINDOWED,), (), ()]):
        pair.pull = lambda asked, fails=fails: Pull(asked, told_before, fails)
        pair.ask(f"{number}", prompt(100, number), AN_ANSWER)
        pair.step()
    pair.decode.scheduler.finish_requests("4", RequestStatus.FINISHED_ABORTED)  # it is read to the end
    pair.finish()
    for _ in range(told_before + 1):
        pair.step()
    assert pair.decode.pulls_told == 3
    pair.check_rest()


@pytest.mark.parametrize("group", [FULL, WINDOWED])
def test_a_running_request_with_such_a_block_ends_and_nobody_shares_what_it_had(model, group):
    pair, whole = Pair.of(model, 40), prompt(200, 1)
    pair.ask("running", whole, 200)
    pair.ask("other", prompt(200, 2), AN_ANSWER)
    for _ in range(5):
        pair.step()
    held = pair.decode.scheduler.kv_cache_manager.get_block_ids("running")
    pair.also_invalid = frozenset({NULL_BLOCK, held[group][-1]})
    pair.pull = lambda asked: Pull(asked, 0, (FULL,))
    pair.ask("fails", prompt(50, 3), AN_ANSWER)
    pair.step()
    assert {name: one.finish_reason for name, one in pair.decode.ended.items()} == dict.fromkeys(
        ("running", "fails"), FinishReason.ERROR
    )
    pair.pull = Pull
    pair.ask("again", whole, AN_ANSWER)
    pair.finish()
    assert pair.pulled["again"][FULL] == -(-len(whole) // BLOCK)
    check_answered(pair, "again", AN_ANSWER - 1)
    check_answered(pair, "other", AN_ANSWER - 1)
    pair.check_rest()


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_comes_together_each_reads_its_own(model, seed):
    """Shared prefixes, slow and failing pulls, streams of many tokens, clients that go, little memory."""
    rng = random.Random(seed)
    pair = Pair.of(
        model,
        rng.choice([BLOCK, 33, 40, 48, 100]),
        decode_blocks=rng.choice([80, 120, 300]),
        chunk=rng.choice([16, 64, 0]),
    )
    pair.pull = lambda asked: Pull(asked, rng.randrange(6), rng.choice([(), (), (), (FULL,), (WINDOWED,)]))
    shared, waiting, failures = prompt(300, 1000), {}, 0
    for number in range(40):
        length, answer = rng.randrange(1, 350), rng.randrange(50, 120)
        asked = prompt(length, number, shared[: rng.randrange(length) if rng.random() < 0.5 else 0])
        carried = (TOKEN,) * rng.choice([0, 1, 1, 7, 30])
        waiting[f"{number}"] = asked, answer, carried
        pair.ask(f"{number}", asked, answer, carried)
        for _ in range(rng.randrange(15)):
            pair.step()
        if rng.random() < 0.2 and (name := rng.choice([*waiting])) in pair.decode.scheduler.requests:
            pair.decode.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            if name not in pair.decode.ended:
                del waiting[name]
    while waiting:
        pair.finish()
        for name, (asked, answer, carried) in [*waiting.items()]:
            del waiting[name]
            if pair.decode.ended[name].finish_reason is FinishReason.ERROR:
                failures += 1
                waiting[f"{name}'"] = asked, answer, carried
                pair.ask(f"{name}'", asked, answer, carried)
            else:
                check_answered(pair, name, answer - len(carried))
    assert failures > 3
    pair.check_rest()
