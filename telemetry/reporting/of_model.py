"""A handle of what serves several models, for those who speak of one."""

from __future__ import annotations

from typing import Any


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


class _Method:
    def __init__(self, method: Any, model: str) -> None:
        self._method = method
        self._model = model

    def remote(self, *args: Any) -> Any:
        return self._method.remote(*args, model=self._model)
