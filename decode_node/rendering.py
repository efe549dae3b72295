"""A request's prompt as tokens, before any prefill is asked for.

Owns the use of vLLM's renderer, so that a prompt that is too long, a template that fails, an unsatisfiable
max_tokens or an image that cannot be fetched is refused at once, so that prefill receives exactly the tokens
that decode will use, and so that a prompt is tokenised once. Also owns which requests the prefill tier
cannot take.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

from aiohttp import (
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientResponseError,
    ClientSSLError,
)
from jinja2 import TemplateError
from PIL.Image import DecompressionBombError
from pydantic_core import to_jsonable_python
from ray.serve.llm.openai_api_models import ErrorResponse
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMUnprocessableEntityError

from decode_node.answers import NOT_TAKEN, error_response
from slo.model_digest import OTHER_MODEL

if TYPE_CHECKING:
    from vllm.sampling_params import StructuredOutputsParams

BAD_REQUEST = 400
_UNKNOWN_MODEL = "NotFoundError"
"""vLLM's type of the error for a model or an adapter that it has not got."""
_PROMPT_PARAMS = frozenset({"input_tokens", "input_text"})
_TEXT_PARTS = frozenset({None, "text", "input_text", "output_text", "refusal", "thinking", "tool_reference"})
"""Types of a message's parts that are no media, unless they have one of these keys all the same."""
_MEDIA_KEYS = frozenset({"image_url", "audio_url", "video_url", "input_audio"})
_RENDERED_FIELDS = ("tools", "documents", "chat_template_kwargs")
"""What a chat template puts into the prompt beside the messages."""
_TOO_MUCH: Final = (NotImplementedError, DecompressionBombError, RecursionError)
"""Of media in another form, or so large that vLLM does not get to look at its size, and of what is nested
too deep; by itself vLLM would answer it as the server's fault."""
_FETCH_FAILED: Final = "Failed to fetch media from URL: "
"""How vLLM begins to say that a host has refused what it was asked for."""
_NOT_REACHED: Final = (
    (TimeoutError, "it did not answer in time"),
    (ClientConnectorDNSError, "its name was not found"),
    (ClientSSLError, "its TLS or its certificate was not accepted"),
    (ClientConnectorError, "it takes no connection"),
)
"""What a fetch fails with, and what that says of the host; of anything else, that its answer broke off."""


class LocalReason(enum.StrEnum):
    """Why the decode tier prefills a request itself; the values label metrics."""

    SEVERAL_SEQUENCES = "several_sequences"
    SEVERAL_PROMPTS = "several_prompts"
    PROMPT_LOGPROBS = "prompt_logprobs"
    NOT_TEXT = "not_text"
    NO_PREFILL_REPLICA = "no_prefill_replica"
    """None is running, and decode may do without."""
    NOTHING_PULLED = "nothing_pulled"
    """Some are running, and this replica cannot pull the KV cache of any."""
    CHEAPER_ON_DECODE = "cheaper_on_decode"
    """The router says so: the way through prefill would take longer."""
    LEFT = "left"
    """Decode had no memory for it, and no prefill replica computes it again."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A request that has been rendered: the tokens of its one prompt, or why prefill cannot take it.

    Attributes:
        token_ids: Exactly what the engine would prefill; empty when `local` says why not.
        local: Why the decode tier has to prefill it itself, None when it need not.
        request: As rendering has left it: parsers of tool calls and of reasoning change what is asked for.
        prompt: What vLLM's renderer has made of it.
        prompts: How often the engine computes a prompt for it: once for each answer.
        input_tokens: Of all its prompts, each once, wherever they are computed.
    """

    token_ids: list[int]
    local: LocalReason | None = None
    request: Any = None
    prompt: Any = None
    prompts: int = 1
    input_tokens: int = 0


async def render(engine: Any, request: Any, *, is_chat: bool, max_model_len: int) -> Rendered | ErrorResponse:
    """The tokens of a request, which is neither run nor changed, or the error to answer with.

    Raises:
        VLLMServerError: when the engine is dead, or fails otherwise.
    """
    serving = engine._oai_serving_chat if is_chat else engine._oai_serving_completion  # noqa: SLF001
    if (refusal := _refused_unread(serving, request, max_model_len)) is not None:
        return refusal
    copy = request.model_copy(deep=is_chat)  # the messages of a chat are changed in places
    try:
        result = await (
            serving.render_chat_request(copy) if is_chat else serving.render_completion_request(copy)
        )
    except (ClientError, TimeoutError, VLLMUnprocessableEntityError) as error:
        return _unfetched(request, error)
    except (*NOT_TAKEN, TemplateError, VLLMClientError, GracefulHTTPError, *_TOO_MUCH) as error:
        told = str(error) if isinstance(error, _TOO_MUCH) else error
        return _as_error(serving.create_error_response(told), is_chat=is_chat)
    if hasattr(result, "error"):
        return _as_error(result, is_chat=is_chat)
    inputs = result[1] if is_chat else result
    if (reason := _local_reason(request, inputs)) is not None:
        times = len(inputs) * computed_of_each(request)
        return Rendered([], reason, copy, result, times, sum(map(_tokens, inputs)))
    token_ids = list(inputs[0]["prompt_token_ids"])
    too_long = _too_long(request, len(token_ids), max_model_len)
    return too_long or Rendered(token_ids, request=copy, prompt=result, input_tokens=len(token_ids))


