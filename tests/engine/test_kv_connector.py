"""Real engines on our connector: what decode refuses under pressure, and what a side channel survives."""

import os
import socket

import msgspec
import pytest
import zmq
from engines import engine, random_prompt
from ports import free_port
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import GET_META_MSG
from vllm.inputs import TokensPrompt

from benchmarks.harness.offline_engine import async_engine
from decode_node.carrying import PRESSURE_SCHEDULER
from kv_transfer.connector import KVRole, kv_transfer_config
from prefill_node.release import Release

pytestmark = [pytest.mark.slow, pytest.mark.long]

PROMPT = random_prompt(600, seed=7)
NO_HANDSHAKES = [b"", b"\xc1", b"x" * 10_000, msgspec.msgpack.encode((GET_META_MSG, 0, 7))]


def tier(role, **options):
    """Engine arguments of one tier."""
    transfer = kv_transfer_config(role, "cpu", lease_s=30)
    return {"kv_transfer_config": transfer, "max_model_len": 1024, **options}


async def answer(engine, name, max_tokens, params=None):
    """(tokens, where their KV cache is) of a greedy answer; `params` are vLLM's for the transfer."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        extra_args=None if params is None else {"kv_transfer_params": params},
    )
    async for output in engine.generate(TokensPrompt(prompt_token_ids=PROMPT), sampling, name):
        last = output
    return list(last.outputs[0].token_ids), last.kv_transfer_params


def vandalise(port):
    """Send what is no handshake, and what is no message of ZeroMQ either."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.linger = 1000
        stranger.connect(f"tcp://127.0.0.1:{port}")
        for body in NO_HANDSHAKES:
            stranger.send_multipart([b"", body])
        stranger.send_multipart([b"one", b"two", b"three", b"four"])
        stranger.send(b"alone")
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(os.urandom(1000))


async def test_a_decode_engine_connects_after_malformed_packets(models, monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    port = free_port()
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
    with async_engine(models("llama"), **tier(KVRole.PREFILL)) as (prefill, _):
        expected, _ = await answer(prefill, "alone", 8)
        vandalise(port)
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
        with async_engine(models("llama"), **tier(KVRole.DECODE)) as (decode, _):
            _, kv = await answer(prefill, "prefill", 1, {"do_remote_decode": True})
            assert kv["remote_port"] == port
            assert (await answer(decode, "decode", 8, kv))[0] == expected


def test_a_prefill_whose_token_ends_the_answer_keeps_no_blocks(models, monkeypatch):
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    with engine(models("llama"), **tier(KVRole.PREFILL)) as running:
        pulled = {"kv_transfer_params": {"do_remote_decode": True}}
        (token,) = running.prefill("alone", PROMPT).tokens
        running.add("ends", PROMPT, extra_args=pulled, stop_token_ids=[token])
        (ended,) = running.llm.llm_engine.step()
        assert (ended.outputs[0].finish_reason, ended.kv_transfer_params) == ("stop", None)
        running.check_at_rest()
        running.add("goes on", PROMPT, extra_args=pulled)
        (first,) = running.llm.llm_engine.step()
        assert first.kv_transfer_params["do_remote_prefill"]
        assert running.scheduler.kv_cache_manager.usage > 0
        running.core.abort_requests([Release("goes on", 0).encode()])
        running.check_at_rest()


@pytest.mark.parametrize(
    ("architecture", "changes", "remedy"),
    [
        ("gemma3_text", {}, "disable_hybrid_kv_cache_manager: true"),
        ("mistral", {"sliding_window": 64}, "leave pressure.enabled off, or set max_model_len"),
    ],
)
def test_a_model_with_windows_is_refused_under_pressure_with_a_remedy(
    models, monkeypatch, architecture, changes, remedy
):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(free_port()))
    options = {"dtype": "float32", "enforce_eager": True, "distributed_executor_backend": "mp"}
    options |= {"scheduler_cls": PRESSURE_SCHEDULER, "async_scheduling": False, "hf_overrides": changes}
    with pytest.raises(ValueError, match=remedy):
        LLM(str(models(architecture)), **options, **tier(KVRole.DECODE))
