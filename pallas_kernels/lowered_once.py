"""Lowers a function once for all modules that call it with the same shapes.

A call that XLA splits over automatic mesh axes is a module of its own: jax makes it while XLA compiles, and lowers it
anew for each call. A Mosaic kernel takes half a second to lower, and forward and backward of a layer have about thirty.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import lru_cache
from typing import Any

import jax
from jax import export
from jax.sharding import AbstractMesh, get_abstract_mesh, use_abstract_mesh

from pallas_kernels import config_store
from pallas_kernels.device import KERNEL_CALLS, device_kind, target_platform

# jax promises nothing of these calls to other versions of itself; these programs stay in this process.
CHECKS = tuple(export.DisabledSafetyCheck.custom_call(name) for name in KERNEL_CALLS)
MOST = 256  # programs of some hundred kilobytes


def lowered_once(function: Callable, static: Hashable, *operands: Any) -> Any:
    """function(static, *operands), by the program of an earlier call with the same shapes.

    Args:
        function: pure, for one device, without collectives; it is kept as long as the process lives.
        operands: pytrees of arrays.
    """
    leaves, tree = jax.tree.flatten(operands)
    types = [jax.typeof(leaf) for leaf in leaves]
    shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type) for leaf in types)
    program = _program(function, static, tree, shapes, _surroundings())
    return function(static, *operands) if program is None else program.call(*leaves)


def _surroundings() -> tuple[Hashable, ...]:
    """What else decides about a program; the first is the device it is for, if this machine has none."""
    device, config = getattr(get_abstract_mesh(), "abstract_device", None), jax.config
    numbers = config.jax_enable_x64, config.jax_default_matmul_precision
    return device, target_platform(), config_store.used_digest(device_kind()), numbers


@lru_cache(maxsize=MOST)
def _program(
    function: Callable, static: Hashable, tree: Any, shapes: tuple[Any, ...], surroundings: tuple[Any, ...]
) -> export.Exported | None:
    """The program; None for what jax cannot export, such as a kernel that is interpreted by calls of the host."""

    def of_leaves(*leaves: Any) -> Any:
        return function(static, *jax.tree.unflatten(tree, leaves))

    device, platform, *_ = surroundings
    platforms = ("cuda",) if platform == "gpu" else None  # None: this machine's
    try:
        with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            return export.export(jax.jit(of_leaves), platforms=platforms, disabled_checks=CHECKS)(*shapes)
    except (NotImplementedError, ValueError):  # an error of the function itself comes again when it runs
        return None