async def grammar_of(engine: Any, chat: Any, *, max_model_len: int) -> StructuredOutputsParams | None:
    """What the answer to a chat must conform to, without a look at its messages; None for nothing.

    None too for what the renderer refuses, which it says again of the whole chat.
    """
    if is_search(chat):  # its beams conform to nothing
        return None
    bare = chat.model_copy(update={"messages": [{"role": "user", "content": "."}]})
    rendered = await render(engine, bare, is_chat=True, max_model_len=max_model_len)
    try:
        return rendered.request.extract_structured_outputs() if isinstance(rendered, Rendered) else None
    except VLLMClientError:  # two that exclude each other
        return None


def stand_before(engine: Any, rendered: Callable[[Any], Any]) -> None:
    """Have vLLM's OpenAI layer take what `rendered` returns for a request; it renders what gives None."""
    _take(engine._oai_serving_chat, "render_chat_request", rendered)  # noqa: SLF001 - no public way in
    _take(engine._oai_serving_completion, "render_completion_request", rendered)  # noqa: SLF001


def _take(serving: Any, method: str, rendered: Callable[[Any], Any]) -> None:
    straight = getattr(serving, method)

    async def take(request: Any) -> Any:
        prompt = rendered(request)
        return await straight(request) if prompt is None else prompt

    setattr(serving, method, take)


def _refused_unread(serving: Any, request: Any, max_model_len: int) -> ErrorResponse | None:
    """Why a request is refused before anything is made of what cannot be a prompt; None for no reason.

    vLLM itself refuses such a text only where the rest is not to be cut off, and token ids only once it has
    made the text of them that an echo begins with.
    """
    if request.echo and not request.return_token_ids and (found := _token_ids(request)) > max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains "
            f"{found} input tokens, and an echo begins with the text of all. Please reduce the length of the "
            "input prompt, or leave out echo."
        )
        return error_response(BAD_REQUEST, "invalid_request_error", message, "prompt")
    if request.truncate_prompt_tokens is None or (tokenizer := serving.renderer.tokenizer) is None:
        return None
    named = "messages" if hasattr(request, "messages") else "prompt"
    return too_much_text(chars_of(request), tokenizer.max_chars_per_token, max_model_len, named)


def _token_ids(request: Any) -> int:
    """How many token ids a request's longest prompt has that came as these."""
    prompt = getattr(request, "prompt", None)
    if not isinstance(prompt, list):
        return 0
    if prompt and isinstance(prompt[0], int):
        return len(prompt)
    return max((len(one) for one in prompt if isinstance(one, list)), default=0)


def _local_reason(request: Any, inputs: list[Any]) -> LocalReason | None:
    if len(inputs) != 1:
        return LocalReason.SEVERAL_PROMPTS
    if (request.n or 1) > 1 or is_search(request):
        return LocalReason.SEVERAL_SEQUENCES
    if prompt_logprobs(request) is not None:
        return LocalReason.PROMPT_LOGPROBS
    if inputs[0].get("type", "token") != "token" or "prompt_token_ids" not in inputs[0]:
        return LocalReason.NOT_TEXT
    return None


def is_search(request: Any) -> bool:
    """Whether a request asks for a beam search."""
    return bool(getattr(request, "use_beam_search", False))


def computed_of_each(request: Any) -> int:
    """How often each prompt of a request is computed: a search has one for all of its beams."""
    return 1 if is_search(request) else request.n or 1


def has_media(request: Any) -> bool:
    """Whether a request brings more than text, by the parts of its messages."""
    return any(
        part.get("type") not in _TEXT_PARTS or not _MEDIA_KEYS.isdisjoint(part) for part in _parts(request)
    )


def _parts(request: Any) -> Iterator[dict[str, Any]]:
    contents = (message.get("content") for message in getattr(request, "messages", ()))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return (part for part in parts if isinstance(part, dict))


