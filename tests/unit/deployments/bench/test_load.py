"""Open-loop load on a real HTTP server."""

import resource
import time
from contextlib import contextmanager

import pytest
from completions_server import Behaviour, CompletionsServer

from deployments.bench import BenchError
from deployments.bench.answer import Fate
from deployments.bench.client import connected
from deployments.bench.load import Asking, Prompts, offer
from deployments.bench.score import score
from simulator.workload.arrivals import Arrival
from slo.tiers import BACKGROUND, PREMIUM


def arrivals(times, tokens=20, output=3, ttft_s=1.0, tier=PREMIUM):
    return [Arrival(number, at_s, "chat", tokens, output, ttft_s, tier) for number, at_s in enumerate(times)]


async def load(server, stream, *, slo_headers=True, timeout_s=20.0, key=None):
    async with connected(server.url, key, timeout_s) as target:
        return await offer(target, stream, Asking("tiny", Prompts(range(5, 50)), slo_headers=slo_headers))


async def test_requests_are_sent_at_their_times_whatever_is_outstanding():
    times = [0.0, 0.1, 0.2, 0.4]
    with CompletionsServer(Behaviour(seconds=lambda _: 1.0)) as server:
        run = await load(server, arrivals(times))
    sent_s = [ended.answer.sent_s - run.ended[0].answer.sent_s for ended in run.ended]
    assert sent_s == pytest.approx(times, abs=0.2)
    assert sent_s[-1] < min(ended.answer.ttft_s for ended in run.ended)  # none was answered by then
    assert [ended.late_s for ended in run.ended] == pytest.approx([0.0] * 4, abs=0.2)
    assert run.wall_s >= 1.4


async def test_a_queue_builds_up_at_a_slow_server():
    with CompletionsServer(Behaviour(seconds=lambda _: 0.2, is_serial=True)) as server:
        run = await load(server, arrivals([0.0] * 5, ttft_s=0.59))
    ttfts_s = sorted(ended.answer.ttft_s for ended in run.ended)
    assert all(ttft_s > 0.2 * place - 0.05 for place, ttft_s in enumerate(ttfts_s, start=1))
    assert score(run).overall.attainment <= 0.4


async def test_no_more_is_sent_once_too_many_have_missed_and_all_that_was_is_awaited():
    times = [0.0, 0.1, 0.2, 1.0, 1.1]
    with CompletionsServer(Behaviour(seconds=lambda _: 0.5)) as server:
        async with connected(server.url, None, 20.0) as target:
            asking = Asking("tiny", Prompts(range(5, 50)))
            run = await offer(target, arrivals(times, ttft_s=0.1), asking, max_missed=1)
    assert (len(run.ended), run.unsent) == (3, 2)
    assert {ended.answer.fate for ended in run.ended} == {Fate.ANSWERED}


async def test_what_is_sent():
    with CompletionsServer() as server:
        await load(server, arrivals([0.0], ttft_s=0.25), key="secret")
        (seen,) = server.seen
    assert seen.headers["x-slo-tier"] == "premium"
    assert float(seen.headers["x-slo-ttft-ms"]) == 250
    assert seen.headers["Authorization"] == "Bearer secret"
    assert len(seen.body["prompt"]) == 20
    assert {*seen.body["prompt"]} <= {*range(5, 50)}
    expected = {"model": "tiny", "max_tokens": 3, "stream": True, "ignore_eos": True}
    assert seen.body | expected == seen.body


async def test_objectives_are_scored_also_if_the_server_is_not_told():
    with CompletionsServer(Behaviour(seconds=lambda _: 0.3)) as server:
        run = await load(server, arrivals([0.0], ttft_s=0.1), slo_headers=False)
        assert not [name for name in server.seen[0].headers if name.startswith("x-slo")]
    assert score(run).overall.attainment == 0


async def test_a_request_without_objective_says_only_its_tier():
    with CompletionsServer() as server:
        await load(server, arrivals([0.0], ttft_s=None, tier=BACKGROUND))
        (seen,) = server.seen
    assert seen.headers["x-slo-tier"] == "background"
    assert "x-slo-ttft-ms" not in seen.headers


async def test_the_time_per_token_leaves_out_the_first():
    with CompletionsServer(Behaviour(seconds=lambda _: 0.3, tpot_s=0.05)) as server:
        run = await load(server, arrivals([0.0], output=11))
    answer = run.ended[0].answer
    assert answer.output_tokens == 11
    assert 0.05 <= answer.tpot_s < 0.15
    assert answer.ttft_s >= 0.3


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ({"refuse": lambda *_: (400, {"code": "x", "message": "no\n\x1b[31m tier"})}, "no [31m tier"),
        ({"refuse": lambda *_: (500, "a text")}, "a text"),
        ({"refuse": lambda *_: (500, {"message": "y" * 1000})}, "y" * 300),
        ({"refuse": lambda *_: (500, {"message": ["z"]})}, ""),
        ({"error_after": 1}, "it broke"),
        ({"event": b'{"object": "error", "message": "of vLLM"}'}, "of vLLM"),
        ({"cut_after": 1}, ""),
        ({}, ""),
    ],
)
async def test_what_the_server_says_of_it_is_kept(behaviour, said):
    with CompletionsServer(Behaviour(**behaviour)) as server:
        run = await load(server, arrivals([0.0]))
    assert run.ended[0].answer.said == said


