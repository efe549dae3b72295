"""vLLM's worker with a forward pass that can be preempted.

One process per tensor-parallel rank. Owns that rank's checkpoints and turns a stopped forward pass into a
`PreemptedOutput`. Which step stops is the governor's decision; what happens next is the scheduler's. The
accelerator's own worker class is mixed in by `prefill_node.worker.cpu` and `prefill_node.worker.cuda`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from vllm.distributed.parallel_state import get_tp_group, in_the_same_node_as

from prefill_node.board.board import Board, BoardUnavailableError
from prefill_node.engine_setup import EngineSetup, PreemptionSupport, hidden
from prefill_node.refusal import is_compiled, why_not
from prefill_node.step_order import PreemptedOutput, StepOrder
from prefill_node.worker import rehearsal
from prefill_node.worker.boundary import Boundaries, BoundaryLevel, NoBoundariesError, install
from prefill_node.worker.checkpoint import Checkpoint, Kept
from prefill_node.worker.compiled.walker import CompiledPass
from prefill_node.worker.forward import Forward, NoBoard, Stop
from prefill_node.worker.kv_pages import KVPages
from prefill_node.worker.launch_ahead import HostOnly, LaunchAhead, TimeBound
from prefill_node.worker.runners import Runner, adapters_made_once, runner_of
from prefill_node.worker.vote import choose_transport
from slo.predict.pass_shape import PassShape

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput


_ONCE_A_LAYER: Final = "ranks on several hosts vote once a layer"
_log = logging.getLogger(__name__)


class NotPreemptibleError(Exception):
    """This engine's forward pass cannot be stopped; the message says why."""


@dataclass(slots=True)
class Preemption:
    """A rank's part in preemption: its forward pass and what it keeps of stopped ones.

    Attributes:
        runner: The model runner whose passes these are.
        keep: Whether a stopped pass goes on where it was.
        late_by: How many boundaries after the one at which an order is seen it stops.
        checkpoint_bytes: By boundary, what a checkpoint has for each token.
        pages: Where checkpoints lie; None for memory of their own.
    """

    runner: Runner
    forward: Forward
    boundaries: Boundaries
    keep: bool
    late_by: int = 0
    checkpoint_bytes: tuple[float, ...] = ()
    pages: KVPages | None = None
    checkpoints: dict[int, Kept] = field(default_factory=dict)

    def begin(self, order: StepOrder, rows: Any) -> None:
        """A step starts; checkpoints that nobody needs are dropped first."""
        for step_id in order.discard:
            self.checkpoints.pop(step_id, None)
        if order.step_id == 0:
            return
        resume = None if order.resume is None else self.checkpoints.pop(order.resume, None)
        self.forward.begin(order.step_id, rows, resume, self._at_s(*order.predicted_s))

    def _at_s(self, tokens_s: float, pairs_s: float) -> list[float]:
        """When each boundary is reached in a pass whose two kinds of work take so long."""
        if isinstance(self.forward.launch_ahead, HostOnly):
            return []
        return [part.tokens * tokens_s + part.pairs * pairs_s for part in self.boundaries.shape.done]

    def keep_checkpoint(self, step_id: int, stop: Stop) -> int | None:
        """Keep what was computed; the bytes that it takes beside KV blocks, None when nothing is kept."""
        kept: Kept = stop.checkpoint
        if not self.keep or kept.boundary == 0:
            return None
        if self.pages is not None:
            try:
                blocks = self.runner.blocks(stop.checkpoint.rows)
                kept = self.pages.keep(stop.checkpoint, stop.boundary, blocks)
            except RuntimeError as error:  # no memory for the copy; what it has written will be overwritten
                _log.warning("a checkpoint stays where it is: %s", error)
        self.checkpoints[step_id] = kept
        return kept.size_bytes

    def use_pages(self, vllm_config: VllmConfig) -> None:
        """Let checkpoints lie in KV blocks, where it is known which are empty. All ranks call it."""
        parallel = vllm_config.parallel_config
        is_whole = parallel.decode_context_parallel_size == parallel.prefill_context_parallel_size == 1
        if not self.keep or not is_whole or not self.boundaries.attentions:
            return
        modules = vllm_config.compilation_config.static_forward_context
        caches = {name: getattr(module, "kv_cache", None) for name, module in modules.items()}
        pages = None
        try:
            pages = KVPages.of(self.runner.of.kv_cache_config, caches, self.boundaries)
            problem = pages.why_inexact()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with these caches, there is another place
            problem = repr(error)[:300]
        try:
            _agree(problem)
        except NotPreemptibleError as error:
            _log.warning("checkpoints do not lie in KV blocks: %s", error)
        else:
            self.pages = pages

    def kept_bytes(self) -> tuple[float, ...]:
        """By boundary, what a stop keeps beside KV blocks for each token."""
        if not self.keep:
            return ()
        room = (0.0,) * len(self.checkpoint_bytes) if self.pages is None else self.pages.room()
        return tuple(max(0.0, whole - some) for whole, some in zip(self.checkpoint_bytes, room, strict=True))


