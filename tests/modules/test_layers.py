"""LoRA in every kind of linear layer of an NNX model, against the product with merged weights in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from drawn_models import draw_module
from flax import nnx
from host_arrays import filled, normal, on_device

from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, apply_lora, lora_report, register_linear, use_adapters

LAW = AdapterSpec(name="law", rank=2, alpha=4)
MED = AdapterSpec(name="med", rank=3, alpha=3, seed=5)
SPECS = [LAW, MED]
TABLE = on_device([0, 1, 1, 0], np.int32)


class Einsum(nnx.Module):
    """A class as packages of models have it: an equation and a weight."""

    def __init__(self, einsum_str, shape, *, rngs, dtype=jnp.float32):
        self.einsum_str, self.shape, self.dtype = einsum_str, shape, dtype
        self.w = nnx.Param(nnx.initializers.glorot_uniform()(rngs.params(), shape))

    @jax.named_scope("einsum")
    def __call__(self, x):
        return jnp.einsum(self.einsum_str, x.astype(self.dtype), self.w[...].astype(self.dtype))


class Block(nnx.Module):
    """Attention with grouped keys and a gated MLP, with the projections of a published Qwen3."""

    def __init__(self, rngs, D=8, N=4, K=2, H=6, F=16):
        self.q_proj = Einsum("BTD,DNH->BTNH", (D, N, H), rngs=rngs)
        self.k_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs=rngs)
        self.v_proj = Einsum("BSD,DKH->BSKH", (D, K, H), rngs=rngs)
        self.o_proj = Einsum("BTNH,NHD->BTD", (N, H, D), rngs=rngs)
        self.gate_proj = nnx.Linear(D, F, use_bias=False, rngs=rngs)
        self.down_proj = nnx.Linear(F, D, use_bias=False, rngs=rngs)
        self.norm = nnx.RMSNorm(D, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        q, k, v = self.q_proj(h), self.k_proj(h), self.v_proj(h)
        k, v = (jnp.repeat(heads, q.shape[2] // k.shape[2], axis=2) for heads in (k, v))
        weights = jax.nn.softmax(jnp.einsum("BTNH,BSNH->BNTS", q, k) / math.sqrt(q.shape[-1]))
        x = x + self.o_proj(jnp.einsum("BNTS,BSNH->BTNH", weights, v))
        return x + self.down_proj(nnx.silu(self.gate_proj(x)))


class Qwen3(nnx.Module):
    def __init__(self, rngs):
        self.embedder = nnx.Embed(32, 8, rngs=rngs)
        self.layers = nnx.List([Block(rngs) for _ in range(2)])
        self.lm_head = Einsum("BTD,DV->BTV", (8, 32), rngs=rngs)

    def __call__(self, tokens):
        x = self.embedder(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


def adapted(model):
    return {path: module for path, module in nnx.iter_modules(model) if hasattr(module, "lora_plan")}


def randomize(model, seed=0):
    """Gives B of each adapter random numbers at its own rank."""
    rng = np.random.default_rng(seed)
    for module in adapted(model).values():
        b = np.zeros(module.lora_b.shape, np.float32)
        for index in module.lora_plan.members:
            rank = SPECS[index].rank
            b[..., index, :rank, :] = rng.normal(size=b[..., index, :rank, :].shape)
        module.lora_b[...] = on_device(b)
    return model


def merged(make, model, index):
    """The plain model with the weights of one adapter added in float64: what the layers must compute."""
    plain = draw_module(make)
    for path, module in adapted(model).items():
        target = plain
        for part in path:
            target = target[part] if isinstance(part, int) else getattr(target, part)
        linear = module.lora_plan.linear
        a, b = (np.asarray(leaf[...], np.float64) for leaf in (module.lora_a, module.lora_b))
        delta = SPECS[index].scale * a[..., index, :, :] @ b[..., index, :, :]
        outside = [axis for axis in range(len(linear.shape)) if axis not in linear.inside]
        delta = delta.reshape(*linear.stack, *(linear.shape[axis] for axis in (*linear.inside, *outside)))
        back = np.argsort([*linear.inside, *outside])
        moved = delta.transpose(*range(len(linear.stack)), *(len(linear.stack) + axis for axis in back))
        variable = getattr(target, linear.weight)
        variable[...] = on_device(np.asarray(variable[...], np.float64) + moved, np.float32)
    return plain


def check(make, *inputs, targets="all-linear", call=lambda model, *inputs: model(*inputs)):
    """A mixed batch equals each example in the model with its adapter merged."""
    model = randomize(apply_lora(draw_module(make), SPECS, targets=targets))

    @nnx.jit
    def forward(model, table, *inputs):
        with use_adapters(SPECS, table):
            return call(model, *inputs)

    actual, plain = np.asarray(forward(model, TABLE, *inputs)), nnx.jit(lambda model, *inputs: call(model, *inputs))
    for index in range(2):
        expected = np.asarray(plain(merged(make, model, index), *inputs))
        rows = np.flatnonzero(np.asarray(TABLE) == index)
        # sums in another order in every layer; the CPU's matrix products differ by 1e-6
        np.testing.assert_allclose(actual[rows], expected[rows], rtol=1e-4, atol=2e-5)
    return model


@pytest.fixture(scope="module")
def x():
    return normal(0, (4, 5, 8))


class Attention(nnx.Module):
    def __init__(self):
        self.attn = nnx.MultiHeadAttention(num_heads=2, in_features=8, decode=False, rngs=nnx.Rngs(0))
        self.head = nnx.Linear(8, 3, rngs=nnx.Rngs(1))

    def __call__(self, x):
        return self.head(self.attn(x))


def test_all_linear_reaches_attention_and_leaves_the_output_head_out(x):
    model = check(Attention, x)
    assert {path[-1] for path in adapted(model)} == {"query", "key", "value", "out"}
    assert model.attn.out.lora_a.shape == (2, 8, 3)
    assert isinstance(model.attn.out, nnx.LinearGeneral)
    (skipped,) = lora_report(model).skipped
    assert skipped.path == "head"
    assert "output head" in skipped.why


def test_the_output_head_takes_lora_when_it_is_named(x):
    assert ("head",) in adapted(check(Attention, x, targets=["head", "query"]))


@pytest.mark.parametrize(
    ("equation", "kernel", "bias", "shape"),
    [
        ("...d,dnh->...nh", (8, 2, 3), (2, 3), (4, 5, 8)),
        ("btd,ndh->btnh", (2, 8, 3), (2, 3), (4, 5, 8)),  # contracts an inner axis
        ("btnh,hnd->btd", (3, 2, 8), (8,), (4, 5, 2, 3)),  # contracts two, in another order
        ("btd,hnd->bnth", (3, 2, 8), None, (4, 5, 8)),  # and mixes rows and features in its output
    ],
)
def test_einsums_over_features(equation, kernel, bias, shape):
    check(
        lambda: nnx.Dict(mix=nnx.Einsum(equation, kernel, bias, rngs=nnx.Rngs(0))),
        normal(1, shape),
        call=lambda model, x: model.mix(x),
    )


def test_linear_general_over_inner_axes():
    check(
        lambda: nnx.Dict(mix=nnx.LinearGeneral((3, 2), (4, 2), axis=(1, 3), rngs=nnx.Rngs(0))),
        normal(1, (4, 3, 5, 2)),
        call=lambda model, x: model.mix(x),
    )


def test_a_class_of_a_package_needs_one_line():
    tokens = on_device(np.random.default_rng(2).integers(0, 32, (4, 6)), np.int32)
    model = check(lambda: Qwen3(nnx.Rngs(3)), tokens)
    assert len(adapted(model)) == 2 * 6
    assert isinstance(model.layers[0].q_proj, Einsum)
    report = lora_report(model)
    assert {row.path for row in report.skipped} == {"embedder", "lm_head"}
    assert report.parameters["law"] == sum(2 * (row.in_features + row.out_features) for row in report.adapted)
    assert "layers.1.o_proj" in str(report)
    assert "<td>layers.1.o_proj</td>" in report._repr_html_()


@pytest.mark.parametrize("shape", [(2, 8, 4), (2, 3, 8, 4)])
def test_experts_take_lora_if_a_target_names_them(x, shape):
    """Each expert has adapters of its own; another order of axes in the call and in the result."""
    letters = "eg"[: len(shape) - 2]

    class Experts(nnx.Module):
        def __init__(self):
            self.mix = nnx.Einsum(f"{letters}bd,{letters}df->b{letters}f", shape, rngs=nnx.Rngs(0))
            self.up = nnx.Linear(8, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            rows = self.up(x).reshape(-1, 8)
            rows = jnp.broadcast_to(rows, (*shape[:-2], *rows.shape)) * jnp.arange(1, 3).reshape(
                -1, *(1,) * (len(shape) - 1)
            )
            return self.mix(rows).reshape(*x.shape[:2], -1)

    with pytest.warns(UserWarning, match=r"mix \(Einsum\): a weight for each expert: .* name it"):
        model = apply_lora(draw_module(Experts), SPECS, targets="all-linear")
    assert {path[-1] for path in adapted(model)} == {"up"}
    assert "for each expert" in next(row.why for row in lora_report(model).skipped if row.path == "mix")
    model = randomize(apply_lora(draw_module(Experts), SPECS, targets=["mix", "up"]))
    assert model.mix.lora_a.shape == (*shape[:-2], 2, 8, 3)
    table = on_device(np.repeat(TABLE, 5))  # an entry for each row of an expert

    @nnx.jit
    def forward(model, x):
        with use_adapters(SPECS, table):
            return model(x)

    y, plain = np.asarray(forward(model, x)), nnx.jit(lambda model, x: model(x))
    for index in range(2):
        expected = np.asarray(plain(merged(Experts, model, index), x))
        rows = np.flatnonzero(np.asarray(TABLE) == index)
        np.testing.assert_allclose(y[rows], expected[rows], rtol=1e-4, atol=2e-5)


class Plain(nnx.Module):
    """A linear class with no equation."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (8, 8)))

    def __call__(self, x):
        return x @ self.kernel[...]


