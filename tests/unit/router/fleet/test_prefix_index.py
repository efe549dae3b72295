"""What a prefill replica is expected to have cached, how far that is trusted, and hashes of prefixes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.http.placing.prefix_hashes import (
    BLOCK_BYTES,
    BLOCK_TOKENS,
    MOST_BLOCKS,
    NO_PREFIX,
    prefix_hashes,
)
from router.fleet.prefix_index import PrefixIndex
from slo.request import JobId, ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")
ONE, TWO, THREE = JobId("1"), JobId("2"), JobId("3")


class Body:
    """A request's body, as far as its prompt goes."""

    def __init__(self, model="model", **fields):
        self.__dict__.update(fields, model=model)


def test_leading_blocks_count_until_the_first_gap():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2, 3], 100)
    index.placed(B, TWO, [1, 9], 100)
    assert index.cached_blocks([1, 2, 3, 4]) == {A: 3, B: 1}
    assert index.cached_blocks([2, 3]) == {A: 2}
    assert index.cached_blocks([7]) == {}
    assert index.cached_blocks([]) == {}


def test_the_least_recently_used_goes_first_and_of_a_prompt_its_end():
    index = PrefixIndex()
    index.resize(A, 400)
    index.placed(A, ONE, [1, 2], 100)
    index.placed(A, TWO, [3, 4, 5], 100)
    assert index.cached_blocks([1, 2]) == {A: 1}
    index.placed(A, THREE, [1], 100)
    index.placed(A, JobId("4"), [6, 7], 100)
    assert index.cached_blocks([1]) == {A: 1}
    assert index.cached_blocks([3, 4, 5]) == {A: 1}


def test_a_replica_that_is_gone_has_nothing_cached():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2, 3], 100)
    assert index.cached_blocks([1, 2, 3]) == {A: 3}
    index.forget(A)
    assert index.cached_blocks([1, 2, 3]) == {}
    assert len(index) == 0


@pytest.mark.parametrize(("expected", "found"), [(1023, 1008), (1023, 896), (10_000, 9_100)])
def test_whole_blocks_and_estimated_lengths_are_no_evictions(expected, found):
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    for _ in range(50):
        index.found(A, expected, found)
    assert index.tokens_of(A) == 1000


@pytest.mark.parametrize(
    ("cached", "is_text", "left"), [(600, True, 1000), (400, True, 900), (0, True, 900), (600, False, 900)]
)
def test_how_a_text_tokenises_is_no_eviction(cached, is_text, left):
    """Of English at 5 bytes a token a tenant whose texts have 3 is expected to have two thirds more."""
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100, is_text=is_text)
    index.computed(ONE)
    index.placed(A, TWO, range(10), 100, is_text=is_text)
    index.started(A, TWO, cached)
    index.ended(A, TWO)
    assert index.tokens_of(A) == left


def test_a_replica_that_has_less_than_expected_is_trusted_with_less():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    for _ in range(5):
        index.found(A, expected_tokens=500, cached_tokens=0)
    assert index.tokens_of(A) < 1000
    shrunk = index.tokens_of(A)
    for _ in range(200):
        index.found(A, expected_tokens=500, cached_tokens=500)
    index.placed(A, TWO, range(10), 100)
    assert shrunk < index.tokens_of(A) <= 1000


def test_prefills_of_which_nothing_was_expected_win_no_trust_back():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    for _ in range(200):
        index.found(A, expected_tokens=1000, cached_tokens=0)
        for _ in range(10):
            index.found(A, expected_tokens=0, cached_tokens=0)
    assert index.tokens_of(A) <= 300


def test_blocks_that_are_not_computed_in_the_end_are_not_cached():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2, 3], 100)
    index.withdrawn(ONE)
    assert index.cached_blocks([1, 2, 3]) == {}
    assert index.tokens_of(A) == 0


