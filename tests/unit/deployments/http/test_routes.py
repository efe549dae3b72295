"""A path that is not one of ours is answered as such, and sends nobody elsewhere."""

import asyncio
import contextlib
from types import SimpleNamespace

import httpx
import pytest

from deployments.config.limits import LimitsConfig
from deployments.http import routes
from deployments.http.ingress import SlackServeIngress
from deployments.http.key_watch import KeysNotReadError
from deployments.http.served_model import ServedModels
from slo.admission.tenants import KeyRing

IN_PLACE = routes._in_place


class Keys:
    ring = KeyRing(())

    async def first_read(self):
        pass


class LateKeys(Keys):
    """As `KeyWatch`, of a file that comes later."""

    def __init__(self):
        self._come = asyncio.Event()
        self.come, self.first_read = self._come.set, self._come.wait

    @property
    def ring(self):
        if not self._come.is_set():
            raise KeysNotReadError("keys.yaml: there is none")
        return Keys.ring


class Ingress(SlackServeIngress):
    def __init__(self):
        self._model_cards, self._models = {}, ServedModels([], {})
        self.announced = asyncio.Event()

    def announce(self):
        self.announced.set()


@pytest.fixture
def make(monkeypatch):
    def made(ingress, endpoint_map, app):
        for name, route in endpoint_map.items():
            route(app)(getattr(ingress, name))
        return app

    monkeypatch.setattr(routes, "make_fastapi_ingress", made)
    monkeypatch.setattr(routes, "_in_place", asyncio.Event().wait)
    return lambda keys: routes.make_ingress(Ingress(), keys, LimitsConfig())


@pytest.fixture
async def client(make):
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(make(Keys())), base_url="http://inside", follow_redirects=False
    ) as client:
        yield client


async def test_an_ingress_has_started_once_its_keys_were_read(make):
    """Until then Serve takes none of its predecessors away."""
    keys = LateKeys()
    app = make(keys)
    async with contextlib.AsyncExitStack() as stack:
        start = asyncio.create_task(stack.enter_async_context(app.router.lifespan_context(app)))
        await asyncio.sleep(0.05)
        assert not start.done()
        keys.come()
        await asyncio.wait_for(start, 1)


async def test_an_ingress_counts_for_the_monitor_once_requests_find_it(make, monkeypatch):
    """While it waits for its keys it serves nobody, and the alert that there is none has to fire."""
    keys, ingress = LateKeys(), Ingress()
    replica = SimpleNamespace(servable_object=None)
    monkeypatch.setattr(routes, "_in_place", IN_PLACE)
    monkeypatch.setattr(routes.serve, "get_replica_context", lambda: replica)
    app = make(keys)
    async with contextlib.AsyncExitStack() as stack:
        start = asyncio.create_task(stack.enter_async_context(app.router.lifespan_context(app)))
        await asyncio.sleep(0.05)
        keys.come()
        await asyncio.wait_for(start, 1)
        await asyncio.sleep(0.05)
        assert not ingress.announced.is_set()
        replica.servable_object = ingress
        await asyncio.wait_for(ingress.announced.wait(), 1)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/chat/completions/"),
        ("POST", "/v1/completions/"),
        ("POST", "/v1/responses/"),
        ("POST", "/tokenize/"),
        ("GET", "/v1/models/"),
        ("GET", "/health/"),
        ("GET", "/"),
    ],
)
async def test_a_slash_too_many_is_no_route_and_no_redirect(client, method, path):
    """A redirect names the scheme inside: whoever follows it sends its prompt and its key again, in clear."""
    answer = await client.request(method, path, json={"model": "m", "prompt": "secret"})
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "no_such_route"
    assert "location" not in answer.headers


@pytest.mark.parametrize("path", ["/metrics", "/version", "/v1/embeddings", "/v1/models/"])
async def test_who_asks_for_another_path_is_told_those_that_there_are_and_where_metrics_are(
    client, make, path
):
    message = (await client.get(path)).json()["error"]["message"]
    assert "metrics are Ray's, on a port of each node's own (docs/metrics.md)" in message
    for route in make(Keys()).routes:
        assert route.path.removesuffix("/{model:path}") in message


async def test_the_paths_themselves_are_routes(client):
    assert (await client.get("/health")).json() == {"status": "ok"}
    assert (await client.get("/v1/models")).json()["data"] == []
    assert (await client.get("/v1/models/other")).json()["error"]["code"] == "model_not_found"


@pytest.mark.parametrize("path", ["/health", "/v1/models"])
async def test_who_only_looks_for_the_status_is_answered(client, path):
    answer = await client.head(path)
    assert answer.status_code == (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/completions", {"POST"}),
        ("PUT", "/v1/chat/completions", {"POST"}),
        ("POST", "/ready", {"GET", "HEAD"}),
        ("DELETE", "/v1/models/other", {"GET", "HEAD"}),
    ],
)
async def test_a_method_that_a_path_has_not_is_told_those_that_it_has(client, method, path, allowed):
    answer = await client.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (405, "no_such_route")
    assert set(answer.headers["allow"].split(", ")) == allowed