def test_a_class_that_nobody_registered_is_named_with_the_line_that_registers_it(x):
    from lorafusion_jax.modules import linear

    make = lambda: nnx.Dict(up=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), mix=nnx.List([Plain(nnx.Rngs(n)) for n in (1, 2)]))  # noqa: E731
    with pytest.warns(UserWarning, match=r"mix\.0 and 1 more \(Plain\): not known to be linear") as caught:
        apply_lora(draw_module(make), SPECS, targets="all-linear")
    line = str(caught[0].message).partition("say so with ")[2].strip()
    with pytest.raises(ConfigError, match="register_linear"):
        apply_lora(draw_module(make), SPECS, targets=r"mix\.\d")
    exec(line, {"register_linear": register_linear, "Plain": Plain})  # as a user pastes it
    try:
        check(make, x, call=lambda model, x: model.mix[1](model.mix[0](model.up(x))))
    finally:
        del linear._CLASSES[Plain]


def test_a_call_that_differs_from_what_was_registered_is_refused(x):
    class Twice(Einsum):
        def __call__(self, x):
            return super().__call__(x) + jnp.sum(self.w[...])

    register_linear(Twice, weight="w", equation="btd,df->btf")
    model = apply_lora(draw_module(lambda: Twice("btd,df->btf", (8, 4), rngs=nnx.Rngs(0))), [LAW], targets="all-linear")
    with pytest.raises(ConfigError, match="more with the weight than one product"):
        model(x)
    register_linear(Twice, weight="w", equation="btf,df->btd")
    other = apply_lora(draw_module(lambda: Twice("btd,df->btf", (8, 4), rngs=nnx.Rngs(0))), [LAW], targets="all-linear")
    with pytest.raises(ConfigError, match=r"sums over axes \(0,\) of the weight, not \(1,\)"):
        other(x)


