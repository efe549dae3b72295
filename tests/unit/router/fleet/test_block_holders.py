"""The replicas that have the blocks of a prompt, as sets of them say."""

import time

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.block_holders import BlockHolders
from slo.request import ReplicaId

REPLICAS = st.sampled_from([ReplicaId(name) for name in "abcd"])
BLOCKS = st.integers(0, 5)
DONE = st.tuples(st.sampled_from(["add", "remove", "forget"]), REPLICAS, BLOCKS)


@given(st.lists(DONE, max_size=60), st.lists(BLOCKS, max_size=8))
def test_a_replica_has_what_was_added_and_not_removed_up_to_the_first_gap(done, hashes):
    holders, has = BlockHolders(), {}
    for what, replica, block in done:
        blocks = has.setdefault(replica, set())
        if what == "add":
            holders.add(replica, block)
            blocks.add(block)
        elif what == "remove" and block in blocks:
            holders.remove(replica, block)
            blocks.remove(block)
        elif what == "forget":
            for each in has.pop(replica):
                holders.remove(replica, each)
            holders.forget(replica)
    expected = {}
    for replica, blocks in has.items():
        count = next((at for at, block in enumerate(hashes) if block not in blocks), len(hashes))
        if count:
            expected[replica] = count
    assert holders.leading(hashes) == expected


def test_a_long_prompt_that_many_have_takes_hardly_longer_than_one_that_one_has():
    took_s, hashes = {}, range(1024)
    for many in (1, 300):
        holders = BlockHolders()
        for number in range(many):
            for block in hashes:
                holders.add(ReplicaId(str(number)), block)
        took_s[many] = []
        for _ in range(20):
            began_s = time.thread_time()
            assert len(holders.leading(hashes)) == many
            took_s[many].append(time.thread_time() - began_s)
    assert min(took_s[300]) < 8 * min(took_s[1])
