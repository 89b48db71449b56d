"""What `quantised_layer.py` times: ways to run a decoder layer on a quantised base, and single products.

Tracing the kernels of a layer takes ten seconds of one core. So programs can be traced ahead on another machine, for an
H200, and lie in files of their own.

T packed tokens · K in features · N out features
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import export, lax
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

import pallas_kernels as pk
from benchmarks import kernel_layer as kl
from lorafusion_jax.objective.loss import token_losses
from lorafusion_jax.weights.table import KINDS
from pallas_kernels import device as pk_device
from pallas_kernels.frozen_weight import frozen_product
from pallas_kernels.linear import vjp as linear_vjp
from pallas_kernels.linear.hopper.gemm_config import gemm_config
from pallas_kernels.quantised import fp8, hopper, hopper_gemm, passes, rows

VOCABULARY = 128256
ADAPTERS, RATE = 4, 0.1
TRACING = threading.Lock()  # flags are everyone's
CUSTOM_CALLS = ("mosaic_gpu_v2", "__gpu$xla.gpu.triton", "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One thing to time.

    Attributes:
        part: "layer" or "product".
        operands: what the step takes, of values that matter for a GPU's clock.
        flags: of `quantised.hopper`, while the step is traced.
        options: whether `pallas_kernels.compiler_options` are used.
        shape: rows, summed features and columns of a product.
    """

    part: str
    name: str
    step: Callable[..., Any]
    operands: Callable[[], tuple]
    flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    options: bool = True
    merged: bool = True  # XLA may make one product of those that share their input
    shape: tuple[int, ...] = ()

    @property
    def file(self) -> str:
        return "-".join((self.part, self.name, *map(str, self.shape))).replace(" ", "_").replace(",", "")


# --- layers ------------------------------------------------------------------------------------------------------


def layers(shape: kl.Shape) -> Iterator[Program]:
    """The most important ones first: what is not compiled in time is not run."""
    lora = {"adapters": ADAPTERS, "rate": RATE, "options": True}
    frozen = kl.Variant(kind="frozen", project=kl.frozen, options=True)
    frozen_of_8_bits = kl.Variant(kind="frozen", project=frozen_fp8, options=True)
    ours = kl.Variant(kind="ours", project=kl.ours(None), mlp=kl.ours_mlp, **lora)
    by_xla = dataclasses.replace(ours, mlp=None, project=kl.ours("xla"), options=False)
    plain = kl.make_arrays_once(shape, ADAPTERS, RATE)
    layer = partial(_layer, shape, plain)
    yield layer("frozen bf16", "bf16", frozen)
    yield layer("frozen fp8", "fp8", frozen_of_8_bits)
    yield layer("fp8", "fp8", ours)
    yield layer("fp8 dequantised", "fp8", _dequantised("fp8", ours))
    yield layer("fp8 by xla", "fp8", by_xla)
    yield layer("fp8 by cublas", "fp8", ours, {"OWN_PRODUCTS": False})
    yield layer("int8", "int8", _dequantised("int8", ours))
    yield layer("frozen int8", "int8", _dequantised("int8", frozen))
    yield layer("frozen nf4", "nf4", _dequantised("nf4", frozen))
    yield layer("nf4", "nf4", _dequantised("nf4", ours))
    yield layer("bf16", "bf16", ours)
    yield layer("fp8 one order", "fp8 one order", ours)


def _layer(
    shape, plain, name: str, weights: str, variant: kl.Variant, flags=None, *, profiled: bool = False
) -> Program:
    def operands() -> tuple:
        arrays = plain()
        return (arrays | {"w": {site: _stored(weights, w) for site, w in arrays["w"].items()}},)

    return Program(
        part="layer", name=name, step=kl.forward_backward(variant, kl.layer, shape), operands=operands,
        flags=flags or {}, options=variant.options,
    )  # fmt: skip


def _dequantised(kind: str, variant: kl.Variant) -> kl.Variant:
    """The weights of a call's projections become bfloat16 arrays when it runs."""
    dequantise = fp8.dequantise if kind == "fp8" else KINDS[kind].dequantise

    def usable(names: tuple[str, ...], x: jax.Array, arrays: dict) -> tuple[jax.Array, dict]:
        stored, x = lax.optimization_barrier(({name: arrays["w"][name] for name in names}, x))
        return x, arrays | {"w": {name: dequantise(weight, x.dtype) for name, weight in stored.items()}}

    def project(names: tuple[str, ...], x: jax.Array, arrays: dict) -> tuple[jax.Array, ...]:
        return variant.project(names, *usable(names, x, arrays))

    def mlp(x: jax.Array, arrays: dict) -> jax.Array:
        return kl.ours_mlp(*usable((*kl.GROUPS[2], *kl.GROUPS[3]), x, arrays))

    return dataclasses.replace(variant, project=project, mlp=mlp if variant.mlp else None)


def _stored(kind: str, w: jax.Array) -> Any:
    return w if kind == "bf16" else _quantise(w, kind)


@partial(jax.jit, static_argnums=1)
def _quantise(w: jax.Array, kind: str) -> Any:
    wide = w.astype(jnp.float32)
    return KINDS[kind].quantise(wide) if kind in ("int8", "nf4") else fp8.quantise(wide, both=kind == "fp8")


# --- products ----------------------------------------------------------------------------------------------------

PLANS = {  # of our kernel: changes to the tiles that a layer takes
    "own": {},
    "own, columns shared": {"split_n": False, "along_n": False},
    "own, band 16": {"along_n": False, "band": 16},
}


