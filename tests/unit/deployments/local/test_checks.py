"""Ports that cannot be had, and labels that this machine has not, are refused before anything starts."""

from contextlib import nullcontext

import pytest
from ports import free_port
from ray._private.ray_constants import DEFAULT_DASHBOARD_AGENT_LISTEN_PORT

from deployments.config import ConfigError
from deployments.config.settings import parse
from deployments.local.checks import check_no_labels, check_ports


def test_a_port_in_use_is_named(taken_port):
    with pytest.raises(ConfigError, match=rf"^port: cannot listen on 127.0.0.1:{taken_port}"):
        check_ports(parse({"port": taken_port}))
    free = {"port": free_port(), "kv_transfer": {"prefill_port": 30000, "decode_port": taken_port}}
    with pytest.raises(ConfigError, match=r"^kv_transfer.decode_port: cannot listen"):
        check_ports(parse(free))
    metrics = {"port": free_port(), "ray_metrics_port": taken_port}
    with pytest.raises(ConfigError, match=rf"^ray_metrics_port: cannot listen on :{taken_port}"):
        check_ports(parse(metrics))


def test_a_port_that_rays_own_agent_takes_is_refused():
    with pytest.raises(ConfigError, match=r"^ray_metrics_port: 52365 is where Ray's own agent listens"):
        check_ports(parse({"port": free_port(), "ray_metrics_port": DEFAULT_DASHBOARD_AGENT_LISTEN_PORT}))


@pytest.mark.parametrize("host", ["192.0.2.77", "no-such-host.invalid"])
def test_a_host_that_is_not_this_machine_is_named(host):
    with pytest.raises(ConfigError, match=f"^host: {host} is no"):
        check_ports(parse({"host": host, "port": free_port()}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"monitor": {"port": 31_001}}, "port: 31001 is a port of monitor.port too"),
        ({"grpc": {"port": 31_001}}, "grpc.port: 31001 is a port of port too"),
        ({"ray_metrics_port": 31_001}, "ray_metrics_port: 31001 is a port of port too"),
        (
            {"monitor": {"port": 31_002}, "ray_metrics_port": 31_002},
            "ray_metrics_port: 31002 is a port of monitor.port too",
        ),
        ({"prefill": {"replicas": 2}, "kv_transfer": {"prefill_port": 31_000}}, "kv_transfer.prefill_port"),
        ({"monitor": {"port": 31_001, "enabled": False}}, None),
    ],
)
def test_a_port_that_two_keys_ask_for_is_named(given, message):
    config = parse({"port": 31_001, "kv_transfer": {"prefill_port": 31_100, "decode_port": 31_200}} | given)
    with nullcontext() if message is None else pytest.raises(ConfigError, match=f"^{message}"):
        check_ports(config)


def test_labels_that_no_node_here_has_are_refused():
    check_no_labels(parse({}))
    with pytest.raises(ConfigError, match=r"^decode.node_labels: `slackserve serve` starts a Ray of its own"):
        check_no_labels(parse({"decode": {"node_labels": {"pool": "b"}}}))
    with pytest.raises(ConfigError, match=r"^node_labels: "):
        check_no_labels(parse({"node_labels": {"pool": "b"}}))
