"""Texts about models that cannot be adapted as asked: they tell which classes there are and why each was not taken."""

import ast
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drawn_models import draw_module
from flax import linen as nn
from flax import nnx
from flax.nnx import bridge
from host_arrays import changed, filled, normal, on_device

import lorafusion_jax as lf
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.modules import AdapterSpec, LinenLoRA, apply_lora, lora_report

LAW = AdapterSpec(name="law", rank=2, alpha=4)


def refusal(model, targets="all-linear"):
    with pytest.raises(ConfigError) as caught:
        apply_lora(model, [LAW], targets=targets)
    return caught.value


class DenseGeneral(nnx.Module):
    """A linear class of a package, with axes in attributes."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (8, 2, 4)))


class Vision(nnx.Module):
    """Tables of every kind beside one linear layer."""

    def __init__(self, rngs):
        self.cls_token = nnx.Param(jnp.zeros((1, 1, 8)))
        self.pos_embed = nnx.Param(jnp.zeros((1, 17, 8)))
        self.position_embeddings = nnx.Param(jnp.zeros((17, 8)))
        self.patches = nnx.Conv(3, 8, (4, 4), rngs=rngs)
        self.tokens = ScaledEmbed(12, 8, rngs=rngs)
        self.up = nnx.Linear(8, 8, rngs=rngs)


class ScaledEmbed(nnx.Embed):
    pass


class Mixed(nnx.Module):
    def __init__(self, *, inner, rngs):
        self.vision, self.up = bridge.ToNNX(inner, rngs=rngs), nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        return self.up(self.vision(x))


def test_no_text_denies_layers_or_proposes_the_same_word():
    error = refusal(nnx.Dict(proj=nnx.List([DenseGeneral(nnx.Rngs(0)) for _ in range(3)])))
    assert "proj.0 and 2 more (DenseGeneral): not known to be linear" in error.why
    assert error.fix == "register_linear(DenseGeneral, weight='kernel', equation='...k,kmn->...mn')"
    assert "did you mean" not in str(error)
    error = refusal(nnx.Dict(filter=nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0))))
    assert "filter (Conv): an nnx.Conv is not a product with a weight" in error.why


class Product(nnx.Module):
    """Multiplies the last axis of its input by a weight of any number of axes."""

    def __init__(self, *shape):
        self.w_out = nnx.Param(normal(0, shape))

    def __call__(self, x):
        return jnp.tensordot(x, self.w_out[...], 1)


class Gated(nn.Module):
    """Two weights of one class, which LinenLoRA does not guess."""

    @nn.compact
    def __call__(self, x):
        first, second = (self.param(name, nn.initializers.lecun_normal(), (8, 4)) for name in ("w_gate", "w_up"))
        return jax.nn.silu(x @ first) * (x @ second)


@pytest.mark.parametrize("shape", [(8, 4), (8, 2, 3), (8, 2, 3, 2)])
def test_a_printed_line_for_nnx_pasted_is_accepted_and_right(shape):
    made = type("Product", (Product,), {"__call__": Product.__call__})  # each case registers a class of its own
    model = nnx.Dict(up=made(*shape))
    line = refusal(model).fix
    assert line.startswith("register_linear(Product, ")
    eval(line, {"register_linear": lf.register_linear, "Product": made})  # as a user pastes it
    apply_lora(model, [LAW], targets="all-linear")
    model.up.lora_b[...] = normal(1, model.up.lora_b.shape)
    x = normal(2, (3, 8))
    low = 2 * x @ model.up.lora_a[0] @ model.up.lora_b[0]
    want = Product(*shape)(x) + low.reshape(3, *shape[1:])
    np.testing.assert_allclose(model.up(x), want, rtol=1e-5, atol=1e-5)


def test_a_printed_line_for_linen_pasted_is_accepted():
    model = nn.Sequential([Gated()])
    x = jnp.ones((3, 8))
    variables = model.init(jax.random.key(0), x)
    with pytest.raises(ConfigError) as caught:
        LinenLoRA([LAW], targets="all-linear").init(model, variables, x)
    line = caught.value.fix
    assert line.startswith("LinenLoRA(…, modules=[(Gated, ")
    pasted = line.replace("…", 'specs, targets="all-linear"')  # what stands for the user's own arguments
    lora = eval(pasted, {"LinenLoRA": LinenLoRA, "Gated": Gated, "specs": [LAW]})
    adapters = lora.init(model, variables, x)
    assert len(jax.tree.leaves(adapters)) == 4


class Unknown(Product):
    pass


class ByColumn(Product):
    def __call__(self, x):
        return jnp.tensordot(x, self.w_out[...] * jnp.arange(8.0), 1)


class Counting(nnx.Linear):
    calls = 0

    def __call__(self, x):
        self.calls += 1
        return super().__call__(x)


class Dropping(nnx.Linear):
    def __init__(self, rngs):
        super().__init__(8, 8, rngs=rngs)
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return super().__call__(self.drop(x))


class Tied(nnx.Module):
    def __init__(self, embed):
        self.embed, self.kernel = embed, embed.kernel

    def __call__(self, x):
        return x @ self.kernel[...].T


def linear(seed=0, **options):
    return nnx.Linear(8, 8, rngs=nnx.Rngs(seed), **options)


def between(odd):
    """A model with a layer of a kind between ordinary ones."""
    return nnx.Dict(layers=nnx.List([nnx.Dict(up=linear(), odd=odd), nnx.Dict(up=linear(), only=linear())]))


REFUSALS = {  # name: the odd layer, targets, more arguments
    "no known product": (lambda: Unknown(8, 8), "odd", {}),
    "scaled by column": (lambda: ByColumn(8, 8), "all-linear", {}),
    "counts its calls": (lambda: Counting(8, 8, rngs=nnx.Rngs(0)), "all-linear", {}),
    "draws": (lambda: Dropping(nnx.Rngs(0)), ("odd", "up"), {}),
    "batch axes": (lambda: nnx.LinearGeneral(8, 8, batch_axis={0: 3}, rngs=nnx.Rngs(0)), ("up", "odd"), {}),
    "one weight": (lambda: Tied(linear()), "all-linear", {}),
    "normed": (lambda: nnx.WeightNorm(linear(), rngs=nnx.Rngs(0)), "layers.*", {}),
    "named and normed": (lambda: nnx.SpectralNorm(linear(), rngs=nnx.Rngs(0)), "layers.0.odd.layer_instance", {}),
    "several": (lambda: nnx.Dict(up=nnx.Conv(8, 8, (1,), rngs=nnx.Rngs(0))), "up", {}),
    "in one layer only": (linear, "only", {}),
    "misspelt": (linear, "onyl", {}),
    "all excluded": (linear, "up", {"exclude": "up"}),
    "none excluded": (linear, "all-linear", {"exclude": "upp"}),
    "no head": (linear, "all-linear", {"heads": "haed"}),
}


def advice(text):
    """What a text says in code: lines to run, and arguments."""
    lines = re.findall(r"register_linear\(\w+, .*\)$", text, re.MULTILINE)
    options = {name: ast.literal_eval(value) for name, value in re.findall(r"(exclude)=(\[.*?\]|'.*?')", text)}
    options |= {"allow_partial": True} if "allow_partial=True" in text else {}
    if names := re.search(r"targets: .*some of \[(.*)\]", text):
        options["targets"] = names[1].split(", ")[0]
    if "leave it out of targets" in text:
        options["targets"] = "up"
    if names := re.search(r"(exclude|heads) '.*' matches no(?s:.*)fix: some of (\[.*\])", text):
        options[names[1]] = ast.literal_eval(names[2])[0]
    if "fix: exclude less" in text:
        options["exclude"] = ()
    return lines, options


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_refusal_says_in_code_is_accepted(name):
    make, targets, given = REFUSALS[name]
    given, lines = {"targets": targets, **given}, []
    for _ in range(3):
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                model = apply_lora(between(make()), [LAW], **given)
                for layer in (model.layers[0].up, model.layers[0].odd):
                    jax.eval_shape(layer, jnp.ones((3, 8))) if hasattr(layer, "lora_plan") else None
            lines, options = advice("".join(str(warning.message) for warning in caught))
            if not lines and not options:
                return
        except ConfigError as error:
            lines, options = advice(str(error))
        given |= options
        for line in lines:
            eval(line, {"register_linear": lf.register_linear, "Unknown": Unknown, "ByColumn": ByColumn})
    raise AssertionError(f"what the texts say is never enough: {given}, {lines}")


@pytest.mark.wrong_types
def test_models_that_are_none_of_nnx_are_shown_the_way():
    assert "LinenLoRA" in refusal(nn.Dense(3)).fix
    assert "nnx.Dict" in refusal({"up": nnx.Linear(8, 4, rngs=nnx.Rngs(0))}).fix
    with pytest.raises(ConfigError, match="LinenLoRA"):
        lora_report(nn.Dense(3))


def test_a_linen_module_inside_an_nnx_model_is_named():
    inner = nn.Sequential([nn.Dense(8), nn.relu])
    model = Mixed(inner=inner, rngs=nnx.Rngs(0))
    bridge.lazy_init(model.vision, filled(1.0, 2, 8))
    with pytest.warns(UserWarning, match=r"1 layer .* has no adapters:\n  vision \(ToNNX\): .*Sequential.*LinenLoRA"):
        apply_lora(model, [LAW], targets="all-linear")
    assert "LinenLoRA" in next(row.why for row in lora_report(model).skipped if row.path == "vision")
    assert "Sequential" in refusal(Mixed(inner=inner, rngs=nnx.Rngs(0)), targets=["vision"]).why


def test_nobody_is_told_to_adapt_tokens_positions_or_embeddings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = apply_lora(Vision(nnx.Rngs(0)), [LAW], targets="all-linear")
    report = lora_report(model)
    assert [row.path for row in report.adapted] == ["up"]
    assert not any("register_linear" in row.why for row in report.skipped)


def test_a_warning_names_only_what_the_pattern_matched():
    model = nnx.Dict(
        a=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), b=DenseGeneral(nnx.Rngs(0)), c=nnx.Conv(8, 4, (3,), rngs=nnx.Rngs(0))
    )
    with pytest.warns(UserWarning, match="1 layer that the targets match has no adapters") as caught:
        apply_lora(model, [LAW], targets="[ab]")
    assert "c (Conv)" not in str(caught[0].message)


def test_heads_are_found_by_the_width_of_the_vocabulary_or_named():
    def layer(*sizes):
        return nnx.Linear(*sizes, rngs=nnx.Rngs(1))

    def make():
        return nnx.Dict(
            wte=nnx.Embed(50, 8, rngs=nnx.Rngs(0)),
            wpe=nnx.Embed(16, 8, rngs=nnx.Rngs(0)),
            layers=nnx.List([nnx.Dict(up=layer(8, 50), classifier=layer(50, 8))]),
            ff_out=layer(8, 50),
        )

    def adapted(**options):
        model = apply_lora(draw_module(make), [LAW], targets="all-linear", **options)
        return {row.path for row in lora_report(model).adapted}

    assert adapted() == {"layers.0.up", "layers.0.classifier"}
    assert adapted(heads=["layers.0.up"]) == {"layers.0.classifier", "ff_out"}
    assert adapted(heads=()) == {"layers.0.up", "layers.0.classifier", "ff_out"}


def test_linen_texts_are_those_of_nnx():
    class Table(nn.Module):
        @nn.compact
        def __call__(self, x):
            return x + self.param("shift", nn.initializers.zeros, (3, 8))

    class Net(nn.Module):
        linear: bool

        @nn.compact
        def __call__(self, x):
            x = Table(name="table")(x)
            return nn.Dense(4, name="up")(x) if self.linear else x

    x = filled(1.0, 2, 3, 8)
    for linear, targets, match in (
        (False, "all-linear", r"the model has none\.\n  because .*table \(Table\)"),
        (True, "upp", r"did you mean 'up'"),
        (True, "table", r"what it matches cannot carry LoRA: table \(Table\)"),
    ):
        params = Net(linear).init(jax.random.key(0), x)
        with pytest.raises(ConfigError, match=match):
            LinenLoRA([LAW], targets=targets).init(Net(linear), params, x)


@pytest.mark.parametrize(
    ("path", "key"),
    [
        ("layer.0.attention.q_proj", "layer.0.attention.q_proj"),
        ("pooler.self_attention_layers.0.self_attn.k_proj", "pooler.self_attention_layers.0.self_attn.k_proj"),
        ("vision.layers.0.attn.q_proj", "vision.layers.0.attn.q_proj"),
        ("text.layers.0.attn.q_proj", "text.layers.0.attn.q_proj"),
        ("layers.11.attn.q_proj", "model.layers.11.self_attn.q_proj"),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
        ("layers.1.cross.attn.q_proj", "layers.1.cross.attn.q_proj"),
        ("q_proj", "q_proj"),
        ("", ""),
    ],
)
def test_peft_keys_are_never_renamed_but_for_a_decoder_s_own_layers(path, key):
    from lorafusion_jax.peft.own_model import hf_key

    assert hf_key(path) == key


def test_a_model_is_exported_with_a_symbolic_batch():
    specs = [LAW, AdapterSpec(name="med", rank=4, alpha=4)]
    make = lambda: nnx.Dict(up=nnx.LinearGeneral(8, (2, 3), rngs=nnx.Rngs(0)))  # noqa: E731
    model = apply_lora(draw_module(make), specs, targets="up")
    model.up.lora_b[...] = changed(normal(0, model.up.lora_b.shape), np.s_[0, 2:], 0)
    graph, state = nnx.split(model)

    def forward(state, x, table):
        with lf.use_adapters(specs, table):
            return nnx.merge(graph, state).up(x)

    b, s = jax.export.symbolic_shape("b, s")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    types = (jax.ShapeDtypeStruct((b, s, 8), jnp.float32), jax.ShapeDtypeStruct((b,), jnp.int32))
    exported = jax.export.export(jax.jit(forward))(shapes, *types)
    for count in (1, 3):
        x, table = normal(1, (count, 5, 8)), on_device(np.arange(count) % 2, np.int32)
        np.testing.assert_allclose(exported.call(state, x, table), jax.jit(forward)(state, x, table), atol=1e-5)


def test_a_weight_beside_the_one_that_takes_lora_is_named():
    class FeedForward(nn.Module):
        @nn.compact
        def __call__(self, x):
            gating = self.param("gating", nn.initializers.ones, (2, 4, 8))
            return (x @ gating[0] * (x @ gating[1])) @ self.param("down", nn.initializers.ones, (8, 4))

    model, x = FeedForward(), filled(1.0, 2, 4)
    variables = model.init(jax.random.key(0), x)
    lora = LinenLoRA([LAW], targets="all-linear", modules=[(FeedForward, "down")])
    with pytest.warns(UserWarning, match=r"FeedForward.*: its gating is beside the weight that takes LoRA"):
        adapters = lora.init(model, variables, x)
    assert adapters["lora_a"].shape == (1, 8, LAW.rank)
