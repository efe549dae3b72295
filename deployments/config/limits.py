"""What one request may ask of the server, whoever sends it.

A refusal names its limit. What a tenant may ask for in a time is `deployments.config.admission`'s.
"""

import re
from typing import Annotated, Final, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sampling.engine_limits import MOST_BAD_WORDS, MOST_STOP_TOKENS, MOST_TOKEN_IDS
from slo.files.strict_yaml import Positive, Section

Count = Annotated[int, Field(ge=1)]
_ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:\d+)?")
_PORT_LEFT_OUT: Final = re.compile(r"http://.*:80|https://.*:443")
_ALL: Final = "*"
_OPAQUE: Final = "null"
"""What browsers say of a page that is a file, or in a sandbox."""
_MIB: Final = 2**20


def may_read_for_s(write_timeout_s: float, size: int) -> float:
    """How long a client may take to read a piece of its answer of so many bytes."""
    return write_timeout_s * (1 + size // _MIB)


def _as_browsers_say_it(origin: str) -> str:
    """An origin that the header of a browser can be, letter by letter."""
    if origin in (_ALL, _OPAQUE) or (_ORIGIN.fullmatch(origin) and not _PORT_LEFT_OUT.fullmatch(origin)):
        return origin
    msg = (
        "is no origin that a browser names; give scheme and host in small letters, and a port if it is not "
        "the scheme's own, as https://chat.example, without a path, a slash at the end or *; * alone is all"
    )
    raise ValueError(msg)


class LimitsConfig(Section):
    """What a client may send."""

    max_body_bytes: Annotated[int, Field(ge=1024)] = Field(
        2 * 1024 * 1024, description="Largest request body. A larger one is answered with 413."
    )
    body_timeout_s: Positive = Field(
        30.0, description="How long a request body may take to arrive. A slower one is answered with 408."
    )
    max_bytes_in_flight: Annotated[int, Field(ge=1024)] = Field(
        128 * 1024 * 1024,
        description="Bytes of all bodies that a node's proxy has and that no ingress has taken yet.",
    )
    header_timeout_s: Positive = Field(
        10.0, description="How long the headers of a request may take to arrive, from the connection on."
    )
    write_timeout_s: Positive = Field(
        30.0, description="How long a client may take to read a piece of its answer."
    )
    sse_keep_alive_s: Positive | None = Field(
        None,
        description="A stream gets a comment whenever nothing else was sent for so long, also before its "
        "first token; none leaves it silent.",
    )
    idle_timeout_s: Annotated[int, Field(ge=1)] = Field(
        60, description="How long a connection may stay open between two requests."
    )
    connection_age_s: Positive = Field(
        300.0,
        description="A connection that is older is closed behind its next answer: a client that always has "
        "something to ask would otherwise never find an ingress that has come since.",
    )
    max_headers: Annotated[int, Field(ge=16)] = Field(100, description="Headers of a request.")
    max_header_bytes: Annotated[int, Field(ge=1024)] = Field(
        16 * 1024, description="Bytes of all headers of a request, names and values."
    )
    max_json_depth: Annotated[int, Field(ge=8, le=200)] = Field(
        64, description="Lists and objects inside each other in a body."
    )
    max_json_containers: Annotated[int, Field(ge=64)] = Field(
        10_000, description="Lists and objects in a body."
    )
    max_json_values: Annotated[int, Field(ge=64)] = Field(
        300_000, description="Values in a body; each token id of a prompt that comes as tokens is one."
    )
    max_json_names: Annotated[int, Field(ge=64)] = Field(
        50_000, description="Names in all objects of a body; each takes as long to read as several values."
    )
    unknown_fields: Literal["refuse", "ignore"] = Field(
        "refuse",
        description="What becomes of a body with a field that is not served: 400, or an answer as if it were "
        "not there. One that is misspelt, says what another does, or is the server's own is 400 anyway.",
    )
    max_sequences: Count = Field(16, description="Answers that one request may ask for: prompts times `n`.")
    max_stop_tokens: Annotated[int, Field(ge=1, le=MOST_STOP_TOKENS)] = Field(
        64, description="Token ids in `stop_token_ids`."
    )
    max_bad_words: Annotated[int, Field(ge=1, le=MOST_BAD_WORDS)] = Field(
        64,
        description="Texts in `bad_words`, four times as many counted once for each answer; vLLM itself "
        "allows four in `stop`.",
    )
    max_stop_bytes: Count = Field(4096, description="Bytes of all texts in `stop`, and in `bad_words`.")
    max_token_ids: Annotated[int, Field(ge=1, le=MOST_TOKEN_IDS)] = Field(
        MOST_TOKEN_IDS,
        description="Token ids in `allowed_token_ids` and in `logit_bias`; `logprob_token_ids` may have 128, "
        "counted once for each answer.",
    )
    max_output_tokens: Count | None = Field(
        None, description="The largest `max_tokens`; none leaves it to the model's length."
    )
    max_logprobs: Count = Field(
        200_000,
        description="Log-probabilities that one request may ask for, of all its prompts, and of all its "
        "answers where they are not streamed.",
    )
    media_domains: tuple[Annotated[str, Field(pattern=r"^[a-z0-9.-]+$")], ...] = Field(
        (),
        description="Hosts from which a multimodal model may fetch what messages name; data: URLs need none.",
    )
    max_media: Count = Field(
        16,
        description="Images, sounds and frames of videos in the messages of a request; a video that does not "
        "come as its frames counts as 32.",
    )
    max_image_pixels: Count = Field(
        2**24,
        description="Pixels of an image, and of a frame of a video; each takes three bytes and more while a "
        "request is read.",
    )
    allowed_origins: tuple[Annotated[str, AfterValidator(_as_browsers_say_it)], ...] = Field(
        ("*",), description="Origins whose web pages may ask; `*` for all, none for no page."
    )
    max_grammar_bytes: Count = Field(
        64 * 1024,
        description="Text of what an answer must conform to: `response_format`, `structured_outputs`, and "
        "the tools' parameters where a tool must be called.",
    )
    grammar_timeout_s: Positive = Field(
        2.0, description="Seconds of computing that compiling such a text may take."
    )
    max_grammar_mib: Annotated[int, Field(ge=64)] = Field(
        1024, description="Memory that compiling it may take, MiB."
    )

    @model_validator(mode="after")
    def _one_body_at_least(self) -> Self:
        if self.max_bytes_in_flight < self.max_body_bytes:
            msg = (
                f"max_bytes_in_flight ({self.max_bytes_in_flight}) is less than max_body_bytes "
                f"({self.max_body_bytes}): not even one body of that size could arrive; raise the one or "
                "lower the other"
            )
            raise ValueError(msg)
        return self
