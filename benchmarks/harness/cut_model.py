"""The embedded model with fewer layers, for measurements of more requests than a slow machine serves."""

from __future__ import annotations

from pathlib import Path

from deployments.models.store import ModelStore


def cut_model(directory: Path, layers: int) -> Path:
    """Write the embedded model's first `layers` layers, with its tokenizer; what it says makes no sense."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = ModelStore().resolve(None).source
    AutoModelForCausalLM.from_pretrained(source, num_hidden_layers=layers).float().save_pretrained(directory)
    AutoTokenizer.from_pretrained(source).save_pretrained(directory)
    return directory
