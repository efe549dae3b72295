"""Keeps penalties that one request asks for from having the answers of its whole batch counted at each step.

Where a request has one, the sampler of vLLM 0.29's first model runner makes a tensor of all that the batch
has generated, as long as the longest answer, and counts it in a table as wide as the vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.utils.torch_utils import async_tensor_h2d

if TYPE_CHECKING:
    from vllm.v1.sample.metadata import SamplingMetadata


def count_only_who_asks(sampler: Any, batch: Any) -> None:
    """Have a sampler apply penalties to those requests that have some.

    Args:
        sampler: vLLM's `Sampler`.
        batch: vLLM's `InputBatch`, whose requests it samples.
    """
    penalise = sampler.apply_penalties

    def apply_penalties(
        logits: torch.Tensor, metadata: SamplingMetadata, output_token_ids: list[list[int]]
    ) -> torch.Tensor:
        asked = {
            *batch.frequency_penalties_reqs,
            *batch.presence_penalties_reqs,
            *batch.repetition_penalties_reqs,
        }
        if metadata.no_penalties or len(asked) == len(logits):
            return penalise(logits, metadata, output_token_ids)
        rows = sorted(batch.req_id_to_index[name] for name in asked)
        at = async_tensor_h2d(rows, logits.device, torch.int64)
        theirs = replace(
            metadata,
            prompt_token_ids=metadata.prompt_token_ids[at],
            frequency_penalties=metadata.frequency_penalties[at],
            presence_penalties=metadata.presence_penalties[at],
            repetition_penalties=metadata.repetition_penalties[at],
        )
        logits[at] = penalise(logits[at], theirs, [output_token_ids[row] for row in rows])
        return logits

    sampler.apply_penalties = apply_penalties
