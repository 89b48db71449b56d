"""NF4 next to what bitsandbytes stores and reads back; `make_nf4_golden.py` wrote the file."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import nf4_cases
import numpy as np
import pytest

from lorafusion_jax.weights import nf4
from lorafusion_jax.weights.nf4 import DYNAMIC, NF4

CASES = nf4_cases.cases()
quantise = jax.jit(nf4.quantise)


@pytest.fixture(scope="module")
def golden():
    return dict(np.load(Path(__file__).parent / "golden" / "nf4.npz"))


def test_the_maps_are_bitwise_those_of_bitsandbytes(golden):
    np.testing.assert_array_equal(NF4, golden["odd/nf4_map"])
    np.testing.assert_array_equal(DYNAMIC, golden["odd/dynamic_map"])


@pytest.mark.parametrize("name", CASES)
def test_weights_get_the_codes_of_bitsandbytes(golden, name):
    quantised = {key: np.asarray(array) for key, array in quantise(CASES[name].T).items()}
    np.testing.assert_array_equal(quantised["codes"].reshape(-1), golden[f"{name}/packed"])
    np.testing.assert_allclose(quantised["offset"], golden[f"{name}/offset"], rtol=3e-7)  # a mean: its order is its own
    np.testing.assert_allclose(quantised["group_absmax"], golden[f"{name}/group_absmax"], rtol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_scales_get_the_codes_of_bitsandbytes_or_nearer_ones(golden, name):
    """Its library for CPUs looks codes up in a table of rounded numbers, so that it misses the nearest now and then."""
    codes, theirs = np.asarray(quantise(CASES[name].T)["absmax"]).reshape(-1), golden[f"{name}/absmax"]
    codes = codes[: theirs.size]
    (apart,) = np.nonzero(codes != theirs)
    assert len(apart) <= 0.01 * theirs.size
    blocks = np.pad(CASES[name].reshape(-1), (0, -CASES[name].size % 64)).reshape(-1, 64)
    centred = np.abs(blocks).max(1) - golden[f"{name}/offset"]
    scaled = centred / np.repeat(golden[f"{name}/group_absmax"], 256)[: theirs.size]
    assert (np.abs(DYNAMIC[codes] - scaled)[apart] < np.abs(DYNAMIC[theirs] - scaled)[apart]).all()


@pytest.mark.parametrize("name", CASES)
def test_the_same_bytes_read_back_as_the_same_numbers(golden, name):
    w_NK = CASES[name]
    groups = nf4.groups_of(w_NK.shape[1], w_NK.shape[0])
    absmax = np.zeros(groups * nf4.GROUP, np.uint8)
    absmax[: golden[f"{name}/absmax"].size] = golden[f"{name}/absmax"]
    arrays = {
        "codes": golden[f"{name}/packed"].reshape(w_NK.shape[0], -1),
        "absmax": absmax.reshape(groups, nf4.GROUP),
        "group_absmax": golden[f"{name}/group_absmax"],
        "offset": golden[f"{name}/offset"],
    }
    back = jax.jit(nf4.dequantise, static_argnums=1)(arrays, jnp.dtype("float32"))
    np.testing.assert_array_equal(back.T, golden[f"{name}/float32"])


def test_the_bytes_do_not_depend_on_how_the_matrix_lies_on_devices():
    whole = CASES["normal"].T
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    split = jax.device_put(whole, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x")))
    for actual, other in zip(jax.tree.leaves(quantise(whole)), jax.tree.leaves(quantise(split)), strict=True):
        np.testing.assert_array_equal(actual, other)


@pytest.mark.parametrize("numbers", [NF4, DYNAMIC], ids=["nf4", "dynamic"])
def test_between_two_numbers_the_lower_one_is_taken(numbers):
    borders = nf4.borders(numbers)
    np.testing.assert_array_equal(nf4._nearest(jnp.asarray(borders), numbers), np.arange(len(borders)))
    above = np.nextafter(borders, np.float32(2), dtype=np.float32)
    np.testing.assert_array_equal(nf4._nearest(jnp.asarray(above), numbers), np.arange(1, len(borders) + 1))
