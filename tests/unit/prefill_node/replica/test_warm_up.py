"""What is measured on replicas, and how, against engines that answer at once."""

import asyncio
from types import SimpleNamespace

import pytest

from slo.predict.measured_on import Subject

pytestmark = pytest.mark.slow  # vLLM and Ray take seconds to import

LONGEST = 4096


class FakeEngine:
    """Remembers prompts; refuses long ones. Streams `tokens` chunks, `step_s` apart, `seconds` later."""

    def __init__(self, *, tokens=1, step_s=0.0, seconds=lambda _: 0.0, step_tokens=8192):
        import torch

        model = SimpleNamespace(
            max_model_len=LONGEST,
            get_vocab_size=lambda: 1000,
            dtype=torch.bfloat16,
            use_mla=False,
            get_total_num_kv_heads=lambda: 8,
            get_head_size=lambda: 128,
            get_total_num_hidden_layers=lambda: 32,
        )
        cache = SimpleNamespace(block_size=16, enable_prefix_caching=True, cache_dtype="auto")
        parallel = SimpleNamespace(tensor_parallel_size=2)
        config = SimpleNamespace(
            model_config=model,
            cache_config=cache,
            parallel_config=parallel,
            scheduler_config=SimpleNamespace(max_num_batched_tokens=step_tokens),
        )
        self._engine_client = SimpleNamespace(vllm_config=config, model_config=model)
        self.prompts = []
        self.params = []
        self._tokens, self._step_s, self._seconds = tokens, step_s, seconds
        self.tokens_of_tries = []

    async def completions(self, request, _):
        self.prompts.append(tuple(request.prompt))
        self.params.append(request.kv_transfer_params)
        if len(request.prompt) >= LONGEST:
            yield SimpleNamespace(error=SimpleNamespace(message="too long"))
            return
        await asyncio.sleep(self._seconds(request.prompt))
        for _ in range(self.tokens_of_tries.pop(0) if self.tokens_of_tries else self._tokens):
            await asyncio.sleep(self._step_s)
            yield 'data: {"choices":[{"text":"a"}]}'
        yield "data: [DONE]"


@pytest.fixture
def engine():
    return FakeEngine()


def probe(engine):
    from prefill_node.replica.warm_up import Probe

    return Probe(engine, "m")


async def test_a_tail_is_measured_behind_the_same_prefix_each_time(engine):
    for _ in range(2):
        assert await probe(engine).prefill_s(100, 512) > 0
    prefix, first, again, second = engine.prompts
    assert prefix == again
    assert len(prefix) == 512
    assert first[:512] == second[:512] == prefix
    assert len(first) == 612
    assert first != second, "what is in the cache is not measured"


async def test_a_prompt_without_a_prefix_is_one_request(engine):
    await probe(engine).prefill_s(100)
    assert [len(prompt) for prompt in engine.prompts] == [100]


async def test_what_the_engine_refuses_is_an_error(engine):
    with pytest.raises(RuntimeError, match="too long"):
        await probe(engine).prefill_s(5000)


async def test_a_warm_up_keeps_to_the_model_and_measures_two_lengths_at_least(engine):
    samples = await probe(engine).warm_up((9000, 9500))
    assert [sample.tokens for sample in samples] == [2047, 4095]


async def test_a_warm_up_measures_single_passes():
    samples = await probe(FakeEngine(step_tokens=2048)).warm_up((64, 512, 2048, 8192))
    assert [sample.tokens for sample in samples] == [64, 512, 2048]


async def test_long_prefills_run_twice_and_short_ones_three_times(monkeypatch):
    from prefill_node.replica import warm_up

    monkeypatch.setattr(warm_up, "LONG_S", 0.05)
    engine = FakeEngine(seconds=lambda prompt: 0.1 if len(prompt) > 100 else 0.0)
    samples = await probe(engine).warm_up((10, 200))
    assert [len(prompt) for prompt in engine.prompts] == [10, 200, 10, 10, 200]
    assert [sample.tokens for sample in samples] == [10, 200]
    assert 0.1 <= samples[1].measured_s < 1.0


async def test_a_short_prefill_that_took_as_long_as_a_longer_one_is_measured_again():
    disturbed = iter([0.0, 0.2, 0.2])
    engine = FakeEngine(seconds=lambda prompt: 0.05 if len(prompt) > 100 else next(disturbed, 0.01))
    samples = await probe(engine).warm_up((10, 200))
    assert samples[0].measured_s < samples[1].measured_s
    assert [len(prompt) for prompt in engine.prompts] == [10, 200, 10, 10, 200, 200, 10]


async def test_prefills_that_take_the_same_are_not_measured_for_ever():
    engine = FakeEngine(seconds=lambda prompt: 0.02 if len(prompt) > 100 else 0.05)
    samples = await probe(engine).warm_up((10, 200))
    assert 0.05 <= samples[0].measured_s < 1
    assert len(engine.prompts) < 12


def test_what_is_measured_is_named(engine):
    about = probe(engine).about(Subject("llama", dtype="auto"))
    assert about.subject == Subject("llama", "cpu", 2, "bfloat16")
    assert (about.max_model_len, about.block_tokens) == (LONGEST, 16)
    assert about.kv_bytes_per_token == 32 * 2 * 8 * 128 * 2, "Llama-3-8B's 128 KiB"
    engine._engine_client.vllm_config.cache_config.enable_prefix_caching = False
    assert probe(engine).about(Subject()).block_tokens == 0


class FakePrefill:
    """The prefill tier's handle: says that a prefill has taken `prefill_s`."""

    def __init__(self, prefill_s):
        self.timed_prefill = SimpleNamespace(remote=self._prefill)
        self.prefill_s = prefill_s
        self.asked = []

    def options(self, **_):
        return self

    async def _prefill(self, request):
        self.asked.append(request)
        await asyncio.sleep(0.05)
        return None if self.prefill_s is None else ({"remote": "here"}, self.prefill_s)


async def handoff(engine, prefill, tokens):
    from decode_node.handoff_probe import measure_handoff

    backend = SimpleNamespace(prepare_prefill_request=lambda request, peer: request)
    return await measure_handoff(engine, "m", prefill, backend, tokens)


async def test_a_handoff_is_all_of_the_way_to_prefills_answer_but_the_prefill():
    engine, prefill = FakeEngine(tokens=4, step_s=0.02), FakePrefill(prefill_s=0.03)
    sample = await handoff(engine, prefill, 300)
    assert sample.tokens == 300
    assert 0.015 < sample.handoff_s < 0.2, "the transfer and the decode step are not in it"
    assert sample.transfer_s < 0.1
    assert engine.params == [{"remote": "here"}]
    assert list(engine.prompts[0]) == prefill.asked[0].prompt
    assert not prefill.asked[0].stream


async def test_a_handoff_whose_tokens_come_at_once_is_measured_again():
    engine = FakeEngine(tokens=1)
    with pytest.raises(RuntimeError, match="its 6 tokens came at once, 3 times"):
        await handoff(engine, FakePrefill(prefill_s=0.03), 300)
    engine.tokens_of_tries = [1, 4]
    sample = await handoff(engine, FakePrefill(prefill_s=0.03), 300)
    assert sample.tokens == 300
    assert len(engine.prompts) == 3 + 2


async def test_a_handoff_that_prefill_refuses_is_an_error():
    with pytest.raises(RuntimeError, match="refused"):
        await handoff(FakeEngine(), FakePrefill(None), 5)
