"""Programs for CUDA devices, made on a machine without one."""

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

A100 = AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", num_cores=108, platform="gpu")
A10 = AbstractDevice(device_kind="NVIDIA A10", num_cores=72, platform="gpu")  # sm_86
L40 = AbstractDevice(device_kind="NVIDIA L40", num_cores=142, platform="gpu")  # sm_89; jax knows no L40S by name
H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")


def lowered(device, function, *arguments) -> str:
    """The program's text."""
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()


def num_kernels(text: str) -> tuple[int, int]:
    """Triton's and Mosaic's in a program."""
    return text.count("__gpu$xla.gpu.triton"), text.count("mosaic_gpu_v2")
