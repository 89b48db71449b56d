"""Memory of devices, and the share of it that a run may use."""

from __future__ import annotations

GIB = 2**30
DEVICE_BYTES = {  # memory that the driver reports
    "h100": 79 * GIB,
    "h200": 140 * GIB,
    "a100-40gb": 39 * GIB,
    "a100": 79 * GIB,
    "l40s": 44 * GIB,
    "a6000": 47 * GIB,
    "rtx6000-ada": 47 * GIB,
}
USABLE = 0.92  # share of the device; the rest is for NOT_MODELLED
ALLOCATOR_USABLE = 0.97  # share of an allocator's limit (95 % of the device), which excludes CUDA and NCCL
# Less with fsdp: a backward pass gathers the weights of all layers of a program into one contiguous block, which a
# nearly full allocator cannot provide.
GATHERING = 0.05
NOT_MODELLED = (
    "copies and temporaries that the compiler adds",
    "fragmentation of the allocator",
    "CUDA, cuDNN and NCCL themselves (about 1 GiB)",
    "host memory",
)
