"""Builds tiny random models that real engines serve in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

CHAT_TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant: "
_GROUP: Final = 32
"""Rows of a quantised matrix that share a scale."""
_MERGED: Final = 2
"""Patches on each side of a square that one token stands for, to `idefics3`."""
_LANGUAGE: Final = {"paligemma": "gemma", "idefics3": "llama"}
"""What models that read images have for text."""
_VISION: Final = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "projection_dim": 128,
}


def build_tiny_llama(directory: Path, *, layers: int = 4, context: int = 4096) -> Path:
    """A random Llama with a byte-level tokenizer (one token per byte) and a chat template."""
    return build_tiny(directory, "llama", layers=layers, context=context)


def build_tiny(
    directory: Path, architecture: str, *, layers: int = 4, context: int = 4096, hidden: int = 128
) -> Path:
    """A random model of a transformers `architecture`, with a byte-level tokenizer and a chat template.

    `solar` is a Llama whose middle layers are skipped over, which transformers does not know; `awq` one whose
    matrices have four bits; `paligemma` a Gemma that also reads images, with nothing that prepares them;
    `idefics3` a Llama that does, with that.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    vocabulary = write_tokenizer(directory)
    if architecture == "idefics3":
        vocabulary = _save_processor(directory)
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
    sizes |= _sizes_of(architecture, layers, hidden)
    torch.manual_seed(0)
    if architecture in _LANGUAGE:
        sizes |= {"model_type": _LANGUAGE[architecture]}
        more = {}
        if architecture == "idefics3":
            sizes |= {"pad_token_id": vocabulary["</s>"]}
            more = {"image_token_id": vocabulary["<image>"], "scale_factor": _MERGED}
        config = AutoConfig.for_model(architecture, text_config=sizes, vision_config=_VISION, **more)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        known = "llama" if architecture in ("solar", "awq") else architecture
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(known, **sizes))
    model.float().save_pretrained(directory)
    if architecture == "awq":
        _quantise(directory)
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


def _sizes_of(architecture: str, layers: int, hidden: int) -> dict[str, Any]:
    """What a transformers architecture has beside the sizes that all have, or has otherwise."""
    half, experts = layers // 2, {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
    sliding = {"sliding_window": 128}  # with whole attention beside it, KV cache of two kinds
    return {
        "mistral": {"sliding_window": None},
        "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {"num_experts": 4, **experts},
        "gemma3_text": sliding
        | {"layer_types": ["sliding_attention"] * half + ["full_attention"] * (layers - half)},
        "gpt_oss": sliding
        | {"layer_types": ["sliding_attention", "full_attention"] * half}
        | {"num_local_experts": 4, "num_experts_per_tok": 2},
        "deepseek_v2": {  # vLLM computes latent attention on a CPU in these sizes only
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
            "head_dim": 64,
            "num_key_value_heads": hidden // 32,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            **experts,
        },
        "falcon_h1": {  # a recurrent state and attention in each layer
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_d_ssm": 256,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    }.get(architecture, {})


def _quantise(directory: Path) -> None:
    """Give a saved Llama random matrices of four bits in its layers, as AWQ stores them."""
    import torch
    from safetensors.torch import load_file, save_file

    generator, weights = torch.Generator().manual_seed(0), {}
    for name, weight in load_file(directory / "model.safetensors").items():
        if ".layers." not in name or weight.dim() != 2:  # noqa: PLR2004 - a matrix
            weights[name] = weight.half()
            continue
        (columns, rows), part = weight.shape, name.removesuffix("weight")
        for kind, groups in (("qweight", rows), ("qzeros", rows // _GROUP)):
            bits = torch.randint(-(2**31), 2**31, (groups, columns // 8), generator=generator)
            weights[part + kind] = bits.int()
        scales = torch.rand(rows // _GROUP, columns, generator=generator)
        weights[f"{part}scales"] = (scales * 0.01).half()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    written = directory / "config.json"
    stored = {"quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True, "version": "gemm"}
    described = json.loads(written.read_text()) | {"quantization_config": stored, "dtype": "float16"}
    written.write_text(json.dumps(described))


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


def write_tokenizer(directory: Path, size: int = 0) -> dict[str, int]:
    """Write a byte-level tokenizer with a chat template, of `size` tokens if these are more than bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<s>", "</s>"])}
    vocabulary |= {f"word{number}": number for number in range(len(vocabulary), size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106 - no passwords
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(directory)
    return vocabulary


def _save_processor(directory: Path) -> dict[str, int]:
    """Save what cuts images of any size into such as the vision model takes; gives the whole vocabulary."""
    from transformers import AutoTokenizer, Idefics3ImageProcessorPil, Idefics3Processor

    size, tokenizer = _VISION["image_size"], AutoTokenizer.from_pretrained(directory)
    marks = ["<image>", "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    tokenizer.add_special_tokens({"additional_special_tokens": marks})
    images = Idefics3ImageProcessorPil(size={"longest_edge": 2 * size}, max_image_size={"longest_edge": size})
    tokens = (size // _VISION["patch_size"] // _MERGED) ** 2
    processor = Idefics3Processor(images, tokenizer, image_seq_len=tokens, chat_template=CHAT_TEMPLATE)
    processor.save_pretrained(directory)
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return vocabulary
