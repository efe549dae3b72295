"""What a stop asks of vLLM's model runners, where engines cannot show it."""

from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import LoRAConfig
from vllm.v1.worker.lora_model_runner_mixin import LoRAModelRunnerMixin

from prefill_node.worker.runners import FirstRunner, SecondRunner, adapters_made_once


class State:
    def prepare_inputs(self, *_):
        return {}


class Connector:
    is_off = False

    def set_disabled(self, disabled):
        self.is_off = disabled


def second(run):
    """vLLM's second runner, as far as a dummy pass goes."""
    runner = SimpleNamespace(
        model_state=State(),
        kv_connector=Connector(),
        execute_model_state=None,
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
    )

    def dummy_run(tokens, **_):
        runner.kv_connector.set_disabled(True)  # and, as vLLM, not on again where the pass fails
        batch = SimpleNamespace(input_ids=torch.zeros(tokens), positions=torch.zeros(tokens))
        runner.model_state.prepare_inputs(batch, None)
        runner.execute_model_state = object()
        return run(batch), None

    runner._dummy_run = dummy_run
    return runner


def test_a_dry_pass_reads_tokens_that_differ():
    runner = second(lambda batch: torch.stack([batch.input_ids, batch.positions], 1))
    hidden = SecondRunner(runner).dry_pass(8)
    assert [len(column.unique()) for column in hidden.T] == [8, 8]


def test_another_dry_pass_reads_another_token_in_each_place():
    runner = SecondRunner(second(lambda batch: batch.input_ids.clone()))
    assert torch.equal(runner.dry_pass(8), runner.dry_pass(8))
    assert not (runner.dry_pass(8) == runner.dry_pass(8, first=1)).any()


def test_a_dry_pass_of_the_first_runner_leaves_no_tokens_behind():
    ids = torch.zeros(10)
    runner = SimpleNamespace(
        input_ids=SimpleNamespace(gpu=ids),
        positions=torch.zeros(10),
        model_config=SimpleNamespace(get_vocab_size=lambda: 100),
        _dummy_run=lambda tokens, **_: (ids[:tokens].clone(), None),
    )
    assert not (FirstRunner(runner).dry_pass(8) == FirstRunner(runner).dry_pass(8, first=1)).any()
    assert not ids.any()


class Adapters:
    """Of an engine, as vLLM's manager of its worker has them."""

    def __init__(self):
        self.here, self.made, self.chosen = set(), 0, []

    def dummy_lora_cache(self):
        return nullcontext()

    def get_dummy_lora_warmup_rank(self, rank):
        return rank

    def add_dummy_lora(self, request, rank):
        self.made += 1
        self.here.add(request.lora_int_id)

    def set_active_adapters(self, requests, mapping):
        self.chosen.append({request.lora_int_id for request in requests})
        assert self.chosen[-1] <= self.here

    def remove_all_adapters(self):
        self.here.clear()


class WithAdapters(LoRAModelRunnerMixin):
    """What both of vLLM's runners are as far as adapters go."""

    def __init__(self, config):
        self.lora_config, self.lora_manager = config, Adapters()

    def dry_pass(self):
        one = np.array([1])
        with self.maybe_dummy_run_with_lora(self.lora_config, one, one, num_active_loras=2):
            pass


def test_adapters_are_made_once_for_all_dry_passes():
    runner = WithAdapters(LoRAConfig(max_loras=2))
    with adapters_made_once(runner):
        for _ in range(5):
            runner.dry_pass()
    adapters = runner.lora_manager
    assert (adapters.made, adapters.chosen, adapters.here) == (2, [{1, 2}] * 5, set())
    runner.dry_pass()
    assert (adapters.made, adapters.here) == (4, set()), "vLLM's own passes are as before"


def test_dry_passes_without_adapters_make_none():
    runner = WithAdapters(None)
    with adapters_made_once(runner):
        runner.dry_pass()
    assert not runner.lora_manager.made


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_stopped_step_ends_when_its_device_has_read_its_inputs(kind, device, monkeypatch):
    """They lie in memory of the host that the next step writes."""
    calls = []
    stream = SimpleNamespace(synchronize=lambda: calls.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    runner = SimpleNamespace(
        device=torch.device(device),
        execute_model_state=object(),
        kv_connector_output="report",
        kv_connector=SimpleNamespace(post_forward=lambda finished: "report"),
    )
    assert kind(runner).abandon(SimpleNamespace(finished_req_ids=set())) == "report"
    assert runner.execute_model_state is None
    assert calls == (["waited"] if device == "cuda" else [])


def test_a_dry_pass_that_fails_leaves_the_connector_on_and_nothing_behind():
    def fail(_):
        raise ValueError("a layer failed")

    runner = second(fail)
    with pytest.raises(ValueError, match="a layer failed"):
        SecondRunner(runner).dry_pass(8)
    assert not runner.kv_connector.is_off
    assert runner.execute_model_state is None
    assert "prepare_inputs" not in vars(runner.model_state)


@pytest.mark.parametrize("kind", [FirstRunner, SecondRunner])
def test_what_another_release_does_not_have_is_named(kind):
    why = kind(SimpleNamespace(execute_model_state=None)).why_unknown()
    assert why.startswith("vLLM's model runner has no ")
    assert "_dummy_run" in why
    assert "execute_model_state" not in why
