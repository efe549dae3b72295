"""An answer that does not become text is decoded a few tokens at a time, and the text is vLLM's."""

from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_tokenizers import TEXT, across_characters, by_bytes
from played_replicas import Play, orchestrated
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer, IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

from decode_node.requests.detokenizing import (
    CONTEXT,
    MOST_PENDING,
    BoundedDetokenizer,
)
from deployments.models.conversion import write_tokenizer
from deployments.models.embedded import find_embedded_source

BROKEN = "\N{REPLACEMENT CHARACTER}"


def as_bytes(text):
    return [f"<0x{byte:02X}>" for byte in text.encode()]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(find_embedded_source().path, directory, 2048)
    return PreTrainedTokenizerFast.from_pretrained(directory)


class Kinds:
    """Tokens of a tokenizer of bytes, by what becomes of them."""

    def __init__(self, tokenizer, bytes_of):
        self.size = len(tokenizer)
        self.broken = [one for one in range(self.size) if tokenizer.decode([one]).endswith(BROKEN)]
        self.special = tokenizer.all_special_ids
        self.added = [*tokenizer.added_tokens_decoder]
        *self.characters, self.replacement = (
            tokenizer.convert_tokens_to_ids([*bytes_of(character)]) for character in "é…世🚀" + BROKEN
        )


def as_letters(text):
    """As ByteLevel has them."""
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]


def vllms(tokenizer, prompt, **asked):
    request = SimpleNamespace(
        request_id="name", prompt_token_ids=prompt, sampling_params=SamplingParams(**asked)
    )
    return FastIncrementalDetokenizer(tokenizer, request)


def ours(tokenizer, prompt, **asked):
    return BoundedDetokenizer(vllms(tokenizer, prompt, **asked), prompt)


def pieces(detokenizer, answer):
    return [detokenizer.decode_next(one) for one in answer]


def text_behind(tokenizer, prompt, text, **asked):
    """An answer's part of the text of both, whose first character may have begun in the prompt."""
    shown = [one for one in prompt if tokenizer.decode([one, one], **asked)]
    of_prompt = (tokenizer.decode(shown[: max(0, len(shown) - within)], **asked) for within in range(4))
    return text[max(len([*takewhile(equal, zip(text, told, strict=False))]) for told in of_prompt) :]


def equal(pair):
    return pair[0] == pair[1]


def is_the_same(tokenizer, prompt, answer, **asked):
    told = pieces(ours(tokenizer, prompt, **asked), answer)
    expected = pieces(vllms(tokenizer, prompt, **asked), answer)
    skip = {"skip_special_tokens": asked.get("skip_special_tokens", True)}
    before = tokenizer._tokenizer.decode(prompt, **skip)
    if before.endswith(BROKEN) and (first := next(filter(None, expected), None)) is not None:
        expected[expected.index(first)] = text_behind(tokenizer._tokenizer, prompt, first, **skip)
    assert told == expected


def runs(kinds, *more):
    """Tokens of all kinds, each often several times in a row, as nothing else keeps text from growing."""
    one = st.one_of(
        st.sampled_from(kinds.broken), st.sampled_from(kinds.added), st.integers(0, kinds.size + 3)
    )
    some = st.one_of(st.lists(one, min_size=1, max_size=4), st.sampled_from([*kinds.characters, *more]))
    several = st.lists(st.tuples(some, st.integers(1, 50)), max_size=5)
    return several.map(lambda them: [one for each, times in them for one in each * times])


SHOWN = st.fixed_dictionaries(
    {"skip_special_tokens": st.booleans(), "spaces_between_special_tokens": st.booleans()}
)
ACROSS = across_characters()
OF_ACROSS = Kinds(ACROSS, as_letters)
AS_LLAMA, AS_GEMMA = by_bytes(decoders.Strip(" ", 1, 0)), by_bytes()
BY_BYTES = Kinds(AS_LLAMA, as_bytes)


@given(prompt=runs(OF_ACROSS), answer=runs(OF_ACROSS), asked=SHOWN)
def test_the_text_is_vllms_and_comes_when_vllms_does(prompt, answer, asked):
    is_the_same(ACROSS, prompt, answer, **asked)


@pytest.mark.parametrize("tokenizer", [AS_LLAMA, AS_GEMMA], ids=["llama", "gemma"])
@given(prompt=runs(BY_BYTES), answer=runs(BY_BYTES, BY_BYTES.replacement), asked=SHOWN)
def test_so_it_is_where_each_byte_is_a_token(tokenizer, prompt, answer, asked):
    is_the_same(tokenizer, prompt, answer, **asked)


@pytest.mark.slow
def test_so_it_is_with_the_embedded_models_tokenizer(embedded):
    kinds = Kinds(embedded, as_letters)

    @given(prompt=runs(kinds), answer=runs(kinds), asked=SHOWN)
    def same(prompt, answer, asked):
        is_the_same(embedded, prompt, answer, **asked)

    same()


@pytest.mark.parametrize("emoji", range(1, 12))
@pytest.mark.parametrize("answer", [["b"], ["▁the"], ["<0xC3>", "<0xA9>"]])
def test_a_prompt_may_end_with_characters_of_which_each_byte_is_a_token(emoji, answer):
    prompt = ["▁a", *as_bytes("🚀" * emoji)]
    answer = [*answer, "b", "▁a"]
    is_the_same(AS_LLAMA, *map(AS_LLAMA.convert_tokens_to_ids, (prompt, answer)))


ROCKET = as_bytes("🚀")


