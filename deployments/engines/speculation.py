"""Which drafters of speculative decoding the two tiers may have, as far as moving KV goes.

A drafter with layers of its own has keys and values too, and they move with the model's. So NIXL's handshake
compares the drafters that read the model's hidden states, and how many layers have KV; where tiers differ, no
pull succeeds. Owns which drafters these are. What speculation keeps from working is found out by each tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from vllm.config.speculative import MTPModelTypes

from deployments.config import ConfigError

_MTP: Final = "mtp"
_SURE: Final = frozenset({"eagle", "eagle3", "dflash", "dspark"})
"""Methods that vLLM takes as given, whatever the draft model is called."""
_WITH_LAYERS: Final = _SURE | {_MTP, "draft_model"}
_WITHOUT_MODEL: Final = frozenset({"custom_class", "extract_hidden_states", "ngram", "ngram_gpu", "suffix"})
"""Likewise, and no draft model is loaded."""
_TOLD_BY_NAME: Final = {"eagle-": "eagle", "eagle3": "eagle3", "dflash": "dflash", "dspark": "dspark"}
"""What vLLM makes of a draft model whose name has this, if another method was given or none."""
_COMPARED: Final = ("model", "revision", "code_revision", "parallel_drafting", "kv_cache_dtype")
"""What the handshake compares beside the method."""


def refuse_unlike_drafters(prefill: Mapping[str, Any], decode: Mapping[str, Any]) -> None:
    """Refuse engine arguments by which one tier has a drafter with KV that the other one has not.

    A draft model of which neither its name nor a method tells what it is may be any, and passes.

    Raises:
        ConfigError: naming both.
    """
    drafters = [_drafter(each.get("speculative_config") or {}) for each in (prefill, decode)]
    if drafters[0] == drafters[1]:
        return
    said = [", ".join(f"{key} {value}" for key, value in each.items()) or "none" for each in drafters]
    msg = (
        "prefill.engine_kwargs and decode.engine_kwargs differ in 'speculative_config', of drafters with a "
        f"KV cache of their own: {said[0]} and {said[1]}; no KV could be pulled, so give the same to both, "
        "or to decode alone one without, as {method: ngram, num_speculative_tokens: 4}"
    )
    raise ConfigError(msg)


def _drafter(given: Mapping[str, Any]) -> dict[str, Any]:
    """What has to be alike of a drafter with layers of its own; nothing of any other, and of none."""
    method = _method(given)
    if method not in _WITH_LAYERS:
        return {}
    return {"method": method, **{key: given[key] for key in _COMPARED if given.get(key)}}


def _method(given: Mapping[str, Any]) -> str:
    """The method as vLLM finds it out, where neither a file nor the model is needed for that."""
    method, model = str(given.get("method") or ""), str(given.get("model") or "").lower()
    if method in _SURE | _WITHOUT_MODEL:
        return method
    if (of_name := next((name for part, name in _TOLD_BY_NAME.items() if part in model), None)) is not None:
        return of_name
    return _MTP if method in get_args(MTPModelTypes) else method