def test_a_class_with_its_own_arithmetic_computes_what_merged_weights_would(x):
    class Scaled(nnx.Linear):
        def __call__(self, x):
            return 2 * super().__call__(x) + 1

    check(lambda: nnx.Dict(up=Scaled(8, 4, rngs=nnx.Rngs(0))), x, call=lambda model, x: model.up(x))


def test_computes_in_the_type_of_the_layer(x):
    make = lambda: nnx.Dict(up=nnx.Linear(8, 4, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), [LAW], targets="up")
    assert model.up(x).dtype == jnp.bfloat16
    assert model.up.lora_a.dtype == jnp.float32


def bf16_product(x, w, dims, precision=None, preferred_element_type=None, **_):
    return jax.lax.dot_general(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), dims, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("precision", ["highest", "float32", jax.lax.Precision.HIGH, (jax.lax.Precision.DEFAULT,) * 2])
def test_a_layer_with_a_precision(x, precision):
    make = lambda: nnx.Dict(up=nnx.Linear(8, 4, precision=precision, rngs=nnx.Rngs(0)))  # noqa: E731
    check(make, x, call=lambda model, x: model.up(x))


def test_an_algorithm_for_the_product_is_refused_by_name(x):
    precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32
    make = lambda: nnx.Dict(up=nnx.Linear(8, 4, precision=precision, rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), [LAW], targets="up")
    with pytest.raises(ConfigError, match=r"at up: .*precision=TF32_TF32_F32|TF32_TF32_F32"):
        model.up(x)


