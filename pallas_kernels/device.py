"""The device a program is built for: the attached one, or the abstract one of an ahead-of-time lowering."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes.util import find_library
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels.policy import HOPPER_SMS

SHARED_KIB = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}  # of other GPUs: 99
LEAST_SHARED_KIB = 99  # what all from sm_80 on have

TARGETS = {  # the vendor's name, as jax knows it, and multiprocessors
    "h200": ("NVIDIA H200", 132),
    "h100": ("NVIDIA H100 80GB HBM3", 132),
    "a100": ("NVIDIA A100-SXM4-80GB", 108),
    "l40s": ("NVIDIA L40", 142),
    "a10": ("NVIDIA A10", 72),
}
KERNEL_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton")  # custom calls that programs with our kernels hold


@contextmanager
def target(name: str) -> Iterator[None]:
    """Traces programs of one device for a GPU that this machine need not have, with its kernels.

    Without it, `jax.export` and `lower(lowering_platforms=("cuda",))` on another machine take what that machine
    prefers, which is XLA's form.

    Args:
        name: h200, h100, a100, l40s or a10.

    Raises:
        ValueError: there is no such target.

    Example:
        >>> with target("h200"):
        ...     is_hopper(), device_kind()
        (True, 'NVIDIA H200')
    """
    if name not in TARGETS:
        raise ValueError(f"target {name!r} is not known: one of {', '.join(TARGETS)}")
    kind, cores = TARGETS[name]
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        yield


def target_platform() -> str:
    """ "gpu", "cpu" or "tpu"."""
    abstract = _abstract_device()
    return abstract.platform if abstract is not None else jax.default_backend()


def device_kind() -> str:
    """The vendor's name, e.g. "NVIDIA H200"."""
    abstract = _abstract_device()
    return abstract.device_kind if abstract is not None else jax.devices()[0].device_kind


def num_sms() -> int:
    """Multiprocessors of the GPU: the size of a persistent grid."""
    abstract = _abstract_device()
    device = abstract if abstract is not None else jax.devices()[0]
    return getattr(device, "num_cores", None) or getattr(device, "core_count", None) or HOPPER_SMS


def shared_memory_bytes() -> int:
    """What one program may ask for: NVIDIA's limits by compute capability (CUDA C++ Programming Guide, 16.1).

    An abstract device has no capability: its name tells. A GPU that is not known gets the smallest limit.
    """
    if interprets():
        return 227 * 1024
    capability = compute_capability()
    if capability is not None:
        return SHARED_KIB.get(capability, LEAST_SHARED_KIB) * 1024
    if is_hopper():
        return 227 * 1024
    return (163 if re.search(r"\b(A100|A800|A30)\b", device_kind()) else LEAST_SHARED_KIB) * 1024


def compute_capability() -> str | None:
    """ "9.0" for an H200; None for an abstract device and for what is no NVIDIA GPU."""
    if _abstract_device() is not None or target_platform() not in ("gpu", "cuda"):
        return None
    capability = str(getattr(jax.devices()[0], "compute_capability", ""))
    return capability if capability.replace(".", "").isdigit() else None


def is_hopper() -> bool:
    """True on sm_90: H100, H200, GH200, H800, H20."""
    if target_platform() not in ("gpu", "cuda"):
        return False
    capability = compute_capability()
    if capability is not None:
        return capability.startswith("9.")
    return any(name in device_kind() for name in ("H100", "H200", "GH200", "H800", "H20"))


def has_fp8_products() -> bool:
    """True where matrix units multiply 8-bit floats: sm_89 (L40S, RTX 4090) and later."""
    if target_platform() not in ("gpu", "cuda"):
        return False
    capability = compute_capability()
    if capability is None:
        return is_hopper()
    return tuple(int(part) for part in capability.split(".")) >= (8, 9)


@functools.cache
def ignores_setmaxnreg() -> bool:
    """Whether Mosaic's kernels cannot move registers between their warpgroups.

    jax 0.12 assembles them by nvJitLink where that library is installed, as a unit that may be linked with others; for
    such units the assembler ignores `setmaxnreg` (its message C7504). jax 0.11 calls ptxas, which obeys.
    """
    if tuple(int(part) for part in version("jaxlib").split(".")[:2]) < (0, 12):
        return False
    packages = find_spec("nvidia")
    folders = [Path(folder) for folder in (packages.submodule_search_locations or () if packages else ())]
    inside = any(next(folder.glob("*/lib/libnvJitLink.so.*"), None) for folder in folders)
    return inside or find_library("nvJitLink") is not None


def compiler_options() -> dict[str, bool]:
    """Options of XLA with which programs of these ops run fastest on this device; none on devices not measured.

    On Hopper this disables XLA's Triton GEMMs. They lose to cuBLAS on the wide products of a layer, and cuBLAS can add
    to its output: the input gradients of q, k and v then need no pass of their own (144 us of a layer of Llama-3.1-8B's
    shape, 8192 tokens, on an H200 with jax 0.11.2). Measured with our kernels; leave it out with
    `implementation="xla"`, whose low-rank products are XLA's, and where XLA's form serves a table of examples that have
    no multiple of 64 rows (a step of four adapters in ViT-L/14: 104 ms without it, 114 ms with it).

    Example:
        >>> step = jax.jit(lambda x: x @ x, compiler_options=compiler_options())
        >>> step(jax.numpy.ones((2, 2))).tolist()
        [[2.0, 2.0], [2.0, 2.0]]
    """
    return {"xla_gpu_enable_triton_gemm": False} if is_hopper() else {}


def wide_integers() -> bool:
    """True under `jax_enable_x64`: grid positions and loop counters are int64 then, and kernels index with int32."""
    return bool(jax.config.jax_enable_x64)


def interprets() -> bool:
    """True where Pallas-Triton kernels can only be interpreted."""
    return target_platform() == "cpu"


def _abstract_device():
    return getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
