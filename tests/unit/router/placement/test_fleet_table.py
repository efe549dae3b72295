"""What trying one more prefill takes, by the memory that numpy takes for it."""

import math
import tracemalloc

from router.fleet.prefill_replica import PlacedJob, PrefillView
from router.placement.fleet_table import FleetTable
from router.placement.policies import NewPrefill
from slo.predict.prefill_time import PrefillPredictor
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD

LINE = PrefillPredictor(per_token_s=0.0001, fixed_s=0.01, handoff_s=0.01)
LONG = [PlacedJob(JobId(f"long-{n}"), STANDARD, 100, 3600.0 + n, 0.0) for n in range(2000)]
NEW = NewPrefill(100, 5000.0, 1.0)


def fleet(many):
    return [PrefillView(ReplicaId(f"prefill-{n}"), LINE, 0.0, {STANDARD: 1.0}) for n in range(many)]


def tried(table, replicas, now_s):
    """What the table holds, the most that a trial takes on top, and what comes of the trial."""
    table.update(replicas, now_s)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    trial = table.trial(NEW, now_s)
    _, peak = tracemalloc.get_traced_memory()
    return held, peak - held, trial.end_s.tolist()


def test_a_queue_that_was_long_once_costs_no_later_placement_anything():
    replicas, table = fleet(50), FleetTable()
    tracemalloc.start()
    try:
        _, took, ends_s = tried(table, replicas, 1.0)
        replicas[0].replace(LONG, None, 1.0)
        long_held, long_took, _ = tried(table, replicas, 1.0)
        replicas[0].replace(LONG[:3], None, 1.0)
        short_held, short_took, _ = tried(table, replicas, 1.0)
        replicas[0].replace([], None, 1.0)
        _, again_took, again_s = tried(table, replicas, 1.0)
    finally:
        tracemalloc.stop()
    assert long_took > 10 * took
    assert short_held < long_held / 10
    assert max(short_took, again_took) < 2 * took
    assert again_s == ends_s


def test_a_table_that_has_shrunk_says_what_a_new_one_does():
    replicas, table = fleet(3), FleetTable()
    for many in (40, 2, 9, 0, 200, 30, 31, 4, 60):
        replicas[1].replace(LONG[:many], LONG[0].job_id if many else None, 1.0)
        replicas[2].replace(LONG[: many // 2], None, 1.0)
        for each in (table, anew := FleetTable()):
            each.update(replicas, 1.0)
        for deadline_s in (2.0, 3601.5, 3604.0, 5000.0, math.inf):
            new = NewPrefill(100, deadline_s, 1.0)
            found, expected = table.trial(new, 1.0), anew.trial(new, 1.0)
            for name in ("own_s", "is_free", "end_s", "shortfall_s", "backlog_s"):
                assert getattr(found, name).tolist() == getattr(expected, name).tolist()
