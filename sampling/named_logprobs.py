"""Keeps the log-probabilities that one request names from taking the place of others' in its batch.

Where a request has `logprob_token_ids`, the sampler of vLLM 0.29's first model runner gives those of named
tokens for the whole batch: a request that names none has token 0 in place of its top ones. When draft tokens
are verified it gives them in place of all logits, and the engine ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from vllm.v1.outputs import SamplerOutput
    from vllm.v1.sample.metadata import SamplingMetadata

_ALL: Final = -1
"""vLLM's number of log-probabilities where those of the whole vocabulary are meant."""


def keep_top_logprobs(sampler: Any) -> None:
    """Have a sampler give each request what it asks for.

    Args:
        sampler: vLLM's `Sampler`.
    """
    sample = sampler.forward

    def forward(logits: torch.Tensor, sampling_metadata: SamplingMetadata, **how: Any) -> SamplerOutput:
        named, most = sampling_metadata.logprob_token_ids, sampling_metadata.max_num_logprobs
        if not named or most is None:
            return sample(logits, sampling_metadata, **how)
        of_all = replace(sampling_metadata, max_num_logprobs=_ALL, logprob_token_ids=None)
        output = sample(logits, of_all, **how)
        if most != _ALL:
            logprobs = output.logprobs_tensors.logprobs
            asked = {**dict(enumerate(logprobs.topk(most).indices.cpu())), **named}
            sampled = output.sampled_token_ids.squeeze(-1).long()
            output.logprobs_tensors = sampler.gather_specific_token_logprobs(logprobs, asked, sampled)
        return output

    sampler.forward = forward
