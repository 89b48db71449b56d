"""Reports registers and spills of every kernel, and the main loops of products, from ptxas, without a GPU.

    python -m benchmarks.ptxas_report     # exits 1 if a kernel spills more than its limit, or no kernel is found

Needs jax-cuda13-plugin, jax-cuda13-pjrt (of jax's version) and nvidia-cuda-nvcc (ptxas); without them it says so and
exits 0. If nvdisasm is installed, it also checks the main loop of every product: moves of addresses from vector to
uniform registers (R2UR) in each step make it about 15 % slower, and fail the check.
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
from collections.abc import Callable, Iterator
from functools import partial

ROOT = pathlib.Path(__file__).resolve().parent.parent
H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4814304000000
 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150109880320 shared_memory_per_block_optin: 232448
 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }
platform_name: "CUDA" """
LINEAR_CASES = (  # backend, rank, adapters, rate, known spill bytes (see LOG.md)
    ("pallas_mosaic_gpu", 16, 1, 0.0, 0),
    ("pallas_mosaic_gpu", 16, 4, 0.1, 0),
    ("pallas_mosaic_gpu", 64, 4, 0.1, 0),
    ("pallas_mosaic_gpu", 64, 4, 0.0, 0),
    ("pallas_triton", 16, 4, 0.1, 0),
    ("pallas_triton", 64, 4, 0.1, 0),
)
MLP_CASES = ((16, 0.1, 0), (16, 0.0, 0), (32, 0.1, 0))  # rank, rate, spills
ATTENTION_SPILLS = 248  # dk and dv
PRODUCT = "kernel_mosaic_gpu_kernel"  # of `linear/hopper/gemm.py`


def main() -> int:
    missing = [name for name in ("jax_cuda13_plugin", "jax_plugins.xla_cuda13") if not _found(name)]
    ptxas, nvdisasm = find_tool("ptxas"), find_tool("nvdisasm")
    if missing or ptxas is None:
        print(f"nothing checked: {', '.join(missing + ([] if ptxas else ['ptxas']))} not installed")
        return 0
    dump = pathlib.Path(tempfile.mkdtemp(prefix="ptxas"))
    os.environ.update(
        JAX_PLATFORMS="cpu", JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1", MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_TO=str(dump),
        XLA_FLAGS=f"--xla_dump_to={dump} --xla_dump_emitter_re=.*",
    )  # fmt: skip
    worst = 0
    try:
        for name, known, compile_one in cases():
            compile_one()
            print(f"{name} (known spills: {known} bytes)")
            found = list(assembled(dump, ptxas, nvdisasm))
            if not found:
                print("   NONE   no kernel of this package in the dump: names or dump flags changed")
                worst = 1
            if nvdisasm and name.startswith("linear pallas_mosaic_gpu") and all(moves is None for *_, moves in found):
                print(f"   NONE   no main loop of {PRODUCT} read: its name or the disassembly changed")
                worst = 1
            for kernel, registers, spilled, moves in found:
                mark = "SPILLS" if spilled > known else "MOVES" if moves else "ok"
                worst = max(worst, int(mark != "ok"))
                loop = "" if moves is None else f" {moves:3d} moves to uniform registers in a step"
                print(f"   {mark:6s} {kernel:30s} {registers:4d} registers {spilled:5d} bytes spilled{loop}")
            for path in dump.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(dump)
    return worst


