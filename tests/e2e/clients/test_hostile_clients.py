"""What one client does to the others of a running server."""

import contextlib
import random
import statistics
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import httpx
import openai
import psutil
import pytest
import raw_client
from request_fuzz import Fuzzed, corpus, draw
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e
KEY = (b"authorization", b"Bearer key-of-acme")
JSON = (b"content-type", b"application/json")
MAX_S = 1.0


def post(deployment, request):
    """Send it as it is, with our key and type in front; short answers do, where it does not say."""
    ours = b'"model": "tiny", "max_tokens": 8'
    body = request.body.replace(b'"model":"m"', ours).replace(b'"model": "m"', ours)
    return raw_client.post(deployment.url, request.path, [KEY, JSON, *request.headers], body)


class Bystander:
    """Another client's stream, and the longest time in which it got nothing."""

    def __init__(self, deployment):
        self._client = deployment.client()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self.gaps_s = []

    def _read(self):
        while not self._stop.is_set():
            stream = self._client.completions.create(
                model="tiny", prompt="once", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
            )
            last_s = None
            for _ in stream:
                now_s = time.monotonic()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
                if self._stop.is_set():
                    break
            stream.close()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


def test_the_worst_requests_are_refused_at_once(deployment, record_property):
    assert_soon(lambda: at_rest(deployment), 30)
    with Bystander(deployment) as alone:
        time.sleep(3)
    took_s = {}
    with Bystander(deployment) as other:
        for name, request in corpus():
            for _ in range(2):  # the machine may have been busy otherwise
                started_s = time.monotonic()
                answer = post(deployment, request)
                took_s[name] = min(took_s.get(name, 99), time.monotonic() - started_s)
                assert 400 <= (answer.status or 0) < 500, (name, answer)
    record_property("longest_gaps_s", (max(alone.gaps_s), max(other.gaps_s)))
    record_property("took_s", took_s)
    assert max(took_s.values()) < MAX_S, took_s
    assert max(other.gaps_s) < 0.2 + max(alone.gaps_s)


def test_a_prompt_of_no_tokens_does_not_keep_the_router_from_hearing_of_others(deployment):
    before = deployment.log.read_text().count("Request failed")
    body = b'{"model": "m", "prompt": "seventeen letters", "truncate_prompt_tokens": 0}'
    assert post(deployment, Fuzzed("/v1/completions", [], body)).status == 400
    answer = deployment.client().completions.create(
        model="tiny", prompt="a", max_tokens=2, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 2
    assert_soon(lambda: at_rest(deployment), 10)
    assert deployment.log.read_text().count("Request failed") == before


def test_output_tokens_are_reserved_and_what_was_not_generated_is_given_back(deployment):
    """The bucket holds a thousand, and fills too slowly to matter."""
    client = deployment.client("metered")
    ask = {"model": "tiny", "prompt": "count", "extra_body": {"ignore_eos": True}}
    with client.completions.create(**ask, max_tokens=900, stream=True) as stream:
        for number, chunk in enumerate(stream):
            assert chunk.usage is None, "nobody asked for it"
            if number == 5:
                break

    def is_served():
        with contextlib.suppress(openai.RateLimitError):
            return client.completions.create(**ask, max_tokens=500).usage.completion_tokens == 500
        return False

    assert_soon(is_served, 10)  # had the first kept its nine hundred, it would take an hour
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**ask, max_tokens=501)
    assert refused.value.code == "output_token_rate"
    assert "max_tokens" in refused.value.message
    assert "limits.output_tokens_per_s" in refused.value.message


