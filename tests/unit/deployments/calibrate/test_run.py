"""A length that an engine refuses is told of in one line."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError

from deployments.calibrate.run import Measuring
from deployments.config import ConfigError

REFUSED = RuntimeError("longer than the model")


def measuring(error):
    """Replicas that answer a measurement with an error."""

    def result():
        raise error

    measure = SimpleNamespace(remote=lambda *_: SimpleNamespace(result=result))
    replica = SimpleNamespace(measure_prefill=measure, measure_handoff=measure)
    return Measuring(SimpleNamespace(prefill=replica, decode=replica))


@pytest.mark.parametrize("error", [REFUSED, RayTaskError("f", "", REFUSED)], ids=["over gRPC", "otherwise"])
def test_a_refused_length_is_an_error_of_the_configuration(error):
    with pytest.raises(ConfigError, match="a prompt of 9 tokens behind 8 was refused: longer than the model"):
        measuring(error).prefill_s(9, 8)
    with pytest.raises(ConfigError, match="a prompt of 9 tokens was refused: longer than the model"):
        measuring(error).handoff(9)


def test_a_replica_that_dies_has_refused_nothing():
    with pytest.raises(RayActorError):
        measuring(RayActorError()).prefill_s(9, 0)
