"""The gated MLP as one op against its parts in plain jnp: values, gradients, names, and what it refuses."""

import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh
from kernel_problems import TILE, draw, new_residuals, relative
from more_cases import mostly_nightly, nightly

import pallas_kernels as pk
from pallas_kernels.dropout import inverse_keep, keep_mask
from pallas_kernels.tiles import row_adapter, rows_per_tile

BACKENDS = ["xla"]
TABLE = [1, -1, 0, 1, 0, -1]
D, F = 64, 96
FLOAT32 = 1e-5  # float32 sums of a hundred terms differ by their order: about 1e-7 each, through two products

CASES = {
    "plain": {},
    "dropout before gate and up": {"rates": [0.5, 0.1]},
    "dropout before down": {"down_rates": [0.5, 0.1]},
    "dropout": {"rates": [0.0, 0.3], "down_rates": [0.5, 0.1]},
    "biases": {"bias": True, "rates": [0.1, 0.2], "down_rates": [0.2, 0.1]},
    "odd shapes": {"d": 70, "f": 50, "bias": True, "rates": [0.3, 0.1], "down_rates": [0.1, 0.0]},
    "ranks": {"ranks": (4, 20, 12)},
    "gate without LoRA": {"ranks": (None, 20, 12), "rates": [0.1, 0.2], "down_rates": [0.2, 0.1]},
    "up without LoRA": {"ranks": (8, None, 8), "rates": [0.1, 0.2], "down_rates": [0.2, 0.1]},
    "down without LoRA": {"ranks": (8, 8, None), "rates": [0.1, 0.2], "bias": True},
}

PARTS = {  # other cases have them, too
    "dropout before gate and up", "dropout before down", "dropout", "biases", "ranks", "up without LoRA",
}  # fmt: skip


def draw_mlp(*, d=D, f=F, ranks=(8, 8, 8), rates=None, down_rates=None, bias=False):
    """The arguments of multi_lora_mlp and the incoming gradient."""
    shared = {"table": TABLE, "adapters": 2, "bias": bias}
    into, _ = draw(k=d, widths=(f, f), ranks=ranks[:2], rates=rates, **shared)
    out, (dy,) = draw(k=f, widths=(d,), ranks=ranks[2:], rates=down_rates, seed=1, **shared)
    lists = {name: into[name] + out[name] for name in ("ws", "as_", "bs", "biases")}
    return {**into, **lists, "down_dropout": out["dropout"]}, dy


@cache
def ours(backend):
    def mlp(arguments, x, as_, bs):
        names = ("tile_adapter", "scale", "dropout", "down_dropout", "biases")
        rest = {name: arguments[name] for name in names}
        return pk.multi_lora_mlp(x, arguments["ws"], as_, bs, implementation=backend, **rest)

    return mlp


def reference(arguments, x, as_, bs):
    shared = {name: arguments[name] for name in ("tile_adapter", "scale")}

    def linear(i, z, dropout):
        w, bias = arguments["ws"][i], arguments["biases"][i]
        if as_[i] is None:
            return jnp.matmul(z, w, precision="highest") + (0 if bias is None else bias)
        return multi_lora_linear_by_rows(z, w, as_[i], bs[i], bias=bias, dropout=dropout, **shared)

    gate, up = (linear(i, x, arguments["dropout"]) for i in range(2))
    return linear(2, jax.nn.silu(gate) * up, arguments["down_dropout"])


def multi_lora_linear_by_rows(x, w, a, b, *, tile_adapter, scale, dropout, bias):
    """Evaluates the layer row by row in the dtype of its arguments.

    y[t] = x[t] W + scale[k] * (drop(x[t]) A[k]) B[k] (+ bias),  k = adapter of row t
    """
    x_TK = x.reshape(-1, x.shape[-1])
    rows = row_adapter(tile_adapter, rows_per_tile(x_TK.shape[0], tile_adapter))
    k_T = jnp.maximum(rows, 0)
    dropped_TK = x_TK
    if dropout is not None:
        keep_TK = keep_mask(dropout, rows, x_TK.shape[1])
        scaled_TK = x_TK * inverse_keep(dropout.rate)[k_T][:, None].astype(x.dtype)
        dropped_TK = jnp.where(keep_TK, scaled_TK, 0)
    s_TR = jnp.einsum("tk,tkr->tr", dropped_TK, a[k_T], precision="highest")
    low_TN = scale[k_T][:, None] * jnp.einsum("tr,trn->tn", s_TR, b[k_T], precision="highest")
    y_TN = jnp.einsum("tk,kn->tn", x_TK, w, precision="highest") + jnp.where((rows >= 0)[:, None], low_TN, 0)
    if bias is not None:
        y_TN = y_TN + bias
    return y_TN.astype(x.dtype).reshape((*x.shape[:-1], w.shape[1]))


