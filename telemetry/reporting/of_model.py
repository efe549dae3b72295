"""A handle of what serves several models, for those who speak of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

Named = TypeVar("Named")


class OfModel:
    """Calls the methods of a deployment with `model` as a keyword argument.

    Args:
        handle: Of the deployment; `of_model.place.remote(request)` is its `place(request, model=model)`.
        model: What all calls are about.
    """

    def __init__(self, handle: Any, model: str) -> None:
        self._handle = handle
        self._model = model

    def __getattr__(self, name: str) -> _Method:  # noqa: D105 - see the class
        return _Method(getattr(self._handle, name), self._model)


def named(models: Mapping[str, Named], name: str) -> Named | None:
    """The one of `models` that has a name, or the first without a name; None for none.

    A name may be as it is in names of deployments: who finds a deployment may know no other.
    """
    if not name:
        return next(iter(models.values()), None)
    found = models.get(name)
    if found is None:
        found = next((each for model, each in models.items() if in_names(model) == name), None)
    return found


def in_names(model: str) -> str:
    """A model's name as Ray Serve LLM has it in the names of deployments."""
    return model.replace("/", "--").replace(".", "_")


class _Method:
    def __init__(self, method: Any, model: str) -> None:
        self._method = method
        self._model = model

    def remote(self, *args: Any) -> Any:
        return self._method.remote(*args, model=self._model)
