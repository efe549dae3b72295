"""Steps are counted, and after vLLM has taken a request's memory a pass may compute a prompt for a while."""

import pickle
from collections import Counter
from types import SimpleNamespace

import msgspec
import pytest
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.metrics.stats import IterationStats, LoRARequestStates, RequestStateStats

from router.fleet.decode_replica import DecodeView
from slo.decode.headroom import DecodeLoad, ToldStreams
from slo.decode.predicted_peak import Holding
from slo.reports import DecodeReported
from slo.request import JobId, ReplicaId
from telemetry.engine_tap import EngineTap
from telemetry.pressure import PRESSURE_KEY, PressureFigures
from telemetry.pulls import PULLS_KEY


class Nothing:
    def set(self, *_, **__):
        pass


class Counting(Nothing):
    """Counts by result, or else by metric."""

    def __init__(self):
        self.counted = Counter()

    def count(self, metric, value=1.0, **labels):
        self.counted[labels.get("result", metric.name)] += value

    def observe(self, *_, **__):
        pass


def step(tap, *, preempted=0, waiting=0):
    iteration = IterationStats()
    iteration.num_preempted_reqs = preempted
    scheduler = SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=None, num_waiting_reqs=waiting)
    tap.record(scheduler, iteration)


def timed(*latencies_s):
    """The statistics of a step with a token for each stream."""
    iteration = IterationStats()
    iteration.inter_token_latencies_iter = list(latencies_s)
    iteration.num_generation_tokens = len(latencies_s)
    return iteration


class Streams:
    """What vLLM counts of streams; each step ends 36 ms after the one before."""

    def __init__(self, tap):
        self._tap = tap
        self._now_s = 0.0
        self._streams = {}

    def step(self, **tokens):
        self._now_s += 0.036
        iteration, adapters = IterationStats(), LoRARequestStates()
        for name, count in tokens.items():
            output = EngineCoreOutput(name, [7] * count)
            begins, stream = name not in self._streams, self._streams.setdefault(name, RequestStateStats())
            iteration.update_from_output(output, self._now_s, begins, stream, adapters, None)
        self._tap.record(None, iteration)


def test_how_many_wait_for_memory_is_as_the_last_step_says():
    tap = EngineTap("decode", Nothing())
    step(tap, waiting=2)
    assert tap.waiting == 2
    step(tap)
    assert tap.waiting == 0


def test_what_was_done_under_pressure_is_counted_as_it_came():
    counted = []

    class Counting(Nothing):
        def count(self, metric, value=1.0, **labels):
            counted.append((metric.name, value, labels))

        def observe(self, metric, value, **labels):
            counted.append((metric.name, value, labels))

        def set(self, metric, value, **labels):
            counted.append((metric.name, value, labels))

    figures = PressureFigures(
        preempted=[("background", "cost", "swap")],
        restored=[("background", 0.5)],
        recomputed_tokens=300,
        swapped_out=7,
        swap_used=0.25,
        peak=0.9,
    )
    # As it arrives from another process.
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode({PRESSURE_KEY: figures}))
    tap = EngineTap("decode", Counting())
    tap.record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=sent, num_waiting_reqs=0), None)
    taken = {"tier": "background", "reason": "cost", "by": "swap"}
    assert ("slackserve_decode_preemptions", 1.0, taken) in counted
    assert ("slackserve_decode_swapped_blocks", 7, {"direction": "out"}) in counted
    assert ("slackserve_decode_swap_ratio", 0.25, {}) in counted
    assert ("slackserve_decode_restore_seconds", 0.5, {"tier": "background"}) in counted
    assert ("slackserve_decode_recomputed_tokens", 300, {}) in counted
    assert ("slackserve_decode_predicted_peak_ratio", 0.9, {}) in counted
    assert not [name for name, _, _ in counted if "skipped" in name or "reserve" in name]


def test_a_stream_whose_memory_is_taken_may_be_computed_again_from_that_step_on():
    tap = EngineTap("decode", Counting())
    sent = {
        PRESSURE_KEY: msgspec.to_builtins(PressureFigures(preempted=[("background", "cost", "recompute")]))
    }
    tap.record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=sent, num_waiting_reqs=1), None)
    assert tap.recomputes


