"""Kernels run on the GPU if there is one, else under Triton's interpreter (which `tests/conftest.py` chooses)."""

import functools
import importlib.util

import pytest
import torch

# Triton has no builds but for Linux.
collect_ignore_glob = [] if importlib.util.find_spec("triton") else ["test_*.py"]


def _mend_interpreter():
    """Put four of the ways of Triton 3.6's interpreter right."""
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    patch, convert = interpreter._patch_lang_tensor, interpreter._convert_float
    dot = interpreter.InterpreterBuilder.create_dot

    def patch_with_index(tensor, scope):
        # Loop bounds are one-element arrays; numpy 2.4 no longer makes integers of those by itself.
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def convert_exactly(data, source, target, rounding):
        # It misreads subnormals of bfloat16.
        if (source, target) == (tl.bfloat16, tl.float32):
            return np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16
        # It cuts float32 off at bfloat16; the hardware rounds to the nearest, ties to even.
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, rounding)
        bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
        nearest = bits + 0x7FFF + (bits >> 16 & 1)
        return (np.where(np.isfinite(data), nearest, bits) >> 16).astype(np.uint16)

    def dot_of_values(self, a, b, *args):
        # It would multiply the bit patterns of bfloat16.
        return dot(self, *(self.cast_impl(x, tl.float32) if x.dtype == tl.bfloat16 else x for x in (a, b)), *args)

    interpreter._patch_lang_tensor, interpreter._convert_float = patch_with_index, convert_exactly
    interpreter.InterpreterBuilder.create_dot = dot_of_values


def _hasten_interpreter():
    """Leave out what Triton 3.6's interpreter does again and again: two thirds of its time."""
    import dataclasses
    from functools import cached_property
    from types import SimpleNamespace

    import triton.language as tl
    from triton.runtime import interpreter

    # It patches the language at every launch, and at every call of a device function.
    interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
    interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()

    # Without `debug` it computes whether a sum overflows and asserts nothing.
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    # It makes its table of dtypes for every value,
    numpy_dtype, known = interpreter._get_np_dtype, {}

    def known_dtype(dtype):
        if dtype.scalar.name not in known:
            known[dtype.scalar.name] = numpy_dtype(dtype)
        return known[dtype.scalar.name]

    interpreter._get_np_dtype = known_dtype

    # and the type of every tuple, a text, which hardly anyone reads.
    make_tuple = tl.tuple.__init__

    def tuple_of_values(self, values, type=None):
        if type is None:
            self.values = list(values)
        else:
            make_tuple(self, values, type)

    tl.tuple.__init__ = tuple_of_values
    tl.tuple.type = cached_property(lambda self: tl.core._type_for_tuple_values(self.values))
    tl.tuple.type.__set_name__(tl.tuple, "type")


if not torch.cuda.is_available() and not collect_ignore_glob:
    _mend_interpreter()
    _hasten_interpreter()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def repository(tmp_path_factory):
    """The kernels as `convert kernels` writes them."""
    from convert.kernel_repository import write_kernels

    return write_kernels(tmp_path_factory.mktemp("kernels") / "repository")


@pytest.fixture
def watched(repository, monkeypatch):
    """From the name of a kernel: the repository's kernels, and the keywords of every call of that one."""
    from modeling_dsv4.kernel_seam import KernelSet

    def watch(name):
        kernels, calls = KernelSet(str(repository)), []
        kernel = getattr(kernels.load(), name)

        @functools.wraps(kernel)
        def counted(*args, **options):
            calls.append(options)
            return kernel(*args, **options)

        monkeypatch.setattr(kernels.load(), name, counted)
        return kernels, calls

    return watch


@pytest.fixture
def poisoned():
    """Memory that nothing wrote reads as NaN, or as the largest integer."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
