"""What is refused before a route sees it."""

import asyncio

import httpx
import pytest
from starlette.requests import Request

from deployments.config.limits import LimitsConfig
from deployments.http.gatekeeper import Gatekeeper
from deployments.http.key_watch import KeysNotReadError
from slo.admission.tenants import ApiKey, KeyRing, Tenant, digest

LIMITS = LimitsConfig(max_body_bytes=1024, body_timeout_s=0.2, max_headers=16, max_header_bytes=2048)


class Keys:
    """As `KeyWatch`, of keys that do not change."""

    def __init__(self, *keys):
        self.ring = KeyRing(keys)


class NoKeys:
    """As `KeyWatch`, of a file that could not be read so far."""

    @property
    def ring(self):
        raise KeysNotReadError("keys.yaml: expected a list of keys")


class Counts:
    def count(self, *_, **labels):
        self.last = labels


async def served(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"served"})


async def post(headers=(), content=b"", *keys, limits=LIMITS, method="POST", path="/v1/completions"):
    gate = Gatekeeper(served, Keys(*keys), limits)
    gate._instruments = Counts()
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://slackserve") as client:
        return await client.request(method, path, headers=headers, content=content)


async def test_an_ordinary_request_passes():
    answer = await post([("x-request-id", "a")], b"x" * 1024)
    assert (answer.status_code, answer.text) == (200, "served")


@pytest.mark.parametrize("encoding", ["identity", "Identity ", "", "identity, identity", "UTF-8", "none"])
async def test_a_body_that_is_said_to_be_plain_passes(encoding):
    assert (await post([("content-encoding", encoding)], b"{}")).text == "served"


async def test_an_underscore_makes_it_another_header_than_the_requests_id():
    """Whoever adds an id to a request without one, as the door does, looks for the other spelling."""
    answer = await post([("X_Request_Id", "mine"), ("x-request-id", "given")])
    assert answer.status_code == httpx.codes.OK


@pytest.mark.parametrize("length", ["9" * 5000, "99999999"])
async def test_an_underscore_makes_it_another_header_than_the_bodys_length(length):
    async def chunked():
        yield b"{}"

    answer = await post([("Content_Length", length)], chunked(), limits=LimitsConfig(max_body_bytes=1024))
    assert (answer.status_code, answer.text) == (200, "served")


@pytest.mark.parametrize(
    ("length", "status"), [("9" * 5000, 413), ("0" * 5000 + "2", 200), ("1025", 413), ("\u00b2", 200)]
)
async def test_a_length_of_any_number_of_digits_is_read(length, status):
    limits = LimitsConfig(max_body_bytes=1024, max_header_bytes=8192)
    answer = await post([("content-length", length.encode("latin-1"))], b"{}", limits=limits)
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("headers", "content", "status", "message"),
    [
        ([("x-request-timeout-seconds", "0")], b"", 400, "x-request-timeout-seconds: is set by the server"),
        ([("X_Request_Disconnect_Disabled", "?1")], b"", 400, "x-request-disconnect-disabled: is set by the"),
        ([(f"x-{number}", "1") for number in range(20)], b"", 431, "limits.max_headers allows 16"),
        ([("x-long", "1" * 3000)], b"", 431, "limits.max_header_bytes allows 2048"),
        ([], b"x" * 1025, 413, "the body is larger than 1024 bytes, limits.max_body_bytes"),
        (
            [("content-encoding", "gzip")],
            b"\x1f\x8b",
            415,
            "'gzip' is not read here; send the body uncompressed",
        ),
        ([("Content_Encoding", "identity, br")], b"{}", 415, "content-encoding: 'identity, br' is not read"),
    ],
)
async def test_refusals(headers, content, status, message):
    answer = await post(headers, content)
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("allowed", "origin", "host", "may"),
    [
        (["*"], "https://evil.example", None, True),
        ([], None, None, True),
        ([], "https://evil.example", None, False),
        (["https://chat.example"], "https://chat.example", None, True),
        (["https://chat.example"], "https://evil.example", None, False),
        (["https://chat.example"], "https://chat.example:8443", None, False),
        (["https://chat.example"], "https://chat.example.evil.example", None, False),
        (["https://chat.example"], "null", None, False),
        (["null"], "null", None, True),
        ([], "http://slackserve", None, True),
        ([], "https://LLM.example", "llm.example:443", True),
        ([], "http://llm.example", "llm.example:80", True),
        ([], "http://llm.example:8000", "llm.example:8000", True),
        ([], "http://llm.example:8000", "llm.example", False),
        ([], "https://llm.example", "llm.example:80", False),
        ([], "null", "", False),
        ([], "", "", False),
        (["https://chat.example", "*"], "https://evil.example", None, True),
    ],
)
async def test_a_page_has_an_answer_computed_only_if_its_origin_is_allowed(allowed, origin, host, may):
    """A browser asks nobody whether a page may post plain text, and lets it not read the answer."""
    limits = LimitsConfig(allowed_origins=allowed)
    headers = [("content-type", "text/plain"), ("x-forwarded-host", "evil.example")]
    headers += [] if origin is None else [("origin", origin)]
    headers += [] if host is None else [("host", host)]
    answer = await post(headers, b"{}", limits=limits)
    assert (await post(headers, b"", limits=limits, method="GET")).status_code == 200
    if may:
        assert (answer.status_code, answer.text) == (200, "served")
        return
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (403, "origin_not_allowed", "origin")
    assert "limits.allowed_origins" in error["message"]
    assert repr(origin) in error["message"]


