"""LoRA adapters: which ones are served beside the model, and what the engines are started with for them.

Owns the checks of adapters in local directories before anything starts. vLLM fetches those that are named by
a Hugging Face id, and applies all of them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from safetensors import SafetensorError, safe_open

from deployments.config import ConfigError
from deployments.models.store import ModelPathError, local_path

if TYPE_CHECKING:
    from vllm.config.lora import LoRAConfig

RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM has room for."""
_CONFIG: Final = "adapter_config.json"
_WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
"""Where vLLM looks for them, in this order."""


def adapter_kwargs(adapters: Mapping[str, str], max_rank: int | None, model_id: str) -> dict[str, Any]:
    """Engine arguments for `adapters`, by name where each is; empty without any.

    All of them fit into one forward pass, so that none waits for another's.

    Raises:
        ConfigError: One has the model's own name, is not there, has a rank above `max_rank`, or is not one
            that vLLM loads.
    """
    if not adapters:
        return {}
    from vllm.config.lora import LoRAConfig  # noqa: PLC0415 - takes seconds to import
    from vllm.entrypoints.openai.models.protocol import LoRAModulePath  # noqa: PLC0415 - likewise

    found = find_adapters(adapters, max_rank, model_id)
    room = LoRAConfig(max_lora_rank=found.room, max_loras=len(adapters))
    for name in found.ranks:
        _check(name, Path(found.places[name]), room)
    return {
        "enable_lora": True,
        "max_loras": room.max_loras,
        "max_lora_rank": room.max_lora_rank,
        "lora_modules": [LoRAModulePath(name, place) for name, place in found.places.items()],
    }


class FoundAdapters(NamedTuple):
    """What is known of adapters without vLLM.

    Attributes:
        places: Where each is, by its name.
        ranks: The rank of each that is on this machine.
        room: The rank that the engines keep room for.
    """

    places: Mapping[str, str]
    ranks: Mapping[str, int]
    room: int


def find_adapters(adapters: Mapping[str, str], max_rank: int | None, model_id: str) -> FoundAdapters:
    """Find `adapters`, by name where each is.

    Raises:
        ConfigError: One has the model's own name, is not there, or has a rank above `max_rank`.
    """
    if model_id in adapters:
        raise ConfigError(f"lora.adapters: {model_id!r} is the name of the model; give the adapter another")
    places = {name: _place(name, where) for name, where in adapters.items()}
    ranks = {name: rank for name, place in places.items() if (rank := _rank(name, place)) is not None}
    return FoundAdapters(places, ranks, _room(ranks, max_rank))


def _place(name: str, where: str) -> str:
    try:
        path = local_path(where)
        is_there = path is not None and (path / _CONFIG).is_file()
    except ModelPathError as error:
        raise ConfigError(f"lora.adapters.{name}: {error}") from None
    except OSError as error:
        raise ConfigError(f"lora.adapters.{name}: {where} cannot be read ({error.strerror})") from None
    if path is None:
        return where
    if not is_there:
        msg = (
            f"lora.adapters.{name}: {path} has no {_CONFIG}; "
            "give the directory of an adapter as PEFT saves it, or a Hugging Face id"
        )
        raise ConfigError(msg)
    return str(path.absolute())


def _rank(name: str, place: str) -> int | None:
    """Of an adapter that is here; None for one that vLLM has yet to fetch."""
    written = Path(place) / _CONFIG
    if not written.is_file():
        return None
    try:
        return index(json.loads(written.read_text())["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        msg = f"lora.adapters.{name}: {written} does not say its rank r ({error!r}); is it a LoRA of PEFT?"
        raise ConfigError(msg) from None


def _check(name: str, place: Path, room: LoRAConfig) -> None:
    """Hold an adapter that is here against vLLM, as far as that needs no model: it would end a replica."""
    from vllm.lora.peft_helper import PEFTHelper  # noqa: PLC0415 - takes seconds to import

    try:
        PEFTHelper.from_local_dir(str(place), None).validate_legal(room)
    except (ValueError, TypeError) as error:
        msg = f"lora.adapters.{name}: {place / _CONFIG}: vLLM does not load it: {error}"
        raise ConfigError(msg) from None
    weights = next((place / each for each in _WEIGHTS if (place / each).is_file()), None)
    if weights is None:
        raise ConfigError(f"lora.adapters.{name}: {place} has no weights, as {_WEIGHTS[0]}")
    if weights.suffix != ".safetensors":
        return
    try:
        with safe_open(weights, framework="np"):
            pass
    except SafetensorError as error:  # as of a pointer that Git LFS left, or a copy that broke off
        msg = f"lora.adapters.{name}: {weights} cannot be read ({error}); copy it again"
        raise ConfigError(msg) from None


def _room(ranks: Mapping[str, int], max_rank: int | None) -> int:
    """The rank that the engines keep room for: what is asked for, or what the adapters that are here need."""
    name = max(ranks, key=ranks.__getitem__, default="")
    needed = ranks.get(name, 0)
    if max_rank is not None:
        if needed > max_rank:
            msg = f"lora.max_rank: the rank of {name!r} is {needed}, and room is kept for {max_rank}"
            raise ConfigError(msg)
        return max_rank
    if needed > RANKS[-1]:
        raise ConfigError(f"lora.adapters.{name}: its rank is {needed}, and vLLM takes at most {RANKS[-1]}")
    return next(rank for rank in RANKS if rank >= max(needed, 16))