@pytest.mark.parametrize(
    ("behaviour", "fate", "reason"),
    [
        (
            {"refuse": lambda *_: (429, {"code": "deadline_infeasible"})},
            Fate.REFUSED,
            "429 deadline_infeasible",
        ),
        ({"refuse": lambda *_: (503, {"code": "no_replica"})}, Fate.REFUSED, "503 no_replica"),
        ({"refuse": lambda *_: (400, {"code": 400, "type": "Bad"})}, Fate.FAILED, "400 Bad"),
        ({"refuse": lambda *_: (500, "a text")}, Fate.FAILED, "500"),
        ({"error_after": 2}, Fate.FAILED, "in the stream: engine_error"),
        ({"error_after": 0}, Fate.FAILED, "in the stream: engine_error"),
        ({"cut_after": 2}, Fate.FAILED, "cut off"),
        ({"cut_after": 0}, Fate.FAILED, "no token"),
        ({"seconds": lambda _: 2.0}, Fate.FAILED, "timeout"),
    ],
)
async def test_what_goes_wrong_is_told_apart(behaviour, fate, reason):
    with CompletionsServer(Behaviour(**behaviour)) as server:
        run = await load(server, arrivals([0.0]), timeout_s=1.0)
    answer = run.ended[0].answer
    assert (answer.fate, answer.reason) == (fate, reason)
    assert not run.ended[0].is_met


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (b'{"error": "boom"}', "in the stream: boom"),
        (b'{"error": {"message": "x", "code": 500}}', "in the stream: 500"),
        (b'{"error": {"message": "x", "code": null}}', "in the stream: x"),
        (b'{"error": {"param": "x"}}', "in the stream: error"),
        (b'{"error": ["x"]}', "in the stream: ['x']"),
        (
            b'{"object": "error", "message": "x", "type": "BadRequestError", "code": 400}',
            "in the stream: BadRequestError",
        ),
        (b"[]", "not an event stream"),
        (b"null", "not an event stream"),
        (b'"x"', "not an event stream"),
        (b'{"choices": 5}', "not an event stream"),
        (b'{"usage": "much"}', "not an event stream"),
    ],
)
async def test_an_error_between_tokens_fails_its_request_and_no_other(event, reason):
    with CompletionsServer(Behaviour(event=event)) as server:
        run = await load(server, arrivals([0.0]))
        server.behaviour.event = None
        assert (await load(server, arrivals([0.0]))).ended[0].answer.fate is Fate.ANSWERED
    answer = run.ended[0].answer
    assert (answer.fate, answer.reason) == (Fate.FAILED, reason)


@contextmanager
def descriptors(soft):
    """Lets this process open no descriptor from number `soft` on."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_a_client_without_descriptors_left_ends_the_run_and_blames_itself():
    with CompletionsServer() as server:
        async with connected(server.url, None, 5.0) as target:
            with descriptors(0), pytest.raises(BenchError, match="0 file descriptors; give a lower rate"):
                await offer(target, arrivals([0.0, 0.0, 9.0]), Asking("tiny", Prompts(range(5, 50))))


async def test_a_client_may_have_as_many_descriptors_as_the_system_lets_it():
    with descriptors(200) as most:
        async with connected("http://127.0.0.1:9", None, 1.0):
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)


async def test_some_refusals_do_not_keep_the_others_from_being_answered():
    def refuse(body, headers):
        return (429, {"code": "deadline_infeasible"}) if len(body["prompt"]) > 50 else None

    with CompletionsServer(Behaviour(refuse=refuse)) as server:
        mixed = arrivals([0.0, 0.1]) + arrivals([0.2, 0.3], tokens=60)
        overall = score(await load(server, mixed)).overall
    assert overall.attainment == 0.5
    assert overall.refused == {"429 deadline_infeasible": 2}


async def test_a_server_that_goes_away_fails_the_requests():
    with CompletionsServer() as server:
        pass
    run = await load(server, arrivals([0.0, 0.05]))
    assert {ended.answer.fate for ended in run.ended} == {Fate.FAILED}
    assert {ended.answer.reason for ended in run.ended} == {"ClientConnectorError"}


async def test_a_client_that_is_held_up_is_late():
    class Slow(Prompts):
        def of(self, arrival):
            time.sleep(0.1)
            return super().of(arrival)

    with CompletionsServer() as server:
        async with connected(server.url, None, 20.0) as target:
            run = await offer(target, arrivals([0.0, 0.01, 0.02, 0.03]), Asking("tiny", Slow(range(5, 50))))
    assert run.ended[-1].late_s > 0.3
    assert score(run).is_client_slow


async def test_a_url_needs_a_scheme():
    with pytest.raises(BenchError, match="does not begin with http"):
        async with connected("localhost:8000", None, 1.0):
            pass


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
async def test_the_url_may_end_in_v1(suffix):
    with CompletionsServer() as server:
        async with connected(server.url + suffix, None, 5.0) as target:
            assert await target.models() == ["tiny", "other"]
