"""What preemption needs to know and do inside vLLM's model runners, of which there are two.

The first is `vllm.v1.worker.gpu_model_runner`; the second, vLLM's own choice on GPUs, is
`vllm.v1.worker.gpu.model_runner`. Both keep the requests of a step, have it run, and take its results in
later, in a call that a stopped step does not get. Owns where each has what a stop asks for: the rows of a
batch, the blocks of a request, and what is left behind of a step that ends in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Protocol

import torch

from prefill_node.worker.kv_pages import Blocks, filled_whole

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import KVConnectorOutput

    from prefill_node.worker.checkpoint import Rows


class Runner(Protocol):
    """One of vLLM's model runners, `of` a worker."""

    of: Any

    def why_unknown(self) -> str:
        """What is missing of it that is used here, once its KV caches are there; empty for nothing."""

    def rows(self, scheduled: SchedulerOutput) -> Rows:
        """The rows of a step's batch, once the runner has prepared it."""

    def blocks(self, rows: Rows) -> Blocks:
        """The blocks that these requests' parts of a step fill whole."""

    def abandon(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        """Have it forget a step whose pass has stopped; what its KV connector has to report meanwhile.

        Waits for what the device has been given of it, as taking the results in would: until then the device
        may read the step's inputs from memory of the host, which the next step writes.
        """

    def dry_pass(self, tokens: int, first: int = 0) -> torch.Tensor:
        """The hidden states of vLLM's own dummy pass, with attention, over tokens that differ.

        Two passes with another `first` have no token in the same place. Writes no KV.
        """


def runner_of(vllm_config: VllmConfig, runner: Any) -> Runner:
    """The one that a worker has loaded its model into."""
    return SecondRunner(runner) if vllm_config.use_v2_model_runner else FirstRunner(runner)


class FirstRunner:
    """See `Runner`. It keeps what it knows of requests on the host."""

    def __init__(self, runner: Any) -> None:
        self.of = runner

    def why_unknown(self) -> str:
        """See `Runner`."""
        return _missing(
            self.of,
            "execute_model_state",
            "device.type",
            "kv_connector_output",
            "input_batch.req_ids",
            "requests",
            "input_ids.gpu",
            "positions",
            "lora_config",
            "maybe_setup_dummy_loras",
            "_dummy_run",
        )

    def rows(self, scheduled: SchedulerOutput) -> Rows:
        """See `Runner`."""
        tokens = scheduled.num_scheduled_tokens
        return tuple([(request_id, tokens[request_id]) for request_id in self.of.input_batch.req_ids])

    def blocks(self, rows: Rows) -> Blocks:
        """See `Runner`."""

        def state(request_id: str) -> tuple[Sequence[Sequence[int]], int]:
            request = self.of.requests[request_id]
            return request.block_ids, request.num_computed_tokens

        return _filled(self.of, rows, state)

    def abandon(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:  # noqa: ARG002 - as the second
        """See `Runner`. What the connector reports has been taken where the pass ended."""
        _wait_for_device(self.of)
        self.of.execute_model_state = None
        report, self.of.kv_connector_output = self.of.kv_connector_output, None
        return report

    def dry_pass(self, tokens: int, first: int = 0) -> torch.Tensor:
        """See `Runner`."""
        runner = self.of
        ids = runner.input_ids.gpu[:tokens]
        _differ(ids, first, runner)
        runner.positions[:tokens] = torch.arange(tokens, device=runner.positions.device)
        hidden, _ = runner._dummy_run(  # noqa: SLF001 - nothing public runs a pass without requests
            tokens, force_attention=True, skip_eplb=True
        )
        ids.zero_()
        return torch.as_tensor(hidden[:tokens]).clone()


class SecondRunner:
    """See `Runner`. It keeps what it knows of requests on the device, each in a place of its own.

    How many tokens of a request are computed is advanced when a step's results are taken in, and the tokens
    that a step reads are written anew for each step. So a step that has stopped is not rolled back: it is
    prepared again as it was.
    """

    def __init__(self, runner: Any) -> None:
        self.of = runner

    def why_unknown(self) -> str:
        """See `Runner`."""
        return _missing(
            self.of,
            "execute_model_state",
            "device.type",
            "gather_batch_req_state",
            "req_states.req_id_to_index",
            "req_states.num_computed_tokens_np",
            "block_tables.block_tables",
            "block_tables.num_blocks.np",
            "block_tables.blocks_per_kv_block",
            "kv_connector.post_forward",
            "model_state.prepare_inputs",
            "lora_config",
            "maybe_setup_dummy_loras",
            "_dummy_run",
        )

    def rows(self, scheduled: SchedulerOutput) -> Rows:
        """See `Runner`. The batch is in the order that the runner has just found by the same call."""
        batch, _ = self.of.gather_batch_req_state(scheduled, dummy_run=False)
        return tuple(zip(batch.req_ids, batch.num_scheduled_tokens.tolist(), strict=True))

    def blocks(self, rows: Rows) -> Blocks:
        """See `Runner`. They are read from the device, which waits for what it has been given to do."""
        states = self.of.req_states

        def state(request_id: str) -> tuple[Sequence[Sequence[int]], int]:
            place = states.req_id_to_index[request_id]
            return self._held(place), int(states.num_computed_tokens_np[place])

        return _filled(self.of, rows, state)

    def _held(self, place: int) -> list[list[int]]:
        """The blocks of the request in this place, as the scheduler numbers them, by group."""
        tables = self.of.block_tables
        groups = zip(
            tables.block_tables, tables.num_blocks.np[:, place], tables.blocks_per_kv_block, strict=True
        )
        return [
            [block // parts for block in table.gpu[place, :count:parts].tolist()]
            for table, count, parts in groups
        ]

    def abandon(self, scheduled: SchedulerOutput) -> KVConnectorOutput | None:
        """See `Runner`. The connector is asked here, as it would be when the results are taken in."""
        _wait_for_device(self.of)
        self.of.execute_model_state = None
        return self.of.kv_connector.post_forward(scheduled.finished_req_ids)

    def dry_pass(self, tokens: int, first: int = 0) -> torch.Tensor:
        """See `Runner`. Outside of CUDA graphs, which would replay the whole pass."""
        state = self.of.model_state
        prepare = state.prepare_inputs

        def prepare_inputs(batch: Any, *arguments: Any) -> Any:
            _differ(batch.input_ids[:tokens], first, self.of)
            batch.positions[:tokens] = torch.arange(tokens, device=batch.positions.device)
            return prepare(batch, *arguments)

        state.prepare_inputs = prepare_inputs
        try:
            hidden, _ = self.of._dummy_run(tokens, is_profile=True, skip_eplb=True)  # noqa: SLF001 - the same
        finally:  # a pass that fails has left the connector off, and everything else goes on
            del state.prepare_inputs
            self.of.kv_connector.set_disabled(False)
            self.of.execute_model_state = None
        return torch.as_tensor(hidden[:tokens]).clone()


@contextmanager
def adapters_made_once(runner: Any) -> Iterator[None]:
    """Have vLLM make the adapters of its dummy passes once for all of them; each would by itself."""
    with runner.maybe_setup_dummy_loras(runner.lora_config):
        runner.maybe_setup_dummy_loras = lambda *_: nullcontext()
        try:
            yield
        finally:
            del runner.maybe_setup_dummy_loras


def _missing(runner: Any, *names: str) -> str:
    """Of what is used of a runner and is no interface of vLLM's, what another release does not have."""
    missing = []
    for name in names:
        try:
            attrgetter(name)(runner)
        except AttributeError:
            missing.append(name)
    return f"vLLM's model runner has no {', '.join(missing)}" if missing else ""


def _filled(runner: Any, rows: Rows, state: Callable[[str], tuple[Sequence[Sequence[int]], int]]) -> Blocks:
    """The blocks that rows fill whole; `state` tells a request's blocks by group, and its computed tokens."""
    sizes = [group.kv_cache_spec.block_size for group in runner.kv_cache_config.kv_cache_groups]
    filled = {}
    for request_id, tokens in rows:
        block_ids, computed = state(request_id)
        filled[request_id] = filled_whole(block_ids, sizes, computed, tokens)
    return filled


def _differ(ids: torch.Tensor, first: int, runner: Any) -> None:
    """Have these tokens be different ones, and others for another `first`."""
    ids.copy_(torch.arange(first, first + len(ids)) * 7919 % runner.model_config.get_vocab_size())


def _wait_for_device(runner: Any) -> None:
    if runner.device.type == "cuda":
        torch.cuda.current_stream().synchronize()