@pytest.mark.parametrize(
    ("prompt", "answer", "text"),
    [
        (["▁a", "b", *ROCKET[:2]], [*ROCKET[2:], "b"], "🚀b"),
        (["▁a", "b", *ROCKET[:3]], [*ROCKET[3:], "b"], "🚀b"),
        (["▁a", *ROCKET, *ROCKET[:3]], [*ROCKET[3:], "b"], "🚀b"),
        (["▁a", *ROCKET, *ROCKET[:3]], ["b"], "b"),
        (["▁a", ROCKET[1], *ROCKET * 30], [*ROCKET, "b"], BROKEN * 4 + "b"),
        ([], ["<s>"] * 21 + [*ROCKET, "b"], "🚀b"),
        ([], ["<s>"] * 22 + [*ROCKET, "b"], "🚀b"),
        ([], [*ROCKET, *as_bytes("é"), *["<s>"] * 22, *ROCKET, "b"], "🚀é🚀b"),
        ([], [*ROCKET[1:], *as_bytes("é") * 30, "b"], BROKEN * 63 + "b"),
        ([], [BROKEN] * 30 + [*ROCKET, "b"], BROKEN * 30 + "🚀b"),
    ],
)
def test_a_character_whose_bytes_are_tokens_is_whole(prompt, answer, text):
    prompt, answer = map(AS_LLAMA.convert_tokens_to_ids, (prompt, answer))
    assert "".join(pieces(ours(AS_LLAMA, prompt), answer)) == text


def test_a_prompt_that_ends_within_a_character_is_not_repeated():
    start, end = (ACROSS.convert_tokens_to_ids(byte) for byte in "Ã©")  # the two of é
    prompt = [*ACROSS.encode("a quick "), start]
    assert pieces(ours(ACROSS, prompt), [end]) == ["é"]
    assert "".join(pieces(ours(ACROSS, prompt), ACROSS.encode("fox"))) == "fox"


def test_what_is_no_token_is_passed_over():
    is_the_same(ACROSS, [], [-1, *LONE * MOST_PENDING, -1, *LONE, *WORDS])


class Measured:
    """A `DecodeStream` that says how many tokens were decoded at once."""

    most = 0
    real = decoders.DecodeStream

    def __init__(self, ids=(), skip_special_tokens=False):
        self.stream = self.real(ids=list(ids), skip_special_tokens=skip_special_tokens)
        self.count = len(ids)

    def step(self, tokenizer, one):
        self.count += len(one) if isinstance(one, list) else 1
        Measured.most = max(Measured.most, self.count)
        text = self.stream.step(tokenizer, one)
        if text is not None:
            self.count = 1
        return text


@pytest.fixture
def measured(monkeypatch):
    monkeypatch.setattr(decoders, "DecodeStream", Measured)
    monkeypatch.setattr(Measured, "most", 0)
    return Measured


LONE, SPECIAL = OF_ACROSS.broken[:1], OF_ACROSS.special[:1]
WORDS = ACROSS.encode(TEXT)


@pytest.mark.parametrize("prompt", [LONE, SPECIAL, WORDS])
@pytest.mark.parametrize("answer", [LONE, SPECIAL])
def test_few_tokens_are_decoded_at_once(measured, prompt, answer):
    pieces(ours(ACROSS, prompt * 300), answer * 300)
    assert measured.most <= CONTEXT + MOST_PENDING


NEVER_TEXT = [
    ["<0x80>"],
    ["<0x80>", *as_bytes("é")],
    ["<0x80>", *as_bytes("é"), BROKEN],
    as_bytes(BROKEN),
    ["<s>"],
]


@pytest.mark.parametrize("prompt", [*NEVER_TEXT, ROCKET, ["▁a"]])
@pytest.mark.parametrize("answer", NEVER_TEXT)
def test_so_it_is_where_each_byte_is_one(measured, prompt, answer):
    prompt, answer = (AS_LLAMA.convert_tokens_to_ids(each * 300) for each in (prompt, answer))
    pieces(ours(AS_LLAMA, prompt), answer)
    assert measured.most <= CONTEXT + MOST_PENDING


def test_what_became_text_is_not_decoded_for_long(measured):
    lone, special, word = AS_LLAMA.convert_tokens_to_ids(["<0x80>", "<s>", "b"])
    stream = ours(AS_LLAMA, [])
    assert pieces(stream, [lone] * 300 + [word])[-1] == BROKEN * 300 + "b"
    measured.most = 0
    pieces(stream, [lone, special] * 100)
    assert measured.most <= CONTEXT + MOST_PENDING


@pytest.mark.parametrize("prompt", [LONE, SPECIAL, WORDS])
@pytest.mark.parametrize("answer", [LONE, SPECIAL])
def test_vllm_alone_decodes_all(measured, prompt, answer):
    """When this fails, vLLM has been mended, and `decode_node.requests.detokenizing` can go."""
    pieces(vllms(ACROSS, prompt * 300), answer * 300)
    assert measured.most >= 600


def engine_request(name, **asked):
    return EngineCoreRequest(
        name, [*LONE], None, SamplingParams(**asked), None, 0.0, None, None, None, external_req_id=name
    )


def test_each_request_of_an_engine_has_one():
    engine, processor = Play({}), OutputProcessor(ACROSS, log_stats=False)
    engine._engine_client.output_processor = processor
    orchestrated(engine)
    queue = RequestOutputCollector(RequestOutputKind.DELTA, "one")
    processor.add_request(engine_request("one"), None, None, 0, queue)
    processor.add_request(engine_request("none", detokenize=False), None)
    kinds = {name: type(state.detokenizer) for name, state in processor.request_states.items()}
    assert kinds == {"one": BoundedDetokenizer, "none": IncrementalDetokenizer}
    processor.process_outputs([EngineCoreOutput("one", ACROSS.encode("quick fox"))])
    assert queue.get_nowait().outputs[0].text == "quick fox"
