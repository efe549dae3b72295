"""The text of tokens is the tokenizer's, and the interpreter is free while it is made."""

import copy
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import TEXT, across_characters, by_bytes
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from vllm.tokenizers.hf import get_cached_tokenizer, maybe_make_thread_pool

from decode_node.tokenizing import decoding


def by_words():
    """One whose text depends on what comes before, and is tidied up when all is there."""
    words = ["[UNK]", "a", "##b", ".", ",", "n", "'", "t", "do", "[SEP]"]
    made = Tokenizer(models.WordPiece({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[SEP]"])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, sep_token="[SEP]", clean_up_tokenization_spaces=True
    )


class Renderer:
    """As vLLM's, which has a pool of copies of its tokenizer."""

    def __init__(self, tokenizer, *, pooled=True):
        self.tokenizer = get_cached_tokenizer(tokenizer)
        if pooled:
            maybe_make_thread_pool(self.tokenizer, 1)

    def _decode(self, *given, **options):
        return self.tokenizer.decode(*given, **options)


MADE = {make.__name__: make() for make in (across_characters, by_bytes, by_words)}


def decode_of(renderer):
    return decoding._decode_of(renderer)


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("name", MADE)
def test_the_text_is_the_tokenizers(name, pooled):
    tokenizer = MADE[name]
    decode = decode_of(Renderer(copy.deepcopy(tokenizer), pooled=pooled))
    assert decode.__func__ is not Renderer._decode
    runs = st.lists(st.tuples(st.integers(0, len(tokenizer) + 3), st.integers(1, 9)), max_size=40)

    @given(runs)
    def same(runs):
        token_ids = [one for one, times in runs for one in [one] * times]
        assert decode(token_ids) == tokenizer.decode(token_ids)

    same()
    token_ids = tokenizer(TEXT)["input_ids"]
    assert decode(token_ids) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("one", [-1, 2**32, 2**63 - 1])
def test_what_is_no_token_id_is_refused_as_by_the_tokenizer(one):
    tokenizer = MADE["by_bytes"]
    with pytest.raises((OverflowError, TypeError)) as refused:
        tokenizer.decode([one])
    with pytest.raises(refused.type):
        decode_of(Renderer(copy.deepcopy(tokenizer)))([one])


async def test_a_renderer_decodes_so():
    tokenizer = MADE["by_bytes"]
    renderer = Renderer(copy.deepcopy(tokenizer))
    decoding.stand_before(renderer, ThreadPoolExecutor(1))
    assert await renderer._async_tokenizer_decode([2, 3, 5]) == tokenizer.decode([2, 3, 5])


def test_a_tokenizer_in_python_decodes_by_itself():
    renderer = SimpleNamespace(tokenizer=SimpleNamespace(), _decode=str)
    assert decode_of(renderer) is str


LONG = "a" * 81


def of_long_tokens():
    made = Tokenizer(models.BPE({"a": 0, LONG: 1}, []))
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.fixture
def nobody_gives_way():
    """Who has the interpreter keeps it until it lets go by itself."""
    was = sys.getswitchinterval()
    sys.setswitchinterval(60.0)
    yield
    sys.setswitchinterval(was)


def ends_before_others_run(decode, token_ids):
    """Whether all of the text is there before another thread has the interpreter again."""
    began, texts = threading.Event(), []

    def work():
        began.set()
        texts.append(decode(token_ids))

    thread = threading.Thread(target=work)
    thread.start()
    began.wait()
    is_there = bool(texts)
    thread.join()
    assert texts == [LONG * len(token_ids)]
    return is_there


def test_the_interpreter_is_free_meanwhile(nobody_gives_way):
    renderer = Renderer(of_long_tokens())
    assert not ends_before_others_run(decode_of(renderer), [1] * 20_000)


def test_a_tokenizer_alone_holds_it(nobody_gives_way):
    """When this fails, `decode` lets go of the interpreter, and `decode_node.tokenizing.decoding` can go."""
    assert ends_before_others_run(of_long_tokens().decode, [1] * 20_000)