def test_gauges_are_set_again_as_the_last_step_has_left_them():
    gauges = []

    class Setting(Nothing):
        def set(self, metric, value, **labels):
            gauges.append((metric.name, value))

        def count(self, *_, **__):
            pass

    tap = EngineTap("decode", Setting())
    tap.show()
    assert gauges == [("slackserve_kv_usage_ratio", 0.0)]
    figures = PressureFigures(swap_used=0.25, peak=0.9, reserve=0.1)
    for told in (figures, PressureFigures(skipped=1)):  # the last one has measured nothing
        stats = {PRESSURE_KEY: msgspec.to_builtins(told)}
        tap.record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=stats, num_waiting_reqs=0), None)
    gauges.clear()
    tap.show()
    assert gauges == [
        ("slackserve_kv_usage_ratio", 0.5),
        ("slackserve_decode_swap_ratio", 0.25),
        ("slackserve_decode_predicted_peak_ratio", 0.9),
        ("slackserve_decode_reserve_ratio", 0.1),
    ]


def test_every_step_is_progress_also_one_without_requests():
    tap = EngineTap("decode", Nothing())
    step(tap)
    tap.record(None, None)
    assert tap.steps == 2


def test_nothing_is_recomputed_while_no_memory_was_taken():
    tap = EngineTap("decode", Nothing())
    for _ in range(3):
        step(tap, waiting=5)
        assert not tap.recomputes


def test_what_lost_its_memory_is_recomputed_until_nothing_has_waited_for_a_while():
    tap = EngineTap("decode", Nothing())
    step(tap, preempted=1, waiting=1)
    for _ in range(1000):
        step(tap, waiting=1)
        assert tap.recomputes
    calm = 0
    while tap.recomputes:
        step(tap)
        calm += 1
    assert 32 < calm < 128


def test_the_pace_is_told_once_for_the_tokens_that_it_is_of():
    tap = EngineTap("decode", Nothing())
    assert tap.newest_tpot_s() is None
    tap.record(None, timed(0.02, 0.02))
    assert tap.newest_tpot_s() == pytest.approx(0.02)
    step(tap)
    assert tap.newest_tpot_s() is None, "nothing has decoded since"
    assert tap.tpot_s == pytest.approx(0.02), "what a step takes is known nevertheless"
    tap.record(None, timed(0.02))
    assert tap.newest_tpot_s() == pytest.approx(0.02)


@pytest.mark.parametrize(("idle_s", "pace_s"), [(29.0, 0.164), (30.0, 0.02)])
def test_the_pace_begins_anew_after_half_a_minute_without_a_token(idle_s, pace_s):
    now_s = 100.0
    tap = EngineTap("decode", Nothing(), lambda: now_s)
    tap.record(None, timed(0.2))
    now_s += idle_s
    tap.record(None, timed(0.02))
    assert tap.newest_tpot_s() == pytest.approx(pace_s)


def test_the_pace_of_a_step_is_that_of_most_of_its_streams_not_of_one_that_comes_back():
    tap = EngineTap("decode", Nothing())
    tap.record(None, timed(*[0.02] * 8))
    tap.record(None, timed(0.02, 0.02, 30.0))
    assert tap.tpot_s == pytest.approx(0.02)


def test_a_step_changes_the_pace_as_much_however_many_streams_it_has():
    few, many = EngineTap("decode", Nothing()), EngineTap("decode", Nothing())
    for tap, streams in ((few, 1), (many, 64)):
        for seconds in (0.02, 0.04):
            tap.record(None, timed(*[seconds] * streams))
    assert few.tpot_s == many.tpot_s == pytest.approx(0.024)


def test_of_a_step_with_several_tokens_for_each_stream_a_token_has_its_part():
    tap = EngineTap("decode", Nothing())
    streams = Streams(tap)
    streams.step(a=1, b=1)
    assert tap.newest_tpot_s() is None
    for _ in range(5):
        streams.step(a=3, b=3)
        assert tap.newest_tpot_s() == pytest.approx(0.012)
        assert tap.step_s == pytest.approx(0.036)


def test_the_first_token_of_a_stream_is_none_that_the_others_have_had_in_that_step():
    tap = EngineTap("decode", Nothing())
    streams = Streams(tap)
    streams.step(a=1)
    streams.step(a=2, b=1, c=1)
    assert tap.newest_tpot_s() == pytest.approx(0.018)


