"""Files of tensors have the library's bytes, and are written without copies of the tensors."""

from __future__ import annotations

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save

from lorafusion_jax.tensor_file import write_tensors


@pytest.mark.parametrize(
    "dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.uint8, np.bool_]
)
def test_the_bytes_are_those_of_the_library(tmp_path, dtype):
    draw = np.random.default_rng(0)
    tensors = {name: draw.standard_normal(shape).astype(dtype) for name, shape in (("b.10", (3, 5)), ("b.9", (7,)))}
    tensors |= {"a": tensors["b.10"].T, "empty": np.zeros((0, 4), dtype), "number": np.ones((), dtype)}
    write_tensors(tmp_path / "file", tensors)
    in_c_order = {name: np.array(tensor, order="C") for name, tensor in tensors.items()}
    assert (tmp_path / "file").read_bytes() == save(in_c_order, metadata={"format": "pt"})


def test_dtypes_may_differ(tmp_path):
    tensors = {"half": np.ones(3, np.float16), "whole": np.ones(3, np.float32)}
    write_tensors(tmp_path / "file", tensors)
    assert (tmp_path / "file").read_bytes() == save(tensors, metadata={"format": "pt"})


def test_tensors_are_not_copied(tmp_path):
    """Copying a large adapter at once would hold the interpreter, and delay the run that saves it."""
    tensors = {name: np.ones((1024, 1024), np.float32) for name in "abcd"}
    tracemalloc.start()
    write_tensors(tmp_path / "file", tensors)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_another_dtype_is_refused_before_a_file_exists(tmp_path):
    with pytest.raises(TypeError, match="phase is complex64; tensors can be written as bool, float64"):
        write_tensors(tmp_path / "file", {"phase": np.ones(3, np.complex64)})
    assert not (tmp_path / "file").exists()
