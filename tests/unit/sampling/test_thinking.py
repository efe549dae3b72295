"""Where thinking begins and ends is looked for in what is new, and found where vLLM finds it."""

from types import SimpleNamespace

import torch
from carrying_workers import take_over
from hypothesis import given
from hypothesis import strategies as st
from input_batches import input_batch
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.sampler import Sampler
from vllm.v1.sample.thinking_budget_state import ThinkingBudgetStateHolder

TOKENS = st.integers(0, 3)
MARKS = st.lists(TOKENS, min_size=1, max_size=3)
NEW = st.lists(TOKENS, max_size=3)
DISCARDED = st.integers(1, 6)
"""How many tokens vLLM cuts off an answer, as those of steps whose KV cache it could not load."""


def thinking(start, end, prompt, answer, budget=10, drafts=0):
    """What vLLM keeps of one request with a budget."""
    reasoning = SimpleNamespace(reasoning_start_token_ids=start, reasoning_end_token_ids=end)
    holder = ThinkingBudgetStateHolder(reasoning, 1, drafts, torch.device("cpu"), is_pin_memory=False)
    asked = SamplingParams(thinking_token_budget=budget)
    holder.sync_batch(BatchUpdate(1, removed=[], moved=[], added=[(0, asked, prompt, answer)]))
    return holder


def mend(holder):
    """Have a worker start whose batch has it."""
    batch = input_batch(1)
    batch.thinking_budget_state_holder = holder
    take_over(batch, Sampler())


def known(holder):
    """What it has found, and what it has come to by that."""
    (state,) = holder._state.values()
    return {name: value for name, value in state.items() if name != "scan_offset"}


@given(
    start=MARKS,
    end=MARKS,
    prompt=st.lists(TOKENS, max_size=6),
    steps=st.lists(st.one_of(NEW, NEW, DISCARDED), min_size=1, max_size=25),
    budget=st.integers(0, 12),
    drafts=st.lists(TOKENS, max_size=2),
    is_ahead=st.booleans(),
)
def test_what_is_found_is_what_vllm_finds(start, end, prompt, steps, budget, drafts, is_ahead):
    answers = [], []
    stock, mended = (thinking(start, end, prompt, answer, budget, len(drafts)) for answer in answers)
    mend(mended)
    for step in steps:
        for holder, answer in zip((stock, mended), answers, strict=True):
            if isinstance(step, int):
                del answer[-step:]
            else:
                answer.extend(step)
            rows = [[*answer, -1]] if is_ahead else [answer]  # the last token may not be known yet
            holder.update_state(rows, [drafts])
        assert known(mended) == known(stock)
        logits = [holder.apply_to_logits(torch.zeros(3, 4), True, [drafts]) for holder in (stock, mended)]
        assert torch.equal(*logits)


def test_what_is_generated_again_is_searched():
    answer = [1, 9, 9]
    holder = thinking(start=[1], end=[2], prompt=[7], answer=answer)
    mend(holder)
    holder.update_state([answer], None)
    del answer[1:]
    holder.update_state([answer], None)
    answer.extend([2, 9])
    holder.update_state([answer], None)
    assert known(holder)["start_thinking"] == -1  # it has ended


class Counted(list):
    """An answer that says how many of its tokens were looked at."""

    looked_at = 0

    def __getitem__(self, which):
        found = super().__getitem__(which)
        Counted.looked_at += len(found) if isinstance(which, slice) else 1
        return found


def looked_at(holder, answer):
    """How many tokens are at a step behind that answer."""
    rows = [Counted(answer)]
    holder.update_state(rows, None)
    rows[0].append(9)
    Counted.looked_at = 0
    holder.update_state(rows, None)
    return Counted.looked_at


MARKED = {"start": [1, 2], "end": [3, 4, 5], "prompt": [7], "answer": [], "budget": 10_000}
NEVER, ONLY_BEGUN, ONLY_ENDED = [9] * 4000, [1, 2, *[9] * 4000], [3, 4, 5, *[9] * 4000]


def test_no_step_looks_at_what_an_earlier_one_has_seen():
    for answer in (NEVER, ONLY_BEGUN, ONLY_ENDED):
        holder = thinking(**MARKED)
        mend(holder)
        assert looked_at(holder, answer) <= 10


def test_vllm_alone_looks_at_all():
    """When this fails, vLLM has been mended, and `sampling.thinking` can go."""
    for answer in (NEVER, ONLY_BEGUN, ONLY_ENDED):
        assert looked_at(thinking(**MARKED), answer) >= 4000