def test_a_key_has_limits_of_its_own(deployment):
    ci, acme = deployment.client("ci"), deployment.client()
    ask = {"model": "tiny", "prompt": "count", "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    with ci.completions.create(**ask, stream=True) as stream:
        next(iter(stream))
        with pytest.raises(openai.RateLimitError) as refused:
            ci.completions.create(**ask)
        assert acme.completions.create(**ask | {"max_tokens": 1}).usage.completion_tokens == 1
    assert refused.value.code == "concurrency"
    assert "the key 'ci' of this tenant" in refused.value.message
    assert "key_limits.max_concurrent" in refused.value.message
    assert "key-of-ci" not in refused.value.message

    def is_served():
        with contextlib.suppress(openai.RateLimitError):
            return ci.completions.create(**ask | {"max_tokens": 1}).usage.completion_tokens == 1
        return False

    assert_soon(is_served, 10)


class Pulse:
    """Asks again and again for what costs the server next to nothing, and how long it waited for the answer.

    The answer comes from the loop of the ingress through that of the proxy, past the engines and the router.
    """

    def __init__(self, deployment):
        self._url = deployment.url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.waits_s = []
        self.longest_at = ""

    def _ask(self):
        with httpx.Client(base_url=self._url) as client:
            while not self._stop.wait(0.02):
                started_s = time.monotonic()
                assert client.get("/health").status_code == 200
                self.waits_s.append(time.monotonic() - started_s)
                if self.waits_s[-1] == max(self.waits_s):
                    self.longest_at = datetime.now(UTC).isoformat()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()


@pytest.mark.nightly
@pytest.mark.parametrize(("seed", "count"), [(3, 1500), (4, 5000), (5, 5000), (6, 5000), (7, 5000)])
def test_thousands_of_requests_that_nobody_would_send(deployment, record_property, seed, count):
    """Four clients at a time send them byte for byte, what no library lets through included.

    Nobody is answered with 500 or more. The loops that all streams go through are not held up: neither
    another client's stream nor a GET of /health waits 200 ms longer than the longest time without the fuzz,
    engines and clients on the same cores. Memory is at rest what it was at rest after the first five hundred.
    """
    rng = random.Random(seed)
    unhandled = deployment.log.read_text().count("Request failed")
    children = psutil.Process(deployment.process.pid).children(recursive=True)
    with Bystander(deployment) as alone, Pulse(deployment) as quiet:
        time.sleep(10)
    _, failed_first = _send(deployment, (draw(rng) for _ in range(500)))
    assert_soon(lambda: at_rest(deployment), 60)
    before = _memory_bytes(children)
    with Bystander(deployment) as other, Pulse(deployment) as pulse:
        started_s = time.monotonic()
        statuses, failed = _send(deployment, (draw(rng) for _ in range(count - 500)))
        took_s = time.monotonic() - started_s
    assert_soon(lambda: at_rest(deployment), 60)
    grown = _memory_bytes(children) / before
    record_property("statuses", dict(statuses))
    record_property("took_s", took_s)
    record_property("longest_gaps_s", (max(alone.gaps_s), max(other.gaps_s)))
    record_property("longest_waits_s", (max(quiet.waits_s), max(pulse.waits_s)))
    record_property("longest_wait_at", pulse.longest_at)
    record_property("memory_grown", grown)
    failed = failed_first + failed
    assert not failed, f"{len(failed)}: {failed[:3]}"
    assert deployment.log.read_text().count("Request failed") == unhandled, "see the server's log"
    assert statuses["left"] < count / 50, "some ask for thousands of tokens"
    assert max(pulse.waits_s) < 0.2 + max(quiet.waits_s)
    assert max(other.gaps_s) < 0.2 + max(alone.gaps_s)
    assert grown < 1.05


def _send(deployment, requests):
    """How often each status came, and what failed."""
    statuses, failed = Counter(), []
    with ThreadPoolExecutor(4) as clients:
        for request, reply in clients.map(lambda one: (one, post(deployment, one)), requests):
            statuses[reply.status if reply.is_whole else "left"] += 1
            if reply.failed:
                failed.append((reply, request))
    return statuses, failed


def _memory_bytes(processes):
    return sum(process.memory_info().rss for process in processes if process.is_running())


@pytest.mark.long
def test_a_tenant_cannot_tell_what_another_has_asked(deployment, record_property):
    """acme guesses prompts of batch's, two hundred times: half are right."""
    verdicts = [_distinguishable(deployment, seed) for seed in (1, 2)]
    record_property("p_of_prediction_and_ttft", verdicts)
    for kind in zip(*verdicts, strict=True):  # one in twenty is below by chance
        assert max(kind) > 0.05, verdicts


def _distinguishable(deployment, seed):
    rng = random.Random(seed)
    right, wrong = [], []
    for number in range(100):
        secret, other = ([rng.randrange(5, 250) for _ in range(1024)] for _ in range(2))
        deployment.client("batch").completions.create(model="tiny", prompt=secret, max_tokens=1)
        guess, seen = (secret, right) if number % 2 else (other, wrong)
        seen.append(_seen(deployment, guess))
    return [_p([pair[kind] for pair in right], [pair[kind] for pair in wrong], rng) for kind in range(2)]


def _seen(deployment, prompt):
    """What the server predicts, and what its client measures, in seconds."""
    started_s = time.monotonic()
    raw = deployment.client().completions.with_raw_response.create(model="tiny", prompt=prompt, max_tokens=1)
    return float(raw.headers["x-slo-predicted-ttft-ms"]) / 1e3, time.monotonic() - started_s


def _p(one, two, rng, rounds=2000):
    """How often chance alone tells two samples as far apart, by their medians."""
    both, size = [*one, *two], len(one)
    apart = abs(statistics.median(one) - statistics.median(two))
    hits = 0
    for _ in range(rounds):
        rng.shuffle(both)
        hits += abs(statistics.median(both[:size]) - statistics.median(both[size:])) >= apart
    return hits / rounds
