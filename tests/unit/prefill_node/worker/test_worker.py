"""What keeps a real engine's configuration from being preempted, and what preemption takes of its memory."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from benchmarks.harness.tiny_models import build_tiny
from prefill_node.engine_setup import EngineSetup
from prefill_node.worker.boundary import BoundaryLevel
from prefill_node.worker.worker import (
    NotPreemptibleError,
    PreemptibleWorker,
    granularity_of,
    prepare,
)
from slo.preemption.types import Limits

KV_TO_HOST = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cuda"}


@pytest.fixture(scope="module")
def reason(tmp_path_factory):
    """Asks about an engine of a tiny model with the given arguments."""
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    from prefill_node.refusal import why_not

    def directory(architecture):
        return str(build_tiny(tmp_path_factory.mktemp("model"), architecture))

    models = {architecture: directory(architecture) for architecture in ("llama", "paligemma", "falcon_h1")}

    def ask(architecture="llama", kv_transfer_config=None, cascade_attn_on=None, **arguments):
        transfer = None if kv_transfer_config is None else KVTransferConfig(**kv_transfer_config)
        model = models.get(architecture, architecture)
        given = {"model": model, "dtype": "float32", "enforce_eager": True, **arguments}
        config = EngineArgs(**given, kv_transfer_config=transfer).create_engine_config()
        with pytest.MonkeyPatch.context() as patched:
            # vLLM sets it while it makes the configuration, which another process does on a GPU.
            patched.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
            if cascade_attn_on is not None:  # what vLLM itself does not have on a CPU
                config.model_config.disable_cascade_attn = False
                # An engine of an earlier test may have kept what the environment said.
                patched.setattr(type(config), "use_v2_model_runner", cascade_attn_on == "second")
            return why_not(config)

    return ask


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"enforce_eager": False}, "the model is compiled; set enforce_eager"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"data_parallel_size": 2}, "data parallelism"),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}}, "speculative decoding"),
        ({"runner": "pooling"}, "the model is an encoder"),
        ({"kv_transfer_config": KV_TO_HOST}, "set kv_transfer.buffer_device to auto"),
        ({"architecture": "paligemma"}, "prefill.engine_kwargs can have language_model_only"),
        (
            {"architecture": "paligemma", "language_model_only": True, "enable_mm_embeds": True},
            "unset enable_prompt_embeds, enable_mm_embeds",
        ),
        ({"enable_prompt_embeds": True}, "unset enable_prompt_embeds, enable_mm_embeds"),
        ({"offload_group_size": 2}, "unset offload_group_size"),
        ({"cascade_attn_on": "first"}, "set disable_cascade_attn"),
        ({"architecture": "falcon_h1", "dtype": "bfloat16"}, "the model keeps a recurrent state"),
    ],
)
def test_what_keeps_an_engine_from_being_preempted_is_named(reason, arguments, why):
    assert why in reason(**arguments)


@pytest.mark.slow
def test_nothing_keeps_an_engine_as_we_start_it_from_being_preempted(reason):
    assert reason() is None
    compiled = EngineSetup(mode="resume", compiled=True).encode()
    assert reason(enforce_eager=False, additional_config=compiled) is None, "the worker has it cut in pieces"


@pytest.fixture(scope="module")
def sparse_attention(tmp_path_factory):
    """A model whose kind vLLM captures in CUDA graphs that it breaks at attention, and does not compile."""
    directory = build_tiny(tmp_path_factory.mktemp("model"), "deepseek_v2")
    config = json.loads((directory / "config.json").read_text())
    config |= {"architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32"}
    config |= {"index_topk": 64, "index_n_heads": 2, "index_head_dim": 32}
    (directory / "config.json").write_text(json.dumps(config))
    return str(directory)


EAGER, COMPILED, NEITHER = (True, False), (False, True), (False, False)
"""`enforce_eager` and `preemption.compiled`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variable", "passes", "is_refused"),
    [
        ("sparse attention", None, COMPILED, True),
        ("sparse attention", None, NEITHER, True),
        ("llama", "1", COMPILED, True),
        ("sparse attention", "0", COMPILED, False),
        ("sparse attention", None, EAGER, False),
        ("llama", "1", EAGER, False),
    ],
)
def test_an_engine_that_has_cuda_graphs_in_place_of_compiled_passes_is_not_preempted(
    reason, sparse_attention, monkeypatch, kind, variable, passes, is_refused
):
    """Short steps would be replayed without stopping, though they were said to stop."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda *_: True)
    monkeypatch.setenv("VLLM_USE_BREAKABLE_CUDAGRAPH", variable or "")
    if variable is None:  # vLLM sets it itself, by the model
        monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH")
    enforce_eager, compiled = passes
    found = reason(
        sparse_attention if kind == "sparse attention" else kind,
        enforce_eager=enforce_eager,
        max_model_len=512,
        additional_config=EngineSetup(mode="resume", compiled=compiled).encode(),
    )
    assert ("has CUDA graphs" in found) if is_refused else (found is None)


@pytest.mark.slow
def test_nothing_keeps_an_engine_from_being_preempted_whose_short_passes_are_whole_cuda_graphs(
    reason, monkeypatch
):
    """Longer ones are eager, and stop."""
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "support_static_graph_mode", lambda *_: True)
    graphs = {"mode": 0, "cudagraph_mode": "FULL"}
    assert reason(enforce_eager=False, compilation_config=graphs) is None


@pytest.mark.slow
def test_nothing_keeps_an_engine_whose_runner_has_no_cascade_attention_from_being_preempted(reason):
    assert reason(cascade_attn_on="second") is None


@pytest.mark.slow
def test_nothing_keeps_an_engine_whose_weights_lie_in_memory_of_the_host_from_being_preempted(reason):
    assert reason(cpu_offload_gb=1.0) is None


@pytest.mark.slow
def test_nothing_keeps_the_text_of_a_model_that_reads_images_from_being_preempted(reason):
    assert reason("paligemma", language_model_only=True) is None


@pytest.mark.parametrize(
    ("device", "mode", "asked_for", "kept_free"),
    [
        ("cuda", "resume", None, 3 << 30),
        ("cuda", "resume", 10 << 30, 0),
        ("cuda", "recompute", None, 0),
        ("cpu", "resume", None, 0),
        ("cuda", "refused", None, 0),
    ],
)
def test_checkpoints_have_memory_of_their_own(device, mode, asked_for, kept_free):
    setup = EngineSetup(mode=mode, limits=Limits(max_suspended_bytes=3 << 30))
    if mode == "refused":
        setup = replace(setup, mode="resume", refused="it cannot be stopped")

    class Worker:
        def determine_available_memory(self):
            return 10 << 30

    class Preemptible(PreemptibleWorker, Worker):
        vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=device),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=asked_for),
            additional_config=setup.encode(),
        )

    assert Preemptible().determine_available_memory() == (10 << 30) - kept_free


@pytest.mark.parametrize("available", [2 << 30, 1 << 30])
def test_memory_that_checkpoints_alone_take_is_refused_by_the_settings(available):
    class Worker:
        def determine_available_memory(self):
            return available

    class Preemptible(PreemptibleWorker, Worker):
        vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type="cuda"),
            cache_config=SimpleNamespace(kv_cache_memory_bytes=None),
            additional_config=EngineSetup(mode="resume", limits=Limits(max_suspended_bytes=2 << 30)).encode(),
        )

    said = f"of {available >> 20} MiB for KV blocks preemption.limits.max_suspended_mib keeps 2048"
    with pytest.raises(ValueError, match=said):
        Preemptible().determine_available_memory()


@pytest.mark.parametrize("mode", ["resume", "off"])
def test_what_was_compiled_once_is_found_at_the_next_start(mode):
    """vLLM looks for it by a hash of the whole configuration."""
    from vllm.config import VllmConfig

    def hashes(board):
        seen = []

        class Worker:
            def load_model(self):
                seen.append(self.vllm_config.compute_hash())

            def determine_available_memory(self):
                seen.append(self.vllm_config.compute_hash())
                return 0

            def compile_or_warm_up_model(self):
                seen.append(self.vllm_config.compute_hash())

        class Preemptible(PreemptibleWorker, Worker):
            setup = EngineSetup(board=board, mode=mode, refused="for this test")
            vllm_config = VllmConfig(additional_config={"other": 1} | setup.encode())
            model_runner = None

        worker = Preemptible()
        worker.load_model()
        worker.determine_available_memory()
        worker.compile_or_warm_up_model()
        assert EngineSetup.of(worker.vllm_config).board == board
        assert worker.vllm_config.additional_config["other"] == 1
        return seen

    assert hashes("/dev/shm/first") == hashes("/dev/shm/second")


def test_a_worker_of_an_engine_that_was_refused_prepares_nothing_and_says_why():
    config = SimpleNamespace(
        additional_config=EngineSetup(board="/no/board", mode="resume", refused="it is hybrid").encode()
    )
    with pytest.raises(NotPreemptibleError, match="it is hybrid"):
        prepare(config, None)


@pytest.mark.parametrize("granularity", ["operator", "layer"])
def test_ranks_on_several_hosts_vote_once_a_layer(granularity):
    setup = EngineSetup(granularity=granularity)
    assert granularity_of(setup, one_host=True) == granularity
    assert granularity_of(setup, one_host=False) is BoundaryLevel.LAYER