def test_blocks_that_are_computed_stay_whoever_leaves():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2], 100)
    index.placed(A, TWO, [1, 2, 3], 100)
    index.computed(ONE)
    index.placed(A, THREE, [1, 2, 3, 4], 100)
    index.withdrawn(ONE)
    index.withdrawn(THREE)
    assert index.cached_blocks([1, 2, 3, 4]) == {A: 3}, "the second is to compute one more"
    index.withdrawn(TWO)
    assert index.cached_blocks([1, 2, 3, 4]) == {A: 2}


@pytest.mark.parametrize("is_started", [True, False])
def test_a_prompt_that_ended_on_its_replica_was_computed_if_it_had_started(is_started):
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2, 3], 100)
    if is_started:
        index.started(A, ONE, 0)
    index.ended(B, ONE)
    index.ended(A, ONE)
    index.withdrawn(ONE)
    assert index.cached_blocks([1, 2, 3]) == ({A: 3} if is_started else {})


def test_a_prompt_that_is_placed_again_is_computed_there_alone():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2], 100)
    index.placed(B, ONE, [1, 2], 100)
    assert index.cached_blocks([1, 2]) == {B: 2}
    index.started(A, ONE, 0)
    index.ended(A, ONE)
    index.placed(A, ONE, [], 0)
    assert index.cached_blocks([1, 2]) == {}, "without its hashes nobody knows"


def test_what_was_to_be_computed_first_and_is_not_there_costs_no_trust():
    index = PrefixIndex()
    index.resize(A, 1000)
    for _ in range(50):
        index.placed(A, ONE, range(10), 100)
        index.placed(A, TWO, range(10), 100)
        index.withdrawn(ONE)
        index.started(A, TWO, 0)
        index.withdrawn(TWO)
    index.placed(A, THREE, range(10), 100)
    assert index.tokens_of(A) == 1000


@pytest.mark.parametrize(("others", "left"), [(0, 900), (10, 1000)])
def test_what_was_forgotten_before_a_prompt_started_costs_no_trust(others, left):
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    index.computed(ONE)
    index.placed(A, TWO, range(10), 100)
    index.placed(A, THREE, range(100, 100 + others), 100)
    index.computed(THREE)
    index.started(A, TWO, 0)
    assert index.tokens_of(A) == left


def test_what_was_computed_and_is_not_there_costs_trust_once():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    index.computed(ONE)
    index.placed(A, TWO, [*range(10), 11], 100)
    for _ in range(50):
        index.started(A, TWO, 0)
    index.withdrawn(TWO)
    assert index.tokens_of(A) == 900


def test_prompts_that_are_never_computed_have_nothing_forgotten_that_was():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    index.computed(ONE)
    index.placed(A, TWO, range(100, 200), 100)
    assert index.cached_blocks(range(10)) == {A: 10}
    assert index.cached_blocks(range(100, 200)) == {A: 10}, "there is no more to come than it can hold"
    index.withdrawn(TWO)
    assert (len(index), index.tokens_of(A)) == (10, 1000)


def test_blocks_that_were_forgotten_and_are_awaited_again_stay_though_the_first_leaves():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, [1, 2], 100)
    index.placed(A, TWO, range(100, 110), 100)
    assert index.cached_blocks([1, 2]) == {}
    index.placed(A, THREE, [1, 2], 100)
    index.withdrawn(ONE)
    assert index.cached_blocks([1, 2]) == {A: 2}
    index.withdrawn(THREE)
    assert index.cached_blocks([1, 2]) == {}


def test_a_prompt_has_others_forgotten_once_it_is_computed():
    index = PrefixIndex()
    index.resize(A, 1000)
    index.placed(A, ONE, range(10), 100)
    index.computed(ONE)
    index.placed(A, TWO, [0, *range(100, 104)], 100)
    index.placed(A, THREE, range(200, 220), 100)
    assert index.cached_blocks(range(10)) == {A: 10}
    index.started(A, TWO, 100)
    index.ended(A, TWO)
    assert index.cached_blocks([0, *range(100, 104)]) == {A: 5}, "though the third has taken its place"
    assert index.cached_blocks(range(10)) == {A: 6}


