"""The real embedded model, converted."""

import json
from pathlib import Path
from typing import Any

import pytest

from deployments.models.store import ModelStore


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real model, converted."""
    return ModelStore(tmp_path_factory.mktemp("store")).ensure_embedded()


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory)


@pytest.mark.slow
class TestRealModel:
    def test_the_architecture(self, directory: Path) -> None:
        config = json.loads((directory / "config.json").read_bytes())

        assert config["architectures"] == ["LlamaForCausalLM"]
        assert config["num_hidden_layers"] == 30
        assert config["num_attention_heads"] == 9
        assert config["num_key_value_heads"] == 3
        assert config["max_position_embeddings"] == 8192
        assert config["dtype"] == "float32"
        assert "quantization_config" not in config

    def test_the_chat_template_gives_chatml(self, tokenizer: Any) -> None:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
        )

        assert prompt.startswith("<|im_start|>system\n")
        assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
        assert tokenizer.eos_token == "<|im_end|>"
        assert tokenizer.model_max_length == 8192

    def test_digits_are_split_from_the_space_before_them(self, tokenizer: Any) -> None:
        assert tokenizer.tokenize("a\n\n 12") == ["a", "ĊĊĠ", "1", "2"]

    def test_it_knows_paris_and_stops(self, directory: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(directory)
        question = [{"role": "user", "content": "What is the capital of France?"}]
        prompts = [
            tokenizer("The capital of France is", return_tensors="pt"),
            tokenizer.apply_chat_template(
                question, add_generation_prompt=True, return_tensors="pt", return_dict=True
            ),
        ]
        completion, answer = (
            tokenizer.decode(
                model.generate(**prompt, max_new_tokens=32, do_sample=False)[0][
                    prompt["input_ids"].shape[1] :
                ]
            )
            for prompt in prompts
        )

        assert completion.startswith(" Paris")
        assert "Paris" in answer
        assert answer.endswith("<|im_end|>")
