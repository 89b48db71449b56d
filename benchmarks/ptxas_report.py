"""Reports registers, spills and shared memory of every kernel, and the main loops of products, without a GPU.

    python -m benchmarks.ptxas_report                  # an H200
    python -m benchmarks.ptxas_report --gpu l40        # or a100, a10: Triton's kernels, minutes per case

Exits 1 if a kernel spills more than its limit, does not fit into the GPU's shared memory, or is not found.

Needs jax-cuda13-plugin, jax-cuda13-pjrt (of jax's version) and nvidia-cuda-nvcc (ptxas); without them it says so and
exits 0. If nvdisasm is installed, it also checks the main loop of every product: moves of addresses from vector to
uniform registers (R2UR) in each step make it about 15 % slower, and fail the check.
"""

from __future__ import annotations

import argparse
import dataclasses
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
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What XLA must know of a GPU that is not there."""

    kind: str
    capability: tuple[int, int]
    cores: int
    shared_kib: int  # of one program; a multiprocessor has 1 KiB more
    threads: int = 2048  # of a multiprocessor
    l2_mib: int
    bandwidth: int  # bytes per second
    memory_gib: int
    clock_ghz: float
    accelerated: bool = False  # sm_90a

    @property
    def arch(self) -> str:
        return f"sm_{self.capability[0]}{self.capability[1]}{'a' if self.accelerated else ''}"

    @property
    def target(self) -> str:
        """The GPU as text of XLA's protocol buffer."""
        major, minor = self.capability
        extension = " feature_extension: ACCELERATED_FEATURES" if self.accelerated else ""
        return f"""gpu_device_info {{ threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: {(self.shared_kib + 1) * 1024} threads_per_core_limit: {self.threads}
 core_count: {self.cores} fpus_per_core: {64 if major == 8 and minor == 0 else 128}
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: {self.bandwidth}
 l2_cache_size: {self.l2_mib * 2**20} clock_rate_ghz: {self.clock_ghz}
 device_memory_size: {self.memory_gib * 2**30} shared_memory_per_block_optin: {self.shared_kib * 1024}
 cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 }}
platform_name: "CUDA" """


