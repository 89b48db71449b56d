"""The cache of a quantised base: a later start reads the bytes that an earlier one made, or makes them again."""

import dataclasses
import errno
import fcntl
import os
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import chex
import jax.numpy as jnp
import pytest
from more_cases import nightly

from benchmarks.saved_model import load_frozen
from lorafusion_jax.checkpoint import weight_cache
from lorafusion_jax.config.schema import BaseSettings
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.models import open_frozen
from lorafusion_jax.session.base_cache import open_cache
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.weights import entry as entry_module
from lorafusion_jax.weights.entry import INDEX, WEIGHTS
from lorafusion_jax.weights.table import INT8, ArraySpec

FILES = {"whole": {"model.safetensors": "a digest"}}
QUANTISED = Path(__file__).parents[1] / "weights" / "golden" / "checkpoints"
Disk = namedtuple("Disk", "total used free")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of an empty cache on a disk with space."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(weight_cache, "SPARE_BYTES", 0)
    return weight_cache.weight_cache()


@pytest.fixture
def opened(tiny_base):
    """opened(kind, …) → the base as a start finds it."""

    def of(quantize="int8", *, base=tiny_base, files=FILES, sharding=None, change=lambda reader: reader, **settings):
        config = SimpleNamespace(directory=".", base=BaseSettings(model=str(base), quantize=quantize, **settings))
        reader = open_frozen(base, dtype=jnp.float32, quantize=quantize, sharding=sharding)
        return open_cache(config, change(reader), files)

    return of


@pytest.fixture
def start(opened):
    """start(kind, …) → (whether the kernels were cached, the weights, notices); writes the cache."""

    def of(*arguments, **settings):
        loader = opened(*arguments, **settings)
        hit, frozen = loader.hit, loader.read(lambda size: None)
        loader.store(lambda: False)
        return hit, frozen, [notice.text for notice in loader.notices]

    return of


def of_mesh(data, fsdp):
    mesh = stage_meshes(1, data, fsdp)[0]
    return lambda name, shape: mesh.weight(shape)


@pytest.mark.parametrize("kind", ["fp8", "nf4", nightly("int8")])
def test_any_mesh_reads_the_bytes_that_another_has_written(cache, start, opened, tiny_base, kind, monkeypatch):
    wanted = load_frozen(tiny_base, dtype=jnp.float32, quantize=kind)
    hit, _, notices = start(kind, sharding=of_mesh(data=2, fsdp=2))
    assert (hit, notices) == (False, [])
    assert [{file.name for file in entry.iterdir()} for entry in cache.iterdir()] == [{WEIGHTS, INDEX}]
    hit, whole, notices = start(kind)
    assert (hit, notices) == (True, [])
    chex.assert_trees_all_equal(whole, wanted)
    assert opened(kind).reader.num_bytes < open_frozen(tiny_base, quantize=kind).num_bytes

    most, preadv = {}, os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda file, parts, at: most.update({at: len(parts[0])}) or preadv(file, parts, at)
    )
    sharding = of_mesh(data=1, fsdp=4)
    hit, split, _ = start(kind, sharding=sharding)
    assert hit
    chex.assert_trees_all_equal(split, wanted)
    name = "layers.0.mlp.up_proj.kernel"
    for array in split[name].values():
        assert array.sharding.is_equivalent_to(sharding(name, array.shape), array.ndim)
    largest = max(array.nbytes for arrays in wanted.values() if isinstance(arrays, dict) for array in arrays.values())
    assert max(most.values()) <= largest // 2, "a device read more than its part"


def test_what_decides_the_bytes_decides_the_entry(cache, start):
    def next_version(reader):
        kind = reader.kind
        return dataclasses.replace(
            reader, kind=dataclasses.replace(kind, quantise=lambda kernel_KN: kind.quantise(2 * kernel_KN))
        )

    other = {"whole": {"model.safetensors": "another digest"}}
    for variant in ({}, {"files": other}, {"quantize": "fp8"}, {"change": next_version}):
        assert not start(**variant)[0]
        assert start(**variant)[0]
    assert len(list(cache.iterdir())) == 4


def test_arrays_of_other_packages_may_have_any_dtype_and_no_axes(cache, start):
    def arrays(in_features, out_features):
        return {
            "rows": ArraySpec(shape=(in_features, out_features), dtype="bfloat16"),
            "nibbles": ArraySpec(shape=(out_features, in_features), dtype="int4"),
            "largest": ArraySpec(shape=(), dtype="float32"),
            "nothing": ArraySpec(shape=(0, 3), dtype="uint16"),
        }

    def quantise(kernel_KN):
        return {
            "rows": kernel_KN.astype(jnp.bfloat16),
            "nibbles": jnp.round(kernel_KN.T * 70).astype(jnp.int4),
            "largest": jnp.abs(kernel_KN).max(),
            "nothing": jnp.zeros((0, 3), jnp.uint16),
        }

    custom = dataclasses.replace(INT8, arrays=arrays, quantise=quantise)
    (first, wanted, _), (second, second_read, _) = (
        start(change=lambda reader: dataclasses.replace(reader, kind=custom), sharding=of_mesh(data=1, fsdp=2))
        for _ in "ab"
    )
    assert (first, second) == (False, True)
    chex.assert_trees_all_equal(second_read, wanted)