def cases() -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yields (name, known spills, function that compiles it)."""
    for backend, rank, adapters, rate, known in LINEAR_CASES:
        yield f"linear {backend} r{rank} A{adapters} p{rate:g}", known, partial(linear, backend, rank, adapters, rate)
    for rank, rate, known in MLP_CASES:
        yield f"mlp r{rank} A4 p{rate:g}", known, partial(mlp, rank, rate)
    yield "attention", ATTENTION_SPILLS, attention
    yield "norm with residual", 0, norm


def linear(backend: str, rank: int, adapters: int, rate: float) -> None:
    """Forward and backward of one layer."""
    import jax

    import pallas_kernels as pk
    from pallas_kernels.arg_specs import LinearSpec, make_arrays

    spec = LinearSpec(tokens=8192, in_features=4096, out_features=4096, rank=rank, adapters=adapters, rate=rate)

    def step(arrays):
        def layer(x, a, b):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_linear(x, arrays["w"], a, b, implementation=backend, **rest)

        y, vjp = jax.vjp(layer, arrays["x"], arrays["a"], arrays["b"])
        return y, *vjp(arrays["dy"])

    compile_for_h200(step, lambda: make_arrays(spec))


def mlp(rank: int, rate: float) -> None:
    import jax
    import jax.numpy as jnp

    import pallas_kernels as pk

    tokens, width, hidden, adapters = 8192, 4096, 14336, 4
    sizes = ((width, hidden), (width, hidden), (hidden, width))

    def make():
        drop = pk.Dropout(
            rate=jnp.full(adapters, rate), key=jnp.zeros(adapters, jnp.uint32), row_key=jnp.zeros(tokens, jnp.uint32)
        )
        return {
            "x": jnp.zeros((tokens, width), jnp.bfloat16),
            "ws": [jnp.zeros(size, jnp.bfloat16) for size in sizes],
            "as_": [jnp.zeros((adapters, k, rank)) for k, _ in sizes],
            "bs": [jnp.zeros((adapters, rank, n)) for _, n in sizes],
            "tile_adapter": jnp.zeros(tokens // 128, jnp.int32),
            "scale": jnp.ones(adapters),
            "dropout": drop if rate else None,
        }

    def step(arrays):
        def run(x, as_, bs):
            rest = {name: arrays[name] for name in ("tile_adapter", "scale", "dropout")}
            return pk.multi_lora_mlp(x, arrays["ws"], as_, bs, down_dropout=arrays["dropout"], **rest)

        y, vjp = jax.vjp(run, arrays["x"], arrays["as_"], arrays["bs"])
        return vjp(y)

    compile_for_h200(step, make)


def attention() -> None:
    import jax.numpy as jnp

    from pallas_kernels.attention import attention_backward, attention_forward, document_rows

    def step(q, k, v, ids, offsets, lengths):
        o, saved = attention_forward(q, k, v, *document_rows(ids, offsets, lengths))
        return attention_backward(saved, o)

    wide, documents = ((8192, 32, 128), (8192, 8, 128), (8192, 8, 128)), (8192, 17, 16)
    compile_for_h200(
        step,
        lambda: (
            *(jnp.zeros(shape, jnp.bfloat16) for shape in wide),
            *(jnp.zeros(size, jnp.int32) for size in documents),
        ),
        unpack=True,
    )


def norm() -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.norm import add_rms_norm

    def step(x, delta, weight):
        out, vjp = jax.vjp(lambda x, delta: add_rms_norm(x, delta, weight, eps=1e-5), x, delta)
        return vjp(out)

    wide = (8192, 4096)
    compile_for_h200(
        step,
        lambda: (jnp.zeros(wide, jnp.bfloat16), jnp.zeros(wide, jnp.bfloat16), jnp.zeros(4096, jnp.bfloat16)),
        unpack=True,
    )


def compile_for_h200(step: Callable, make: Callable, *, unpack: bool = False) -> None:
    """Compiles a function to machine code, for the abstract arrays of `make`."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200)
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    arrays = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), jax.eval_shape(make)
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(step).trace(*arrays) if unpack else jax.jit(step).trace(arrays)
        traced.lower(lowering_platforms=("cuda",)).compile()


def assembled(dump: pathlib.Path, ptxas: str, nvdisasm: str | None) -> Iterator[tuple[str, int, int, int | None]]:
    """Yields (kernel, registers, bytes of spill stores, moves per step of products) for this package's kernels."""
    for path in sorted(dump.glob("*.ptx")):
        binary = path.with_suffix(".cubin")
        command = [ptxas, "-v", "-arch=sm_90a", str(path), "-o", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        entry = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
        for name, spilled, registers in re.findall(entry, text, re.S):
            if name.startswith(("lora_", "rms_norm")) or "mosaic" in name:
                moves = None
                if nvdisasm and name == PRODUCT:
                    code = subprocess.run([nvdisasm, "-c", str(binary)], capture_output=True, text=True, check=True)
                    moves = moves_in_a_step(code.stdout)
                yield name, int(registers), int(spilled), moves


def moves_in_a_step(code: str) -> int | None:
    """Number of R2UR instructions in the main loop, the shortest loop with a product; None if there is none.

    Args:
        code: nvdisasm's output for one kernel.
    """
    begins, steps, lines = {}, [], []
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            begins[label[1]] = len(lines)
        elif re.search(r"/\*[0-9a-f]{4,}\*/", line):
            lines.append(line)
            back = re.search(r"BRA `\((\.L_x_\d+)\)", line)
            if back and back[1] in begins:  # a forward branch has no label yet
                steps.append(lines[begins[back[1]] :])
    loops = [step for step in steps if any("HGMMA" in line for line in step)]
    return sum("R2UR" in line for line in min(loops, key=len)) if loops else None


def find_tool(name: str) -> str | None:
    """Finds a program in NVIDIA's Python packages or on the path."""
    spec = importlib.util.find_spec("nvidia")
    folders = [pathlib.Path(folder) for folder in (spec.submodule_search_locations if spec else [])]
    found = [path for folder in folders for path in folder.glob(f"*/bin/{name}")]
    return str(found[0]) if found else shutil.which(name)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
