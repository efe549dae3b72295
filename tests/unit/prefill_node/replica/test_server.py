"""The start of a prefill replica, as far as it goes without an engine."""

import asyncio
from types import SimpleNamespace

import pytest
from ray import serve
from ray.serve.llm.deployment import PDPrefillServer

from prefill_node.board.board import Board
from prefill_node.engine_setup import EngineSetup
from prefill_node.replica import server
from prefill_node.replica.server import PrefillServer


def test_an_engine_that_ends_while_it_starts_leaves_no_board(monkeypatch, tmp_path):
    """The next replica on this machine would remove it, but none need come."""
    boards = []

    async def engine_dies(*_, **__):
        boards.extend(tmp_path.iterdir())
        raise RuntimeError("the engine was killed")

    monkeypatch.setattr(PDPrefillServer, "__init__", engine_dies)
    context = SimpleNamespace(rank=SimpleNamespace(local_rank=0))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(server, "_make_board", lambda ranks: Board.create(ranks, tmp_path))
    config = SimpleNamespace(engine_kwargs={}, update_engine_kwargs=lambda **_: None)
    node = SimpleNamespace(tracing=None, cores=(), setup=EngineSetup(mode="resume"))
    starting = object.__new__(PrefillServer)
    with pytest.raises(RuntimeError, match="was killed"):
        asyncio.run(starting.__init__(config, node=node, router=None))
    assert len(boards) == 1, "the engine finds it by its name"
    assert list(tmp_path.iterdir()) == []