def test_a_stream_that_ends_without_a_token_leaves_the_pace_what_the_step_takes():
    tap = EngineTap("decode", Nothing())
    streams = Streams(tap)
    streams.step(a=1, b=1)
    streams.step(a=1, b=0)
    streams.step(a=0, b=0)
    assert tap.newest_tpot_s() == pytest.approx(0.036)


def test_steps_with_few_and_many_tokens_count_by_their_tokens():
    tap = EngineTap("decode", Nothing())
    streams = Streams(tap)
    streams.step(a=1)
    for _ in range(50):
        streams.step(a=1)
        streams.step(a=5)
    assert tap.newest_tpot_s() == pytest.approx(0.012, rel=0.1)
    assert tap.step_s == pytest.approx(0.036)


@pytest.mark.parametrize("ranks", [1, 8])
def test_a_transfer_counts_once_however_many_ranks_tell_of_it(ranks):
    instruments = Counting()
    counted = instruments.counted
    tap = EngineTap("decode", instruments)
    tap.attach(engine_of(ranks))

    def told(**stats):
        scheduler = SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=stats, num_waiting_reqs=0)
        tap.record(scheduler, None)

    told(num_kv_expired_reqs=[1] * ranks, num_failed_transfers=[1] * 2 * ranks)
    told(num_failed_transfers=[1])
    told(transfer_duration=[0.1] * (ranks - 1))
    told(transfer_duration=[0.1] * (ranks + 1), **{PULLS_KEY: 2})
    assert (counted["expired"], counted["failed"], counted["done"]) == (1, 3, 2)


def test_a_transfer_of_which_one_rank_has_failed_is_not_done_whatever_the_others_have_read():
    instruments = Counting()
    counted = instruments.counted
    tap = EngineTap("decode", instruments)
    tap.attach(engine_of(2))
    for _ in range(10):
        stats = {"transfer_duration": [0.1], "num_failed_transfers": [1]}
        tap.record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=stats, num_waiting_reqs=0), None)
    assert (counted["done"], counted["failed"]) == (0, 10)


@pytest.mark.parametrize(("size", "tokens"), [(70, 70), (None, 160), (500, 160)])
def test_where_tokens_take_blocks_in_several_groups_there_is_room_for_fewer(size, tokens):
    tap = EngineTap("decode", Nothing())
    tap.attach(engine_of(1, size=size))
    assert tap.kv_tokens == tokens


def engine_of(ranks, size=160):
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_gpu_blocks=10, block_size=16, kv_cache_size_tokens=size, enable_prefix_caching=True
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
    )
    client = SimpleNamespace(logger_manager=SimpleNamespace(stat_loggers=[]), vllm_config=config)
    return SimpleNamespace(_engine_client=client)


def test_what_streams_hold_is_read_once_however_often_it_is_reported(monkeypatch):
    read, holds_what = [], ToldStreams.__getitem__

    def reading(streams, job):
        read.append(job)
        return holds_what(streams, job)

    monkeypatch.setattr(ToldStreams, "__getitem__", reading)
    tap, known = EngineTap("decode", Counting()), DecodeView(ReplicaId("d"))

    def holds(tokens):
        streams = {JobId(f"s{number}"): Holding(tokens, 50) for number in range(3)}
        figures = PressureFigures(peak=0.5, load=DecodeLoad(1000, 0, 0, 0.1, streams))
        stats = {PRESSURE_KEY: msgspec.to_builtins(figures)}
        tap.record(SimpleNamespace(kv_cache_usage=0.5, kv_connector_stats=stats, num_waiting_reqs=0), None)
        return streams

    def reported(now_s):
        sent = pickle.dumps(DecodeReported(known.replica_id, 0.5, 3, load=tap.load))
        read.clear()
        known.reported(pickle.loads(sent), now_s)
        return len(read)

    for now_s, tokens in ((1.0, 100), (2.0, 200)):
        streams = holds(tokens)
        assert reported(now_s) == 3
        assert [reported(now_s + later_s) for later_s in (0.1, 0.2)] == [0, 0]
        assert (known.load.streams, known.load_since_s) == (streams, now_s)
