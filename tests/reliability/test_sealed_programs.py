"""Compiled programs that were exchanged, cut or changed on the disk are compiled again, and nobody runs them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from jax._src.lru_cache import LRUCache

from lorafusion_jax.sealed_programs import SealedCache

# Every line of the input is answered by a fork, which has imported everything and done nothing.
PROGRAM = """
import os, sys
import jax, jax.numpy as jnp
from lorafusion_jax.machine import prepare_machine
from lorafusion_jax.session.compiles import CompileCounter
for _ in sys.stdin:
    if os.fork():
        os.wait()
        continue
    prepare_machine()
    with CompileCounter() as programs:
        double, triple = jax.jit(lambda x: 2 * x + 1), jax.jit(lambda x: jnp.sin(x) * 3)
        print(double(jnp.float32(4)), float(triple(jnp.zeros(7)).sum()), programs.compiled, flush=True)
    os._exit(0)
"""


@pytest.fixture
def cache(tmp_path):
    cache = SealedCache(LRUCache(str(tmp_path), max_size=-1))
    for name in ("first", "second"):
        cache.put(name, name.encode() * 9)
    return cache


def file_of(tmp_path, name):
    return tmp_path / f"{name}-cache"


def test_what_was_written_is_read(cache):
    assert (cache.get("first"), cache.get("second"), cache.get("third")) == (b"first" * 9, b"second" * 9, None)


@pytest.mark.parametrize(
    "spoil",
    [lambda file: file.write_bytes(b""), lambda file: file.write_bytes(file.read_bytes()[:40]),
     lambda file: file.write_bytes(file.read_bytes()[:-1] + b"x"), lambda file: file.write_bytes(b"\0" * 500)],
    ids=["empty", "cut", "changed", "zeros"],
)  # fmt: skip
def test_a_spoilt_entry_is_thrown_away(cache, tmp_path, spoil):
    spoil(file_of(tmp_path, "first"))
    assert cache.get("first") is None
    assert not file_of(tmp_path, "first").exists()
    cache.put("first", b"anew")
    assert (cache.get("first"), cache.get("second")) == (b"anew", b"second" * 9)


def test_exchanged_entries_are_thrown_away(cache, tmp_path):
    first, other = file_of(tmp_path, "first"), file_of(tmp_path, "second")
    content = first.read_bytes()
    first.write_bytes(other.read_bytes())
    other.write_bytes(content)
    assert (cache.get("first"), cache.get("second")) == (None, None)


def test_a_process_compiles_anew_what_was_exchanged(tmp_path):
    home = os.environ | {"XDG_CACHE_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    home.pop("JAX_COMPILATION_CACHE_DIR", None)
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=home, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as forks:
        assert forks.stdin is not None
        assert forks.stdout is not None

        def run() -> tuple[str, int]:
            forks.stdin.write("\n")
            forks.stdin.flush()
            *numbers, compiled = forks.stdout.readline().split()
            return " ".join(numbers), int(compiled)

        assert run()[0] == "9.0 0.0"
        assert run() == ("9.0 0.0", 0)
        files = sorted((tmp_path / "lorafusion" / "programs").glob("*-cache"))
        assert len(files) > 1
        contents = [file.read_bytes() for file in files]
        for file, content in zip(files, contents[1:] + contents[:1], strict=True):
            file.write_bytes(content)
        assert run() == ("9.0 0.0", len(files))
        assert run() == ("9.0 0.0", 0)