def _hosts(request: Any) -> list[str]:
    """From where a request has media fetched."""
    given = (part[key] for part in _parts(request) for key in _MEDIA_KEYS & part.keys())
    urls = (value.get("url") if isinstance(value, dict) else value for value in given)
    hosts = (urlsplit(url.strip()).hostname for url in urls if isinstance(url, str))
    return sorted({host for host in hosts if host})


def _unfetched(request: Any, error: Exception) -> ErrorResponse:
    """The error for media that could not be fetched: another replica would ask the same hosts.

    Raises:
        Exception: the given one, of a request that has nothing fetched.
    """
    if not (hosts := _hosts(request)):
        raise error
    if isinstance(error, VLLMUnprocessableEntityError):
        why = str(error.args[0]).removeprefix(_FETCH_FAILED)
    elif isinstance(error, ClientResponseError):
        why = f"HTTP {error.status} error"
    else:
        reasons = (reason for kind, reason in _NOT_REACHED if isinstance(error, kind))
        why = next(reasons, "its answer broke off")
    message = f"media could not be fetched from {', '.join(hosts)}: {why}"
    return error_response(BAD_REQUEST, "invalid_request_error", message, "messages")


def prompt_logprobs(request: Any) -> int | None:
    """How many log-probabilities vLLM will give of each prompt token; an echo has those of the answer."""
    if request.prompt_logprobs is not None or not request.echo:
        given: int | None = request.prompt_logprobs
    else:
        given = request.top_logprobs if hasattr(request, "messages") else request.logprobs
    return given


def _tokens(prompt: Any) -> int:
    """Of a prompt as vLLM's renderer gives it, which may have come as embeddings."""
    given = prompt.get("prompt_token_ids")
    return len(prompt.get("prompt_embeds", ()) if given is None else given)


def chars_of(request: Any) -> int:
    """Characters of a request's longest text; of a chat, of all that a template may render."""
    if not hasattr(request, "messages"):
        prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
        return max((len(prompt) for prompt in prompts if isinstance(prompt, str)), default=0)
    others = [getattr(request, name, None) for name in _RENDERED_FIELDS]
    others = to_jsonable_python(others, serialize_unknown=True)
    return chars_in(request.messages, _MEDIA_KEYS) + chars_in(others)


def chars_in(value: Any, left_out: Collection[str] = ()) -> int:
    """Characters of all text inside, whatever its nesting, without fields that are left out."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(chars_in(item, left_out) for name, item in value.items() if name not in left_out)
    if isinstance(value, list | tuple):
        return sum(chars_in(item, left_out) for item in value)
    return 0


def too_much_text(
    chars: int, max_chars_per_token: int, max_model_len: int, param: str = "prompt"
) -> ErrorResponse | None:
    """The error for a text that cannot be a prompt, whatever its characters; reading it takes time of others.

    Args:
        chars: Of the text, which is to be made tokens of.
        max_chars_per_token: The tokenizer's longest token.
        max_model_len: Longest prompt and answer, tokens.
        param: The request's field that has it.
    """
    if chars <= (most := max_chars_per_token * max_model_len):
        return None
    message = (
        f"the text has {chars} characters; this model takes at most {max_model_len} tokens, which have "
        f"at most {most} characters"
    )
    return error_response(BAD_REQUEST, "invalid_request_error", message, param)


def _too_long(request: Any, prompt_tokens: int, max_model_len: int) -> ErrorResponse | None:
    asked = getattr(request, "max_completion_tokens", None) or request.max_tokens
    if prompt_tokens >= max_model_len:
        message = (
            f"the prompt has {prompt_tokens} tokens; this model takes at most {max_model_len - 1} "
            f"and at least one token of output"
        )
        return error_response(BAD_REQUEST, "invalid_request_error", message, "prompt")
    if asked is not None and prompt_tokens + asked > max_model_len:
        message = (
            f"the prompt has {prompt_tokens} tokens and max_tokens asks for {asked}; together they may be "
            f"at most {max_model_len}"
        )
        return error_response(BAD_REQUEST, "invalid_request_error", message, "max_tokens")
    return None


def _as_error(response: Any, *, is_chat: bool) -> ErrorResponse:
    """An error of vLLM, with its own names for the prompt replaced by the API's.

    The ingress has passed on no name that its configuration does not have: this replica is of another one.
    """
    error = response.error.model_dump()
    if error["type"] == _UNKNOWN_MODEL:
        return error_response(503, OTHER_MODEL, error["message"])
    if error.get("param") in _PROMPT_PARAMS:
        error["param"] = "messages" if is_chat else "prompt"
    return ErrorResponse(error=error)
