"""vLLM's OpenAI layer on this replica: the answers that it makes, and the errors that it ends them with.

Owns what an error of vLLM is answered with in our own words, that what it refuses makes no line in the
replica's log, and which of its answers another replica cannot go on with. What the layer is given by the
engine is `decode_node.orchestrator`'s.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMServerError

from decode_node.answers import REQUEST_FAILED, SERVER_ERRORS, ends_answer, error_in, error_response
from decode_node.carrying import BoundReason
from decode_node.rendering import Rendered, grammar_of, render
from decode_node.requests.underway import Call, Underway
from slo.model_digest import OTHER_MODEL
from slo.request import ENGINE_DIED, ReplicaId
from telemetry.reporting.answering import is_cancelled

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse
    from vllm.sampling_params import StructuredOutputsParams

_LOGGERS: Final = (
    "vllm.entrypoints.chat_utils",
    "vllm.renderers.hf",
    "vllm.renderers.mistral",
    "vllm.tokenizers.mistral",
    "vllm.entrypoints.openai.chat_completion.serving",
    "vllm.entrypoints.openai.completion.serving",
)
"""Of vLLM, where it writes of what it answers with 400, and of what it does not take of a message."""
_BY_A_TEMPLATE: Final = ("An error occurred in `", "apply_chat_template failed")
"""How lines begin about a chat that a template refuses, whatever that raises."""
_OF_A_MESSAGE: Final = (
    "'image_url.detail' is currently not supported",
    "Placeholder count is negative!",
    "Skipping multimodal part ",
    "Tool call %r ",
    "Truncating tool call ID: ",
    "Truncating tool_call_id: ",
)
"""How lines begin about what is not taken of a message; most show what a client has sent, of any length."""


def log_no_refusals() -> None:
    """Have vLLM write no line about a request that it refuses; the ingress has one of its own for each.

    And none about what it does not take of a message.
    """
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_no_refusal)


def _is_no_refusal(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    is_refused = isinstance(error, VLLMClientError | GracefulHTTPError)
    return not (is_refused or str(record.msg).startswith((*_BY_A_TEMPLATE, *_OF_A_MESSAGE)))


@dataclass(frozen=True, slots=True)
class OpenAILayer:
    """Answers requests with what the engine below it generates.

    Attributes:
        replica: Who answers.
        engine: Its started engine.
    """

    replica: ReplicaId
    engine: Any

    @property
    def is_dead(self) -> bool:
        """Whether the engine has died."""
        return bool(self.engine._engine_client.errored)  # noqa: SLF001 - no public way in

    async def rendered(self, request: Any, *, is_chat: bool, max_model_len: int) -> Rendered | ErrorResponse:
        """As `decode_node.rendering.render`; that the engine has failed is an error to answer with, too.

        One that another replica may answer names this one.
        """
        try:
            rendered = await render(self.engine, request, is_chat=is_chat, max_model_len=max_model_len)
        except VLLMServerError as error:
            return self.failed(str(error))
        refused = error_in(rendered)
        if refused is not None and refused.type == OTHER_MODEL:
            return self.other_model(refused.message)
        return rendered

    async def grammar_of(self, chat: Any, *, max_model_len: int) -> StructuredOutputsParams | None:
        """As `decode_node.rendering.grammar_of`; None too when the engine has failed."""
        try:
            return await grammar_of(self.engine, chat, max_model_len=max_model_len)
        except VLLMServerError:
            return None

    async def answer(self, request: Any, run: Underway) -> AsyncGenerator[Any, None]:
        """The pieces of the answer to `request`, which is the run's call's or has been made of it.

        Raises:
            CancelledError: The client is gone. vLLM answers the cancellation of a whole answer with an error.
        """
        answer = self.engine.chat if run.call.is_chat else self.engine.completions
        run.progress.replica = self.replica
        try:
            async with aclosing(answer(request, run.call.info)) as pieces:
                async for piece in pieces:
                    if is_cancelled():
                        raise asyncio.CancelledError
                    if run.refusal is not None:
                        break  # the piece is vLLM's word for it
                    error = error_in(piece)
                    if error is not None and error.code >= SERVER_ERRORS:
                        run.refusal = self.failed(error.message)
                        break
                    told = piece
                    if isinstance(piece, str):
                        told = run.progress.piece(self._stamped(piece, is_chat=run.call.is_chat))
                    if told is not None:
                        yield told
        except VLLMServerError as error:  # not streaming; a stream has it as an event
            run.refusal = run.refusal or self.failed(str(error))
        if run.refusal is not None:
            yield run.refusal

    def _stamped(self, event: str, *, is_chat: bool) -> str:
        """An event of a stream, with the engine's fingerprint if an answer ends with it.

        So vLLM has it for whoever asks for no totals. The ingress asks for them whatever its client does, and
        vLLM has it in these alone.
        """
        if not ends_answer(event):
            return event
        serving = self.engine._oai_serving_chat if is_chat else self.engine._oai_serving_completion  # noqa: SLF001
        if (fingerprint := serving.system_fingerprint) is None:
            return event
        head, brace, end = event.rpartition("}")
        return f'{head},"system_fingerprint":{json.dumps(fingerprint)}{brace}{end}'

    def failed(self, message: str) -> ErrorResponse:
        """That the engine has failed a request, and whether it lives on."""
        return error_response(500, ENGINE_DIED if self.is_dead else REQUEST_FAILED, message, self.replica)

    def other_model(self, message: str) -> ErrorResponse:
        """That the request is for another model than the one that is served here."""
        return error_response(503, OTHER_MODEL, message, self.replica)

    def why_bound(self, call: Call) -> BoundReason | None:
        """What the layer keeps of a chat that is not carried; None for nothing."""
        if not call.is_chat:
            return None
        if self.engine._oai_serving_chat.parser_cls is not None:  # noqa: SLF001 - no public way in
            return BoundReason.PARSER
        return BoundReason.ECHO if call.request.echo else None
