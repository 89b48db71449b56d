"""Registers, spills and shared memory of every kernel, from NVIDIA's assembler, on a machine without a GPU.

    python benchmarks/ptxas_report.py            # exits 1 if a kernel spills more than it is known to, or none is found

Needs jax-cuda13-plugin, jax-cuda13-pjrt (the version of jax) and nvidia-cuda-nvcc (ptxas); without them it says so
and exits 0, because there is nothing to check then.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4814304000000
 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150109880320 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" """
CASES = (  # backend, rank, adapters, rate, spill bytes that are known and measured (see LOG.md)
    ("pallas_mosaic_gpu", 16, 1, 0.0, 0),
    ("pallas_mosaic_gpu", 16, 4, 0.1, 0),
    ("pallas_mosaic_gpu", 64, 4, 0.1, 16),
    ("pallas_triton", 16, 4, 0.1, 0),
)


def main() -> int:
    missing = [name for name in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13") if not _found(name)]
    ptxas = find_ptxas()
    if missing or ptxas is None:
        print(f"nothing checked: {', '.join(missing + ([] if ptxas else ['ptxas']))} not installed")
        return 0
    dump = pathlib.Path(tempfile.mkdtemp(prefix="ptxas"))
    os.environ.update(
        JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_TO=str(dump),
        XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_emitter_re=.*",
    )  # fmt: skip
    sys.path.insert(0, str(ROOT))
    worst = 0
    try:
        for backend, rank, adapters, rate, known in CASES:
            compile_op(backend, rank, adapters, rate)
            print(f"{backend} r{rank} A{adapters} p{rate:g} (known spills: {known} bytes)")
            found = list(assembled(dump, ptxas))
            if not found:
                print("   NONE   no kernel of this package in the dump: names or dump flags changed")
                worst = 1
            for kernel, registers, spilled in found:
                bad = spilled > known
                worst = max(worst, int(bad))
                mark = "SPILLS" if bad else "ok"
                print(f"   {mark:6s} {kernel:30s} {registers:4d} registers {spilled:5d} bytes spilled")
            for path in dump.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(dump)
    return worst


def compile_op(backend: str, rank: int, adapters: int, rate: float) -> None:
    """Compiles forward and backward of one layer down to machine code."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

    import pallas_kernels as pk
    from pallas_kernels.arg_specs import LinearSpec, make_arrays

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200)
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    spec = LinearSpec(tokens=8192, in_features=4096, out_features=4096, rank=rank, adapters=adapters, rate=rate)
    arrays = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        jax.eval_shape(lambda: make_arrays(spec)),
    )

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_linear(x, arrays["w"], a, b, implementation=backend, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        jax.jit(step).trace(arrays).lower(lowering_platforms=("cuda",)).compile()


def assembled(dump: pathlib.Path, ptxas: str) -> Iterator[tuple[str, int, int]]:
    """Yields (kernel, registers, bytes of spill stores) for the kernels of this package."""
    for path in sorted(dump.glob("*.ptx")):
        command = [ptxas, "-v", "-arch=sm_90a", str(path), "-o", os.devnull]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        entry = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
        for name, spilled, registers in re.findall(entry, text, re.S):
            if name.startswith("lora_") or "mosaic" in name:
                yield name, int(registers), int(spilled)


def find_ptxas() -> str | None:
    spec = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) for folder in (spec.submodule_search_locations if spec else [])]
    found = [path for folder in folders for path in folder.glob("*/bin/ptxas")]
    return str(found[0]) if found else shutil.which("ptxas")


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
