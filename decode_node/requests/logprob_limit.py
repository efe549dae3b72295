"""How many log-probabilities one request may ask for.

vLLM builds an object for each of a whole answer, and of a prompt, in one go on the event loop that all
streams of a replica share, and the ingress writes them as JSON on its own. Owns how many a request comes to,
once its prompts are tokens. How many of one token an engine takes is vLLM's to say (`max_logprobs`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Self

from decode_node.answers import error_response
from decode_node.rendering import BAD_REQUEST, Rendered, is_search, prompt_logprobs

if TYPE_CHECKING:
    from ray.serve.llm.openai_api_models import ErrorResponse

MAX_LOGPROBS: Final = 200_000
_ALL: Final = -1
"""vLLM's number of log-probabilities where those of the whole vocabulary are meant."""


@dataclass(frozen=True, slots=True)
class LogprobLimit:
    """The limit for the requests to one model.

    Attributes:
        most: Log-probabilities of one request.
        vocabulary: How many tokens the model knows.
        max_model_len: Longest prompt and answer, tokens.
        max_tokens: Of an answer whose request names none; None for all that there is room for.
    """

    most: int
    vocabulary: int
    max_model_len: int
    max_tokens: int | None = None

    @classmethod
    def of(cls, most: int, model: Any) -> Self:
        """The limit for a model, of which `model` is vLLM's configuration."""
        max_tokens = model.get_diff_sampling_param().get("max_tokens")
        return cls(most, model.get_vocab_size(), model.max_model_len, max_tokens)

    def bound(self, request: Any, rendered: Rendered) -> None:
        """Have an answer whose request names no length end before it has more than one may ask for."""
        if (most := self._most_of_each(request, rendered)) is not None:
            rendered.request.max_tokens = most

    def refusal(self, request: Any, rendered: Rendered) -> ErrorResponse | None:
        """The error for a request that asks for more than it may; None for one that does not.

        A streamed answer has no whole, so of its log-probabilities only the prompts' count.
        """
        of_output, of_prompt = self._of_output(request), self._of_prompt(request)
        output_tokens = self._output_tokens(request, rendered)
        if (most := self._most_of_each(request, rendered)) is not None:
            output_tokens = most * self._answers(request, rendered)
        prompt_tokens = self._prompt_tokens(request, rendered)
        counts = of_output * output_tokens, of_prompt * prompt_tokens
        if sum(counts) <= self.most:
            return None
        asked, ways = [], ["ask for fewer of each token"]
        if of_output:
            asked.append(f"{of_output} for each of up to {output_tokens} tokens of output")
            ways += ["give a smaller max_tokens", "have the answer streamed"]
        if of_prompt:
            asked.append(f"{of_prompt} for each of {prompt_tokens} tokens of prompts, times n")
            ways.append("send fewer or shorter prompts")
        message = (
            f"the request asks for up to {sum(counts)} log-probabilities, {' and '.join(asked)}; "
            f"limits.max_logprobs allows {self.most}: {', or '.join(ways)}"
        )
        field = _output_field(request) if counts[0] >= counts[1] else _prompt_field(request)
        return error_response(BAD_REQUEST, "invalid_request_error", message, field)

    def _of_output(self, request: Any) -> int:
        """How many each token of output counts for."""
        return 0 if request.stream else self._of_each(_output_logprobs(request))

    def _of_prompt(self, request: Any) -> int:
        """How many each token of a prompt counts for."""
        return self._of_each(prompt_logprobs(request))

    def _of_each(self, beside: int | None) -> int:
        """How many a token has, of which so many are beside its own."""
        if beside is None:
            return 0
        return 1 + (self.vocabulary if beside == _ALL else beside)

    def _output_tokens(self, request: Any, rendered: Rendered) -> int:
        """The most tokens that all answers may have together."""
        answers = self._answers(request, rendered)
        room = answers * self.max_model_len - self._prompt_tokens(request, rendered)
        of_each = self._named(request)
        return room if of_each is None else min(answers * of_each, room)

    def _named(self, request: Any) -> int | None:
        """The most tokens that an answer may have, where its request or the model says so."""
        named: int | None = getattr(request, "max_completion_tokens", None) or request.max_tokens
        return self.max_tokens if named is None else named

    def _prompt_tokens(self, request: Any, rendered: Rendered) -> int:
        """Of all its prompts, each as often as it has an answer."""
        return rendered.input_tokens * (request.n or 1)

    def _answers(self, request: Any, rendered: Rendered) -> int:
        return rendered.prompts * ((request.n or 1) if is_search(request) else 1)

    def _most_of_each(self, request: Any, rendered: Rendered) -> int | None:
        """The tokens that an answer may have where its request names none; None where it may have all."""
        of_output = self._of_output(request)
        if not of_output or self._named(request) is not None:
            return None
        most = self.most - self._of_prompt(request) * self._prompt_tokens(request, rendered)
        if of_output * self._output_tokens(request, rendered) <= most:
            return None
        return max(1, most // (of_output * self._answers(request, rendered)))


def _output_logprobs(request: Any) -> int | None:
    """How many each token of output has beside its own; None where not even that."""
    if request.logprob_token_ids:
        return len(request.logprob_token_ids)
    if not hasattr(request, "messages"):
        given: int | None = request.logprobs
    else:
        given = request.top_logprobs if request.logprobs else None
    return given


def _output_field(request: Any) -> str:
    """The field that says how many each token of output has, as a completion calls it."""
    return "logprob_token_ids" if request.logprob_token_ids else "logprobs"


def _prompt_field(request: Any) -> str:
    return "echo" if request.prompt_logprobs is None else "prompt_logprobs"