class PreemptibleWorker:
    """Mixed into a vLLM worker; see the module."""

    vllm_config: VllmConfig
    model_runner: Any
    _preemption: Preemption | None = None
    _refusal: str = "the engine has not loaded its model"
    _compiled: CompiledPass | None = None

    def load_model(self, **kwargs: Any) -> None:
        """Load the model, then wrap its layers; those of one that is compiled are cut when it has been."""
        setup = EngineSetup.of(self.vllm_config)
        if setup.compiled and is_compiled(self.vllm_config):
            self._compiled = CompiledPass(granularity_of(setup, one_host=_is_on_one_host()))
            self._compiled.watch()
        with hidden(self.vllm_config):
            super().load_model(**kwargs)  # type: ignore[misc] # the worker mixed in
        try:
            self._preemption = prepare(self.vllm_config, self.model_runner, self._compiled)
        except NotPreemptibleError as error:
            self._refuse(error)

    def determine_available_memory(self) -> int:
        """Bytes for KV blocks: what vLLM finds, less what checkpoints may take of an accelerator's memory.

        With `kv_cache_memory_bytes` it is what was asked for, and checkpoints take of what is left.

        Raises:
            ValueError: when nothing is left beside checkpoints; the message names the settings.
        """
        setup, config = EngineSetup.of(self.vllm_config), self.vllm_config
        # A plan that vLLM has stored of an earlier start sets it as well.
        is_asked_for = config.cache_config.kv_cache_memory_bytes is not None
        with hidden(config):
            available: int = super().determine_available_memory()  # type: ignore[misc] # the worker mixed in
        if config.device_config.device_type == "cpu" or setup.mode != "resume" or setup.refused:
            return available
        if is_asked_for:
            return available
        kept, left = setup.limits.max_suspended_bytes, available - setup.limits.max_suspended_bytes
        _log.info(
            "%d MiB are left for KV blocks, beside %d MiB for suspended prefills", left >> 20, kept >> 20
        )
        if left <= 0 < available:
            raise ValueError(
                f"of {available >> 20} MiB for KV blocks preemption.limits.max_suspended_mib keeps "
                f"{kept >> 20} for suspended prefills; set it to less, or give the engine more memory by "
                "gpu_memory_utilization in prefill.engine_kwargs"
            )
        return left

    def compile_or_warm_up_model(self) -> Any:
        """Warm up, then see whether a stopped pass resumes exactly; one that does not is never stopped."""
        with hidden(self.vllm_config):
            times = super().compile_or_warm_up_model()  # type: ignore[misc] # the worker mixed in
        if self._compiled is not None:
            self._compiled.unwatch()
        if self._preemption is not None:
            try:
                if self._compiled is not None:
                    cut(self._preemption, self._compiled)
                rehearse(self._preemption)
                self._preemption.use_pages(self.vllm_config)
            except NotPreemptibleError as error:
                self._refuse(error)
        return times

    def _refuse(self, error: NotPreemptibleError) -> None:
        self._preemption, self._refusal = None, str(error)
        _log.warning("prefills of this replica cannot be preempted: %s", error)

    def preemption_support(self) -> PreemptionSupport:
        """Where this rank's passes can stop; the replica asks after start."""
        if self._preemption is None:
            return PreemptionSupport((), 0.0, 0, "", self._refusal)
        boundaries = self._preemption.boundaries
        shape = boundaries.shape
        return PreemptionSupport(
            tuple([(part.tokens, part.pairs) for part in shape.done]),
            shape.pair_work,
            self._preemption.late_by,
            boundaries.granularity.value,
            boundaries.why_not_finer,
        )

    def kept_bytes(self) -> tuple[float, ...]:
        """By boundary, bytes that a stop keeps beside KV blocks for each token; empty for none."""
        return () if self._preemption is None else self._preemption.kept_bytes()

    def checkpoints_held(self) -> int:
        """Checkpoints that this rank keeps; none when nothing is suspended."""
        return 0 if self._preemption is None else len(self._preemption.checkpoints)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run a step; a `PreemptedOutput` when it stopped."""
        order = StepOrder.of(scheduler_output)
        if self._preemption is None or order is None:
            return super().execute_model(scheduler_output)  # type: ignore[misc] # the worker mixed in
        runner = self._preemption.runner
        self._preemption.begin(order, lambda: runner.rows(scheduler_output))
        try:
            output = super().execute_model(scheduler_output)  # type: ignore[misc] # the worker mixed in
        finally:
            stop = self._preemption.forward.end()
        return (
            output if stop is None else self._stopped(self._preemption, scheduler_output, order.step_id, stop)
        )

    @staticmethod
    def _stopped(
        preemption: Preemption, scheduled: SchedulerOutput, step_id: int, stop: Stop
    ) -> PreemptedOutput:
        report = preemption.runner.abandon(scheduled)
        shape = preemption.boundaries.shape
        kept_bytes = preemption.keep_checkpoint(step_id, stop)
        return PreemptedOutput(
            req_ids=[],
            req_id_to_index={},
            kv_connector_output=report,
            boundary=stop.boundary,
            boundaries=shape.boundaries,
            computed=shape.at(stop.boundary),
            resumes_at=stop.checkpoint.boundary,
            done=shape.at(stop.checkpoint.boundary),
            is_kept=kept_bytes is not None,
            checkpoint_bytes=kept_bytes or 0,
            stopped_s=stop.stopped_s,
        )


def prepare(vllm_config: VllmConfig, runner: Any, compiled: CompiledPass | None = None) -> Preemption | None:
    """Make a loaded engine's forward pass yield; None when preemption is off. All ranks call it.

    A compiled pass has no boundaries before `cut`.

    Raises:
        NotPreemptibleError: on every rank, when it cannot on one.
    """
    setup = EngineSetup.of(vllm_config)
    if setup.refused:
        raise NotPreemptibleError(setup.refused)
    if setup.mode == "off" or not setup.board:
        return None
    one_host = _is_on_one_host()
    preemption, refusal = None, ""
    try:
        preemption = _prepare_rank(vllm_config, setup, runner, compiled, one_host=one_host)
    except (NotPreemptibleError, NoBoundariesError, BoardUnavailableError) as error:
        refusal = str(error)
    _agree(refusal)
    return preemption


def cut(preemption: Preemption, compiled: CompiledPass) -> None:
    """Find the boundaries of a pass that has been compiled and has run. All ranks call it.

    Raises:
        NotPreemptibleError: on every rank, when one has none.
    """
    refusal = ""
    try:
        preemption.boundaries = compiled.attach(preemption.runner.of.get_model(), preemption.forward)
    except NoBoundariesError as error:
        refusal = str(error)
    _agree(refusal)


def rehearse(preemption: Preemption) -> None:
    """Stop and resume a dummy pass at every boundary. All ranks call it, once KV caches are there.

    Raises:
        NotPreemptibleError: on every rank, when the result differs on one.
    """
    runner = preemption.runner
    _agree(runner.why_unknown())
    tokens = min(rehearsal.TOKENS, runner.of.max_num_tokens)
    forward, boundaries = preemption.forward, preemption.boundaries.count
    sizes: list[float] = []

    def seen(checkpoint: Checkpoint) -> None:  # which is used up by the pass that goes on from it
        sizes.append(checkpoint.bytes_per_token if checkpoint.boundary else 0.0)

    try:
        with adapters_made_once(runner.of):
            refusal = rehearsal.why_inexact(
                forward, boundaries, tokens, lambda first: runner.dry_pass(tokens, first), seen
            )
    except Exception as error:  # noqa: BLE001 - whatever a model does to it, it runs without preemption
        refusal = f"a pass of it that is stopped and resumed fails: {error!r}"[:300]
    _agree(refusal and f"{type(runner.of.get_model()).__name__}: {refusal}")
    preemption.checkpoint_bytes = tuple(sizes)


def _agree(refusal: str) -> None:
    """Have all ranks do the same.

    Raises:
        NotPreemptibleError: on every rank, when one refuses.
    """
    group = get_tp_group()
    refused = torch.tensor([int(bool(refusal))])
    if group.world_size > 1:
        torch.distributed.all_reduce(refused, group=group.cpu_group)
    if refused.item():
        raise NotPreemptibleError(refusal or "another rank cannot stop, see its log")


def _prepare_rank(
    vllm_config: VllmConfig, setup: EngineSetup, runner: Any, compiled: CompiledPass | None, *, one_host: bool
) -> Preemption:
    if (reason := why_not(vllm_config)) is not None:
        raise NotPreemptibleError(reason)
    group = get_tp_group()
    rank, ranks = group.rank_in_group, group.world_size
    board = Board.attach(Path(setup.board)) if one_host else _board_if_here(Path(setup.board), group)
    votes = choose_transport(
        rank,
        ranks,
        setup.vote_timeout_s,
        same_host=one_host,
        board=board,
        group=group.cpu_group,
    )
    launch_ahead: LaunchAhead = HostOnly()
    if vllm_config.device_config.device_type == "cuda":
        launch_ahead = TimeBound(setup.launch_ahead_s, torch.cuda.Event)
    forward = Forward(rank, board or NoBoard(), votes, launch_ahead)
    granularity = granularity_of(setup, one_host=one_host)
    boundaries = (
        install(runner.get_model(), granularity, forward)
        if compiled is None
        else Boundaries(PassShape(()), granularity)
    )
    if not one_host and granularity is not BoundaryLevel(setup.granularity):
        boundaries = replace(boundaries, why_not_finer=_ONCE_A_LAYER)
    return Preemption(
        runner_of(vllm_config, runner),
        forward,
        boundaries,
        keep=setup.mode == "resume",
        late_by=0 if one_host else 1,
    )


def _is_on_one_host() -> bool:
    """Whether the ranks share memory. All ranks call it."""
    group = get_tp_group()
    return group.world_size == 1 or all(in_the_same_node_as(group.cpu_group, source_rank=0))


def granularity_of(setup: EngineSetup, *, one_host: bool) -> BoundaryLevel:
    """Where passes stop: ranks on several hosts vote once a layer, as each vote goes over the network."""
    return BoundaryLevel(setup.granularity) if one_host else BoundaryLevel.LAYER


def _board_if_here(path: Path, group: Any) -> Board | None:
    """The board on the ranks of its host, None on the others, which learn of a stop from the vote.

    Raises:
        NotPreemptibleError: on every rank, when it is on nobody's host: no order would ever be heard.
    """
    try:
        board = Board.attach(path)
    except BoardUnavailableError:
        board = None
    held = torch.tensor([int(board is not None)])
    torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    if not held.item():
        raise NotPreemptibleError("no rank is on the host of the replica; set prefill.across_nodes: false")
    return board
