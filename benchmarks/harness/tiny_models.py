"""Builds tiny random models that real engines serve in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "


def build_tiny_llama(directory: Path, *, layers: int = 4, context: int = 4096) -> Path:
    """A random Llama with a byte-level tokenizer (one token per byte) and a chat template."""
    return build_tiny(directory, "llama", layers=layers, context=context)


def build_tiny(
    directory: Path, architecture: str, *, layers: int = 4, context: int = 4096, hidden: int = 128
) -> Path:
    """A random model of a transformers `architecture`, with a byte-level tokenizer and a chat template.

    `solar` is a Llama whose middle layers are skipped over, which transformers does not know.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    vocabulary = _save_tokenizer(directory)
    sizes = {
        "vocab_size": len(vocabulary),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 32,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": context,
        "bos_token_id": vocabulary["<s>"],
        "eos_token_id": vocabulary["</s>"],
    }
    if architecture == "qwen3_moe":
        sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    if architecture == "gemma3_text":  # KV cache of two kinds
        half = layers // 2
        sizes |= {
            "sliding_window": 128,
            "layer_types": ["sliding_attention"] * half + ["full_attention"] * (layers - half),
        }
    torch.manual_seed(0)
    config = AutoConfig.for_model("llama" if architecture == "solar" else architecture, **sizes)
    AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)
    if architecture == "solar":
        skips = {
            "bskcn_1": [1],
            "bskcn_2": [],
            "bskcn_3": [layers - 1],
            "bskcn_4": [],
            "bskcn_tv": [0.9, 0.8],
        }
        written = directory / "config.json"
        named = json.loads(written.read_text()) | skips | {"bskcn_tv": [0.9, 0.8]}
        written.write_text(json.dumps(named | {"architectures": ["SolarForCausalLM"]}))
    return directory


def _save_tokenizer(directory: Path) -> dict[str, int]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<s>", "</s>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return vocabulary
