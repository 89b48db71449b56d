"""Equal programs compile once for a whole suite: whichever test, process or device needs them."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path
from typing import Any

import jax
from jax import monitoring
from jax._src import cache_key, compilation_cache, compiler


def share_programs(patch: Any) -> None:
    """Makes jax's cache of compiled programs, on CPUs, one for all devices and processes.

    Keys are without the numbers of devices, as jax has them on GPUs, and every process keeps what it compiles. Whoever
    needs a program that another one is compiling waits for it.

    Args:
        patch: pytest's, or whatever else has a `setattr`.
    """
    hash_options, read_cache = cache_key._hash_serialized_compile_options, compiler._cache_read

    def hash_without_devices(hash_obj, options, strip_device_assignment=True):
        return hash_options(hash_obj, options, strip_device_assignment=True)

    def compile_once(backend, computation, devices, options, callbacks, name, key):
        with Path(jax.config.jax_compilation_cache_dir, f"{key}-lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            kept, _ = read_cache(name, key, options, backend, devices, callbacks)
            if kept is not None:
                monitoring.record_event("/jax/compilation_cache/cache_hits")
                return kept
            began = time.monotonic()
            program = compiler.backend_compile_and_load(backend, computation, devices, options, callbacks)
            seconds = int(time.monotonic() - began)
            compilation_cache.put_executable_and_time(key, name, program, backend, seconds)
            return program

    patch.setattr(cache_key, "_hash_serialized_compile_options", hash_without_devices)
    patch.setattr(cache_key, "_hash_accelerator_config", lambda hash_obj, devices: None)
    patch.setattr(compiler, "_compile_and_write_cache", compile_once)
