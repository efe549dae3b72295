"""A proxy that drains, or knows no replica, is not ready."""

import httpx
from ray.serve._private.proxy import HTTPProxy
from starlette.responses import JSONResponse

from deployments.http.proxy import ReadyUntilDrained


class Routes:
    """Of Serve's proxy: to one ingress, or to none yet."""

    def __init__(self):
        self.has_replicas = True

    def ready_for_traffic(self, is_head):
        return self.has_replicas, "no replicas"


async def test_a_proxy_that_drains_is_not_ready():
    """Serve ends it when it has drained: who has opened a connection by then is refused."""
    routes, asked = Routes(), []
    drains = HTTPProxy("node", "127.0.0.1", is_head=False, proxy_router=routes, self_actor_name="proxy")

    async def serves_proxy(scope, receive, send):
        if scope["path"] == "/-/healthz":
            await drains(scope, receive, send)
            return
        asked.append(scope["path"])
        await JSONResponse({"status": "ready"})(scope, receive, send)

    transport = httpx.ASGITransport(ReadyUntilDrained(serves_proxy))
    async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:

        async def is_ready():
            answer = await client.get("/ready?degraded")
            assert answer.json()["status"] == ("ready" if answer.is_success else "not ready")
            return answer.status_code

        assert await is_ready() == 200
        drains.update_draining(draining=True)
        assert await is_ready() == 503
        assert (await client.get("/v1/models")).is_success, "what comes all the same is answered"
        drains.update_draining(draining=False)
        assert await is_ready() == 200
        routes.has_replicas = False
        assert await is_ready() == 503
    assert asked == ["/ready", "/v1/models", "/ready"]
