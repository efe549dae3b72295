"""What the ingress reads out of an OpenAI request body beyond what vLLM reads itself.

Owns how much one request may ask for. Which fields there are is `deployments.http.body.allowed`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from deployments.config.limits import LimitsConfig
from deployments.http.body.media import MEDIA_KEYS
from deployments.http.body.values import function_of, plain
from deployments.http.model_config import ModelConfig
from sampling.engine_limits import MOST_COMPARED_TOKENS, MOST_LOGPROB_TOKEN_IDS, MOST_REPEATED_TOKENS
from slo.admission.tenants import Tenant
from slo.errors import FieldError
from slo.request import RESERVED_XARG_PREFIX

if TYPE_CHECKING:
    from pydantic import BaseModel

UNKNOWN_LENGTH: Final = 32_768
"""Tokens that a model is taken to take while only its replicas know it."""
_MOST_LENGTH: Final = 1 << 24
"""More than any model takes."""
VLLMS_XARGS: Final[Mapping[str, tuple[str, str]]] = {
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "kv_cache_report_mode"),
        ("is set by the server itself", "leave it out"),
    ),
    "session_id": ("is a field of the body", "give session_id there"),
}
"""Engine arguments that vLLM itself reads, why no client may set them and what instead.

Others are for logits processors, which an operator chooses; a test compares these with the installed vLLM."""
_TOKEN_FIELDS: Final = ("allowed_token_ids", "logprob_token_ids", "logit_bias")
_NOT_CARRIED: Final = ("logprob_token_ids", "thinking_token_budget")
"""What decode alone can heed while it samples, besides grammars."""
_OUTPUT_FIELDS: Final = ("max_tokens", "max_completion_tokens")
_ANSWERS_WITH_ALL_BAD_WORDS: Final = 4
"""How many answers may have as many bad words as a request may name; more have fewer each. At every token the
engine writes each word of an answer that is one token into its logits by itself."""


def refuse_internal_xargs(body: Any) -> None:
    """Refuse engine arguments that a client must not set.

    Raises:
        FieldError: naming the field.
    """
    for name in getattr(body, "vllm_xargs", None) or {}:
        if name.startswith(RESERVED_XARG_PREFIX):
            raise FieldError(f"vllm_xargs.{name}", "is set by the server itself", "leave it out")
        if name in VLLMS_XARGS:
            raise FieldError(f"vllm_xargs.{name}", *VLLMS_XARGS[name])


def keep_apart(body: Any, tenant: Tenant) -> None:
    """Salt what is cached of a prompt, in place, so that a tenant finds nothing of another's."""
    if tenant.cache_salt is not None:
        body.cache_salt = f"{tenant.cache_salt}{getattr(body, 'cache_salt', None) or ''}"


def refuse_excess(body: Any, limits: LimitsConfig) -> None:
    """Refuse what is more than one request may ask for, or less than nothing; after `materialise`.

    Raises:
        FieldError: naming the field and the limit.
    """
    for field, least in (("n", 1), ("min_tokens", 0), *((field, 0) for field in _OUTPUT_FIELDS)):
        value = getattr(body, field, None)
        if value is not None and value < least:  # limits of a tenant would reckon with it before vLLM refuses
            raise FieldError(field, f"is {value}", f"give {least} or more")
    prompt = getattr(body, "prompt", None)
    if isinstance(prompt, list) and (not prompt or [] in prompt):
        raise FieldError("prompt", "is empty", "give text or token ids, and one prompt at least")
    most_named = max(_OUTPUT_FIELDS, key=lambda field: getattr(body, field, None) or 0)
    asked = [
        (
            "n" if answers_per_prompt(body) > 1 else "prompt",
            prompts(body) * answers_per_prompt(body),
            "max_sequences",
            "answers, prompts times n",
        ),
        ("stop_token_ids", len(_listed(body, "stop_token_ids")), "max_stop_tokens", "token ids"),
        (most_named, _named_output_tokens(body) or 0, "max_output_tokens", "tokens"),
        ("min_tokens", getattr(body, "min_tokens", None) or 0, "max_output_tokens", "tokens"),
        ("bad_words", len(_listed(body, "bad_words")), "max_bad_words", "texts"),
        *((field, len(_listed(body, field)), "max_token_ids", "token ids") for field in _TOKEN_FIELDS),
    ]
    for field in ("stop", "bad_words"):  # all of them are looked for at each token
        size = sum(len(text.encode()) for text in _listed(body, field))
        asked.append((field, size, "max_stop_bytes", "bytes"))
    for field, found, name, what in asked:
        limit = getattr(limits, name)
        if limit is not None and found > limit:
            raise FieldError(field, f"asks for {found} {what}", f"limits.{name} allows {limit}")
    _refuse_much_of_each_token(body, limits)
    _refuse_long_comparisons(body)


def _refuse_much_of_each_token(body: Any, limits: LimitsConfig) -> None:
    """Refuse what takes vLLM long at each token, by all the answers that it is done for.

    What a named token that is no whole character would add to the text, vLLM finds out by several calls of
    the tokenizer, on the event loop of the replica.
    """
    answers = prompts(body) * answers_per_prompt(body)
    times = ", counted once for each answer" if answers > 1 else ""
    if (found := len(_listed(body, "logprob_token_ids")) * answers) > MOST_LOGPROB_TOKEN_IDS:
        problem = f"asks for {found} token ids{times}"
        raise FieldError("logprob_token_ids", problem, f"give at most {MOST_LOGPROB_TOKEN_IDS}")
    most = _ANSWERS_WITH_ALL_BAD_WORDS * limits.max_bad_words
    if (found := len(_listed(body, "bad_words")) * answers) > most:
        problem = f"asks for {found} texts{times}"
        raise FieldError("bad_words", problem, f"limits.max_bad_words allows {most} for all answers")