GPUS = {
    "h200": Gpu(
        kind="NVIDIA H200", capability=(9, 0), cores=132, shared_kib=227, l2_mib=60, bandwidth=4814304000000,
        memory_gib=139, clock_ghz=1.98, accelerated=True,
    ),
    "a100": Gpu(
        kind="NVIDIA A100-SXM4-80GB", capability=(8, 0), cores=108, shared_kib=163, l2_mib=40,
        bandwidth=2039000000000, memory_gib=79, clock_ghz=1.41,
    ),
    "a10": Gpu(
        kind="NVIDIA A10", capability=(8, 6), cores=72, shared_kib=99, threads=1536, l2_mib=6, bandwidth=600000000000,
        memory_gib=22, clock_ghz=1.7,
    ),
    "l40": Gpu(  # jax knows the L40S only where there is one
        kind="NVIDIA L40", capability=(8, 9), cores=142, shared_kib=99, threads=1536, l2_mib=96,
        bandwidth=864000000000, memory_gib=44, clock_ghz=2.49,
    ),
}  # fmt: skip
LINEAR_CASES = (  # backend, rank, adapters, rate, known spill bytes (see LOG.md)
    ("pallas_mosaic_gpu", 16, 1, 0.0, 0),
    ("pallas_mosaic_gpu", 16, 4, 0.1, 0),
    ("pallas_mosaic_gpu", 64, 4, 0.1, 0),
    ("pallas_mosaic_gpu", 64, 4, 0.0, 0),
    ("pallas_triton", 16, 4, 0.1, 0),
    ("pallas_triton", 64, 4, 0.1, 0),
)
PORTABLE_CASES = (  # rank, adapters, rate, known spill bytes of the pass over dY on an A100, A10 or L40
    (16, 4, 0.1, 0),
    (64, 4, 0.1, 36),
    (256, 4, 0.1, 724),
    (64, 1, 0.0, 36),
)
PORTABLE_ATTENTION = ((64, 0), (128, 72))  # head width, known spill bytes of dk and dv
PORTABLE_NORM_SPILLS = 8
MLP_CASES = ((16, 0.1, 0), (16, 0.0, 0), (32, 0.1, 0))  # rank, rate, spills
EXPERT_CASES = ((8, 4, False), (64, 4, False), (8, 4, True), (64, 4, True))  # rank, adapters, in 8-bit floats
ATTENTION_SPILLS = 248  # dk and dv
KERNELS = (
    "lora_", "rms_norm", "attention", "experts", "round_rows", "delta_rule", "paged_attention", "down_all", "row_",
)  # fmt: skip
PRODUCT = "kernel_mosaic_gpu_kernel"  # of `linear/hopper/gemm.py`


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", choices=GPUS, default="h200")
    parser.add_argument("--only", default="", help="cases whose names contain this text")
    asked = parser.parse_args()
    gpu = GPUS[asked.gpu]
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
        for name, known, compile_one in cases(gpu):
            if asked.only not in name:
                continue
            print(f"{name} (known spills: {known} bytes)", flush=True)
            try:
                compile_one()
            except Exception as error:  # above all too much shared memory
                print(f"   FAILS  {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
                worst = 1
                continue
            kernels = list(assembled(dump, ptxas, nvdisasm, gpu.arch))
            shared = shared_bytes(dump)
            if not kernels:
                print("   NONE   no kernel of this package in the dump: names or dump flags changed")
                worst = 1
            if nvdisasm and name.startswith("linear pallas_mosaic_gpu") and all(moves is None for *_, moves in kernels):
                print(f"   NONE   no main loop of {PRODUCT} read: its name or the disassembly changed")
                worst = 1
            for kernel, registers, spilled, moves in kernels:
                asks = shared.get(kernel, 0)
                mark = "SPILLS" if spilled > known else "MOVES" if moves else "ok"
                mark = "SHARED" if asks > gpu.shared_kib * 1024 else mark
                worst = max(worst, int(mark != "ok"))
                loop = "" if moves is None else f" {moves:3d} moves to uniform registers in a step"
                print(f"   {mark:6s} {kernel:30s} {registers:4d} registers {spilled:5d} bytes spilled"
                      f" {asks / 1024:6.1f} KiB shared{loop}")  # fmt: skip
            for path in dump.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        shutil.rmtree(dump)
    return worst


def cases(gpu: Gpu) -> Iterator[tuple[str, int, Callable[[], None]]]:
    """Yields (name, known spills, function that compiles it)."""
    if not gpu.accelerated:
        for rank, adapters, rate, known in PORTABLE_CASES:
            name = f"linear pallas_triton r{rank} A{adapters} p{rate:g}"
            yield name, known, partial(linear, "pallas_triton", rank, adapters, rate, gpu=gpu)
        for width, known in PORTABLE_ATTENTION:
            yield f"attention pallas_triton C{width}", known, partial(triton_attention, width, gpu=gpu)
        yield "norm with residual", PORTABLE_NORM_SPILLS, partial(norm, "pallas_triton", gpu=gpu)
        return
    for backend, rank, adapters, rate, known in LINEAR_CASES:
        yield f"linear {backend} r{rank} A{adapters} p{rate:g}", known, partial(linear, backend, rank, adapters, rate)
    for rank, rate, known in MLP_CASES:
        yield f"mlp r{rank} A4 p{rate:g}", known, partial(mlp, rank, rate)
    for rank, adapters, fp8 in EXPERT_CASES:
        yield f"experts{' fp8' * fp8} r{rank} A{adapters}", 0, partial(experts, rank, adapters, fp8=fp8)
    yield "attention", ATTENTION_SPILLS, attention
    yield "norm with residual", 0, norm
    yield "delta rule", 0, delta_rule
    yield "decoding", 0, decoding
    yield "joined products of decoding", 0, joined_products
    yield "joined products of decoding, 8-bit", 0, partial(joined_products, fp8=True)


def linear(backend: str, rank: int, adapters: int, rate: float, gpu: Gpu = GPUS["h200"]) -> None:
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

    compile_for(gpu, step, lambda: make_arrays(spec))


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

    compile_for(GPUS["h200"], step, make)


def experts(rank: int, adapters: int, *, fp8: bool) -> None:
    """Forward and backward of gate and up of Qwen3-30B-A3B's experts."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.experts.api import Lora, expert_linear
    from pallas_kernels.experts.fp8 import Fp8Experts
    from pallas_kernels.experts.rows import sort_rows
    from pallas_kernels.experts.sizes import sorted_rows

    tokens, count, active, width, out = 8192, 128, 8, 2048, 1536

    def step(chosen, adapter, x, w, a, b):
        rows = sort_rows(chosen, adapter, experts=count, adapters=adapters)
        run = lambda x, a, b: expert_linear(x, w, rows, Lora(a, b, jnp.ones(adapters)), experts=count)  # noqa: E731
        y, vjp = jax.vjp(run, x, a, b)
        return vjp(y)

    def kernels():
        if not fp8:
            return jnp.zeros((count * width, out), jnp.bfloat16)
        values = jnp.zeros((count * out, width), jnp.float8_e4m3fn)
        return Fp8Experts(values=values, scales=jnp.zeros((count, out)))

    compile_for(
        GPUS["h200"],
        step,
        lambda: (
            jnp.zeros((tokens, active), jnp.int32),
            jnp.zeros(tokens, jnp.int32),
            jnp.zeros((sorted_rows(tokens, active, count), width), jnp.bfloat16),
            kernels(),
            jnp.zeros((adapters, count, width, rank)),
            jnp.zeros((adapters, count, rank, out)),
        ),
        unpack=True,
    )


def attention() -> None:
    import jax.numpy as jnp

    from pallas_kernels.attention import attention_backward, attention_forward, document_rows

    def step(q, k, v, ids, offsets, lengths):
        o, saved = attention_forward(q, k, v, *document_rows(ids, offsets, lengths))
        return attention_backward(saved, o)

    wide, documents = ((8192, 32, 128), (8192, 8, 128), (8192, 8, 128)), (8192, 17, 16)
    compile_for(
        GPUS["h200"],
        step,
        lambda: (
            *(jnp.zeros(shape, jnp.bfloat16) for shape in wide),
            *(jnp.zeros(size, jnp.int32) for size in documents),
        ),
        unpack=True,
    )


def triton_attention(width: int, gpu: Gpu) -> None:
    import jax.numpy as jnp

    from pallas_kernels.attention import document_rows
    from pallas_kernels.attention.triton.api import triton_attention_backward, triton_attention_forward

    def step(q, k, v, ids, offsets, lengths):
        o, saved = triton_attention_forward(q, k, v, *document_rows(ids, offsets, lengths))
        return triton_attention_backward(saved, o)

    compile_for(
        gpu,
        step,
        lambda: (
            *(jnp.zeros((8192, heads, width), jnp.bfloat16) for heads in (32, 8, 8)),
            *(jnp.zeros(size, jnp.int32) for size in (8192, 17, 16)),
        ),
        unpack=True,
    )


def delta_rule() -> None:
    """The steps from chunk to chunk of 8192 rows in eight samples, with the heads of Qwen3.5-9B."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.delta_rule import triton

    def step(u, w, late, decay, first):
        out, vjp = jax.vjp(lambda *wide: triton.walk(*wide, first), u, w, late, decay)
        return vjp(out)

    chunks, heads = 135, 32
    compile_for(
        GPUS["h200"],
        step,
        lambda: (
            *(jnp.zeros((chunks, heads, 64, 128), jnp.float32) for _ in range(3)),
            jnp.zeros((chunks, heads), jnp.float32),
            jnp.zeros(chunks, bool),
        ),
        unpack=True,
    )


def decoding() -> None:
    """Attention to blocks, and the products with A of 16 adapters, for 64 rows of Qwen3-8B's shape."""
    import jax.numpy as jnp

    from pallas_kernels.attention.triton.paged import paged_attention_kernel
    from pallas_kernels.linear.triton.down_all import down_all

    def step(q, keys, values, tables, position, x, a):
        return paged_attention_kernel(q, keys, values, tables, position, scale=0.1), down_all(x, [a, a, a])

    shapes = [(64, 32, 128), (4096, 32, 8, 128), (4096, 32, 8, 128), (64, 36), (64,), (64, 4096), (4096, 256)]
    dtypes = [jnp.bfloat16] * 3 + [jnp.int32] * 2 + [jnp.bfloat16] * 2
    compile_for(
        GPUS["h200"], step, lambda: tuple(jnp.zeros(*pair) for pair in zip(shapes, dtypes, strict=True)), unpack=True
    )


def joined_products(*, fp8: bool = False) -> None:
    """Query, key and value of Qwen3-8B for 64 rows of 16 adapters."""
    import jax.numpy as jnp

    from pallas_kernels.linear.triton.row_products import row_products
    from pallas_kernels.linear.triton.row_products_8bit import row_products as row_products_8bit
    from pallas_kernels.problem import Operands, Static
    from pallas_kernels.quantised.fp8 import Fp8Weight

    rows, width, adapters, rank, outs = 64, 4096, 16, 16, (4096, 1024, 1024)

    def weight(n: int) -> Any:
        if not fp8:
            return jnp.zeros((width, n), jnp.bfloat16)
        return Fp8Weight(values=jnp.zeros((n, width), jnp.float8_e4m3fn), scales=jnp.ones(n))

    def make():
        return Operands(
            x=jnp.zeros((rows, width), jnp.bfloat16),
            ws=tuple(weight(n) for n in outs),
            as_=tuple(jnp.zeros((adapters, width, rank), jnp.bfloat16) for _ in outs),
            bs=tuple(jnp.zeros((adapters, rank, n), jnp.bfloat16) for n in outs),
            biases=(None,) * len(outs),
            tile_adapter=jnp.zeros(rows, jnp.int32),
            scale=jnp.ones(adapters),
            dropout=None,
        )

    static = Static(tile=1, num_adapters=adapters, single=False)
    products = row_products_8bit if fp8 else row_products
    compile_for(GPUS["h200"], lambda ops: products(static, ops), make)


def norm(implementation: Any = None, gpu: Gpu = GPUS["h200"]) -> None:
    import jax
    import jax.numpy as jnp

    from pallas_kernels.norm import add_rms_norm

    def step(x, delta, weight):
        out, vjp = jax.vjp(
            lambda x, delta: add_rms_norm(x, delta, weight, eps=1e-5, implementation=implementation), x, delta
        )
        return vjp(out)

    wide = (8192, 4096)
    compile_for(
        gpu,
        step,
        lambda: (jnp.zeros(wide, jnp.bfloat16), jnp.zeros(wide, jnp.bfloat16), jnp.zeros(4096, jnp.bfloat16)),
        unpack=True,
    )


def compile_for(gpu: Gpu, step: Callable, make: Callable, *, unpack: bool = False) -> None:
    """Compiles a function to machine code, for the abstract arrays of `make`."""
    import jax
    from jax.experimental import topologies
    from jax.sharding import AbstractDevice, AbstractMesh, NamedSharding, PartitionSpec, use_abstract_mesh

    device = AbstractDevice(device_kind=gpu.kind, num_cores=gpu.cores, platform="gpu")
    topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=gpu.target)
    sharding = NamedSharding(topologies.make_mesh(topology, (1,), ("x",)), PartitionSpec())
    arrays = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), jax.eval_shape(make)
    )
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        traced = jax.jit(step).trace(*arrays) if unpack else jax.jit(step).trace(arrays)
        traced.lower(lowering_platforms=("cuda",)).compile()


def shared_bytes(dump: pathlib.Path) -> dict[str, int]:
    """Shared memory that Triton asked for, by kernel."""
    by_kernel = {}
    for path in dump.glob("*.triton-to-llvm.txt"):
        asked = re.findall(r"ttg\.shared = (\d+)", path.read_text())
        by_kernel[path.name.split(".")[-3]] = max(map(int, asked), default=0)
    return by_kernel


def assembled(
    dump: pathlib.Path, ptxas: str, nvdisasm: str | None, arch: str
) -> Iterator[tuple[str, int, int, int | None]]:
    """Yields (kernel, registers, bytes of spill stores, moves per step of products) for this package's kernels."""
    for path in sorted(dump.glob("*.ptx")):
        binary = path.with_suffix(".cubin")
        command = [ptxas, "-v", f"-arch={arch}", str(path), "-o", str(binary)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        entry = r"Compiling entry function '(\S+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers"
        for name, spilled, registers in re.findall(entry, text, re.S):
            if name.startswith(KERNELS) or "mosaic" in name:
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
    candidates = [path for folder in folders for path in folder.glob(f"*/bin/{name}")]
    return str(candidates[0]) if candidates else shutil.which(name)


def _found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


if __name__ == "__main__":
    sys.exit(main())
