"""The sums of what was sent follow each request, and take no longer for many."""

from hypothesis import given
from hypothesis import strategies as st

from router.fleet.decode_replica import DecodeView, Newcomer
from router.fleet.sent_requests import SentRequests, Ticket
from slo.decode.headroom import DecodeLoad
from slo.decode.predicted_peak import Holding
from slo.reports import AwaitedKv, DecodeReported
from slo.request import JobId, ReplicaId
from slo.tiers import STANDARD

JOBS = st.sampled_from([JobId(name) for name in "abcdef"])
HOLDINGS = st.builds(Holding, st.integers(0, 50), st.integers(0, 50), waits=st.booleans())
TICKETS = st.builds(
    Ticket,
    st.just(0.0),
    st.integers(0, 50),
    st.integers(0, 20),
    st.one_of(st.none(), HOLDINGS),
    st.booleans(),
    st.integers(0, 2),
)


def sums(sent):
    by_rank = [(sent.named(rank), sent.shared_tokens(rank)) for rank in range(4)]
    return sent.tokens, sent.unseen_tokens, sent.most_tokens, by_rank, list(sent.on_way), len(sent)


def counted(tickets, streams):
    """The same sums, each over all tickets."""
    waiting = {job: one for job, one in tickets.items() if job not in streams or streams[job].waits}
    on_way = [one.holding for job, one in tickets.items() if one.holding and job not in streams]
    by_rank = [
        (
            sum(one.is_known for one in tickets.values() if one.rank >= rank),
            sum(one.shared_tokens for one in waiting.values() if one.holding and one.rank >= rank),
        )
        for rank in range(4)
    ]
    return (
        sum(one.tokens for one in waiting.values()),
        sum(one.tokens for one in tickets.values() if not one.is_known),
        sum(one.tokens + one.remaining for one in on_way),
        by_rank,
        on_way,
        len(tickets),
    )


@given(
    st.dictionaries(JOBS, TICKETS),
    st.dictionaries(JOBS, HOLDINGS, max_size=3),
    st.lists(st.tuples(JOBS, st.one_of(st.none(), TICKETS))),
)
def test_the_sums_are_those_of_all_tickets(stated, streams, then):
    sent, tickets = SentRequests(), dict(stated)
    on_way = sent.on_way
    sent.restate(tickets, streams)
    for job, ticket in then:
        if ticket is None:
            sent.remove(job)
            tickets.pop(job, None)
        else:
            sent.add(job, ticket)
            tickets[job] = ticket
        assert sums(sent) == counted(tickets, streams)
        assert list(on_way) == list(sent.on_way), "it is a view"


class Streams(dict):
    """Counts how often it is asked for a stream."""

    asked = 0

    def __contains__(self, key):
        self.asked += 1
        return super().__contains__(key)

    def get(self, key, default=None):
        self.asked += 1
        return super().get(key, default)


def test_one_more_takes_no_more_for_many_that_are_awaited():
    took = []
    for many in (10, 1000):
        streams = Streams({JobId("there"): Holding(100, 50)})
        load, known = DecodeLoad(10_000_000, 0, 0, 0.1, streams), DecodeView(ReplicaId("decode"))
        awaited = tuple(AwaitedKv(JobId(f"waits-{number}"), STANDARD, 64) for number in range(many))
        known.reported(DecodeReported(known.replica_id, 0.1, many, load=load, awaited=awaited), 0.0)
        before = streams.asked
        for number in range(5):
            newcomer = Newcomer(JobId(f"new-{number}"), STANDARD, 64)
            assert known.has_room(newcomer)
            known.placed(newcomer, 1.0)
            known.job_ended(JobId(f"waits-{number}"))
        took.append(streams.asked - before)
    assert took[0] == took[1]
