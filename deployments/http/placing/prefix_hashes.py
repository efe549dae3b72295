"""Names for the leading blocks of a prompt, by which the router knows who has them cached.

Owns what is hashed: token ids of a prompt that came as tokens, the bytes of its text otherwise. Each hash
stands for all of the prompt up to the end of its block. What the router makes of them is
`router.fleet.prefix_index`'s. One more stands for the whole prompt, by which it is known when it comes again.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass
from hashlib import blake2b, sha256
from typing import Any, Final

from deployments.http.body.values import plain

BLOCK_TOKENS: Final = 128
BLOCK_BYTES: Final = 512
"""About as much text."""
MOST_BLOCKS: Final = 1024
"""131,072 tokens, the context of many models; what is cached beyond them counts as work to do. A block takes
about a microsecond."""
_DIGEST_BYTES: Final = 8
_OF_THE_BEGINNING: Final = ("documents", "chat_template_kwargs", "reasoning_effort", "add_special_tokens")
"""What changes how a rendered prompt begins, by the template of some model; none of it is hashed as text."""


@dataclass(frozen=True, slots=True)
class PrefixHashes:
    """Hashes of a prompt's leading whole blocks.

    Attributes:
        block: Size of a block: tokens, or bytes of text.
        whole: Hash of all that is hashed, with what is left behind the last whole block; 0 of nothing.
    """

    hashes: tuple[int, ...] = ()
    block: int = 0
    whole: int = 0


NO_PREFIX: Final = PrefixHashes()


def prefix_hashes(body: Any) -> PrefixHashes:
    """Hash the prompt of a chat or text completion; of a chat, after `asks.materialise`.

    Of several prompts in one request none is hashed; a list of one is that prompt. Nor is one that may be
    cut: vLLM keeps its end unless asked for its beginning, and how much is left shows once there are tokens.
    Prompts with different `cache_salt`, for different models, or rendered otherwise, have nothing in common.
    """
    if getattr(body, "truncate_prompt_tokens", None) is not None:
        return NO_PREFIX
    salt = _salt(body)
    if hasattr(body, "messages"):
        return _chained(salt, _chat_text(body), BLOCK_BYTES)
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, str):
        text = prompt.encode()[: MOST_BLOCKS * BLOCK_BYTES]
        return _chained(salt, text, BLOCK_BYTES)
    if prompt and isinstance(prompt[0], int):
        tokens = array("q", prompt[: MOST_BLOCKS * BLOCK_TOKENS])
        return _chained(salt, tokens.tobytes(), BLOCK_TOKENS, tokens.itemsize)
    return NO_PREFIX


def _salt(body: Any) -> bytes:
    """All that has to be alike in two requests, beside the text, for their prompts to begin alike."""
    names = ("model", "cache_salt", *_OF_THE_BEGINNING)
    given = {name: plain(getattr(body, name, None)) or None for name in names}
    return json.dumps(given, sort_keys=True).encode()


def _chained(salt: bytes, data: bytes, block: int, item_bytes: int = 1) -> PrefixHashes:
    """A hash for each whole block, each of the salt and all bytes up to the block's end, and one of all."""
    running, block_bytes = blake2b(sha256(salt).digest(), digest_size=_DIGEST_BYTES), block * item_bytes
    hashes = []
    for start in range(0, len(data) - block_bytes + 1, block_bytes):
        running.update(data[start : start + block_bytes])
        hashes.append(int.from_bytes(running.copy().digest(), "big"))
    running.update(data[len(hashes) * block_bytes :])
    return PrefixHashes(tuple(hashes), block, int.from_bytes(running.digest(), "big"))


def _chat_text(body: Any) -> bytes:
    """The beginning of a chat in the order in which templates write it: tools first, then the messages."""
    most = MOST_BLOCKS * BLOCK_BYTES
    pieces: list[bytes] = []
    length = 0
    for part in [getattr(body, "tools", None) or [], *body.messages]:
        piece = _text(part)
        pieces.append(piece)
        length += len(piece)
        if length >= most:
            break
    return b"".join(pieces)[:most]


def _text(value: Any) -> bytes:
    """All text inside a chat message, told apart by what separates it."""
    if isinstance(value, str):
        return value.encode() + b"\0"
    if isinstance(value, dict):
        return b"".join(_text(item) for item in value.values())
    if isinstance(value, list | tuple):
        return b"".join(_text(item) for item in value)
    if hasattr(value, "model_dump"):
        return _text(value.model_dump())
    return b""