def test_nothing_comes_of_a_prompt_whose_replica_was_lost():
    index = PrefixIndex()
    index.placed(A, ONE, [1, 2, 3], 100)
    index.forget(A)
    index.resize(A, 1000)
    index.computed(ONE)
    assert index.cached_blocks([1, 2, 3]) == {}


def test_prompts_whose_end_is_not_told_are_not_remembered_for_good():
    index = PrefixIndex()
    index.placed(A, ONE, [1], 100)
    for number in range(16_384):
        index.placed(A, JobId(f"later-{number}"), [2], 100)
    index.withdrawn(ONE)
    assert index.cached_blocks([1]) == {A: 1}, "as if it was computed"


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["placed", "started", "ended", "computed", "withdrawn", "forget", "resize", "found"]),
        st.sampled_from([A, B]),
        st.sampled_from([ONE, TWO, THREE]),
        st.lists(st.integers(0, 30), max_size=12, unique=True),
        st.integers(0, 2000),
    ),
    max_size=40,
)


@given(CHANGES)
def test_it_stays_within_the_capacity_and_agrees_with_itself(changes):
    index, capacity = PrefixIndex(), {A: 1000, B: 1000}
    index.resize(A, 1000)
    index.resize(B, 1000)
    for what, replica, job, blocks, number in changes:
        match what:
            case "placed":
                index.placed(replica, job, blocks, 100)
            case "started":
                index.started(replica, job, number)
            case "ended":
                index.ended(replica, job)
            case "computed" | "withdrawn":
                getattr(index, what)(job)
            case "forget":
                index.forget(replica)
                index.resize(replica, capacity[replica])
            case "resize":
                capacity[replica] = number
                index.resize(replica, number)
            case "found":
                index.found(replica, number, 500)
        for one, limit in capacity.items():
            assert 0 <= index.tokens_of(one) <= 2 * limit, "what it has, and what it is to compute"
            held = [block for block in range(31) if one in index.cached_blocks([block])]
            assert index.tokens_of(one) == pytest.approx(100 * len(held))
    assert len(index) == sum(len(index.cached_blocks([block])) for block in range(31))
    index.withdrawn(ONE)
    index.withdrawn(TWO)
    index.withdrawn(THREE)
    assert index.tokens_of(A) <= capacity[A]
    assert index.tokens_of(B) <= capacity[B]


# What ingresses hash


def test_equal_prefixes_of_tokens_have_equal_hashes():
    one = prefix_hashes(Body(prompt=[*range(300)]))
    other = prefix_hashes(Body(prompt=[*range(BLOCK_TOKENS), *range(900, 1100)]))
    assert one.block == other.block == BLOCK_TOKENS
    assert len(one.hashes) == len(other.hashes) == 2
    assert one.hashes[0] == other.hashes[0]
    assert one.hashes[1] != other.hashes[1]


def test_a_block_after_another_beginning_is_another_block():
    tail = "x" * BLOCK_BYTES
    one = prefix_hashes(Body(prompt="a" * BLOCK_BYTES + tail))
    other = prefix_hashes(Body(prompt="b" * BLOCK_BYTES + tail))
    assert one.hashes[1] != other.hashes[1]


def test_a_conversation_that_goes_on_keeps_its_prefix():
    turns = [{"role": "system", "content": "s" * 600}, {"role": "user", "content": "u" * 600}]
    more = [*turns, {"role": "assistant", "content": [{"type": "text", "text": "t" * 600}]}]
    before, after = (prefix_hashes(Body(messages=messages)).hashes for messages in (turns, more))
    assert len(before) == 2
    assert after[:2] == before
    assert len(after) == 3
    assert prefix_hashes(Body(messages=more, tools=[{"name": "f" * 600}])).hashes[0] != before[0]