@pytest.mark.parametrize("options", [{"preferred_element_type": jnp.float32}, {"dot_general": bf16_product}])
def test_half_operands_with_sums_that_stay_in_float32(x, options):
    """The result keeps what a rounding to bfloat16 would lose, and so does its merged model."""
    dtype = {"dtype": jnp.bfloat16} if "dot_general" not in options else {}
    make = lambda: nnx.Dict(up=nnx.Linear(8, 4, use_bias=False, **dtype, **options, rngs=nnx.Rngs(0)))  # noqa: E731
    model = randomize(apply_lora(draw_module(make), SPECS, targets="up"))
    y = nnx.jit(call_with)(model, x)
    a, b, w, rows = (
        np.asarray(np.asarray(leaf, jnp.bfloat16), np.float64)
        for leaf in (model.up.lora_a[...], model.up.lora_b[...], model.up.kernel[...], x)
    )
    s = np.einsum("btk,bkr->btr", rows, a[np.asarray(TABLE)])
    s = np.asarray(np.asarray(s, jnp.bfloat16), np.float64)  # S is kept in the type of x
    scale = np.asarray([spec.scale for spec in SPECS])[np.asarray(TABLE), None, None]
    want = rows @ w + scale * np.einsum("btr,brn->btn", s, b[np.asarray(TABLE)])
    assert y.dtype == jnp.float32
    # a sum of bfloat16 products in float32; rounded to bfloat16 it would differ by 2e-3
    np.testing.assert_allclose(y, want, rtol=0, atol=1e-4 * np.abs(want).max())
    wrt = nnx.DiffState(0, nnx.LoRAParam)
    grads = nnx.jit(nnx.grad(lambda model: jnp.sum(jnp.sin(call_with(model, x))), argnums=wrt))(model)
    assert np.asarray(grads["up"]["lora_a"][...]).any()


def call_with(model, x):
    with use_adapters(SPECS, TABLE):
        return model.up(x)


def test_a_product_that_rounds_its_weight_is_refused_by_name(x):
    def rounded(x, w, dims, **options):
        return jax.lax.dot_general(x, jnp.round(w * 8) / 8, dims)

    make = lambda: nnx.Dict(up=nnx.Linear(8, 4, dot_general=rounded, rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), [LAW], targets="up")
    with pytest.raises(ConfigError, match=r"more with the weight than one product \(mul\)"):
        model.up(x)


class Deep(nnx.Module):
    """Layers stacked by vmap and run by scan, each rematerialised."""

    def __init__(self):
        @nnx.split_rngs(splits=3)
        @nnx.vmap
        def make(rngs):
            return MLP(rngs)

        self.layers = make(nnx.Rngs(0))

    def __call__(self, x):
        @nnx.scan
        @nnx.remat
        def run(x, layer):
            return layer(x), None

        return run(x, self.layers)[0]


class MLP(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 12, rngs=rngs), nnx.Linear(12, 8, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(x)))


def test_layers_stacked_by_vmap_and_run_by_scan(x):
    model = check(Deep, x)
    assert model.layers.up.lora_a.shape == (3, 2, 8, 3)
    first, second = np.asarray(model.layers.up.lora_a[...])[:2]
    assert (first != second).any()
    assert lora_report(model).adapted[0].layers == 3


