"""How a prefill replica's engine is started: so that it can be stopped, or as vLLM is by itself."""

from types import SimpleNamespace

import pytest

from prefill_node.engine_setup import EngineSetup
from prefill_node.replica import engine as module
from prefill_node.replica.engine import ASYNC_SCHEDULER, SCHEDULER, PrefillEngine

STOCK = {"enforce_eager": False, "async_scheduling": None}
REFUSAL = "the model keeps a recurrent state"


class Arguments:
    """Ray's configuration of an engine, as far as it is read here."""

    def __init__(self, setup):
        self.engine_kwargs = {"enforce_eager": True, "async_scheduling": False, "max_model_len": 99}
        self.engine_kwargs["additional_config"] = {"other": 1} | setup.encode()

    def update_engine_kwargs(self, **given):
        self.engine_kwargs |= given


@pytest.fixture
def started(monkeypatch):
    """What vLLM is asked to start with, of an engine that is refused or not."""
    seen = []

    def prepare(self, context):
        """vLLM composes steps ahead unless it is told not to."""
        given = dict(self.llm_config.engine_kwargs)
        seen.append((given, context.runtime_env))
        is_ahead = given["async_scheduling"] is not False
        return (
            given,
            None,
            SimpleNamespace(
                scheduler_config=SimpleNamespace(async_scheduling=is_ahead, scheduler_cls=SCHEDULER)
            ),
        )

    monkeypatch.setattr(module.ReplicaEngine, "_prepare_engine_config", prepare)

    def start(setup, why=None):
        monkeypatch.setattr(module, "why_not", lambda config: why)
        engine = PrefillEngine.__new__(PrefillEngine)
        engine.llm_config = Arguments(setup)
        context = SimpleNamespace(runtime_env={"env_vars": {"A": "1"}})
        given, _, config = engine._prepare_engine_config(context)
        return SimpleNamespace(
            given=given,
            setup=EngineSetup.of_arguments(given["additional_config"]),
            scheduler=config.scheduler_config.scheduler_cls,
            variables=seen[-1][1]["env_vars"],
            asked=len(seen),
            refused=engine.refused,
        )

    return start


def test_an_engine_that_can_be_stopped_is_eager_and_in_step(started):
    engine = started(EngineSetup(mode="resume", stock=STOCK))
    assert engine.given["enforce_eager"] is True
    assert engine.scheduler == SCHEDULER
    assert engine.variables == {"A": "1"}, "vLLM chooses the model runner"
    assert engine.refused == ""
    assert engine.asked == 1


def test_one_that_cannot_is_what_vllm_is_by_itself(started):
    engine = started(EngineSetup(mode="resume", compiled=True, stop_within_s=0.01, stock=STOCK), REFUSAL)
    assert engine.given | STOCK == engine.given
    assert engine.given["max_model_len"] == 99
    assert engine.given["additional_config"]["other"] == 1
    assert engine.scheduler == ASYNC_SCHEDULER
    assert engine.variables == {"A": "1"}
    assert engine.refused == engine.setup.refused == REFUSAL
    assert not engine.setup.compiled


def test_one_that_shall_not_be_stopped_is_too_and_nobody_asks_whether_it_could(started):
    engine = started(EngineSetup(mode="off"), "nobody asks")
    assert engine.asked == 1
    assert engine.setup.refused == ""
