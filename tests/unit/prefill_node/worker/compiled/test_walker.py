"""A compiled pass in stretches, with its batch padded to the size of a CUDA graph as vLLM does it."""

from functools import partial

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import ForwardContext, override_forward_context

from prefill_node.worker.compiled.stretches import FUNCTION, PIECES, cut
from prefill_node.worker.compiled.walker import Walker
from prefill_node.worker.forward import Forward, NoBoard
from prefill_node.worker.launch_ahead import HostOnly

CODE = """
def __vllm_inlined_submods__1(q, out):
    out.copy_(q.cumsum(1))
    return ()

def execution_fn(x, rows, *, __vllm_submods__):
    submod_0 = __vllm_submods__[0](x, rows)
    q = submod_0[0]
    out = submod_0[1]
    submod_1 = __vllm_inlined_submods__1(q, out)
    submod_2 = __vllm_submods__[1](out, q, rows)
    return (submod_2,)
"""
WIDTH = 3


def sized(rows, *tensors):
    """What inductor's `assert_size_stride` does at the start of a piece."""
    assert [tensor.shape[0] for tensor in tensors] == [rows] * len(tensors)


def heads(x, rows):
    sized(rows, x)
    return x * 2, torch.empty(rows, WIDTH)


def rest(out, q, rows):
    sized(rows, out, q)
    return out + q


class Votes:
    is_first_pass = False
    stop_at = None

    def vote(self, step_id, boundary, wish):
        return boundary == self.stop_at


class Passes:
    """Runs passes whose rows are those of requests, by name."""

    def __init__(self):
        pieces = [heads, rest]
        namespace = {}
        exec(CODE, namespace)
        self.walker = Walker(partial(namespace[FUNCTION], **{PIECES: pieces}), cut(CODE, before=True), None)
        self.votes = Votes()
        self.forward = Forward(0, NoBoard(), self.votes, HostOnly())
        self.run((("warm-up", 4),), 4)
        self.walker.attach(self.forward)

    def run(self, rows, padded):
        """The outputs of a pass whose batch has been padded to so many rows."""
        tokens = sum(count for _, count in rows)
        x = torch.cat([torch.full((count, WIDTH), float(len(name))) for name, count in rows])
        x = torch.cat([x, torch.zeros(padded - tokens, WIDTH)])
        mode = CUDAGraphMode.PIECEWISE
        with override_forward_context(ForwardContext({}, {}, {}, cudagraph_runtime_mode=mode)):
            (output,) = self.walker(x, padded)
        return output[:tokens]

    def step(self, rows, padded, *, stop_at=None, resume=None):
        """(output, stop) of a step that may stop."""
        self.votes.stop_at = stop_at
        self.forward.begin(1, lambda: rows, resume)
        output = self.run(rows, padded)
        return output, self.forward.end()


BOTH = (("long", 5), ("b", 4))
LEFT = BOTH[1:]


@pytest.mark.parametrize("boundary", [1, 2])
@pytest.mark.parametrize(
    ("rows", "padded", "then", "then_padded", "goes_on"),
    [
        pytest.param(BOTH, 9, BOTH, 9, True, id="the same"),
        pytest.param(BOTH, 12, BOTH, 12, True, id="the same, padded"),
        pytest.param(BOTH, 9, LEFT, 4, True, id="one has left"),
        pytest.param(BOTH, 9, LEFT, 8, False, id="one has left, and the rest is padded"),
        pytest.param(BOTH, 12, LEFT, 4, False, id="one has left a padded step"),
        pytest.param(BOTH, 12, LEFT, 8, False, id="one has left a padded step, and the rest is padded"),
    ],
)
def test_a_resumed_pass_has_one_number_of_rows(boundary, rows, padded, then, then_padded, goes_on):
    passes = Passes()
    expected = passes.run(then, then_padded)
    _, stop = passes.step(rows, padded, stop_at=boundary)
    assert stop.boundary == boundary
    output, stop = passes.step(then, then_padded, resume=stop.checkpoint)
    assert stop is None
    assert passes.forward.resumed_from == (boundary if goes_on else 0)
    assert torch.equal(output, expected)


def test_the_rest_of_a_step_is_stopped_and_resumed_again():
    passes = Passes()
    expected = passes.run(LEFT, 4)
    _, stop = passes.step(BOTH, 9, stop_at=1)
    _, stop = passes.step(LEFT, 4, stop_at=2, resume=stop.checkpoint)
    output, _ = passes.step(LEFT, 4, resume=stop.checkpoint)
    assert passes.forward.resumed_from == 2
    assert torch.equal(output, expected)
