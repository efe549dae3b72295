"""The start of a prefill replica, as far as it goes without an engine."""

import asyncio
import os
import random
import socket
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.llm.deployment import PDPrefillServer

from kv_transfer import side_channel
from prefill_node.board.board import Board
from prefill_node.engine_setup import EngineSetup
from prefill_node.replica import server
from prefill_node.replica.server import PrefillServer


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Starts a replica whose engine does something and is killed; its tier has these ports and cores."""
    for name in ("VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(side_channel, "_holds", holds := [])
    context = SimpleNamespace(rank=SimpleNamespace(local_rank=0))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(server, "_make_board", lambda ranks: Board.create(ranks, tmp_path))

    def start(engine, first_port, cores=()):
        async def engine_dies(*_, **__):
            engine()
            raise RuntimeError("the engine was killed")

        monkeypatch.setattr(PDPrefillServer, "__init__", engine_dies)
        config = SimpleNamespace(
            engine_kwargs={},
            experimental_configs={side_channel.PORT_BASE: first_port},
            update_engine_kwargs=lambda **_: None,
        )
        node = SimpleNamespace(tracing=None, cores=cores, setup=EngineSetup(mode="resume"))
        starting = object.__new__(PrefillServer)
        with pytest.raises(RuntimeError, match="was killed"):
            asyncio.run(starting.__init__(config, node=node, router=None))

    yield start
    for hold in holds:
        hold.close()


@pytest.fixture
def first_port():
    """No test that runs beside others listens there, nor behind it."""
    return random.randrange(24_000, 31_000)


def test_an_engine_that_ends_while_it_starts_leaves_no_board(start, first_port, tmp_path):
    """The next replica on this machine would remove it, but none need come."""
    boards = []
    start(lambda: boards.extend(tmp_path.iterdir()), first_port)
    assert len(boards) == 1, "the engine finds it by its name"
    assert list(tmp_path.iterdir()) == []


def test_an_engine_has_the_port_and_the_cores_that_are_free_whatever_rank_serve_gives_it(start, first_port):
    """Serve may call it the first while the first port is that of one that runs."""
    seen = {}
    with socket.create_server(("127.0.0.1", first_port)):
        start(lambda: seen.update(os.environ), first_port, cores=("4", "5"))
    assert seen["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(first_port + 1)
    assert seen["VLLM_CPU_OMP_THREADS_BIND"] == "5"
