"""Records of pulls that nothing comes of do not stay."""

from types import SimpleNamespace

from kv_transfer.empty_pulls import KEPT_S, EmptyPulls


def record(*blocks):
    return SimpleNamespace(local_block_ids=(list(blocks),))


def test_a_record_is_kept_while_vllm_may_read_it_and_no_longer():
    pulls, records = EmptyPulls(), {"a": record(), "b": record()}
    pulls.asked("a", 0.0)
    pulls.asked("b", 10.0)
    pulls.forget(records, KEPT_S - 1)
    assert records.keys() == {"a", "b"}
    pulls.forget(records, KEPT_S + 1)
    assert records.keys() == {"b"}
    pulls.forget(records, KEPT_S + 11)
    assert records == {}


def test_a_request_that_has_blocks_to_pull_by_now_is_left_alone():
    pulls, records = EmptyPulls(), {"a": record(7)}
    pulls.asked("a", 0.0)
    pulls.asked("done meanwhile", 0.0)
    pulls.forget(records, KEPT_S + 1)
    assert records.keys() == {"a"}
