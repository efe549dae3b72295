"""What the engines of both tiers have alike: the model, its KV cache, how they sample."""

import shutil

import pytest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("values", "is_offline"),
    [
        ({}, True),
        ({"lora": {"adapters": {"sql": "org/sql"}, "max_rank": 16}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"model": "org/draft"}}}}, False),
        ({"decode": {"engine_kwargs": {"speculative_config": {"method": "ngram"}}}}, True),
        ({"prefill": {"engine_kwargs": {"trust_remote_code": True}}}, False),
        ({"decode": {"engine_kwargs": {"hf_config_path": "org/model"}}}, False),
        ({"decode": {"engine_kwargs": {"generation_config": "org/model"}}}, False),
        ({"decode": {"engine_kwargs": {"generation_config": "vllm"}}}, True),
    ],
    ids=str,
)
def test_engines_ask_the_hub_for_what_is_not_here(options, tiny, monkeypatch, values, is_offline):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    for config, _ in options({"model": tiny, **values}).values():
        environment = config.runtime_env["env_vars"]
        assert ("HF_HUB_OFFLINE" in environment) is is_offline
        assert environment["VLLM_MEDIA_URL_ALLOW_REDIRECTS"] == "0"


@pytest.mark.slow
@pytest.mark.parametrize(("model", "said"), [("tiny", "0"), ("org/model", "1")])
def test_whether_engines_may_ask_the_hub_is_the_operators_to_say(options, tiny, monkeypatch, model, said):
    monkeypatch.setenv("HF_HUB_OFFLINE", said)
    for config, _ in options({"model": tiny if model == "tiny" else model}).values():
        assert config.runtime_env["env_vars"]["HF_HUB_OFFLINE"] == said


@pytest.mark.slow
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_both_tiers_sample_alike(options, tiny, section):
    sampling = {
        "logits_processors": ["some.Processor"],
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 100,
        "generation_config": "vllm",
        "override_generation_config": {"temperature": 0.5},
        "use_fp64_gumbel": True,
    }
    found = options({"model": tiny, section: {"engine_kwargs": {**sampling, "max_num_seqs": 7}}})
    for tier in ("prefill", "decode"):
        given = found[tier][0].engine_kwargs
        assert {name: given[name] for name in sampling} == sampling
        assert (given.get("max_num_seqs") == 7) == (tier == section)


@pytest.mark.slow
@pytest.mark.parametrize("section", ["prefill", "decode"])
def test_both_tiers_have_the_same_model_and_kv_cache(options, tiny, section):
    """What NIXL's handshake does not compare would make answers of two models."""
    of_the_model = {
        "revision": "0123abc",
        "code_revision": "0123abc",
        "tokenizer_revision": "0123abc",
        "hf_overrides": {"rope_theta": 1e6},
        "quantization": "fp8",
        "kv_cache_dtype": "fp8",
        "block_size": 32,
    }
    own = {"load_format": "safetensors", "language_model_only": True}
    found = options({"model": tiny, section: {"engine_kwargs": {**of_the_model, **own}}})
    for tier in ("prefill", "decode"):
        given = found[tier][0].engine_kwargs
        assert {name: given.get(name) for name in of_the_model} == of_the_model
        assert all((name in given) == (tier == section) for name in own)


@pytest.mark.slow
def test_both_tiers_know_the_model_by_one_digest_that_other_weights_under_its_name_do_not_have(
    options, tiny, tmp_path
):
    other = tmp_path / "other"
    shutil.copytree(tiny, other)
    weights = other / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    digests = []
    for model in (tiny, str(other)):
        options({"model": model, "model_name": "alpha"})
        nodes = options.nodes
        assert nodes["prefill"].digest == nodes["decode"].digest
        digests.append(nodes["decode"].digest)
    options({"model": tiny, "model_name": "alpha", "pressure": {"enabled": True}})
    assert options.nodes["prefill"].digest == digests[0], "what is unlike does not count"
    assert all(digests)
    assert digests[0] != digests[1]


@pytest.mark.slow
@pytest.mark.parametrize("given", [{"temperature": 0.5}, {}, None], ids=str)
def test_what_bounds_an_answer_adds_to_what_one_tier_names_of_sampling(options, tiny, given):
    values = {"model": tiny, "limits": {"max_output_tokens": 9}}
    found = options({**values, "decode": {"engine_kwargs": {"override_generation_config": given}}})
    for tier in ("prefill", "decode"):
        told = found[tier][0].engine_kwargs["override_generation_config"]
        assert told == {**(given or {}), "max_new_tokens": 9}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limits", "said", "told"),
    [({}, None, str(2**24)), ({"max_image_pixels": 1000}, None, "1000"), ({}, "7", "7")],
)
def test_engines_are_told_how_large_a_picture_may_be(options, tiny, monkeypatch, limits, said, told):
    """What an operator has told vLLM himself holds."""
    monkeypatch.delenv("VLLM_MAX_IMAGE_PIXELS", raising=False)
    if said is not None:
        monkeypatch.setenv("VLLM_MAX_IMAGE_PIXELS", said)
    for config, _ in options({"model": tiny, "limits": limits}).values():
        assert config.runtime_env["env_vars"]["VLLM_MAX_IMAGE_PIXELS"] == told
