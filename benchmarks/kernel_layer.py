"""Times a whole decoder layer, forward and backward, with LoRA on all seven linears, and groups of sibling projections.

T packed tokens · D model width · H heads · K key heads · C head width · A adapters · R rank
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np

import pallas_kernels as pk
from benchmarks import oracles
from pallas_kernels.device import target_platform
from pallas_kernels.mlp.xla import silu_gate
from pallas_kernels.tuning.timing import time_calls

RANK = 16
GROUPS = (("q", "k", "v"), ("o",), ("gate", "up"), ("down",))
SITES = {name: i for i, name in enumerate(("q", "k", "v", "o", "gate", "up", "down"))}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One decoder layer of a Llama-like model."""

    name: str
    width: int
    heads: int
    key_heads: int
    head: int
    inner: int
    tokens: int = 8192
    dtype: str = "bfloat16"

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head, self.key_heads * self.head
        return {
            "q": (self.width, q), "k": (self.width, kv), "v": (self.width, kv), "o": (q, self.width),
            "gate": (self.width, self.inner), "up": (self.width, self.inner), "down": (self.inner, self.width),
        }  # fmt: skip


SHAPES = (
    Shape(name="8B", width=4096, heads=32, key_heads=8, head=128, inner=14336),
    Shape(name="32B", width=5120, heads=40, key_heads=8, head=128, inner=27648),
    Shape(name="70B", width=8192, heads=64, key_heads=8, head=128, inner=28672),
    Shape(name="8B-2048", width=4096, heads=32, key_heads=8, head=128, inner=14336, tokens=2048),
    Shape(name="8B-4096", width=4096, heads=32, key_heads=8, head=128, inner=14336, tokens=4096),
)
TINY = Shape(name="tiny", width=128, heads=2, key_heads=1, head=64, inner=256, tokens=512, dtype="float32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run the projections of one input: project(names, x, arrays) -> tuple.

    If the MLP is one op, also mlp(x, arrays).
    """

    kind: str
    project: Callable[..., tuple]
    mlp: Callable[..., jax.Array] | None = None
    adapters: int = 1
    rate: float = 0.0
    siblings: bool = True
    options: bool = False  # uses the package's compiler options

    @property
    def name(self) -> str:
        return f"{self.kind} A{self.adapters} p{self.rate:g}"


def variants(full: bool) -> Iterator[Variant]:
    yield Variant(kind="frozen", project=frozen, options=True)
    yield Variant(kind="xla_naive", project=plain(oracles.lora_xla), rate=0.1)
    yield Variant(kind="ours", project=ours(None), mlp=ours_mlp, options=True, rate=0.1)
    yield Variant(kind="xla_wide", project=plain(oracles.lora_wide), rate=0.1, adapters=4)
    yield Variant(kind="ours", project=ours(None), mlp=ours_mlp, options=True, rate=0.1, adapters=4)
    if full:
        yield Variant(kind="frozen_default", project=frozen)
        yield Variant(kind="ours_mlp_apart", project=ours(None), options=True, rate=0.1, adapters=4)
        yield Variant(kind="ours_separate", project=ours(None, siblings=False), options=True, rate=0.1, adapters=4)
        yield Variant(kind="ours_on_xla", project=ours("xla"), rate=0.1, adapters=4)
        yield Variant(kind="xla_wide", project=plain(oracles.lora_wide), adapters=4)
        yield Variant(kind="ours", project=ours(None), mlp=ours_mlp, options=True, adapters=4)
        yield Variant(kind="ours", project=ours(None), mlp=ours_mlp, options=True)
        yield Variant(kind="xla_naive", project=plain(oracles.lora_xla))
        yield Variant(kind="ragged_dot", project=plain(oracles.lora_ragged), rate=0.1, adapters=4)


def run(recorder, tiny: bool, only: Sequence[str] = (), kinds: Sequence[str] = ()) -> None:
    """Times every variant of every shape, and the sibling groups of the first shape.

    Args:
        only: names of shapes and groups ("32B", "q,k,v"); empty: all.
        kinds: of variants ("frozen", "ours"); empty: all.
    """
    parts: list[tuple[Shape, str, list[Variant], Callable]] = []
    for number, shape in enumerate((TINY,) if tiny else SHAPES):
        if not only or shape.name in only:
            parts.append((shape, f"layer {shape.name}", list(variants(number == 0)), layer))
        if number == 0:
            for group in (("q", "k", "v"), ("gate", "up")):
                if only and ",".join(group) not in only:
                    continue
                chosen = [v for v in variants(True) if v.kind in ("frozen", "ours", "ours_separate", "xla_wide")]

                def siblings(variant, x, arrays, shape, group=group):
                    return jnp.concatenate(variant.project(group, x, arrays), axis=1)

                chosen = [v for v in chosen if v.kind == "frozen" or (v.rate and v.adapters == 4)]
                parts.append((shape, ",".join(group), chosen, siblings))
    if kinds:
        parts = [(shape, part, [v for v in some if v.kind in kinds], body) for shape, part, some, body in parts]
    for _, part, chosen, _ in parts:
        recorder.plan(part, (f"{part} {variant.name}" for variant in chosen))
    for part in parts:
        run_part(recorder, *part, tiny)


def run_part(recorder, shape: Shape, part: str, chosen: list[Variant], body, tiny: bool) -> None:
    calls = {}
    for variant in chosen:

        def compile_one(variant=variant):
            arrays = make_arrays(shape, variant)
            options = pk.compiler_options() if variant.options else None
            fn = jax.jit(forward_backward(variant, body, shape), compiler_options=options).lower(arrays).compile()
            jax.block_until_ready(fn(arrays))
            calls[variant.name] = (fn, [(arrays,)])

        if tiny or recorder.left_s > 20:
            recorder.attempt(f"{part} {variant.name}", compile_one)
    timings = time_calls(calls, rounds=2 if tiny else 9, round_s=0.001 if tiny else 0.06)
    for variant in chosen:
        if variant.name in timings:
            recorder.add(
                name=f"{part} {variant.name}", part=part, variant=variant.kind, adapters=variant.adapters,
                rate=variant.rate, tokens=shape.tokens, **dataclasses.asdict(timings[variant.name]),
            )  # fmt: skip


def forward_backward(variant: Variant, body, shape: Shape):
    def step(arrays):
        def of(x, a, b):
            return body(variant, x, {**arrays, "a": a, "b": b}, shape)

        if variant.kind == "frozen":
            y, vjp = jax.vjp(lambda x: of(x, None, None), arrays["x"])
        else:
            y, vjp = jax.vjp(of, arrays["x"], arrays["a"], arrays["b"])
        return y, vjp(y)  # uses the output as its gradient; the values do not matter

    return step


def make_arrays(shape: Shape, variant: Variant) -> dict:
    dtype, key = jnp.dtype(shape.dtype), jax.random.key(0)

    def normal(number: int, dims: tuple[int, ...], scale: float, dtype=dtype):
        return (jax.random.normal(jax.random.fold_in(key, number), dims, jnp.float32) * scale).astype(dtype)

    num = variant.adapters
    tiles = shape.tokens // 128
    linears = shape.linears
    return {
        "x": normal(99, (shape.tokens, shape.width), 1.0),
        "w": {name: normal(i, dims, 0.02) for i, (name, dims) in enumerate(linears.items())},
        "a": {n: normal(10 + i, (num, d[0], RANK), 0.02, jnp.float32) for i, (n, d) in enumerate(linears.items())},
        "b": {n: normal(20 + i, (num, RANK, d[1]), 0.02, jnp.float32) for i, (n, d) in enumerate(linears.items())},
        "tile_adapter": (jnp.arange(tiles) * num // tiles).astype(jnp.int32),
        "scale": jnp.full(num, 2.0),
        "keys": jax.random.bits(key, (num,)),
        "row_key": jax.random.bits(key, (shape.tokens,)),
        "rate": jnp.full(num, variant.rate) if variant.rate else None,
    }


def make_arrays_once(shape: Shape, adapters: int, rate: float) -> Callable[[], dict]:
    """The same arrays at every call; nothing is made before the first one that is not traced."""
    variant = Variant(kind="", project=frozen, adapters=adapters, rate=rate)
    made: list[dict] = []

    def arrays() -> dict:
        if not made:
            operands = make_arrays(shape, variant)
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(operands)):
                return operands
            made.append(operands)
        return made[0]

    return arrays


def frozen(names, x, arrays):
    return tuple(x @ arrays["w"][name] for name in names)


def plain(form):
    def project(names, x, arrays):
        out = []
        for name in names:
            a, b = (arrays[part][name].astype(x.dtype) for part in "ab")
            rate = 0.0 if arrays["rate"] is None else 0.1
            options = {"rate": rate, "key": jax.random.fold_in(jax.random.key(0), SITES[name])}
            if form is oracles.lora_xla:
                out.append(form(x, arrays["w"][name], a[0], b[0], scale=2.0, **options))
            else:
                options.update(tile_adapter=arrays["tile_adapter"], scale=arrays["scale"])
                out.append(form(x, arrays["w"][name], a, b, **options))
        return tuple(out)

    return project


def ours(implementation: str | None, *, siblings: bool = True):
    def project(names, x, arrays):
        if not siblings and len(names) > 1:
            return tuple(y for name in names for y in project((name,), x, arrays))
        w, a, b = ([arrays[part][name] for name in names] for part in "wab")
        return pk.multi_lora_linears(
            x, w, a, b, tile_adapter=arrays["tile_adapter"], scale=arrays["scale"],
            dropout=dropout_of(names[0], arrays), implementation=implementation,
        )  # fmt: skip

    return project


def ours_mlp(x, arrays):
    names = (*GROUPS[2], *GROUPS[3])
    w, a, b = ([arrays[part][name] for name in names] for part in "wab")
    return pk.multi_lora_mlp(
        x, w, a, b, tile_adapter=arrays["tile_adapter"], scale=arrays["scale"], dropout=dropout_of("gate", arrays),
        down_dropout=dropout_of("down", arrays),
    )  # fmt: skip


def dropout_of(name: str, arrays) -> pk.Dropout | None:
    if arrays["rate"] is None:
        return None
    return pk.Dropout(rate=arrays["rate"], key=pk.fold_key(arrays["keys"], SITES[name]), row_key=arrays["row_key"])


def layer(variant: Variant, x_TD, arrays, shape: Shape):
    """Attention and feed-forward block with their norms and residuals."""
    h_TD = norm(x_TD)
    q, k, v = (y.reshape(shape.tokens, -1, shape.head) for y in variant.project(GROUPS[0], h_TD, arrays))
    o = attention(rope(q), rope(k), v).reshape(shape.tokens, -1)
    x_TD = x_TD + variant.project(GROUPS[1], o, arrays)[0]
    h_TD = norm(x_TD)
    if variant.mlp:
        return x_TD + variant.mlp(h_TD, arrays)
    gate, up = variant.project(GROUPS[2], h_TD, arrays)
    return x_TD + variant.project(GROUPS[3], silu_gate(gate, up), arrays)[0]


def norm(x):
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def rope(x_THC):
    half = x_THC.shape[2] // 2
    angle = jnp.arange(x_THC.shape[0])[:, None] * 1e-4 ** (jnp.arange(half) / half)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    first, second = jnp.split(x_THC.astype(jnp.float32), 2, -1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x_THC.dtype)


def attention(q_THC, k_TKC, v_TKC):
    """Packed causal attention over sixteen documents of equal length: cuDNN on a GPU."""
    if target_platform() not in ("gpu", "cuda"):
        return jax.nn.dot_product_attention(q_THC[None], k_TKC[None], v_TKC[None], is_causal=True)[0]
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    documents, rows = 16, q_THC.shape[0]
    offsets = np.append(np.arange(documents) * (rows // documents), -1).astype(np.int32)
    lengths = jnp.full((1, documents), rows // documents, jnp.int32)
    out = cudnn.dot_product_attention(
        query=q_THC[None], key=k_TKC[None], value=v_TKC[None], q_seqlen=lengths, kv_seqlen=lengths,
        q_offsets=jnp.asarray(offsets)[None], kv_offsets=jnp.asarray(offsets)[None], scale=q_THC.shape[2] ** -0.5,
        mask_type=cudnn.MaskType.PADDING_CAUSAL, qkv_layout="BTNH",
    )  # fmt: skip
    return (out[0] if isinstance(out, tuple | list) else out)[0]
