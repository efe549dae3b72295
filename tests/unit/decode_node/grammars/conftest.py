"""Checks of grammars for a tokenizer of single characters."""

import shutil
from pathlib import Path

import mistral_common
import pytest
from transformers import PreTrainedTokenizerFast
from vllm.config import StructuredOutputsConfig
from vllm.tokenizers.mistral import MistralTokenizer

from benchmarks.harness.tiny_models import build_tiny_llama
from decode_node.grammars.backends import Xgrammar, backend_of
from decode_node.grammars.check import GrammarCheck, GrammarLimits

LIMITS = GrammarLimits(timeout_s=0.5, max_mib=512)


@pytest.fixture(scope="package")
def tokenizer(tmp_path_factory):
    return PreTrainedTokenizerFast.from_pretrained(build_tiny_llama(tmp_path_factory.mktemp("m") / "tiny"))


@pytest.fixture
async def check(tokenizer):
    check = GrammarCheck(LIMITS, Xgrammar(tokenizer, len(tokenizer)))
    yield check
    await check.close()


@pytest.fixture
async def check_by(tokenizer):
    """Makes checks that compile with a backend."""
    made = []

    def make(name, tokenizer=tokenizer, limits=LIMITS, **config):
        config = StructuredOutputsConfig(backend=name, **config)
        made.append(GrammarCheck(limits, backend_of(config, tokenizer, len(tokenizer.get_vocab()))))
        return made[-1]

    yield make
    for check in made:
        await check.close()


@pytest.fixture
def mistrals(tmp_path):
    """Gives the tokenizer of a file of Mistral's; by default one of 131,072 tokens."""

    def of(file="tekken_240911.json", as_name="tekken.json"):
        shutil.copy(Path(mistral_common.__file__).parent / "data" / file, tmp_path / as_name)
        return MistralTokenizer.from_pretrained(str(tmp_path))

    return of
