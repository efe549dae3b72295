"""An answer that does not become text is decoded a few tokens at a time, and the text is vLLM's."""

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


@pytest.fixture(scope="module")
def embedded(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(find_embedded_source().path, directory, 2048)
    return PreTrainedTokenizerFast.from_pretrained(directory)


class Kinds:
    """Tokens of a tokenizer of bytes, by what becomes of them."""

    def __init__(self, tokenizer):
        self.size = len(tokenizer)
        self.broken = [one for one in range(self.size) if tokenizer.decode([one]).endswith(BROKEN)]
        self.special = tokenizer.all_special_ids
        self.added = [*tokenizer.added_tokens_decoder]
        bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
        self.characters = [
            [tokenizer.convert_tokens_to_ids(byte) for byte in bytes_of(character)[0][0]]
            for character in "é…世🚀"
        ]


def vllms(tokenizer, prompt, **asked):
    request = SimpleNamespace(
        request_id="name", prompt_token_ids=prompt, sampling_params=SamplingParams(**asked)
    )
    return FastIncrementalDetokenizer(tokenizer, request)


def ours(tokenizer, prompt, **asked):
    return BoundedDetokenizer(vllms(tokenizer, prompt, **asked), prompt)


def pieces(detokenizer, answer):
    return [detokenizer.decode_next(one) for one in answer]


def text_behind(prompt, text):
    """An answer's part of the text of both, whose first character may have begun in the prompt."""
    return text[len(prompt) :] if text.startswith(prompt) else text[len(prompt) - 1 :]


def is_the_same(tokenizer, prompt, answer, **asked):
    told = pieces(ours(tokenizer, prompt, **asked), answer)
    expected = pieces(vllms(tokenizer, prompt, **asked), answer)
    before = tokenizer._tokenizer.decode(prompt, skip_special_tokens=asked.get("skip_special_tokens", True))
    if before.endswith(BROKEN) and (first := next(filter(None, expected), None)) is not None:
        expected[expected.index(first)] = text_behind(before, first)
    assert told == expected


def runs(kinds):
    """Tokens of all kinds, each often several times in a row, as nothing else keeps text from growing."""
    one = st.one_of(
        st.sampled_from(kinds.broken), st.sampled_from(kinds.added), st.integers(0, kinds.size + 3)
    )
    some = st.one_of(st.lists(one, min_size=1, max_size=4), st.sampled_from(kinds.characters))
    several = st.lists(st.tuples(some, st.integers(1, 50)), max_size=5)
    return several.map(lambda them: [one for each, times in them for one in each * times])


SHOWN = st.fixed_dictionaries(
    {"skip_special_tokens": st.booleans(), "spaces_between_special_tokens": st.booleans()}
)
ACROSS = across_characters()
OF_ACROSS = Kinds(ACROSS)


@given(prompt=runs(OF_ACROSS), answer=runs(OF_ACROSS), asked=SHOWN)
def test_the_text_is_vllms_and_comes_when_vllms_does(prompt, answer, asked):
    is_the_same(ACROSS, prompt, answer, **asked)


@pytest.mark.slow
def test_so_it_is_with_the_embedded_models_tokenizer(embedded):
    kinds = Kinds(embedded)

    @given(prompt=runs(kinds), answer=runs(kinds), asked=SHOWN)
    def same(prompt, answer, asked):
        is_the_same(embedded, prompt, answer, **asked)

    same()


@pytest.mark.parametrize("emoji", range(1, 12))
@pytest.mark.parametrize("answer", [["b"], ["▁the"], ["<0xC3>", "<0xA9>"]])
def test_a_prompt_may_end_with_characters_of_which_each_byte_is_a_token(emoji, answer):
    tokenizer = by_bytes()
    prompt = ["▁a", *(f"<0x{byte:02X}>" for byte in "🚀".encode() * emoji)]
    answer = [*answer, "b", "▁a"]
    is_the_same(tokenizer, *map(tokenizer.convert_tokens_to_ids, (prompt, answer)))


def test_a_prompt_that_ends_within_a_character_is_not_repeated():
    start, end = (ACROSS.convert_tokens_to_ids(byte) for byte in "Ã©")  # the two of é
    prompt = [*ACROSS.encode("a quick "), start]
    assert pieces(ours(ACROSS, prompt), [end]) == ["é"]
    assert "".join(pieces(ours(ACROSS, prompt), ACROSS.encode("fox"))) == "fox"


class Measured:
    """A `DecodeStream` that says how many tokens were decoded at once."""

    most = 0
    real = decoders.DecodeStream

    def __init__(self, ids=(), skip_special_tokens=False):
        self.stream = self.real(ids=list(ids), skip_special_tokens=skip_special_tokens)
        self.count = len(ids)

    def step(self, tokenizer, one):
        self.count += 1
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