SYSTEM_PROMPT = {"role": "system", "content": "s" * 600}


@pytest.mark.parametrize(
    "prompts",
    [
        [{"prompt": text} for text in ("one", "two", "one ")],
        [{"prompt": "x" * BLOCK_BYTES + text} for text in ("one", "two")],
        [{"prompt": [*range(BLOCK_TOKENS), *rest]} for rest in ((1, 2), (1, 3))],
        [{"messages": [SYSTEM_PROMPT, {"role": "user", "content": text}]} for text in ("one", "two")],
    ],
    ids=["shorter than a block", "behind a block", "tokens", "behind a system prompt"],
)
def test_prompts_that_differ_behind_their_last_whole_block_are_told_apart(prompts):
    found = [prefix_hashes(Body(**prompt)) for prompt in prompts]
    assert len({each.hashes for each in found}) == 1
    assert len({each.whole for each in found}) == len(prompts)
    assert [prefix_hashes(Body(**prompt)) for prompt in prompts] == found


def test_an_adapter_finds_nothing_of_the_model_or_of_another():
    models = ("model", "one adapter", "another")
    hashes = {prefix_hashes(Body(model, prompt="x" * 600)).hashes for model in models}
    assert len(hashes) == len(models)


def test_hashes_are_capped_and_short_or_many_prompts_have_none():
    assert len(prefix_hashes(Body(prompt="x" * 10_000_000)).hashes) == MOST_BLOCKS
    assert prefix_hashes(Body(prompt="short")).hashes == ()
    assert prefix_hashes(Body(prompt=["a" * 600, "b" * 600])).hashes == ()
    assert prefix_hashes(Body(prompt=[])).hashes == ()


@pytest.mark.parametrize("prompt", ["a" * 1200, [*range(300)]], ids=["text", "tokens"])
def test_a_prompt_in_a_list_of_its_own_is_that_prompt(prompt):
    """Clients that batch send lists, and a list of one goes to the prefill tier as any prompt."""
    alone = prefix_hashes(Body(prompt=prompt))
    assert alone.hashes
    assert prefix_hashes(Body(prompt=[prompt])) == alone
    assert prefix_hashes(Body(prompt=[prompt, prompt])).hashes == ()


@pytest.mark.parametrize("cut", [{}, {"truncation_side": "left"}, {"truncation_side": "right"}])
@pytest.mark.parametrize("most", [-1, 10, 100_000])
def test_a_prompt_that_may_be_cut_has_no_prefix_that_is_known(most, cut):
    turns = [{"role": "user", "content": "u" * 1200}]
    for body in (Body(prompt="x" * 1200), Body(prompt=[*range(300)]), Body(messages=turns)):
        assert prefix_hashes(body).hashes
        body.__dict__.update(cut, truncate_prompt_tokens=most)
        assert prefix_hashes(body) == NO_PREFIX


@pytest.mark.parametrize(
    "rendered",
    [
        {"documents": [{"title": "a", "text": "b"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"reasoning_effort": "high"},
        {"add_special_tokens": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("prompt", [{"prompt": "x" * 600}, {"messages": [{"content": "x" * 600}]}])
def test_prompts_that_are_rendered_otherwise_have_nothing_in_common(prompt, rendered):
    hashes = prefix_hashes(Body(**prompt, **rendered)).hashes
    assert hashes
    assert hashes == prefix_hashes(Body(**prompt, **rendered)).hashes
    assert not {*hashes} & {*prefix_hashes(Body(**prompt)).hashes}


def test_the_order_of_a_templates_variables_makes_no_other_prompt():
    one, other = ({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    bodies = [Body(prompt="x" * 600, chat_template_kwargs=given) for given in (one, other)]
    assert prefix_hashes(bodies[0]) == prefix_hashes(bodies[1])
    assert prefix_hashes(Body(prompt="x" * 600, documents=[])) == prefix_hashes(Body(prompt="x" * 600))
