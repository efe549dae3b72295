"""Ray Serve's processes trace with our provider: what is decided at its proxy holds everywhere."""

import json
import os
import subprocess
import sys

import pytest

from telemetry.tracing import BEGINS_VARIABLE, TracingOptions

SCRIPT = """
import json, sys
from types import SimpleNamespace
from opentelemetry import trace
from ray import serve
from ray.serve._private.tracing_utils import is_tracing_enabled, setup_tracing
from telemetry import tracing

if sys.argv[1]:
    serve.get_replica_context = lambda: SimpleNamespace(deployment=sys.argv[1])
assert setup_tracing("a component", "its id")
tracing.start(tracing.TracingOptions("http://127.0.0.1:1", 1.0), "our own", begins_traces=True)
tracer = trace.get_tracer("any")
roots = [tracer.start_span("proxy_http_request").is_recording() for _ in range(400)]
parents = ("00-" + "1" * 32 + "-" + "2" * 16 + "-0" + flag for flag in "01")
children = [tracer.start_span("any", tracing.continued(parent)).is_recording() for parent in parents]
role = trace.get_tracer_provider().resource.attributes["slackserve.role"]
print(json.dumps({"on": is_tracing_enabled(), "role": role, "roots": sum(roots), "children": children}))
"""


def in_serve(deployment, **environment):
    """What a process of Serve does that runs `deployment`, or the proxy for none."""
    env = os.environ | TracingOptions("http://127.0.0.1:1", 0.5).environment() | environment
    command = [sys.executable, "-c", SCRIPT, deployment]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.slow
def test_traces_begin_in_the_proxy_at_the_ratio_and_nowhere_else():
    proxy, replica = in_serve(""), in_serve("Prefill:tiny")
    assert (proxy["on"], proxy["role"], proxy["children"]) == (True, "proxy", [False, True])
    assert 140 < proxy["roots"] < 260
    assert replica == {"on": True, "role": "prefill", "roots": 0, "children": [False, True]}


@pytest.mark.slow
def test_traces_begin_at_the_ratio_in_an_ingress_without_a_proxy_before_it():
    ingress, replica = (
        in_serve(name, **{BEGINS_VARIABLE: "ingress"}) for name in ("Ingress", "Prefill:tiny")
    )
    assert ingress["children"] == [False, True]
    assert 140 < ingress["roots"] < 260
    assert replica["roots"] == 0