def test_stacked_layers_draw_different_dropout(x):
    """With equal weights in all layers, equal masks would give equal layers."""
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5, targets=("up",))]
    model = apply_lora(draw_module(Deep), specs)
    sites = model.layers.up.lora_site[...]
    assert len(set(np.asarray(sites).tolist())) == 3

    @nnx.jit
    def forward(model, x, step):
        with use_adapters(specs, only="law", step=step):
            return model(x)

    model.layers.up.lora_b[...] = filled(1.0, *model.layers.up.lora_b.shape)
    before = np.asarray(forward(model, x, 1))
    model.layers.up.lora_site[...] = on_device(np.asarray(sites)[::-1])
    assert (np.asarray(forward(model, x, 1)) != before).any()


def test_gradients_of_all_leaves_agree_with_the_slope():
    tokens = on_device(np.random.default_rng(2).integers(0, 32, (4, 6)), np.int32)
    model = randomize(apply_lora(draw_module(lambda: Qwen3(nnx.Rngs(3))), SPECS, targets="all-linear"))
    graph, lora, frozen = nnx.split(model, nnx.LoRAParam, ...)

    @jax.jit
    def loss(lora):
        with use_adapters(SPECS, TABLE):
            return jnp.mean(jnp.sin(nnx.merge(graph, lora, frozen)(tokens)))

    grads = dict(nnx.to_flat_state(jax.grad(loss)(lora)))
    leaves = dict(nnx.to_flat_state(lora))
    direction = {path: np.random.default_rng(0).normal(size=leaf.shape) for path, leaf in leaves.items()}
    # A and B of a member only: elsewhere both are zero and stay so
    direction = {path: value * (np.asarray(leaves[path][...]) != 0) for path, value in direction.items()}
    assert all(np.asarray(grads[path][...]).any() for path in grads)

    def moved(size):
        shifted = {path: leaf.replace(leaf[...] + size * direction[path]) for path, leaf in leaves.items()}
        return float(loss(nnx.from_flat_state(shifted.items())))

    slope = sum(float(np.sum(np.float64(grads[path][...]) * direction[path])) for path in grads)
    # central difference: error of size², and of float32 sums of 1e-7 / size
    assert slope == pytest.approx((moved(3e-3) - moved(-3e-3)) / 6e-3, rel=2e-2, abs=1e-4)


def test_trains_under_nnx_optimizer():
    tokens = on_device(np.random.default_rng(2).integers(0, 32, (4, 6)), np.int32)
    model = apply_lora(draw_module(lambda: Qwen3(nnx.Rngs(3))), SPECS, targets="all-linear")
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def step(model, optimizer):
        def loss(model):
            with use_adapters(SPECS, TABLE):
                return jnp.mean((model(tokens) - 1) ** 2)

        value, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)
        return value

    losses = [float(step(model, optimizer)) for _ in range(4)]
    assert losses[-1] < losses[0]


def test_two_compiled_functions_over_one_rematerialised_block(x):
    """The table of one compiled function must not reach another through what remat remembers of its block."""

    class Remat(nnx.Module):
        def __init__(self):
            self.mlp = MLP(nnx.Rngs(0))

        def __call__(self, x):
            return nnx.remat(MLP.__call__)(self.mlp, x)

    model = randomize(apply_lora(draw_module(Remat), SPECS, targets="all-linear"))

    def forward(model, x, table):
        with use_adapters(SPECS, table):
            return model(x)

    first = nnx.jit(forward)(model, x, TABLE)
    other = on_device(1 - np.asarray(TABLE))
    second = nnx.jit(lambda *inputs: forward(*inputs) + 0)(model, x, other)

    @nnx.jit
    def without_remat(model, x, table):
        with use_adapters(SPECS, table):
            return model.mlp(x)

    np.testing.assert_allclose(first, without_remat(model, x, TABLE), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(second, without_remat(model, x, other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("pattern", "count"), [("layers.*.q_proj", 2), (r"layers\.\d\.(q|k)_proj", 4), ("*_proj", 12)])
def test_targets_by_glob_or_regular_expression(pattern, count):
    assert len(adapted(apply_lora(draw_module(lambda: Qwen3(nnx.Rngs(0))), [LAW], targets=pattern))) == count


def test_a_pattern_that_matches_nothing_lists_near_misses():
    with pytest.raises(ConfigError, match=r"did you mean 'q_proj'") as caught:
        apply_lora(draw_module(lambda: Qwen3(nnx.Rngs(0))), [LAW], targets=["q_prj"])
    assert caught.value.code == "lora.unknown-target"
