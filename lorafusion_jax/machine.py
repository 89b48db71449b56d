"""What jax must know before it touches a device, the same for every command and call."""

from __future__ import annotations

import os
from pathlib import Path

from lorafusion_jax.files import user_cache
from lorafusion_jax.tuning_table import use_tables

MEMORY_FRACTION = 0.95  # of a GPU; CUDA, cuDNN and NCCL need about 1 GiB of the rest
# If one of several GPUs runs out of memory inside a program, XLA lets the others wait forever (jax 0.11.2). The limit
# is longer than the differences in compile time between processes.
GPUS_WAIT = "--xla_gpu_nccl_termination_timeout_seconds=600"


def program_cache() -> Path:
    """Where compiled programs are kept, `$XDG_CACHE_HOME/lorafusion/programs` on Linux; it may be removed any time."""
    return user_cache("programs")


def prepare_machine(*, cache: bool = True) -> None:
    """Sets what jax must know before it touches a device.

    Most of a GPU's memory may be used: jax's own default of 75 % leaves 35 GB of an H200 idle, and what fits decides
    what has to be computed twice. Compiled programs are kept between runs, unless jax was told of another place; small
    ones, too, for a start has a hundred of them. GPUs that wait for another one end the program after ten minutes.
    Anything the user has told jax stays. Tables of `lorafusion tune` decide the defaults of the ops.

    Args:
        cache: whether programs are kept.
    Raises:
        ConfigError, ErrorList: a tuning table is broken or of another device.
    """
    import jax

    flags = os.environ.get("XLA_FLAGS", "")
    if GPUS_WAIT.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {GPUS_WAIT}".strip()
    if jax.config.jax_pjrt_client_create_options is None:
        jax.config.update("jax_pjrt_client_create_options", {"memory_fraction": MEMORY_FRACTION})
    if not cache:
        jax.config.update("jax_enable_compilation_cache", False)
    elif not jax.config.jax_compilation_cache_dir:
        from lorafusion_jax.sealed_programs import seal_programs

        seal_programs()
        jax.config.update("jax_compilation_cache_dir", str(program_cache()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    use_tables()
