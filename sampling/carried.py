"""Tokens that one engine has generated and another goes on from, and the prefill that gives the first.

Owns the messages between the tiers, and how carried tokens travel inside an engine: among the request's
`extra_args`, from the replica process to the scheduler and the workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec
from vllm.sampling_params import RequestOutputKind, SamplingParams

from slo.model_digest import UNTOLD, ModelDigest
from slo.protocol import Message

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.outputs import RequestOutput

CARRIED_XARG: Final = "slackserve_carried"
KV_PARAMS: Final = "kv_transfer_params"
"""vLLM's name of what its KV connector is told about a request, in `extra_args`."""
_KEEP_FOR_PULL: Final = {"do_remote_decode": True, "do_remote_prefill": False}


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities at one position, as vLLM samples them: the sampled token, then the top ones."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class CacheUse(NamedTuple):
    """What a prefill has to do with the prefix cache, in tokens of its prompt.

    Attributes:
        cached_tokens: What it has found there.
        created_tokens: What it has put there.
    """

    cached_tokens: int = 0
    created_tokens: int = 0

    @staticmethod
    def of(output: RequestOutput) -> CacheUse:
        """What the engine says."""
        return CacheUse(output.num_cached_tokens or 0, output.num_cache_creation_tokens or 0)

    def put_in(self, output: RequestOutput) -> None:
        """Have vLLM's OpenAI layer say this of an answer."""
        output.num_cached_tokens, output.num_cache_creation_tokens = self


_NO_USE: Final = CacheUse()


class Carried(msgspec.Struct, frozen=True):
    """What has been generated of an answer elsewhere.

    Attributes:
        token_ids: All of it, from the first token on.
        logprobs: One for each token; None when the request asks for none, or the client has got them.
        finish_reason: What vLLM calls the end, when the last token is the answer's end; else None.
        stop_reason: The token that ended it, where vLLM names one.
        is_sent: Whether vLLM's OpenAI layer has got it already.
        cache: What its prompt's first prefill had to do with the prefix cache; None when nobody has told.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    is_sent: bool = False
    cache: CacheUse | None = None

    def put_in(self, params: SamplingParams) -> None:
        """Have the engine that runs a request with `params` go on from here."""
        params.extra_args = {**(params.extra_args or {}), CARRIED_XARG: msgspec.to_builtins(self)}

    @staticmethod
    def of(params: SamplingParams | None) -> Carried | None:
        """What a request brings along; None for nothing."""
        carried = (getattr(params, "extra_args", None) or {}).get(CARRIED_XARG)
        return None if carried is None else msgspec.convert(carried, Carried)

    @staticmethod
    def first(completion: Any, params: SamplingParams) -> Carried:
        """The one token of a prefill.

        Args:
            completion: vLLM's `CompletionOutput` of a request with `first_token(params)`.
            params: As the client wants its answer sampled.
        """
        ended = completion.finish_reason
        if ended == "length" and params.max_tokens != 1:
            ended = None  # ended for us only
        logprobs = None
        if completion.logprobs is not None:
            (sampled,), (position,) = completion.token_ids, completion.logprobs
            logprobs = [as_sampled(sampled, position, params)]
        return Carried(list(completion.token_ids), logprobs, ended, completion.stop_reason)


class Adapter(NamedTuple):
    """A LoRA adapter: its name, and where it was loaded from, which a new configuration may change."""

    name: str
    path: str


@dataclass(frozen=True, slots=True)
class PrefillRequest(Message):
    """What the decode tier asks the prefill tier for.

    Attributes:
        token_ids: The prompt's.
        params: How its one token is sampled, see `first_token` and `nothing_but_kv`.
        cache_salt: Separates its prefixes from others' in the cache.
        adapter: The LoRA adapter that answers; None for the model itself.
        draws: How decode, which goes on, draws with a seed (`draws_of`).
        digest: Of the model that goes on from its KV cache.
    """

    token_ids: list[int]
    params: SamplingParams
    cache_salt: str | None = None
    adapter: Adapter | None = None
    draws: str = ""
    digest: ModelDigest = UNTOLD

    def sampled_by(self, draws: str) -> SamplingParams | None:
        """`params`, where an engine that draws so does as the one that goes on; else None."""
        return self.params if self.params.seed is None or self.draws == draws else None


@dataclass(frozen=True, slots=True)
class Prefilled(Message):
    """What it answers.

    Attributes:
        completion: vLLM's `CompletionOutput` with the sampled token; None when it does not count, as decode
            draws otherwise with its seed.
        kv_transfer_params: Where the KV blocks wait; None when they do not, as the token ended the answer.
        replica: Who has them.
        cache: What of the prompt it had cached, and has.
    """

    completion: Any
    kv_transfer_params: dict[str, Any] | None
    replica: str
    cache: CacheUse = _NO_USE


def draws_of(config: VllmConfig) -> str:
    """How an engine draws with a seed: vLLM's model runners do otherwise, and each in two ways."""
    runner = "second" if config.use_v2_model_runner else "first"
    return f"{runner}, fp64" if config.model_config.use_fp64_gumbel else runner


def first_token(params: SamplingParams) -> SamplingParams:
    """How prefill samples the first token of an answer with `params`, so that decode can go on from it.

    A token that ends the answer by itself ends the prefill as well, whose KV blocks are not kept then. Stop
    strings are left to decode, where the text is.
    """
    first = params.clone()
    first.max_tokens = 1
    first.min_tokens = min(1, params.min_tokens)
    first.stop = []
    first.detokenize = False
    first.output_text_buffer_length = 0
    first.output_kind = RequestOutputKind.FINAL_ONLY
    first.stream_interval = None
    first.extra_args = dict(_without_transfer(params.extra_args))
    if params.max_tokens != 1:
        first.extra_args[KV_PARAMS] = dict(_KEEP_FOR_PULL)
    return first


def nothing_but_kv() -> SamplingParams:
    """How prefill runs a request whose first token decode samples."""
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args={KV_PARAMS: dict(_KEEP_FOR_PULL)},
    )


def _without_transfer(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    return {
        name: value for name, value in (extra_args or {}).items() if name not in {KV_PARAMS, CARRIED_XARG}
    }


def as_sampled(sampled: int, position: Mapping[int, Any], params: SamplingParams) -> TokenLogprobs:
    """Undo what vLLM makes of its sampler's list: a dictionary, where the sampled token is in once.

    The sampled token comes first, with its rank; the top ones follow, by rank, with the sampled one again if
    it is among them.
    """
    most = len(position) if params.logprobs == -1 else params.logprobs
    top = sorted((one.rank, token) for token, one in position.items() if one.rank <= most)
    ordered = [sampled, *(token for _, token in top)]
    return TokenLogprobs(ordered, [position[token].logprob for token in ordered], position[sampled].rank)
