"""A function in stretches computes what the whole function does, from any of its cuts on."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prefill_node.worker.compiled.stretches import FUNCTION, NotInPiecesError, cut, stretch_name

LAYERS = 3
CODE = """
import torch
import operator

def __vllm_inlined_submods__1(q, k, out):
    out.append(q * k)
    return ()

def execution_fn(rows, x, w_0, w_1, *, __vllm_submods__):
    submod_0 = __vllm_submods__[0](x, rows, w_0)
    del x, w_0
    q = submod_0[0]
    k = submod_0[1]
    out = submod_0[2]
    residual = submod_0[3]
    del submod_0
    submod_1 = __vllm_inlined_submods__1(q, k, out)
    del q, k
    submod_2 = __vllm_submods__[2](out, residual, w_1)
    result = submod_2[0]
    return (result,)
"""
PIECES = [
    lambda x, rows, w: (x + w, x - w, [], rows),
    None,
    lambda out, residual, w: (out[0] + residual * w,),
]
INPUTS = (7, 5, 3, 2)


def functions(stretches):
    namespace = {}
    exec(stretches.source, namespace)
    return [namespace[stretch_name(number)] for number in range(stretches.count)]


def test_what_vllm_generates():
    stretches = cut(CODE, before=True)
    assert stretches.at_attention == (False, True, False)
    assert stretches.inputs == ("rows", "x", "w_0", "w_1")
    first, attention, last = functions(stretches)
    alive = first(INPUTS, [], PIECES)
    assert alive == [8, 2, [], 7]
    behind = attention(INPUTS, alive, PIECES)
    assert behind == [[16], 7], "neither heads nor what the attention returns is needed any more"
    assert alive == [], "who called lets go of them too"
    assert last(INPUTS, behind, PIECES) == (30,)


def test_cut_behind_the_attention_only():
    stretches = cut(CODE, before=False)
    assert stretches.at_attention == (False, False)
    first, last = functions(stretches)
    assert last(INPUTS, first(INPUTS, [], PIECES), PIECES) == (30,)


def test_not_around_what_only_writes_the_cache():
    """Of latent attention that stands by itself, with a piece that computes next to nothing behind it."""
    code = """
import torch

def __vllm_inlined_submods__1(kv):
    written = torch.ops.vllm.unified_mla_kv_cache_update(kv, 'layer')
    return (written,)

def __vllm_inlined_submods__3(q, written):
    empty = torch.empty([1])
    attended = torch.ops.vllm.unified_mla_attention_with_output(q, written, empty, 'layer')
    return (empty,)

def execution_fn(x, *, __vllm_submods__):
    submod_0 = __vllm_submods__[0](x)
    q = submod_0[0]
    kv = submod_0[1]
    submod_1 = __vllm_inlined_submods__1(kv)
    written = submod_1[0]
    submod_2 = __vllm_submods__[2](q)
    view = submod_2[0]
    submod_3 = __vllm_inlined_submods__3(view, written)
    out = submod_3[0]
    submod_4 = __vllm_submods__[4](out)
    return (submod_4,)
"""
    stretches = cut(code, before=True)
    assert stretches.at_attention == (False, True, False)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("def another(x):\n    return x", "no function execution_fn"),
        ("def execution_fn(x, *, __vllm_submods__):\n    return (x,)", "nothing stands between"),
        (
            "def execution_fn(x, *, __vllm_submods__):\n    if x:\n        x = 1\n    return (x,)",
            "more than assignments",
        ),
        ("def execution_fn(x, *, __vllm_submods__):\n    y = x", "more than assignments"),
    ],
)
def test_other_code_is_refused(code, why):
    with pytest.raises(NotInPiecesError, match=why):
        cut(code, before=True)


@st.composite
def straight_lines(draw):
    """Code of random assignments, some of them calls of what stands between pieces."""
    names, lines = ["a", "b"], []
    for number in range(draw(st.integers(1, 12))):
        one, other = draw(st.sampled_from(names)), draw(st.sampled_from(names))
        name = f"__vllm_inlined_submods__{number}" if draw(st.booleans()) else "__vllm_submods__[0]"
        target = draw(st.sampled_from([f"v{number}", names[-1] if names[-1] not in "ab" else f"v{number}"]))
        lines.append((target, name, one, other))
        names.append(target)
    lines.append(("last", "__vllm_inlined_submods__99", names[-1], names[0]))
    inlined = sorted({name for _, name, _, _ in lines if "inlined" in name})
    code = "".join(f"def {name}(x, y):\n    return x * 31 + y + {len(name)}\n" for name in inlined)
    body = "".join(f"    {target} = {name}({one}, {other})\n" for target, name, one, other in lines)
    results = ", ".join(draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)))
    return f"{code}def {FUNCTION}(a, b, *, __vllm_submods__):\n{body}    return ({results}, last)\n"


@given(straight_lines(), st.booleans(), st.integers(-9, 9), st.integers(-9, 9))
def test_any_straight_code_from_any_cut_on(code, before, a, b):
    pieces = [lambda x, y: x - 7 * y]
    namespace = {}
    exec(code, namespace)
    expected = namespace[FUNCTION](a, b, __vllm_submods__=pieces)
    stretches = cut(code, before=before)
    run = functions(stretches)
    for stop in range(stretches.count):
        alive = []
        for number in range(stop):
            alive = run[number]((a, b), alive, pieces)
        kept = list(alive)
        for number in range(stop, stretches.count):
            kept = run[number]((a, b), kept, pieces)
        assert kept == expected
