"""The section `tracing`."""

import pytest

from deployments.config import ConfigError
from deployments.config.settings import parse
from telemetry.tracing import USUAL_RATIO, TracingOptions


def test_nothing_is_traced_unless_it_is_said_where_to():
    assert parse({}).tracing.options() is None


def test_every_key_reaches_the_processes():
    tracing = parse({"tracing": {"endpoint": "http://collector:4317", "ratio": 0.5}}).tracing
    assert tracing.options() == TracingOptions("http://collector:4317", 0.5)


@pytest.mark.parametrize(
    ("values", "key", "hint"),
    [
        *(
            ({"endpoint": endpoint}, "tracing.endpoint", "give a URL, as http://collector:4317")
            for endpoint in (
                "collector:4317",
                "http://",
                "http://collector",
                "http://collector:0",
                "http://collector:99999",
                "https://:4317",
                "http://[::1",
            )
        ),
        ({"ratio": 0.5}, "tracing", "ratio goes with endpoint; where that is in the environment"),
        ({"ratio": 1.5}, "tracing.ratio", "less than or equal to 1"),
        ({"raito": 0.1}, "tracing: unknown key 'raito'", "did you mean 'ratio'?"),
    ],
)
def test_what_cannot_work_is_refused_by_name(values, key, hint):
    with pytest.raises(ConfigError) as caught:
        parse({"tracing": values})
    assert key in str(caught.value)
    assert hint in str(caught.value)


@pytest.mark.parametrize("endpoint", ["https://collector", "http://[::1]:4317", "http://10.0.0.1:4317/"])
def test_a_host_with_its_port_is_taken(endpoint):
    options = parse({"tracing": {"endpoint": endpoint}}).tracing.options()
    assert options == TracingOptions(endpoint, USUAL_RATIO)


def test_a_cluster_says_it_in_the_environment_that_serve_traces_with(monkeypatch):
    for name, value in TracingOptions("http://collector:4317", 0.5).environment().items():
        monkeypatch.setenv(name, value)
    assert parse({}).tracing.options() == TracingOptions("http://collector:4317", 0.5)
    own = parse({"tracing": {"endpoint": "http://other:4317"}}).tracing.options()
    assert own == TracingOptions("http://other:4317", USUAL_RATIO)


@pytest.mark.parametrize(
    ("name", "value"), [("TRACES_SAMPLER_ARG", "two"), ("EXPORTER_OTLP_TRACES_ENDPOINT", "")]
)
def test_an_environment_that_says_half_of_it_is_refused(monkeypatch, name, value):
    for each, good in TracingOptions("http://collector:4317", 0.5).environment().items():
        monkeypatch.setenv(each, good)
    monkeypatch.setenv(f"OTEL_{name}", value)
    with pytest.raises(ConfigError, match=f"tracing: .*OTEL_{name}.*{value}"):
        parse({}).tracing.options()