@partial(jax.jit, static_argnums=0)
def value_and_gradients(mlp, arguments, dy):
    """y, dx, dAs, dBs."""
    y, vjp = jax.vjp(partial(mlp, arguments), *(arguments[name] for name in ("x", "as_", "bs")))
    return y, *vjp(dy)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", mostly_nightly(CASES, CASES.keys() - PARTS))
def test_values_and_gradients(backend, case):
    arguments, dy = draw_mlp(**CASES[case])
    got = value_and_gradients(ours(backend), arguments, dy)
    want = value_and_gradients(reference, arguments, dy)
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert relative(g, w) < FLOAT32


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_dropout_acts_on_its_own_input(backend):
    arguments, _ = draw_mlp(rates=[0.5, 0.5], down_rates=[0.5, 0.5])
    gate_up_dropout, other = arguments["dropout"], arguments["down_dropout"]
    draws = [
        ours(backend)({**arguments, **changes}, arguments["x"], arguments["as_"], arguments["bs"])
        for changes in (
            {},
            {"dropout": other},
            {"down_dropout": gate_up_dropout},
            {"dropout": None},
            {"down_dropout": None},
        )
    ]
    assert all(relative(draws[i], draws[j]) > 1e-2 for i in range(5) for j in range(i))


@pytest.mark.parametrize("backend", BACKENDS)
def test_leading_dimensions_are_rows_and_biases_may_be_left_out(backend):
    arguments, _ = draw_mlp()
    x, ws, as_, bs = (arguments[name] for name in ("x", "ws", "as_", "bs"))
    rest = {name: arguments[name] for name in ("tile_adapter", "scale")}
    y = pk.multi_lora_mlp(x.reshape(2, -1, D), ws, as_, bs, implementation=backend, **rest)
    assert y.shape == (2, TILE * len(TABLE) // 2, D)
    assert (y.reshape(x.shape) == ours(backend)(arguments, x, as_, bs)).all()


def test_policies_can_keep_what_enters_the_gate():
    arguments, _ = draw_mlp(ranks=(4, 8, 12), rates=[0.1, 0.2], down_rates=[0.2, 0.1])
    rows = TILE * len(TABLE)
    low_rank = [(len(TABLE), TILE, rank) for rank in (4, 8, 12)]
    assert sorted(new_residuals(ours("xla"), arguments, ("gate", "up", "lora_s"))) == [*low_rank, *[(rows, F)] * 2]
    assert sorted(new_residuals(ours("xla"), arguments, ("lora_s",))) == low_rank
    (kept,) = new_residuals(ours("xla"), arguments, ("gate",))
    assert kept == (rows, F)


@pytest.mark.wrong_types
@pytest.mark.parametrize("name", ["ws", "as_", "bs", "biases"])
@pytest.mark.parametrize("count", [2, 4])
def test_gate_up_and_down_are_expected_everywhere(name, count):
    arguments, _ = draw_mlp(bias=True)
    arguments[name] = (arguments[name] * 2)[:count]
    with pytest.raises(ValueError, match=rf"{count} {name}.*expected gate, up and down"):
        ours("xla")(arguments, arguments["x"], arguments["as_"], arguments["bs"])


@pytest.mark.wrong_types
def test_names_and_shapes_are_checked():
    arguments, _ = draw_mlp()
    given = [arguments[name] for name in ("x", "as_", "bs")]
    with pytest.raises(ValueError, match="choose one of pallas_mosaic_gpu, pallas_triton, xla"):
        ours("cuda")(arguments, *given)
    with pytest.raises(NotImplementedError, match="Hopper"):
        ours("pallas_mosaic_gpu")(arguments, *given)
    for turned in range(3):
        ws = [w.T if i == turned else w for i, w in enumerate(arguments["ws"])]
        with pytest.raises(ValueError, match="with one F"):
            ours("xla")({**arguments, "ws": ws}, *given)


@pytest.mark.wrong_types
def test_a_gate_of_one_column_is_not_stretched_over_up():
    arguments, _ = draw_mlp()
    x, as_, bs = (arguments[name] for name in ("x", "as_", "bs"))
    gate, up, down = arguments["ws"]
    with pytest.raises(ValueError, match="with one F"):
        ours("xla")({**arguments, "ws": [gate[:, :1], up, down]}, x, as_, [bs[0][:, :, :1], *bs[1:]])


def traced(tokens=8192, width=4096, hidden=14336, ranks=(16, 16, 16), tile=128, implementation=None, adapters=4):
    """Forward and backward on an H200; one adapter goes without a table."""
    shape = jax.ShapeDtypeStruct
    sizes = [(width, hidden), (width, hidden), (hidden, width)]
    as_ = [shape((adapters, k, rank), jnp.float32) if rank else None for rank, (k, _) in zip(ranks, sizes, strict=True)]
    bs = [shape((adapters, rank, n), jnp.float32) if rank else None for rank, (_, n) in zip(ranks, sizes, strict=True)]

    def step(x, ws, as_, bs, table, scale, rate, key, row_key):
        drop = pk.Dropout(rate=rate, key=key, row_key=row_key)
        y, back = jax.vjp(
            lambda x, as_, bs: pk.multi_lora_mlp(
                x, ws, as_, bs, tile_adapter=table, scale=scale, dropout=drop, down_dropout=drop,
                implementation=implementation,
            ),
            x, as_, bs,
        )  # fmt: skip
        return back(y)

    arguments = (
        shape((tokens, width), jnp.bfloat16), [shape(size, jnp.bfloat16) for size in sizes], as_, bs,
        shape((tokens // tile,), jnp.int32) if adapters > 1 else None,
        *[shape((adapters,), dtype) for dtype in (jnp.float32, jnp.float32, jnp.uint32)],
        shape((tokens,), jnp.uint32),
    )  # fmt: skip
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        return jax.jit(step).trace(*arguments)


PASSES = ("lora_wide_gate_backward", "lora_gate_backward", "lora_wide_dsdb")
NARROW = (16, 16, 16), ("lora_wide_gate_backward",)
WIDE = (32, 16, 16), ("lora_gate_backward", "lora_wide_dsdb")


@pytest.mark.parametrize(
    ("adapters", "ranks", "passes"), [(4, *NARROW), (1, *WIDE), nightly(1, *NARROW), nightly(4, *WIDE)], ids=str
)
def test_hopper_runs_the_mlp_as_one_op(adapters, ranks, passes):
    """Up to rank 16 no pass reads the gradients of gate and up again for dS and dB; above, one of their own does."""
    program = str(traced(ranks=ranks, adapters=adapters).jaxpr)
    assert "lora_gate" in program
    assert [name for name in PASSES if re.search(rf"\b{name}\b", program)] == list(passes)
    wide = re.findall(r":bf16\[8192,14336\] = dot_general\[", program)
    assert len(wide) == 3  # gate, up and the gradient of down's input are plain products


@pytest.mark.parametrize(("ranks", "passes"), [NARROW, nightly(*WIDE)], ids=str)
def test_the_mlp_lowers_for_hopper(ranks, passes):
    text = traced(ranks=ranks).lower(lowering_platforms=("cuda",)).as_text()
    assert [name for name in PASSES if f"{name}_mosaic_gpu" in text] == list(passes)


@pytest.mark.parametrize(
    "changes",
    [{"ranks": (16, 16, 0)}, {"ranks": (16, 0, 16)}, {"hidden": 14336 - 128}, {"implementation": "xla"}, {"tile": 32}],
    ids=["down-without-lora", "up-without-lora", "odd-width", "xla", "small-tiles"],
)  # fmt: skip
def test_what_the_gate_kernels_cannot_serve_is_served_otherwise(changes):
    program = str(traced(**changes).jaxpr)
    assert "lora_gate" not in program
    assert "dot_general" in program


@pytest.mark.wrong_types
def test_errors_of_the_last_projection_name_it():
    arguments, _ = draw_mlp()
    x, as_, bs = (arguments[name] for name in ("x", "as_", "bs"))
    with pytest.raises(ValueError, match="projection after the gate: b of projection 0 has shape"):
        ours("xla")(arguments, x, [*as_[:2], as_[2][:, :, :1]], bs)
