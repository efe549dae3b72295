"""The libraries that vLLM keeps answers to grammars with, as the check of grammars needs each.

Owns how vLLM's backend of each reads a grammar and the vocabulary, in the decode replica. The compiling is
`decode_node.grammars.child`'s, which reads both from here.
"""

from __future__ import annotations

import base64
import copy
import json
from typing import Any, ClassVar, Protocol, TypeAlias

import regex
import xgrammar
from vllm.exceptions import VLLMValidationError
from vllm.utils.mistral import is_mistral_tokenizer
from vllm.v1.structured_output.backend_guidance import serialize_guidance_grammar
from vllm.v1.structured_output.backend_types import StructuredOutputOptions
from vllm.v1.structured_output.utils import (
    choice_as_grammar,
    convert_lark_to_ebnf,
    get_outlines_vocabulary,
    grammar_is_likely_lark,
    maybe_wrap_mistral_common_tokenizer,
)

_Kind: TypeAlias = StructuredOutputOptions


class GrammarBackend(Protocol):
    """One of them.

    Attributes:
        name: vLLM's.
        knows_any_object: Whether it can hold an answer to be a JSON object, whatever is in it.
    """

    name: ClassVar[str]
    knows_any_object: ClassVar[bool]

    def grammar(self, kind: _Kind, text: str) -> tuple[str, str] | None:
        """The kind and text of a grammar as the child compiles it; None when vLLM refuses it unread."""

    def vocabulary(self) -> Any:
        """The vocabulary that masks are made for, as JSON has it.

        Raises:
            Exception: of many types, when the library knows no way to read it.
        """


class Xgrammar:
    """What vLLM takes for nearly all.

    Args:
        tokenizer: The engine's.
        vocab_size: The model's.
    """

    name: ClassVar[str] = "xgrammar"
    knows_any_object: ClassVar[bool] = True

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size

    def grammar(self, kind: _Kind, text: str) -> tuple[str, str] | None:
        """The kind and text of a grammar as the child compiles it; None for one of Lark's without a like."""
        match kind:
            case StructuredOutputOptions.CHOICE:
                return "grammar", choice_as_grammar(json.loads(text))
            case StructuredOutputOptions.GRAMMAR if grammar_is_likely_lark(text):
                try:
                    return "grammar", convert_lark_to_ebnf(text)
                except ValueError:
                    return None
        return kind.name.lower(), text

    def vocabulary(self) -> str:
        """The vocabulary, serialized by the library itself."""
        if is_mistral_tokenizer(self._tokenizer):
            is_raw = self._tokenizer.is_tekken
            info = xgrammar.TokenizerInfo(
                self._tokenizer.vocab,
                xgrammar.VocabType.RAW if is_raw else xgrammar.VocabType.BYTE_FALLBACK,
                vocab_size=len(self._tokenizer.vocab),
                stop_token_ids=[self._tokenizer.eos_token_id],
                add_prefix_space=True,
            )
        else:
            info = xgrammar.TokenizerInfo.from_huggingface(self._tokenizer, vocab_size=self._vocab_size)
        return str(info.serialize_json())


class Guidance:
    """llguidance, which reads a grammar in a form of its own.

    Args:
        tokenizer: The engine's.
        vocab_size: The model's.
        config: vLLM's `StructuredOutputsConfig`.
    """

    name: ClassVar[str] = "guidance"
    knows_any_object: ClassVar[bool] = True

    def __init__(self, tokenizer: Any, vocab_size: int, config: Any) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._config = config

    def grammar(self, kind: _Kind, text: str) -> tuple[str, str] | None:
        """The grammar in llguidance's form; None when it has none."""
        config = self._config
        try:
            serialized = serialize_guidance_grammar(
                kind, text, config.disable_any_whitespace, config.disable_additional_properties
            )
        except (ValueError, KeyError, TypeError, RecursionError, VLLMValidationError):
            return None
        return self.name, serialized

    def vocabulary(self) -> dict[str, Any]:
        """The bytes of each token, a character each, and which tokens are special and which end an answer."""
        if is_mistral_tokenizer(self._tokenizer):
            read = self._tokenizer.llg_tokenizer
        else:
            from llguidance.hf import from_tokenizer  # noqa: PLC0415 - only where it is configured

            read = from_tokenizer(self._tokenizer, max(self._vocab_size, len(self._tokenizer)))
        return {
            "tokens": [read.decode_bytes([token]).decode("latin-1") for token in range(read.vocab_size)],
            "special": [token for token in range(read.vocab_size) if read.is_special_token(token)],
            "eos": list(read.eos_tokens),
        }


class Outlines:
    """outlines-core, which knows regular expressions, and JSON schemas that it makes some of.

    Args:
        tokenizer: The engine's.
    """

    name: ClassVar[str] = "outlines"
    knows_any_object: ClassVar[bool] = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def grammar(self, kind: _Kind, text: str) -> tuple[str, str] | None:
        """The kind and text of a grammar as the child compiles it; None for kinds that it does not know."""
        match kind:
            case StructuredOutputOptions.JSON | StructuredOutputOptions.REGEX:
                return kind.name.lower(), text
            case StructuredOutputOptions.CHOICE:
                return "regex", "(" + "|".join(regex.escape(str(one)) for one in json.loads(text)) + ")"
        return None

    def vocabulary(self) -> str:
        """The vocabulary as the library serializes it, in base64."""
        apart = copy.copy(self._tokenizer)  # vLLM keeps what it reads as an attribute of the tokenizer
        _, (serialized,) = get_outlines_vocabulary(apart).inner.__reduce__()
        return base64.b64encode(serialized).decode()


def backend_of(config: Any, tokenizer: Any, vocab_size: int) -> GrammarBackend:
    """The backend that an engine keeps answers to grammars with.

    Args:
        config: vLLM's `StructuredOutputsConfig`.
        tokenizer: The engine's.
        vocab_size: The model's.

    Raises:
        ValueError: when it is none of `decode_node.grammars.child.CHECKED`.
    """
    tokenizer = maybe_wrap_mistral_common_tokenizer(tokenizer)
    match config.backend:
        case Xgrammar.name:
            return Xgrammar(tokenizer, vocab_size)
        case Guidance.name:
            return Guidance(tokenizer, vocab_size, config)
        case Outlines.name:
            return Outlines(tokenizer)
    raise ValueError(f"no grammar of the backend {config.backend!r} can be compiled beforehand")
