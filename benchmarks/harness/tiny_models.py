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


def build_tiny_adapter(directory: Path, model: Path, seed: int, rank: int = 8) -> Path:
    """A random LoRA adapter of all matrices in the layers of a tiny Llama, as PEFT saves it.

    It changes what the model says: its product with the input is as large as the matrix's own.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(seed)
    weights, targets = {}, set()
    for name, part in AutoModelForCausalLM.from_pretrained(model).named_modules():
        if ".layers." not in name or not isinstance(part, torch.nn.Linear):
            continue
        targets.add(name.rpartition(".")[2])
        scale = float(part.weight.detach().std()) * (part.in_features / rank) ** 0.5
        shapes = {"lora_A": (rank, part.in_features), "lora_B": (part.out_features, rank)}
        for half, shape in shapes.items():
            drawn = torch.randn(shape, generator=generator)
            weights[f"base_model.model.{name}.{half}.weight"] = drawn * (
                scale if half == "lora_B" else part.in_features**-0.5
            )
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, directory / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": sorted(targets),
        "bias": "none",
    }
    (directory / "adapter_config.json").write_text(json.dumps(described))
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
