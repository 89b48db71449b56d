"""Programs for CUDA devices, made on a machine without one."""

import jax
from jax.extend import core as jex
from jax.interpreters import partial_eval
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

A100 = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
A10 = AbstractDevice(device_kind="NVIDIA A10", num_cores=72, platform="gpu")  # sm_86
L40 = AbstractDevice(device_kind="NVIDIA L40", num_cores=142, platform="gpu")  # sm_89; jax knows no L40S by name
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
TRITON, MOSAIC = ("pallas_call",), ("mpmd_map", "core_map")  # jax's names of a kernel


def lowered(device, function, *arguments) -> str:
    """The program's text."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_kernels(text: str) -> tuple[int, int]:
    """Triton's and Mosaic's in a program."""
    return text.count("__gpu$xla.gpu.triton"), text.count("mosaic_gpu_v2")


def chosen_kernels(device, function, *arguments) -> tuple[int, int]:
    """Triton's and Mosaic's that a program calls; lowering them takes ten times as long as tracing."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jaxpr = jax.jit(function).trace(*arguments).jaxpr.jaxpr
    alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    names = list(_primitives(alive))
    return sum(name in TRITON for name in names), sum(name in MOSAIC for name in names)


def _primitives(jaxpr):
    """Names of all primitives but for those inside of kernels."""
    inner = jex.ClosedJaxpr, jex.Jaxpr
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        if equation.primitive.name in TRITON + MOSAIC:
            continue
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: isinstance(leaf, inner)):
            if isinstance(value, inner):
                yield from _primitives(value.jaxpr if isinstance(value, jex.ClosedJaxpr) else value)
