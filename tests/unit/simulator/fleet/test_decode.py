"""The clock of a decode replica, against one that takes every step."""

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost.accelerators import A100, H100, VOCABULARY, decode_model, kv_tokens, weight_bytes
from simulator.cost.decode_steps import INSTANT_DECODE, DecodeModel
from simulator.cost.operators import LLAMA_3_8B, LLAMA_3_70B
from simulator.fleet.decode import Decoding, VirtualDecodeReplica
from simulator.replica.loop import EventLoop

MODEL = DecodeModel(8.0, 3.0, 0.25, 1.0, kv_tokens=60, max_batch=4)
"""All times are multiples of a quarter, so that equal times are equal."""


def decoded(model, requests):
    """First and last token of each of (time, prompt, output, what computing it adds), KV there at once."""
    loop = EventLoop()
    replica = VirtualDecodeReplica(loop, model)
    items = []

    def come(prompt, output, compute_s=0.0):
        item = Decoding(prompt, output, lambda: replica.join(item), lambda _: None, compute_s)
        items.append(item)
        replica.admit(item)

    for at_s, *request in requests:
        loop.call_at(at_s, come, *request)
    loop.run()
    return [(item.first_token_s, item.last_token_s) for item in items], replica


def step_by_step(model, requests):
    """The same, one token after the other."""
    coming, queue, batch = deque(enumerate(requests)), deque(), {}
    first, last, now_s = {}, {}, 0.0
    while coming or queue or batch:
        if not batch and not queue:
            now_s = max(now_s, coming[0][1][0])
        while coming and coming[0][1][0] <= now_s:
            queue.append(coming.popleft())
        while queue:
            number, (_, prompt, output, *compute_s) = queue[0]
            held = sum(p + o for p, o, _ in batch.values())
            if held + prompt + output > model.kv_tokens or len(batch) >= model.max_batch:
                break
            batch[number] = (prompt, output, 0)
            now_s += sum(compute_s)
            queue.popleft()
        now_s += model.step_s(len(batch), sum(prompt + done for prompt, _, done in batch.values()))
        for number, (prompt, output, done) in [*batch.items()]:
            first.setdefault(number, now_s)
            batch[number] = (prompt, output, done + 1)
            if done + 1 == output:
                last[number] = now_s
                del batch[number]
    return [(first[number], last[number]) for number in range(len(requests))]


REQUEST = st.tuples(
    st.integers(0, 400).map(lambda quarters: quarters / 4),
    st.integers(1, 20),
    st.integers(1, 25),
    st.one_of(st.just(0.0), st.integers(1, 20).map(lambda quarters: quarters / 4)),
)


@given(st.lists(REQUEST, min_size=1, max_size=12))
def test_tokens_come_when_a_step_by_step_simulation_has_them(requests):
    requests.sort(key=lambda request: request[0])
    times, replica = decoded(MODEL, requests)
    assert times == step_by_step(MODEL, requests)
    assert replica.tokens == sum(output for _, _, output, _ in requests)
    assert replica.kv_usage == 0.0


@given(
    st.lists(REQUEST, min_size=1, max_size=8),
    st.floats(0.001, 10),
    st.floats(0, 1),
    st.floats(0, 0.1),
)
def test_any_model_agrees_with_a_step_by_step_simulation(requests, weights_s, request_s, kv_token_s):
    model = DecodeModel(weights_s, request_s, kv_token_s, 0.0, kv_tokens=1000)
    requests = [(0.0, *request) for _, *request in requests]
    times, _ = decoded(model, requests)
    for ours, theirs in zip(times, step_by_step(model, requests), strict=True):
        assert ours == pytest.approx(theirs)


@given(st.integers(1, 5000), st.integers(1, 64), st.integers(0, 100_000), st.floats(0, 1))
def test_time_becomes_steps_and_back(steps, batch, context, within):
    model = DecodeModel(0.01, 0.0001, 1e-7, 0.002, kv_tokens=1)
    before_s = model.steps_s(steps - 1, batch, context)
    step_s = model.steps_s(steps, batch, context) - before_s
    elapsed_s = before_s + (0.01 + 0.98 * within) * step_s
    assert model.steps_within(elapsed_s, batch, context) == steps


def test_a_request_waits_for_memory_in_turn():
    requests = [(0.0, 30, 20), (0.0, 20, 2), (0.0, 5, 1)]
    times, replica = decoded(MODEL, requests)
    assert times[1][0] > times[0][1]
    assert times[2][0] == times[1][0], "nobody overtakes in the queue for memory"
    assert replica.waited == 2


def test_a_request_that_withdraws_frees_its_memory():
    loop = EventLoop()
    replica = VirtualDecodeReplica(loop, MODEL)
    admitted = []
    first = Decoding(30, 20, lambda: admitted.append("first"), lambda _: None)
    second = Decoding(30, 20, lambda: admitted.append("second"), lambda _: None)
    third = Decoding(30, 20, lambda: admitted.append("third"), lambda _: None)
    for request in (first, second, third):
        replica.admit(request)
    replica.withdraw(second)
    assert admitted == ["first"]
    replica.withdraw(first)
    assert admitted == ["first", "third"]
    replica.withdraw(third)
    assert replica.kv_usage == 0.0


def test_the_pace_is_the_time_between_tokens():
    loop = EventLoop()
    replica = VirtualDecodeReplica(loop, DecodeModel(1.0, 0.0, 0.0, 0.0, kv_tokens=100))
    long = Decoding(1, 11, lambda: replica.join(long), lambda _: None)
    single = Decoding(1, 1, lambda: replica.join(single), lambda _: None)
    replica.admit(long)
    replica.admit(single)
    loop.run()
    assert long.tpot_s == 1.0
    assert single.tpot_s is None


def test_an_instant_replica_takes_no_time():
    assert decoded(INSTANT_DECODE, [(1.0, 5, 1000), (1.0, 5, 1)])[0] == [(1.0, 1.0), (1.0, 1.0)]


def test_the_built_in_accelerators_decode_at_plausible_paces():
    a100, h100 = decode_model(LLAMA_3_8B, A100, 1), decode_model(LLAMA_3_8B, H100, 1)
    assert 0.008 < a100.step_s(1, 1000) < 0.015
    assert h100.step_s(32, 32_000) < a100.step_s(32, 32_000)
    assert 300_000 < kv_tokens(LLAMA_3_8B, A100, 1) < 500_000
    assert kv_tokens(LLAMA_3_70B, A100, 1) < 0


def test_more_ranks_than_kv_heads_each_hold_and_read_one():
    assert LLAMA_3_70B.kv_heads == 8
    eight, sixteen = (decode_model(LLAMA_3_70B, A100, ranks) for ranks in (8, 16))
    assert sixteen.kv_token_s == pytest.approx(eight.kv_token_s), "each rank reads one head, as of eight"
    room_bytes = (
        16 * 0.9 * A100.memory_bytes - weight_bytes(LLAMA_3_70B) - 2 * VOCABULARY * LLAMA_3_70B.hidden
    )
    assert sixteen.kv_tokens == pytest.approx(room_bytes / (2 * LLAMA_3_70B.kv_bytes_per_token), rel=1e-3)
