"""A deployment that speaks HTTPS."""

import ssl

import httpx
import openai
import pytest
import yaml
from certificates import self_signed
from ports import free_port, side_channels

from benchmarks.harness.local_server import end, environment, start_until
from deployments.config.tls import TLSConfig
from deployments.local.launcher import get_json

pytestmark = [pytest.mark.e2e, pytest.mark.nightly]


def test_a_client_streams_over_https_and_nobody_is_served_without(tmp_path, tiny_model):
    made = self_signed(tmp_path)
    port = free_port()
    config = {
        "model": str(tiny_model),
        "model_name": "tiny",
        "port": port,
        "tls": {"certificate": str(made.certificate), "key": str(made.key)},
        "kv_transfer": side_channels(),
        "monitor": {"port": free_port()},
        "max_model_len": 1024,
        "warmup_tokens": [32, 512],
    }
    path, log = tmp_path / "config.yaml", tmp_path / "log"
    path.write_text(yaml.safe_dump(config))
    trust = TLSConfig(certificate=made.certificate, key=made.key).trust()
    url = f"https://127.0.0.1:{port}"
    command = ["deployments.cli", "serve", "--config", str(path)]
    process = start_until(lambda: "Ready after" in log.read_text(), command, log, environment())
    try:
        assert url in log.read_text()
        assert get_json(f"{url}/ready", trust=trust)["status"] == "ready"
        verified = ssl.create_default_context(cafile=str(made.certificate))
        with httpx.Client(verify=verified) as http:
            client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", http_client=http, max_retries=0)
            ask = {"model": "tiny", "prompt": "once", "max_tokens": 8, "extra_body": {"ignore_eos": True}}
            assert len(list(client.completions.create(**ask, stream=True))) >= 8
        assert get_json(f"{url}/health") is None, "nobody else trusts it"
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/health")
    finally:
        end(process)
