"""A length that an engine refuses, and a replica that ends, are told of in one line."""

from types import SimpleNamespace

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import DeploymentUnavailableError
from vllm.v1.engine.exceptions import EngineDeadError

from deployments.calibrate.run import Measuring
from deployments.config import ConfigError

REFUSED = RuntimeError("longer than the model")


def measuring(error):
    """Replicas that answer a measurement with an error."""

    def result():
        raise error

    measure = SimpleNamespace(remote=lambda *_: SimpleNamespace(result=result))
    replica = SimpleNamespace(measure_prefill=measure, measure_handoff=measure, measurable=measure)
    return Measuring(SimpleNamespace(prefill=replica, decode=replica))


@pytest.mark.parametrize("error", [REFUSED, RayTaskError("f", "", REFUSED)], ids=["over gRPC", "otherwise"])
def test_a_refused_length_is_an_error_of_the_configuration(error):
    with pytest.raises(ConfigError, match="a prompt of 9 tokens behind 8 was refused: longer than the model"):
        measuring(error).prefill_s(9, 8)
    with pytest.raises(ConfigError, match="a prompt of 9 tokens was refused: longer than the model"):
        measuring(error).handoff(9)


@pytest.mark.parametrize(
    "error",
    [
        RayActorError(),
        DeploymentUnavailableError(DeploymentID("Prefill")),
        EngineDeadError(),
        RayTaskError("f", "", EngineDeadError()),
    ],
    ids=repr,
)
def test_a_replica_that_dies_has_refused_nothing_and_is_told_in_one_line(error):
    with pytest.raises(
        ConfigError, match=r"a replica ended .* a prompt of 9 tokens \(\w+\); nothing was saved"
    ):
        measuring(error).prefill_s(9, 0)
    with pytest.raises(ConfigError, match="a replica ended when it was asked for its description"):
        measuring(error).measurable()
