"""Finds the deployment that runs on this machine, for commands that talk to it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray._private.services import find_gcs_addresses
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from deployments.local.launcher import APP_NAME
from deployments.names import DECODE_PREFIX, PREFILL_PREFIX, ROUTER_NAME
from telemetry.reporting.monitor_names import monitors_of
from telemetry.reporting.of_model import OfModel, in_names

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle
    from ray.serve.schema import ApplicationStatusOverview


_TIMEOUT_S: Final = 5.0


class NotRunningError(Exception):
    """There is no deployment to talk to; the message says why and what to do."""


class _SeveralFitError(NotRunningError):
    """Several do, and whoever asks has to say which is meant."""


@dataclass(frozen=True, slots=True)
class RunningDeployment:
    """A deployment that runs: the model it serves, its Ray's address, and whom to ask.

    `find_monitors` returns the handles of its SLO monitors' actors; None when nobody shall be asked.
    """

    model: str
    address: str
    router: OfModel
    prefill: DeploymentHandle
    decode: DeploymentHandle | None = None
    find_monitors: Callable[[], Iterable[Any]] | None = None

    async def ask_prefill(self, method: str, replica: str, *arguments: Any) -> Any:
        """One replica's own answer; None when Serve has it no more and would have another one answer."""
        question = getattr(self.prefill, method)
        async with question.choose_replica(pin=replica) as chosen:
            if chosen.replica_id != replica:
                return None
            return await question.dispatch(chosen, *arguments, pin=replica)


def connect(model: str | None = None, application: str | None = None) -> RunningDeployment:
    """Find the deployment that runs on this machine; starts nothing.

    Of several models it is the one of that name, without a name the first. Looks at the cluster that
    `RAY_ADDRESS` names. Without that, at the last one that was started here, and then at all others; one that
    cannot be joined, as another user's, is passed over.

    Raises:
        NotRunningError: when there is none, none with that model, or on one cluster several applications.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # each handle says that it has started
    refused: NotRunningError | None = None
    not_joined: NotRunningError | None = None
    for address in _addresses():
        ray.shutdown()
        try:
            applications = _applications(address)
        except NotRunningError as error:
            not_joined = not_joined or error
            continue
        try:
            if (found := _deployment(applications, model, application)) is not None:
                return found
        except _SeveralFitError:
            raise
        except NotRunningError as error:
            refused = refused or error
    nothing = (
        f"the Ray cluster here runs no {APP_NAME} application; start `slackserve serve`, or deploy "
        "`deployments.app:build` on it"
    )
    raise refused or not_joined or NotRunningError(nothing)


def _addresses() -> Iterator[str]:
    """Which clusters to ask, each after the one before was; `auto` is that of `RAY_ADDRESS`, or the last."""
    yield "auto"
    if not os.environ.get("RAY_ADDRESS") and len(here := find_gcs_addresses()) > 1:
        asked = {ray.get_runtime_context().gcs_address} if ray.is_initialized() else set()
        yield from sorted(here - asked)


def _applications(address: str) -> dict[str, ApplicationStatusOverview]:
    """What Serve runs on a cluster.

    Raises:
        NotRunningError: when it cannot be asked.
    """
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        return dict(serve.status().applications)
    except ConnectionError as error:
        if error.__cause__ is None:  # none was found
            raise NotRunningError("nothing is running here; start `slackserve serve` first") from None
        raise NotRunningError(
            f"{error}; start it, or set RAY_AUTH_MODE=token if it asks for a token"
        ) from None
    except (RayError, RuntimeError, ValueError) as error:
        raise NotRunningError(f"the Ray cluster here cannot be used: {error}") from None


def _deployment(
    applications: dict[str, ApplicationStatusOverview],
    model: str | None = None,
    application: str | None = None,
) -> RunningDeployment | None:
    """The one of ours that fits; of several models the one asked for, or the first that was configured.

    Raises:
        _SeveralFitError: when several of ours do.
        NotRunningError: when none of ours has such a name, or such a model; or when it is being built
            or deleted.
    """
    ours = {name: parts for name, state in applications.items() if (parts := _parts(state))}
    building = [name for name, state in applications.items() if _is_being_built(state)]
    if application in building or (building and not ours and application is None):
        raise NotRunningError(f"an application is being deployed here: {', '.join(building)}; try again soon")
    if not ours:
        return None
    if application is not None and application not in ours:
        raise NotRunningError(f"there is no application {application!r} here; give one of {', '.join(ours)}")
    there: list[str] = []
    fit: dict[str, RunningDeployment] = {}
    for each in ours if application is None else [application]:
        router, parts = _handle(ROUTER_NAME, each), ours[each]
        models = _models(router) or parts
        name = model or models[0]
        if name in models or (models is parts and in_names(name) in parts):
            fit[each] = _running(each, name, router)
        else:
            there += models
    if len(fit) > 1:
        raise _SeveralFitError(f"several applications fit: {', '.join(fit)}; name one with --application")
    if not fit:
        raise NotRunningError(f"{APP_NAME} serves no model {model!r} here; give one of {', '.join(there)}")
    return next(iter(fit.values()))


def _parts(state: ApplicationStatusOverview) -> list[str]:
    """An application's models, as its deployments' names have them; none of one that is not ours.

    Ray Serve LLM's own prefill/decode application names its deployments like ours, and has no router.
    """
    if ROUTER_NAME not in state.deployments:
        return []
    return [
        name.removeprefix(PREFILL_PREFIX) for name in state.deployments if name.startswith(PREFILL_PREFIX)
    ]


def _is_being_built(state: ApplicationStatusOverview) -> bool:
    """Whether Serve lists none of an application's deployments, also not those of before, as it builds it."""
    return not state.deployments and state.status is ApplicationStatus.DEPLOYING


def _running(application: str, model: str, router: DeploymentHandle) -> RunningDeployment:
    prefill, decode = (
        _handle(prefix + in_names(model), application) for prefix in (PREFILL_PREFIX, DECODE_PREFIX)
    )
    address = ray.get_runtime_context().gcs_address
    find_monitors = partial(monitors_of, application)
    return RunningDeployment(model, address, OfModel(router, model), prefill, decode, find_monitors)


def _handle(deployment: str, application: str) -> DeploymentHandle:
    """A handle that answers without an event loop of the caller's, whatever the environment says.

    Replicas share the loop of their handles, and a shell may have their environment.

    Raises:
        NotRunningError: when Serve has the deployment no more.
    """
    try:
        handle = serve.get_deployment_handle(deployment, application)
    except KeyError:
        raise NotRunningError(
            f"the application {application} is being deployed or deleted here; try again soon"
        ) from None
    if not handle.is_initialized:  # Serve gives the same one again
        handle._init(_run_router_in_separate_loop=True)  # noqa: SLF001 - the public way is the environment
    return handle


def _models(router: DeploymentHandle) -> list[str]:
    """The models that are served; none when the router does not say."""
    try:
        return list(router.models.remote().result(timeout_s=_TIMEOUT_S))
    except Exception:  # noqa: BLE001 - whatever ails it; who is asked later will see
        return []
