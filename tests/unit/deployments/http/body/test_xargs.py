"""Engine arguments that a client may set, and those that are vLLM's or the server's own."""

import json
import re
from pathlib import Path

import pytest
import vllm
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from deployments.config.limits import LimitsConfig
from deployments.http.body.asks import VLLMS_XARGS
from deployments.http.body.reading import read
from slo.admission.tenants import ANONYMOUS
from slo.errors import FieldError

NAME = r"""["'](\w+)["']"""
READ = re.compile(
    rf"""\b(?:extra_args|vllm_xargs)(?:\.(?:get|pop)\(\s*|\[){NAME}|{NAME}\s+in\s+[\w.]*(?:extra_args|vllm_xargs)\b"""
)
"""Reads of one by its name."""
OTHERS = {
    "model_executor/layers/fused_moe/oracle/int_wna16.py": {"max_num_tokens", "num_dispatchers"},
    "model_executor/models/deepseek_ocr.py": {"ngram_size", "window_size", "whitelist_token_ids"},
}
"""What is called alike and is none, and what a logits processor reads that an operator may choose."""


def found():
    root = Path(vllm.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "extra_args" in text or "vllm_xargs" in text:
            names = {name for pair in READ.findall(text) for name in pair if name}
            yield str(path.relative_to(root)), names


def test_every_argument_that_vllm_reads_is_decided_on():
    """One that upstream adds is refused, unless it was read what it does."""
    read_by = dict(found())
    assert {name: read_by.pop(name) for name in OTHERS} == OTHERS
    assert set().union(*read_by.values()) == VLLMS_XARGS.keys()


def body(**xargs):
    raw = json.dumps({"model": "m", "prompt": "hi", "vllm_xargs": xargs}).encode()
    return read(raw, CompletionRequest, LimitsConfig(), ANONYMOUS)


@pytest.mark.parametrize("name", [*VLLMS_XARGS, "slackserve_job"])
def test_no_client_sets_them(name):
    with pytest.raises(FieldError) as refused:
        body(**{name: "full"})
    assert refused.value.field == f"vllm_xargs.{name}"


def test_a_logits_processor_has_arguments_of_its_own():
    assert body(ngram_size=3, own=1.5).vllm_xargs == {"ngram_size": 3, "own": 1.5}
