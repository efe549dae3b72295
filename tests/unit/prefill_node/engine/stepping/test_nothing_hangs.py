"""That nothing ever hangs for want of memory, whatever waits, is stopped and holds it."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import chain

from hypothesis import event, given, settings
from hypothesis import strategies as st
from step_choices import LINE, having_led, rules

from prefill_node.board.messages import Queued
from prefill_node.engine.stepping.memory import Memory
from prefill_node.engine.stepping.step_choice import Resume, Start, Wait, choose
from prefill_node.engine.stepping.suspension import Suspended, SuspendedStep
from slo.queue.fairness import Fairness
from slo.queue.order import QueueOrder
from slo.queue.prefill import Prefill
from slo.request import JobId
from slo.tiers import BACKGROUND, STANDARD, SYSTEM, Tier

BLOCKS = 12
TOKENS_PER_BLOCK = 16


@dataclass
class Request:
    """A prompt and how far it is; it computes `chunk` of its blocks at a time.

    Its first `common` blocks are those of every other prompt that has as many.
    """

    name: str
    blocks: int
    chunk: int
    weight: float
    deadline_s: float
    common: int = 0
    tier: Tier = SYSTEM
    arrived_s: float = 0.0
    computed: int = 0
    held: int = 0
    stops_left: int = 0

    @property
    def chunk_end(self):
        return min(self.blocks, self.computed + self.chunk)

    def text(self, blocks=BLOCKS):
        """The first of its blocks, by what they hold."""
        return [
            ("" if number < self.common else self.name, number) for number in range(min(blocks, self.blocks))
        ]

    def allocate(self, used=()):
        """Memory for its next chunk; what others hold of it is computed, but for the last block."""
        if not self.held:
            self.computed = next((at for at, one in enumerate(self.text()) if one not in used), self.blocks)
            self.computed = min(self.computed, self.blocks - 1)
        self.held = self.chunk_end


@dataclass
class Engine:
    """A replica's memory and queues, as far as the choice depends on them and they on it.

    A step computes a chunk of each of its requests. It is stopped as long as one of them has `stops_left`
    and somebody else is there to be preempted for; then it keeps its blocks. So does who has ended, until
    `pulled_after` further steps have been issued, or nothing can run.
    """

    requests: dict[str, Request]
    order: QueueOrder
    join_tokens: int
    pulled_after: int = 0
    fairness: Fairness | None = None
    now_s: float = 0.0
    steps: list[SuspendedStep] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    lent: list[tuple[int, list]] = field(default_factory=list)
    issued: int = 0
    used: Counter = field(default_factory=Counter)

    def count_used(self):
        """By content, how many hold each block."""
        held = [request.text(request.held) for request in self.requests.values()]
        self.used = Counter(chain(*held, *(blocks for _, blocks in self.lent)))

    @property
    def free_blocks(self):
        self.count_used()
        return BLOCKS - len(self.used)

    def shared_blocks(self, item):
        request = self.requests[item.request]
        if request.held:
            return 0
        shared = next((at for at, one in enumerate(request.text()) if one not in self.used), request.blocks)
        return min(shared, request.blocks - 1)

    def freed_blocks(self, holders):
        used, freed = self.used.copy(), []
        for one in holders:
            before = len(used)
            for name in one.step.members if isinstance(one, Suspended) else (one.request,):
                used -= Counter(self.requests[name].text(self.requests[name].held))
            freed.append(before - len(used))
        return freed

    def choose(self):
        inside = {name for step in self.steps for name in step.members}
        queue = [self._queued(request) for request in self.requests.values() if request.name not in inside]
        stopped = [self._suspended(step) for step in self.steps]
        free = self.free_blocks
        memory = Memory(BLOCKS - free, self.shared_blocks, self.freed_blocks)
        how = rules(self.join_tokens, self.order, self.fairness)
        return choose(queue, stopped, free, self.now_s, how, memory=memory)

    def apply(self, choice):
        match choice:
            case Resume(step):
                assert step in self.steps
                self.steps.remove(step)
                self._run(step.members)
            case Start(names, drop_steps, drop_requests):
                for step in drop_steps:
                    self.steps.remove(step)
                    self._start_over(*step.members)
                self._start_over(*drop_requests)
                whole = {block for name in names for block in self.requests[name].text()}
                self.count_used()
                assert len(whole | set(self.used)) <= BLOCKS, "more was started than fits"
                for name in names:
                    self.requests[name].allocate(self.used)
                self._run({name: self._tokens(self.requests[name]) for name in names})
            case Wait():
                assert self.lent, f"nothing runs, and left are {self.requests} and {self.steps}"
                self.lent.pop(0)

    def _start_over(self, *names):
        for name in names:
            assert self.requests[name].held, "somebody gave up what it did not have"
            self.requests[name].held = self.requests[name].computed = 0

    def _run(self, members):
        self.issued += 1
        self.lent = [
            (since, blocks) for since, blocks in self.lent if self.issued < since + self.pulled_after
        ]
        self.now_s += LINE.prefill_s(sum(members.values()))
        requests = [self.requests[name] for name in members]
        others = sorted(set(self.requests) - set(members))
        if others and any(request.stops_left for request in requests):
            for request in requests:
                request.stops_left = max(0, request.stops_left - 1)
            beneficiary = others[self.issued % len(others)]
            self.steps.append(
                SuspendedStep(self.issued, dict(members), 0.0, 5, 0.5, 1, self.now_s, beneficiary, 0.0)
            )
            return
        for request in requests:
            request.computed = request.chunk_end
            if request.computed == request.blocks:
                del self.requests[request.name]
                self.done.append(request.name)
                if self.pulled_after:
                    self.lent.append((self.issued, request.text(request.held)))

    def _tokens(self, request):
        return (request.chunk_end - request.computed) * TOKENS_PER_BLOCK

    def _prefill(self, key, request, remaining_s):
        return Prefill(
            JobId(key), request.weight, request.deadline_s, remaining_s, request.arrived_s, tier=request.tier
        )

    def _queued(self, request):
        tokens = (request.blocks - request.computed) * TOKENS_PER_BLOCK
        prefill = self._prefill(request.name, request, LINE.prefill_s(tokens))
        return Queued(prefill, tokens, 0.0, request.blocks - request.held, request.held, request.name)

    def _suspended(self, step):
        members = [self.requests[name] for name in step.members]
        urgent = min(members, key=lambda request: request.deadline_s)
        prefill = self._prefill(f"step:{step.step_id}", urgent, LINE.prefill_s(step.tokens) * (1 - step.done))
        return Suspended(
            step,
            prefill,
            held_blocks=sum(request.held for request in members),
            blocked=step.preempted_by in self.requests,
            overdue=self.now_s - step.since_s > 1.0,
        )


deadlines = st.one_of(st.just(math.inf), st.floats(0.01, 3.0))
prompts = st.builds(
    Request,
    name=st.just(""),
    blocks=st.integers(1, BLOCKS),
    chunk=st.integers(1, BLOCKS),
    weight=st.sampled_from([1.0, 2.0, 4.0]),
    deadline_s=deadlines,
    common=st.sampled_from([0, 0, 1, 4, 8]),
    tier=st.sampled_from([STANDARD, BACKGROUND]),
    arrived_s=st.sampled_from([0.0, -40.0, -90.0]),
    stops_left=st.integers(0, 3),
)


@given(
    st.lists(prompts, min_size=1, max_size=7),
    st.sampled_from(QueueOrder),
    st.sampled_from([1, 64, 1000]),
    st.integers(0, 3),
    st.one_of(
        st.none(), st.sets(st.sampled_from([STANDARD, BACKGROUND])).map(lambda leads: having_led(*leads))
    ),
    st.data(),
)
@settings(max_examples=150, deadline=None)
def test_everything_ends_whatever_waits_is_stopped_and_holds_memory(
    requests, order, join_tokens, pulled_after, account, data
):
    """As long as any single prompt fits into the memory, and nobody is awaited who never comes."""
    named = {}
    for number, request in enumerate(requests):
        request.name = f"request-{number}"
        named[request.name] = request
    engine = Engine(dict(named), order, join_tokens, pulled_after, account)
    for name in data.draw(st.lists(st.sampled_from(sorted(named)), unique=True), label="hold memory"):
        request = named[name]
        if request.chunk_end > engine.free_blocks:
            continue
        request.allocate()
        if request.chunk >= request.blocks or data.draw(st.booleans(), label=f"{name} is suspended"):
            beneficiary = data.draw(st.sampled_from([*sorted(set(named) - {name}), ""]))
            members = {name: engine._tokens(request)}
            engine.steps.append(
                SuspendedStep(-len(engine.steps), members, 0.0, 5, 0.5, 1, 0.0, beneficiary, 0.0)
            )
        else:
            request.computed = request.chunk_end
    while engine.requests:
        engine.apply(engine.choose())
        assert engine.issued < 500, "it goes round in circles"
    assert sorted(engine.done) == sorted(named), "each ends, once"
    assert engine.steps == []
    event(f"steps: {engine.issued // 10 * 10}+")
