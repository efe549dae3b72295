"""Runs measurements on the replicas of a running deployment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from decode_node.tier_calls import REPLICA_ERRORS
from deployments.config import ConfigError
from slo.predict.handoff import HandoffSample
from slo.predict.measured_on import Measurable

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentResponse

    from deployments.local.running import RunningDeployment


class Measuring:
    """Asks the replicas of a deployment to measure, one at a time, and waits for each."""

    def __init__(self, running: RunningDeployment) -> None:
        assert running.decode is not None
        self._prefill, self._decode = running.prefill, running.decode

    def measurable(self) -> Measurable:
        """What is measured.

        Raises:
            ConfigError: when no replica says so.
        """
        measurable: Measurable = _answer(self._prefill.measurable.remote(), "its description")
        return measurable

    def prefill_s(self, tokens: int, context_tokens: int) -> float:
        """Seconds of a prefill behind a cached prefix.

        Raises:
            ConfigError: when the engine refuses the length, or a replica ends.
        """
        asked = f"a prompt of {tokens} tokens" + (f" behind {context_tokens}" if context_tokens else "")
        return float(_answer(self._prefill.measure_prefill.remote(tokens, context_tokens), asked))

    def handoff(self, tokens: int) -> HandoffSample:
        """What lies between the end of a prefill, its first token, and the KV cache on decode.

        Raises:
            ConfigError: when an engine refuses the length, or a replica ends.
        """
        sample: HandoffSample = _answer(
            self._decode.measure_handoff.remote(tokens), f"a prompt of {tokens} tokens"
        )
        return sample


def _answer(response: DeploymentResponse, asked: str) -> Any:
    try:
        return response.result()
    except REPLICA_ERRORS as error:
        raise _ended(error, asked) from None
    except Exception as error:  # noqa: BLE001 - over gRPC a replica's own error is raised as it is
        from vllm.v1.engine.exceptions import EngineDeadError  # noqa: PLC0415 - takes seconds to import

        why = getattr(error, "cause", error)
        if isinstance(why, EngineDeadError):
            raise _ended(why, asked) from None
        raise ConfigError(f"calibrate: {asked} was refused: {why}") from None


def _ended(error: Exception, asked: str) -> ConfigError:
    return ConfigError(
        f"calibrate: a replica ended when it was asked for {asked} ({type(error).__name__}); nothing was "
        "saved, as a profile needs all lengths; look at its log, and measure again once all are ready"
    )
