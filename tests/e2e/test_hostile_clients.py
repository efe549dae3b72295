"""What one client does to the others of a running server."""

import contextlib
import random
import statistics
import threading
import time

import httpx
import openai
import psutil
import pytest
from request_fuzz import corpus, draw
from waiting import assert_soon, at_rest

pytestmark = pytest.mark.e2e
KEY = (b"authorization", b"Bearer key-of-acme")
MAX_S = 1.0


def post(deployment, request, client=httpx):
    headers = [(name, value) for name, value in request.headers if name != b"authorization"]
    body = request.body.replace(b'"model":"m"', b'"model":"tiny"').replace(
        b'"model": "m"', b'"model": "tiny"'
    )
    with contextlib.suppress(httpx.WriteError, httpx.ReadError, httpx.RemoteProtocolError):
        return client.post(
            f"{deployment.url}{request.path}", headers=[*headers, KEY], content=body, timeout=30
        )
    return None


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
                assert answer is None or 400 <= answer.status_code < 500, (name, answer.text)
                assert name == "10,000 headers" or answer is not None, name
    record_property("longest_gaps_s", (max(alone.gaps_s), max(other.gaps_s)))
    record_property("took_s", took_s)
    assert max(took_s.values()) < MAX_S, took_s
    assert max(other.gaps_s) < 0.2 + max(alone.gaps_s)


def test_output_tokens_are_reserved_and_what_was_not_generated_is_given_back(deployment):
    """The bucket holds a hundred, and fills too slowly to matter."""
    client = deployment.client("metered")
    ask = {"model": "tiny", "prompt": "count", "max_tokens": 90, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**ask, stream=True) as stream:
        for number, chunk in enumerate(stream):
            assert chunk.usage is None, "nobody asked for it"
            if number == 5:
                break

    def is_served():
        with contextlib.suppress(openai.RateLimitError):
            return client.completions.create(**ask).usage.completion_tokens == 90
        return False

    assert_soon(is_served, 10)  # had the first kept its ninety, it would take minutes
    with pytest.raises(openai.RateLimitError) as refused:
        client.completions.create(**ask)
    assert refused.value.code == "output_token_rate"
    assert "max_tokens" in refused.value.message


@pytest.mark.nightly
def test_thousands_of_requests_that_nobody_would_send(deployment, record_property):
    """Without the larger part, which the gate refuses alone: `tests/unit/deployments/http/test_fuzz.py`."""
    rng, worst = random.Random(3), []
    children = psutil.Process(deployment.process.pid).children(recursive=True)
    assert_soon(lambda: at_rest(deployment), 30)
    with httpx.Client() as client, Bystander(deployment) as other:
        for number in range(2000):
            if number == 500:
                before = _memory_bytes(children)
            request = draw(rng)
            answer = post(deployment, request, client)
            if answer is not None and answer.status_code >= 500:
                worst.append((answer.status_code, answer.text[:300], request))
    assert_soon(lambda: at_rest(deployment), 30)
    grown = _memory_bytes(children) / before
    record_property("longest_gap_s", max(other.gaps_s))
    record_property("memory_grown", grown)
    assert not worst, f"{len(worst)}: {worst[:3]}"
    assert grown < 1.05


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