def products(shape: kl.Shape, *, own_kernels: bool) -> Iterator[Program]:
    """A product with the scales of rows and columns: by cuBLAS without and with the pass that scales, and by us."""
    T = shape.tokens
    for K, N in ((shape.width, shape.inner), (shape.inner, shape.width), (shape.width, shape.width)):
        chosen: dict[str, Callable] = {"cublas": _by_cublas, "cublas and finish": _by_cublas_and_finish}
        tiles = gemm_config(T, K // 2, N, 16, 128, transposed=True)
        if own_kernels and tiles is not None:
            tiles = dataclasses.replace(tiles, tile_k=2 * tiles.tile_k)
            chosen |= {name: partial(_by_us, dataclasses.replace(tiles, **plan)) for name, plan in PLANS.items()}
            chosen["own, adding"] = partial(_by_us_adding, hopper_gemm.fit_addend(tiles))
        for name, step in chosen.items():
            yield Program(part="product", name=name, step=step, operands=partial(_factors, T, K, N), shape=(T, K, N))
    head = (T, shape.width, VOCABULARY)
    if own_kernels:
        yield Program(part="product", name="head and loss", step=_head, operands=partial(_hidden, head), shape=head)


def _factors(T: int, K: int, N: int) -> tuple:
    x8, w8 = (_normal(dims).astype(rows.E4M3) for dims in ((T, K), (N, K)))
    owners = jnp.arange(T // 64, dtype=jnp.int32) % ADAPTERS
    s, bank = jnp.ones((T, 16), jnp.bfloat16), jnp.ones((ADAPTERS + 1, 16, N), jnp.bfloat16)
    return x8, w8, jnp.ones((T, 1)), jnp.ones(N), s, bank, owners


@partial(jax.jit, static_argnums=0)
def _normal(dims: tuple[int, ...]) -> jax.Array:
    return jax.random.normal(jax.random.key(0), dims, jnp.bfloat16)


def _hidden(dims: tuple[int, int, int]) -> tuple:
    T, D, V = dims
    return _normal((T, D)), _normal((D, V)), jnp.zeros(T, jnp.int32), jnp.ones(T)


def _head(hidden, head, targets, weights):
    return jax.value_and_grad(lambda hidden: token_losses(hidden, head, targets, weights).sum())(hidden)


def _by_cublas(x8, w8, scales, columns, s, bank, owners):
    return lax.dot_general(x8, w8, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def _by_cublas_and_finish(x8, w8, scales, columns, s, bank, owners):
    sums = _by_cublas(x8, w8, scales, columns, s, bank, owners)
    return passes.load().finish(sums, scales, columns, s, bank, owners, interpret=pk_device.interprets())


def _by_us(config, x8, w8, scales, columns, s, bank, owners):
    low = hopper_gemm.LowRank(s=s, bank=bank, block_adapter=owners[:: config.tile_m // 64])
    return hopper_gemm.gemm(x8, w8, scales[:, 0], columns, low, config=config, num_sms=pk_device.num_sms())


def _by_us_adding(config, x8, w8, scales, columns, s, bank, owners):
    addend = jnp.broadcast_to(s[:, :1], (x8.shape[0], w8.shape[0]))
    addend = lax.optimization_barrier(addend)
    return hopper_gemm.gemm(x8, w8, scales[:, 0], None, None, addend, config=config, num_sms=pk_device.num_sms())


# --- tracing -----------------------------------------------------------------------------------------------------


def lowered(program: Program, operands: tuple, folder: Path | None) -> Any:
    """Ready to compile: from the folder, where its file is."""
    options: dict[str, Any] = pk.compiler_options() if program.options else {}
    options |= {} if program.merged else {"xla_gpu_dot_merger_threshold_mb": 0}
    file = folder and folder / program.file
    if file and file.exists():
        exported = export.Exported(**pickle.loads(gzip.decompress(file.read_bytes())))
        return jax.jit(lambda *given: exported.call(*jax.tree.leaves(given)), compiler_options=options or None).lower(
            *operands
        )
    with TRACING, flags_on(program.flags):
        return jax.jit(program.step, compiler_options=options or None).lower(*operands)


def write_lowered(program: Program, folder: Path) -> None:
    """Traces a program for an H200, on any machine."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(program.operands))

    def step(*leaves):
        return program.step(*jax.tree.unflatten(tree, leaves))

    checks = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    with on_a_hopper_host(), flags_on(program.flags):
        exported = export.export(jax.jit(step), platforms=["cuda"], disabled_checks=checks)(*leaves)
    fields = {field.name: getattr(exported, field.name) for field in dataclasses.fields(exported)} | {"_get_vjp": None}
    (folder / program.file).write_bytes(gzip.compress(pickle.dumps(fields)))


@contextlib.contextmanager
def on_a_hopper_host() -> Iterator[None]:
    """Answers questions about the machine as an H200's host would."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    names = {
        "check_cudnn_version": lambda: 91400,
        "check_compute_capability": lambda capability: True,
        "is_cuda_compute_capability_equal": lambda capability: False,
    }
    before = {name: getattr(cudnn, name) for name in names}
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        for name, value in names.items():
            setattr(cudnn, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(cudnn, name, value)


@contextlib.contextmanager
def flags_on(flags: Mapping[str, Any]) -> Iterator[None]:
    """A call that was traced before is not traced again, so what is remembered must go, too."""
    before = {name: getattr(hopper, name) for name in flags}
    for name, value in flags.items():
        setattr(hopper, name, value)
    traced: tuple[Any, ...] = (linear_vjp._compute, linear_vjp._differentiate)
    for function in traced:
        function.clear_cache()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(hopper, name, value)


def frozen_fp8(names, x, arrays):
    return tuple(frozen_product(x, arrays["w"][name]) for name in names)
