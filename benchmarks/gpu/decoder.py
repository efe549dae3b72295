"""A decoder of Llama's shape in plain PyTorch, with random weights.

Written like vLLM's: hidden states and residual go from layer to layer, norms write in place, keys and values
go into a cache, and submodules have vLLM's names. So `prefill_node.worker.boundary` finds and wraps its
layers as it does in an engine. Attention is PyTorch's; everything between the matrices runs unfused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - PyTorch's own name for it
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from simulator.cost.operators import ModelShape

_EPSILON = 1e-5
_ROPE_BASE = 500_000.0
_STANDARD_DEVIATION = 0.02


class KVCache:
    """Keys and values of one request, of every layer: [2, tokens, KV heads, head size] each."""

    def __init__(self, decoder: Decoder, tokens: int) -> None:
        shape, weight = decoder.shape, decoder.embed_tokens
        size = (2, tokens, shape.kv_heads, shape.head_dim)
        self.layers = [torch.zeros(size, dtype=weight.dtype, device=weight.device) for _ in decoder.layers]


Linear = partial(nn.Linear, bias=False)


class RMSNorm(nn.RMSNorm):
    """A norm; with a residual it adds and writes in place, as vLLM's fused kernel does."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        """The normed hidden states; with a residual both, in the memory of the arguments."""
        if residual is None:
            return self.normed(hidden)
        residual.add_(hidden)
        return hidden.copy_(self.normed(residual)), residual

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed, in memory of its own."""
        return super().forward(hidden)


class RotaryEmbedding(nn.Module):
    """Turns queries and keys by their positions."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.head_dim = head_dim

    def forward(
        self, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both are [tokens, heads, head size]."""
        half = self.head_dim // 2
        steps = torch.arange(half, dtype=torch.float32, device=positions.device)
        angles = positions[:, None].float() * _ROPE_BASE ** (-steps / half)
        cos, sin = (part[:, None].to(query.dtype) for part in (angles.cos(), angles.sin()))
        return _turned(query, cos, sin), _turned(key, cos, sin)


def _turned(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Causal attention of one whole prompt; the cache that it fills is set for each pass."""

    cache: torch.Tensor

    def __init__(self, heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads, self.head_size = heads, head_size

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, head size] each; returns [tokens, heads x head size]."""
        self.cache[0].copy_(key)
        self.cache[1].copy_(value)
        heads = (part.transpose(0, 1)[None] for part in (query, key, value))
        out = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        return out[0].transpose(0, 1).flatten(1)

    def get_attn_backend(self) -> None:
        """By this and the next vLLM's attention is known."""

    def get_kv_cache_spec(self, vllm_config: Any) -> None:
        """See `get_attn_backend`."""


class LlamaAttention(nn.Module):
    """Projections, rotation, attention."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.sizes = [heads * shape.head_dim for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.head_dim = shape.head_dim
        self.qkv_proj = Linear(shape.hidden, sum(self.sizes))
        self.rotary_emb = RotaryEmbedding(shape.head_dim)
        self.attn = Attention(shape.heads, shape.head_dim)
        self.o_proj = Linear(self.sizes[0], shape.hidden)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        qkv = self.qkv_proj(hidden_states)
        query, key, value = (part.unflatten(1, (-1, self.head_dim)) for part in qkv.split(self.sizes, dim=1))
        query, key = self.rotary_emb(positions, query, key)
        return self.o_proj(self.attn(query, key, value))


class SiluAndMul(nn.Module):
    """The gated activation."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """[tokens, 2 x intermediate] to [tokens, intermediate]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


class LlamaMLP(nn.Module):
    """A gated MLP."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_up_proj = Linear(shape.hidden, 2 * shape.intermediate)
        self.act_fn = SiluAndMul()
        self.down_proj = Linear(shape.intermediate, shape.hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] to the same."""
        return self.down_proj(self.act_fn(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Named like vLLM's, whose code it repeats."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden, _EPSILON)
        self.self_attn = LlamaAttention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden, _EPSILON)
        self.mlp = LlamaMLP(shape)

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states and residual to the same of the next layer."""
        if residual is None:
            hidden_states, residual = self.input_layernorm(hidden_states), hidden_states
        else:
            hidden_states, residual = self.input_layernorm(hidden_states, residual)
        hidden_states = self.self_attn(positions=positions, hidden_states=hidden_states)
        hidden_states, residual = self.post_attention_layernorm(hidden_states, residual)
        return self.mlp(hidden_states), residual


class Decoder(nn.Module):
    """Token ids to the logits of the last token."""

    def __init__(self, shape: ModelShape, vocabulary: int) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Parameter(torch.empty(vocabulary, shape.hidden), requires_grad=False)
        self.layers = nn.ModuleList(LlamaDecoderLayer(shape) for _ in range(shape.layers))
        self.norm = RMSNorm(shape.hidden, _EPSILON)
        self.lm_head = Linear(shape.hidden, vocabulary)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """The first kernel of a pass."""
        return F.embedding(tokens, self.embed_tokens)

    def decode(self, hidden: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """The rest of the pass: embeddings to the logits of the last token."""
        positions = torch.arange(hidden.shape[0], device=hidden.device)
        residual = None
        for layer, kv in zip(self.layers, cache.layers, strict=True):
            layer.self_attn.attn.cache = kv
            hidden, residual = layer(positions, hidden, residual)
        hidden, _ = self.norm(hidden[-1:].clone(), residual[-1:].clone())
        return self.lm_head(hidden)

    def forward(self, tokens: torch.Tensor, cache: KVCache) -> torch.Tensor:
        """A whole pass."""
        return self.decode(self.embed(tokens), cache)


def random_decoder(
    shape: ModelShape, vocabulary: int, dtype: torch.dtype, device: torch.device, seed: int
) -> Decoder:
    """A decoder whose weights are those of an untrained model: the same for the same seed and device."""
    with torch.device("meta"):
        decoder = Decoder(shape, vocabulary).to(dtype).requires_grad_(requires_grad=False)
    decoder.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(seed)
    for name, parameter in decoder.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(0.0, _STANDARD_DEVIATION, generator=generator)
    return decoder.eval()


def fast_attention(device: torch.device) -> AbstractContextManager[Any]:
    """On a GPU, attention whose memory grows with the prompt and not with its square."""
    if device.type != "cuda":
        return nullcontext()
    return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION])
