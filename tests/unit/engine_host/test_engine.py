"""How an engine is started; that it serves so is `tests/e2e`'s."""

import os
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from ray.llm._internal.serve.engines.vllm.vllm_engine import VLLMEngine
from vllm import envs

from engine_host import engine
from engine_host.engine import EngineNotStartedError, ReplicaEngine


@pytest.fixture
def started(monkeypatch):
    """What Ray's engine class is asked to start: (executor, OpenMP's variables) of each."""
    seen = []

    def start(self, args, config, placement_group):
        openmp = {
            name: value for name, value in os.environ.items() if name.startswith(("OMP", "GOMP", "KMP"))
        }
        seen.append((config.parallel_config.distributed_executor_backend, openmp))
        return "client"

    monkeypatch.setattr(VLLMEngine, "_start_async_llm_engine", start)
    envs.disable_envs_cache()  # an engine of another test in this process has read them
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "1")
    for name in ("OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "GOMP_CPU_AFFINITY", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    return seen


def config(ranks):
    parallel = SimpleNamespace(
        world_size=ranks,
        local_world_size=ranks,
        data_parallel_rank_local=None,
        _api_process_count=1,
        distributed_executor_backend="mp",
    )
    return SimpleNamespace(parallel_config=parallel, kv_transfer_config=object())


def start(ranks):
    return object.__new__(ReplicaEngine)._start_async_llm_engine(None, config(ranks), None)


def test_one_rank_is_one_process_which_begins_with_its_cores(started):
    before = dict(os.environ)
    assert start(1) == "client"
    [(executor, openmp)] = started
    assert executor == "uni"
    assert openmp["OMP_NUM_THREADS"] == "1"
    assert "1" in openmp["OMP_PLACES"]
    assert dict(os.environ) == before


def test_several_ranks_are_started_as_vllm_does(started):
    start(2)
    [(executor, openmp)] = started
    assert executor == "mp"
    assert "OMP_PLACES" not in openmp


@contextmanager
def printing_to(out, err):
    """This process prints to two files, as a replica does, and its engine with it."""
    kept = {number: os.dup(number) for number in (1, 2)}
    try:
        for number, path in ((1, out), (2, err)):
            with path.open("ab") as file:
                os.dup2(file.fileno(), number)
        yield
    finally:
        for number, copy in kept.items():
            os.dup2(copy, number)
            os.close(copy)


CORE = "(EngineCore pid=7)"
CAUSE = "ValueError: To serve one request 0.02 GiB KV cache is needed"
ERROR = "ERROR 11-29 00:14:39 [core.py:1374]"
QUOTED = "CUDA out of memory. Tried to allocate 1.96 GiB."
SEE = "please check the stack trace above for the root cause"
VLLMS = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("out", "err", "why"),
    [
        (f"{CORE} {ERROR} Traceback (most recent call last):\n{CORE} {ERROR} {CAUSE}", "", CAUSE),
        (f"{CORE} INFO all is well", f"{CORE}     raise ValueError(\n{CORE} {CAUSE}", CAUSE),
        (f"(Worker_TP1 pid=8) {ERROR} {CAUSE}", f"{CORE} Exception: See stack trace for root cause.", CAUSE),
        (f"{CORE} {ERROR} RuntimeError: Worker failed with error '{QUOTED}', {SEE}", "", QUOTED),
        (f"{CORE} {ERROR} RuntimeError: Worker failed with error '', {SEE}", "", VLLMS),
        (f"{CORE} \x1b[36m(RayWorkerProc pid=8, ip=10.0.0.2)\x1b[0m {ERROR} {CAUSE}", "", CAUSE),
        (f"{CORE} INFO all is well", "Killed", VLLMS),
        ("", "", VLLMS),
    ],
)
def test_of_an_engine_that_does_not_start_its_own_words_are_told(
    started, monkeypatch, tmp_path, ranks, out, err, why
):
    printed = tmp_path / "worker-1.out", tmp_path / "worker-1.err"
    printed[0].write_text("(EngineCore pid=3) RuntimeError: of an engine before this one\n")
    told = []
    monkeypatch.setattr(engine.logs, "event", lambda name, **what: told.append((name, what["error"])))

    def start_fails(self, args, config, placement_group):
        for number, text in ((1, out), (2, err)):
            os.write(number, text.encode() + b"\n")
        raise RuntimeError(VLLMS)

    monkeypatch.setattr(VLLMEngine, "_start_async_llm_engine", start_fails)
    with printing_to(*printed), pytest.raises(EngineNotStartedError) as raised:
        start(ranks)
    words = f"the engine does not start: {why}; what it has printed is in {printed[0]}, {printed[1]}"
    assert str(raised.value) == words
    assert told == [("engine_not_started", words)]


def test_what_an_engine_has_printed_elsewhere_than_in_files_is_not_looked_for(started, monkeypatch):
    def start_fails(self, args, config, placement_group):
        raise RuntimeError(VLLMS)

    monkeypatch.setattr(VLLMEngine, "_start_async_llm_engine", start_fails)
    monkeypatch.setattr(engine.Path, "readlink", lambda path: engine.Path("pipe:[17]"))
    with pytest.raises(RuntimeError, match="See root cause above") as raised:
        start(1)
    assert type(raised.value) is RuntimeError