async def test_a_body_that_does_not_arrive_is_given_up():
    async def slowly():
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.05)

    answer = await post(content=slowly())
    assert answer.status_code == 408
    assert answer.json()["error"]["code"] == "body_timeout"


async def test_a_route_takes_a_body_as_one_however_small_its_pieces_were():
    taken = []

    async def route(scope, receive, send):
        taken.extend([await receive(), await receive()])

    pieces = [{"type": "http.request", "body": b"x", "more_body": number < 999} for number in range(1000)]
    messages = iter([*pieces, {"type": "http.disconnect"}])

    async def receive():
        return next(messages)

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    await Gatekeeper(route, Keys(), LIMITS)(scope, receive, None)
    assert [message.get("body") for message in taken] == [b"x" * 1000, None]
    assert taken[0]["more_body"] is False


async def test_every_answer_has_an_id_that_no_client_chooses():
    ids = set()
    for content in (b"", b"", b"x" * 2000):
        answer = await post([("x-request-id", "mine")], content)
        ids.add(answer.headers["x-slackserve-id"])
    assert len(ids) == 3
    assert not any("mine" in each for each in ids)


async def test_a_refusal_is_logged_with_its_tenant_and_never_the_key(caplog):
    key = ApiKey(digest("key-of-acme"), Tenant("acme"))
    with caplog.at_level("WARNING", "ray.serve"):
        answer = await post([("authorization", "Bearer key-of-acme")], b"x" * 2000, key)
        wrong = await post([("authorization", "Bearer wrong-key-1")], b"", key)
    assert (answer.status_code, wrong.status_code) == (413, 401)
    acme, unknown = (record.getMessage() for record in caplog.records)
    for part in (
        "request_refused",
        "tenant=acme",
        "status=413",
        "code=body_too_large",
        "path=/v1/completions",
    ):
        assert part in acme
    assert f"server_id={answer.headers['x-slackserve-id']}" in acme
    assert "tenant=" not in unknown
    assert "code=invalid_api_key" in unknown
    assert "key-of-acme" not in acme
    assert "wrong-key-1" not in unknown


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ([("x-api-key", "key-of-acme")], 200),
        ([("x-api-key", " ")], 401),
        ([("x-api-key", "wrong-key-1")], 401),
        ([("x-api-key", "wrong-key-1"), ("authorization", "Bearer key-of-acme")], 200),
        ([("x-api-key", "key-of-acme"), ("authorization", "Bearer wrong-key-1")], 401),
        ([("x-api-key", "key-of-acme"), ("authorization", "Basic abc")], 401),
    ],
)
async def test_the_key_may_be_where_anthropics_clients_have_it(headers, status):
    key = ApiKey(digest("key-of-acme"), Tenant("acme"))
    assert (await post(headers, b"{}", key)).status_code == status


@pytest.mark.parametrize(
    ("content", "status", "kind"),
    [(b"{}", 401, "authentication_error"), (b"x" * 2000, 413, "request_too_large")],
)
async def test_a_refusal_has_the_shape_of_the_api_that_was_asked(content, status, kind):
    key = ApiKey(digest("key-of-acme"), Tenant("acme"))
    headers = [] if status == 401 else [("x-api-key", "key-of-acme")]
    answer = await post(headers, content, key, path="/v1/messages")
    assert answer.status_code == status
    told = answer.json()
    assert (told["type"], told["error"]["type"]) == ("error", kind)
    assert told["error"]["message"]


async def test_a_client_that_leaves_in_the_middle_of_its_body_has_failed_nobody(caplog):
    messages = [
        {"type": "http.request", "body": b"abc", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent = []

    async def route(scope, receive, send):
        await Request(scope, receive, send).body()

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    gate = Gatekeeper(route, Keys(), LIMITS)
    gate._instruments = Counts()
    with caplog.at_level("INFO", "ray.serve"):
        await gate(
            {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}, receive, send
        )
    assert not sent
    assert not caplog.records


@pytest.mark.parametrize("headers", [[("authorization", "Bearer key-of-acme")], []])
async def test_while_no_keys_could_be_read_nobody_is_let_in_and_only_the_process_is_well(headers):
    gate = Gatekeeper(served, NoKeys(), LIMITS)
    gate._instruments = Counts()
    transport = httpx.ASGITransport(app=gate)
    async with httpx.AsyncClient(transport=transport, base_url="http://slackserve") as client:
        for method, path in (("POST", "/v1/completions"), ("GET", "/ready"), ("GET", "/ready?degraded")):
            answer = await client.request(method, path, headers=headers)
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["code"] == "api_keys_not_read"
            assert "keys.yaml" not in answer.text, "why is for the log"
            assert gate._instruments.last["reason"] == "api_keys_not_read"
        assert (await client.get("/health", headers=headers)).status_code == 200
