"""Preemption measured on a GPU: on a plain PyTorch decoder, and on a stock vLLM engine. See docs/gpu.md."""