def _refuse_long_comparisons(body: Any) -> None:
    """Refuse a search for repetitions that would keep the engine from the next step."""
    wanted = getattr(body, "repetition_detection", None)
    if wanted is None:
        return
    pattern, field = wanted.max_pattern_size, "repetition_detection"
    if pattern > MOST_REPEATED_TOKENS:
        problem = f"has a max_pattern_size of {pattern}"
        raise FieldError(field, problem, f"give at most {MOST_REPEATED_TOKENS}")
    if (compared := pattern * wanted.min_count) > MOST_COMPARED_TOKENS:
        problem = f"compares {compared} tokens, max_pattern_size times min_count"
        raise FieldError(field, problem, f"give at most {MOST_COMPARED_TOKENS} of them")


def allowed_default(
    values: Mapping[str, Any], model: type[BaseModel], limits: LimitsConfig
) -> dict[str, int]:
    """What a body that names no `max_tokens` has instead of vLLM's default, where the limit is lower."""
    limit, field = limits.max_output_tokens, model.model_fields.get("max_tokens")
    default = None if field is None else field.default
    if limit is None or not isinstance(default, int) or values.get("max_tokens") is not None:
        return {}
    return {"max_tokens": min(limit, default)}


def _listed(body: Any, field: str) -> Collection[Any]:
    """What a field has, of which one text may stand for a list of it."""
    value = getattr(body, field, None) or ()
    return [value] if isinstance(value, str) else value


def output_tokens(body: Any, model: ModelConfig) -> int:
    """The most tokens that all answers to a request may have together.

    Where the model's length is not known, what is named counts as it is.
    """
    named = _named_output_tokens(body)
    room = model.max_model_len or min(max(UNKNOWN_LENGTH, named or 0), _MOST_LENGTH)
    # An echo without an answer computes a token, too.
    of_each = max(1, min([room, *model.output_bounds(named)]))
    return of_each * prompts(body) * answers_per_prompt(body)


def answers_per_prompt(body: Any) -> int:
    """How many answers a request computes for each of its prompts."""
    return getattr(body, "n", None) or 1


def prompts(body: Any) -> int:
    """How many prompts a request has."""
    prompt = getattr(body, "prompt", None)
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], int):
        return 1
    return len(prompt)


def _named_output_tokens(body: Any) -> int | None:
    """The most tokens of an answer that the request names itself."""
    named = [value for field in _OUTPUT_FIELDS if (value := getattr(body, field, None)) is not None]
    return max(named, default=None)


def decode_samples_first(body: Any) -> bool:
    """Whether the first token of a request is one that decode samples, and prefill cannot.

    It is a guess for the sake of predictions; decode itself knows (`decode_node.carrying.why_resampled`).
    """
    named = any(getattr(body, name, None) is not None for name in _NOT_CARRIED)
    return named or grammar_field(body) is not None


def grammar_field(body: Any) -> str | None:
    """The field that says what the answer to a request must conform to; None where none is seen to.

    A call that must be made goes before a format, which vLLM then leaves out.
    """
    if getattr(body, "structured_outputs", None) is not None:
        return "structured_outputs"
    tools, choice = plain(getattr(body, "tools", None)), getattr(body, "tool_choice", None)
    if tools and choice not in (None, "none", "auto"):
        return "tools"
    wanted = plain(getattr(body, "response_format", None))
    if isinstance(wanted, Mapping) and wanted.get("type") != "text":
        return "response_format"
    return "tools" if tools and choice != "none" and _any_strict(tools) else None


def only_decode(body: Any) -> bool:
    """Whether only decode can compute the prompts of a request; after `materialise`.

    Several of them or several answers, log-probabilities of the prompt, or more than text. Decode itself
    knows (`decode_node.rendering`).
    """
    if prompts(body) > 1 or answers_per_prompt(body) > 1 or getattr(body, "use_beam_search", False):
        return True
    of_answer = "top_logprobs" if hasattr(body, "messages") else "logprobs"
    is_echoed = getattr(body, "echo", False) and getattr(body, of_answer, None) is not None
    if is_echoed or getattr(body, "prompt_logprobs", None) is not None:
        return True
    contents = (message.get("content") for message in getattr(body, "messages", ()))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(isinstance(part, dict) and not MEDIA_KEYS.isdisjoint(part) for part in parts)


def _any_strict(tools: Any) -> bool:
    """Whether a tool, as a chat or a response names it, is strict."""
    return isinstance(tools, list) and any(function_of(tool).get("strict") for tool in tools)


def service_tier(body: Any) -> str | None:
    """The OpenAI field `service_tier` of a chat or text completion.

    Raises:
        FieldError: when it is not a string.
    """
    value = getattr(body, "service_tier", None)
    if value is not None and not isinstance(value, str):
        raise FieldError("service_tier", "is not a string", "give the name of a service tier, such as auto")
    return value


def materialise(body: Any) -> None:
    """Turn the lazy iterators that pydantic leaves in chat messages into lists, in place.

    They can be read once only and cannot travel to another process.
    """
    for message in getattr(body, "messages", ()):
        for field in ("content", "tool_calls"):
            value = message.get(field)
            if value is not None and not isinstance(value, str | list):
                message[field] = list(value)
