"""A message arrives as it was sent, and one of another protocol is refused before anything of it is read."""

import pickle
import subprocess
import sys
from pathlib import Path

import cloudpickle
import pytest
from vllm import SamplingParams

from router.messages import Answered, JobEnded, LiveJobs, Placed, PlacementReason, PlacementRequested
from sampling.carried import Prefilled, PrefillRequest
from slo import protocol
from slo.admission.tenant_limits import Usage
from slo.errors import Rejected, RejectionReason
from slo.monitor.messages import DecodeSeen, MonitorAnswer, MonitorReport, Role
from slo.monitor.policy import ClusterPolicy
from slo.objectives import Objective
from slo.predict.prefill_time import PrefillPredictor
from slo.protocol import Message, OtherProtocolError
from slo.replacement import FailureCause, Replaced, ReplacementRequested
from slo.reports import DecodeReported, EngineEnd, OutstandingJob, PrefillReported, ReplicaGone
from slo.request import JobId, ReplicaId, RequestContext
from slo.tiers import PREMIUM

JOB, REPLICA = JobId("job"), ReplicaId("replica")
MESSAGES = [
    PlacementRequested(JOB, Objective(PREMIUM, 0.5, None), True, None, 100, prefix_hashes=(1, 2)),
    JobEnded(JOB, 0.2, None, Answered(PREMIUM, "acme", 17)),
    LiveJobs("ingress", 7, (JOB,), (JobEnded(JOB, 0.2, Usage(100, 10)),)),
    Placed(REPLICA, REPLICA, 10, 0.5, 0.2, 0.3, 0.05, PlacementReason.NOBODY_LATE),
    Rejected(RejectionReason.NO_REPLICA, 10.0),
    ReplacementRequested(JOB, PREMIUM, 0.1, False, 100, REPLICA, (REPLICA,), FailureCause.SILENT),
    Replaced(REPLICA, 0.05),
    PrefillReported(REPLICA, PrefillPredictor(1e-3, 0.0), (OutstandingJob(JOB, PREMIUM, 5, None),), JOB, 0.1),
    DecodeReported(REPLICA, 0.5, 3),
    ReplicaGone(REPLICA, (Role.DECODE, EngineEnd.HUNG)),
    MonitorReport("decode", Role.DECODE, 0, DecodeSeen(2)),
    MonitorAnswer(ClusterPolicy(3, {PREMIUM: 0.5})),
    PrefillRequest([1, 2, 3], SamplingParams(max_tokens=1), "salt"),
    Prefilled(None, {"remote_port": 1}, REPLICA),
]
ROOT = Path(__file__).parents[3]


def name_of(message):
    return type(message).__name__


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_it_arrives_as_it_was_sent(message):
    arrived = pickle.loads(cloudpickle.dumps(message))
    if isinstance(message, PrefillRequest):  # vLLM's parameters compare by identity
        assert repr(arrived) == repr(message)
    else:
        assert arrived == message


@pytest.mark.parametrize("message", MESSAGES, ids=name_of)
def test_another_protocol_is_refused_with_words(message, monkeypatch):
    with monkeypatch.context() as older:
        older.setattr(protocol, "PROTOCOL", 0)
        sent = cloudpickle.dumps(message)
    ours = protocol.PROTOCOL
    with pytest.raises(OtherProtocolError, match=rf"protocol 0 .* speaks protocol {ours}; .* beside the old"):
        pickle.loads(sent)


def test_every_message_is_among_these():
    assert {name_of(message) for message in MESSAGES} == {each.__name__ for each in Message.__subclasses__()}


def test_nothing_is_read_of_a_message_whose_content_only_the_other_version_has():
    script = """
import sys, dataclasses, pickle
from slo import protocol
protocol.PROTOCOL = 99
@dataclasses.dataclass(frozen=True, slots=True)
class OnlyThere(protocol.Message):
    field: int
sys.stdout.buffer.write(pickle.dumps(OnlyThere(1)))
"""
    sent = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, check=True).stdout
    with pytest.raises(OtherProtocolError, match="protocol 99"):
        pickle.loads(sent)


def test_the_context_of_a_request_says_its_protocol(monkeypatch):
    context = RequestContext(JOB, "id", PREMIUM, 0.5)
    with monkeypatch.context() as newer:
        newer.setattr("slo.request.PROTOCOL", protocol.PROTOCOL + 1)
        sent = context.encode()
    assert RequestContext.decode(context.encode()) == context
    with pytest.raises(OtherProtocolError, match=rf"protocol {protocol.PROTOCOL + 1} has"):
        RequestContext.decode(sent)
    with pytest.raises(OtherProtocolError, match=r"protocol '{\"job_id"):  # written before there was one
        RequestContext.decode(sent.partition(" ")[2].replace(":", ": ", 1))
