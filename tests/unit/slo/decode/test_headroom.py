"""What a replica's streams are taken to hold, and those that join them."""

import pickle

from slo.decode.headroom import DecodeLoad, ToldStreams
from slo.decode.output_length import FIRST_GUESS
from slo.decode.predicted_peak import Holding
from slo.request import JobId
from slo.tiers import BACKGROUND, STANDARD


def test_a_newcomer_has_what_answers_of_its_tier_have():
    asked = DecodeLoad(1000, 0, 0, 0.1, answers={STANDARD: 70})
    assert asked.newcomer(STANDARD, 1, 100, 1, 0) == Holding(100, 70, 1)
    assert asked.newcomer(STANDARD, 1, 100, 3, 0) == Holding(100, 210, 1)
    assert asked.newcomer(STANDARD, 1, 100, 1, 20) == Holding(100, 20, 1)
    assert asked.newcomer(BACKGROUND, 0, 100, 1, 0) == Holding(100, FIRST_GUESS)


def test_streams_arrive_as_they_were_told_and_are_compared_unread_where_nothing_has_changed():
    streams = {JobId("a"): Holding(300, 40, 2), JobId("b"): Holding(0, 1, waits=True)}
    told = pickle.loads(pickle.dumps(ToldStreams.of(streams)))
    assert told == ToldStreams.of(streams) == streams
    assert told != {}
    assert told != ToldStreams.of({**streams, JobId("b"): Holding(0, 2, waits=True)})
    unreadable = ToldStreams(b"nobody can read this")
    assert pickle.loads(pickle.dumps(unreadable)) == unreadable