@pytest.mark.parametrize(
    "damage",
    [
        lambda entry: os.truncate(entry / WEIGHTS, 1000),
        lambda entry: (entry / WEIGHTS).write_bytes(bytes((entry / WEIGHTS).stat().st_size)),
        lambda entry: (entry / WEIGHTS).unlink(),
        lambda entry: (entry / INDEX).unlink(),
        lambda entry: (entry / INDEX).write_text('{"arrays": []}'),
        lambda entry: (entry / INDEX).write_text("{"),
    ],
    ids=["truncated", "zeros", "no weights", "no index", "no arrays", "half an index"],
)
def test_a_damaged_entry_is_noticed_and_written_again(cache, start, damage):
    _, wanted, _ = start()
    (entry,) = cache.iterdir()
    damage(entry)
    hit, again, (notice,) = start()
    assert not hit
    assert notice.startswith(f"damaged: {entry}")
    assert "quantised again" in notice
    chex.assert_trees_all_equal(again, wanted)
    hit, cached, notices = start()
    assert (hit, notices) == (True, [])
    chex.assert_trees_all_equal(cached, wanted)


def test_an_entry_that_another_process_removes_can_be_read_to_its_end(cache, start, opened):
    _, wanted, _ = start()
    loader = opened()
    weight_cache.shutil.rmtree(cache)
    chex.assert_trees_all_equal(loader.read(lambda size: None), wanted)


def test_a_file_that_ends_while_it_is_read_is_an_error_that_says_what_to_do(cache, start, opened):
    start()
    loader = opened()
    os.truncate(next(cache.iterdir()) / WEIGHTS, 0)
    with pytest.raises(CheckpointError, match=r"model\.broken-cache[\s\S]*fix: rm -r"):
        loader.read(lambda size: None)


def test_without_space_the_run_goes_on_with_a_warning(cache, start, monkeypatch):
    monkeypatch.setattr(weight_cache, "SPARE_BYTES", 20 * 10**9)
    monkeypatch.setattr(weight_cache.shutil, "disk_usage", lambda path: Disk(10**12, 0, 20 * 10**9))
    hit, frozen, (notice,) = start()
    assert not hit
    assert "20.0 GB must stay free" in notice
    assert "base.cache_quantized: false" in notice
    assert frozen
    assert not list(cache.iterdir())


def test_a_place_that_cannot_be_written_is_a_warning(cache, start):
    cache.parent.mkdir()
    cache.write_text("a file")
    hit, _, (notice,) = start()
    assert not hit
    assert str(cache) in notice


def test_a_disk_that_fills_up_leaves_nothing(cache, start, monkeypatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(entry_module, "replace_text", full)  # the last file of an entry
    _, _, (notice,) = start()
    assert "No space left on device" in notice
    assert not list(cache.iterdir())


def test_nothing_is_written_where_nothing_is_cached(cache, start):
    assert not start(cache_quantized=False)[0]
    assert not start(files=None)[0]
    assert not start("none")[0]
    assert not start("nf4", base=QUANTISED / "nf4")[0]  # comes quantised
    assert not cache.exists()


def test_writing_that_is_cancelled_leaves_nothing(cache, opened):
    loader, asked = opened(), iter([False, False, True])
    loader.read(lambda size: None)
    loader.store(lambda: next(asked))
    assert not list(cache.iterdir())
    assert not loader.notices


def test_one_of_several_processes_writes(cache, opened, start):
    both = [opened(), opened()]
    threads = [threading.Thread(target=loader.store, args=(lambda: False,)) for loader in both]
    for loader in both:
        loader.read(lambda size: None)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [loader.notices for loader in both] == [[], []]
    assert len(list(cache.iterdir())) == 1
    assert start()[0]


def test_entries_that_nobody_uses_and_what_killed_processes_left_are_removed(cache, start):
    names = ("unused", "used", ".killed.new", ".written.new")
    unused, used, killed, written = (cache / name for name in names)
    for folder in (unused, used, killed, written):
        folder.mkdir(parents=True)
        (folder / WEIGHTS).write_bytes(b"weights")
    os.utime(unused, (0, time.time() - weight_cache.UNUSED_S - 60))
    os.utime(used, (0, time.time() - weight_cache.UNUSED_S + 60))
    handle = os.open(written, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        start()
    finally:
        os.close(handle)
    assert [folder.exists() for folder in (unused, used, killed, written)] == [False, True, False, True]
