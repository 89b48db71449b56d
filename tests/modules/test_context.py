"""One context, right by default: tables, dropout and steps."""

import contextlib
import copy
import pickle
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cuda_lowering import H200, chosen_kernels
from drawn_models import draw_module
from flax import nnx
from host_arrays import filled, normal, on_device

from lorafusion_jax.errors import ConfigError, RunError
from lorafusion_jax.modules import AdapterSpec, LoRAContext, apply_lora, merge_adapter, only_adapter, use_adapters
from lorafusion_jax.modules.tree import exchanged_class

PLAIN = [AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=3, alpha=3)]
DROPPING = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5), AdapterSpec(name="med", rank=3, alpha=3)]


def model_of(specs, **more):
    make = lambda: nnx.Dict(up=nnx.Linear(64, 4, rngs=nnx.Rngs(0)), **more)  # noqa: E731
    model = apply_lora(draw_module(make), specs, targets="up")
    model.up.lora_b[...] = filled(1.0, *model.up.lora_b.shape)
    return model


@pytest.fixture(scope="module")
def x():
    return normal(0, (8, 6, 64))


def run(model, x, specs, table=None, **options):
    with use_adapters(specs, table, **options):
        return np.asarray(model.up(x))


@pytest.mark.parametrize("entries", [1, 2, 4, 6, 16])
def test_a_table_that_merely_divides_the_rows_is_refused(x, entries):
    with pytest.raises(RunError, match=r"one entry per example \(8\) or per row \(48\)") as caught:
        run(model_of(PLAIN), x, PLAIN, [0] * entries)
    assert caught.value.code == "lora.table-rows"


def test_a_table_has_an_entry_per_example_per_row_or_per_stated_tile(x):
    model, table = model_of(PLAIN), np.array([0, 1, 1, 0, -1, 1, 0, 0])
    example = run(model, x, PLAIN, table)
    for other in (
        run(model, x, PLAIN, np.repeat(table, 6)),
        run(model, x, PLAIN, np.repeat(table, 3), tile=2),
        run(model, x.reshape(48, 64), PLAIN, table, tile=6).reshape(8, 6, 4),
    ):  # float32 sums of 64 products, in tiles of other heights
        np.testing.assert_allclose(other, example, rtol=1e-4, atol=1e-5)
    with pytest.raises(RunError, match="8 entries of 5 rows"):
        run(model, x, PLAIN, table, tile=5)


def test_without_a_context_several_adapters_are_an_error_and_one_is_fine(x):
    with pytest.raises(RunError, match=r"only='law'") as caught:
        model_of(PLAIN).up(x)
    assert caught.value.code == "lora.no-context"
    model = model_of(PLAIN[:1])
    np.testing.assert_array_equal(model.up(x), run(model, x, PLAIN[:1], only="law"))


def test_only_is_a_table_of_one_adapter(x):
    model = model_of(PLAIN)
    np.testing.assert_array_equal(run(model, x, PLAIN, only="med"), run(model, x, PLAIN, [1] * 8))
    np.testing.assert_array_equal(run(model, x, PLAIN, only=-1), run(model, x, PLAIN, [-1] * 8))
    with pytest.raises(ConfigError, match=r"one of \[law, med\]"):
        run(model, x, PLAIN, only="lay")


def test_only_trains_its_adapter_as_a_table_does_and_no_other(x):
    model = model_of(DROPPING)

    def gradients(**rows):
        def loss(model):
            with use_adapters(DROPPING, step=3, **rows):
                return (model.up(x) ** 2).sum()

        grads = nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        return [np.asarray(grads["up"][name][...]) for name in ("lora_a", "lora_b")]

    for only, number in (("law", 0), ("med", 1)):
        for mine, expected in zip(gradients(only=only), gradients(table=[number] * 8), strict=True):
            np.testing.assert_allclose(mine[number], expected[number], rtol=1e-4, atol=1e-4)
            assert np.any(mine[number])
            assert not np.any(mine[1 - number])


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_kernels_serve_one_adapter_whatever_the_rows_of_an_example(implementation):
    specs = [AdapterSpec(name=name, rank=16, alpha=32) for name in ("law", "med")]
    kind = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    model = apply_lora(nnx.Linear(1024, 1024, **kind), specs, targets=".*")

    def kernels(**rows):
        def forward(x):
            with use_adapters(specs, **rows, train=False, implementation=implementation):
                return model(x)

        return sum(chosen_kernels(H200, forward, jax.ShapeDtypeStruct((64, 257, 1024), jnp.bfloat16)))

    assert (kernels(only="med") > 0) == (implementation is None)
    assert kernels(table=[1] * 64) == 0  # each example is a tile of 257 rows


@pytest.mark.parametrize("options", [{}, {"table": [0] * 8, "only": "law"}])
def test_neither_and_both_of_table_and_only_are_refused(options):
    with pytest.raises(ConfigError, match=r"lora\.table"), use_adapters(PLAIN, **options):
        pass


@pytest.mark.parametrize("train", [None, True])
def test_dropout_without_a_step_is_an_error_that_names_dropout(train):
    with pytest.raises(ConfigError, match=r"dropout=0\.5.*\n.*step=STEP in training, train=False") as caught:
        LoRAContext.of(DROPPING, [0], train=train)
    assert caught.value.code == "lora.dropout-step"


def test_dropout_without_a_context_is_an_error_until_the_model_evaluates(x):
    model = model_of(DROPPING[:1])
    with pytest.raises(RunError, match=r"dropout=0\.5"):
        model.up(x)
    model.eval()
    np.testing.assert_array_equal(model.up(x), run(model, x, DROPPING[:1], only="law", train=False))


def test_train_false_draws_none(x):
    model, plain = model_of(DROPPING), model_of(PLAIN)
    plain.up.lora_a[...] = model.up.lora_a[...]
    expected = run(plain, x, PLAIN, [0, 1] * 4)
    np.testing.assert_array_equal(run(model, x, DROPPING, [0, 1] * 4, train=False), expected)
    np.testing.assert_array_equal(run(model, x, DROPPING, [0, 1] * 4, train=False, step=3), expected)


def test_dropout_is_drawn_from_the_step_for_adapters_that_have_it(x):
    model, table = model_of(DROPPING), np.array([0, 1] * 4)
    first, again, later = (run(model, x, DROPPING, table, step=step) for step in (1, 1, 2))
    still = run(model, x, DROPPING, table, train=False)
    np.testing.assert_array_equal(first, again)
    assert (first[table == 0] != later[table == 0]).all()
    assert (first[table == 0] != still[table == 0]).all()
    np.testing.assert_array_equal(first[table == 1], still[table == 1])


def test_every_example_and_position_draws_its_own():
    model = model_of(DROPPING[:1])
    same = on_device(np.broadcast_to(normal(1, (64,)), (8, 6, 64)))
    rows = run(model, same, DROPPING[:1], only="law", step=1).reshape(48, 4)
    assert len({row.tobytes() for row in rows}) == 48


def test_examples_keep_their_draw_wherever_they_stand(x):
    model, order = model_of(DROPPING), np.array([3, 1, 7, 0, 2, 6, 5, 4])
    table = np.array([0, 1, 0, 0, 1, 0, 1, 0])
    first = run(model, x, DROPPING, table, step=1, examples=np.arange(100, 108))
    x_moved, examples = on_device(np.asarray(x)[order]), np.arange(100, 108)[order]
    moved = run(model, x_moved, DROPPING, table[order], step=1, examples=examples)
    np.testing.assert_allclose(moved, first[order], rtol=1e-6, atol=1e-6)
    assert (run(model, x, DROPPING, table, step=1)[table == 0] != first[table == 0]).any()
    with pytest.raises(RunError, match="examples has 3 entries"):
        run(model, x, DROPPING, table, step=1, examples=[1, 2, 3])


def test_layers_draw_different_masks_of_equal_inputs(x):
    specs = [AdapterSpec(name="law", rank=2, alpha=4, dropout=0.5)]
    layer = lambda: nnx.Linear(64, 4, rngs=nnx.Rngs(0))  # noqa: E731
    pair = draw_module(lambda: nnx.Dict(up=layer(), down=layer()))
    pair.down.kernel[...] = pair.up.kernel[...]
    model = apply_lora(pair, specs, targets=["up", "down"])
    model.down.lora_a[...] = model.up.lora_a[...]
    for layer in (model.up, model.down):
        layer.lora_b[...] = filled(1.0, *layer.lora_b.shape)
    with use_adapters(specs, only="law", step=0):
        assert (np.asarray(model.up(x)) != np.asarray(model.down(x))).any()
    with use_adapters(specs, only="law", train=False):
        np.testing.assert_array_equal(model.up(x), model.down(x))


def test_the_step_may_be_traced_and_does_not_compile_again(x):
    model, traces = model_of(DROPPING), []

    @nnx.jit
    def forward(model, x, table, step):
        traces.append(1)
        with use_adapters(DROPPING, table, step=step):
            return model.up(x)

    table = on_device([0, 1] * 4, np.int32)
    outputs = [forward(model, x, table, on_device(step, np.uint32)) for step in range(3)]
    assert len(traces) == 1
    np.testing.assert_allclose(outputs[1], run(model, x, DROPPING, table, step=1), rtol=1e-6, atol=1e-6)


def test_options_beside_a_complete_context_are_refused():
    with (
        pytest.raises(ConfigError, match="step would have no effect"),
        use_adapters(LoRAContext.of(PLAIN, [0]), step=1),
    ):
        pass


def test_ranks_of_a_microbatch_are_known_where_all_adapters_have_the_same():
    equal = [AdapterSpec(name=name, rank=100, alpha=4) for name in ("law", "med", "tax")]

    @jax.jit
    def ranks(places):
        known = LoRAContext.of(equal, [0, 2, 2]).in_places(places).ranks
        assert known == (100, 100)
        return LoRAContext.of(PLAIN, [0, 1, 1]).in_places(places).ranks

    assert ranks(on_device([1, 0], np.int32)).tolist() == [3, 2]


@pytest.mark.parametrize(
    ("table", "shape", "tile"), [([1, 0, 1, -1], (4, 3), None), ([1, 1, 0], (1, 3, 2), None), ([0, 1], (2, 4, 1), 4)]
)
def test_a_mean_per_adapter_is_that_of_its_own_rows(table, shape, tile):
    losses = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    where = (np.arange(losses.size) % 2).reshape(shape)
    context = LoRAContext.of(PLAIN, table, tile=tile, train=False)
    owners = np.repeat(table, losses.size // len(table))
    for weights in (None, where):
        counted = np.ones(losses.size) if weights is None else weights.ravel()
        means = [np.average(losses.ravel()[owners == n], weights=counted[owners == n]) for n in (0, 1)]
        np.testing.assert_allclose(context.mean(jnp.asarray(losses), weights), means, rtol=1e-5)


def test_an_adapter_without_rows_has_no_loss_and_losses_that_do_not_count_may_be_nan():
    context = LoRAContext.of(PLAIN, [0, -1], train=False)
    means, grads = jax.value_and_grad(lambda x: context.mean(x, jnp.array([1, 0])).sum())(jnp.array([2.0, jnp.nan]))
    assert float(means) == 2.0
    assert grads.tolist() == [1.0, 0.0]
    only = LoRAContext.of(PLAIN, only="med", train=False)
    assert only.mean(jnp.array([[1.0, 2.0], [3.0, 6.0]])).tolist() == [0.0, 3.0]
    with pytest.raises(RunError, match="2 entries"):
        context.mean(jnp.ones((3, 5)))


@pytest.mark.parametrize("options", [{"train": False}, {"step": 1}])
def test_a_batch_without_examples_has_results_without_rows(options):
    specs = [DROPPING[0], AdapterSpec(name="dora", kind="dora", rank=3, alpha=3)]
    with use_adapters(specs, np.zeros(0, np.int32), **options) as context:
        y = model_of(specs).up(np.zeros((0, 6, 64), np.float32))
        assert y.shape == (0, 6, 4)
        assert context.mean(y).tolist() == [0, 0]


class Absorbed(nnx.Module):
    """Attention-like: q and k are read as one fused weight, so both are adapted in vain."""

    def __init__(self):
        make = lambda seed: nnx.Linear(8, 8, use_bias=False, rngs=nnx.Rngs(seed))  # noqa: E731
        self.q, self.k, self.o = make(0), make(1), make(2)

    def __call__(self, x):
        q, k = jnp.split(x @ jnp.concatenate([self.q.kernel[...], self.k.kernel[...]], 1), 2, -1)
        return self.o(jax.nn.tanh(q) * k)


def absorbed(targets="all-linear"):
    model = apply_lora(Absorbed(), PLAIN, targets=targets)
    for layer in (model.q, model.k, model.o):
        if hasattr(layer, "lora_b"):
            layer.lora_b[...] = jnp.ones_like(layer.lora_b[...])
    return model


@pytest.mark.parametrize("transform", [lambda run: run, nnx.jit, lambda run: nnx.jit(nnx.remat(run))])
def test_adapted_layers_that_never_run_are_named_and_not_merged(transform):
    model, x = absorbed(), normal(0, (4, 8))

    @transform
    def run(model, x, **options):
        with use_adapters(PLAIN, only=0, train=False):
            return model(x)

    with pytest.warns(UserWarning, match=r"\[lora.uncalled\] .*: q, k\. Their adapters have no effect"):
        before = run(model, x)
    for other in (model, nnx.clone(model), copy.deepcopy(model)):
        with pytest.raises(ConfigError, match=r"lora\.uncalled.*q, k"):
            merge_adapter(other, PLAIN[0].name)
    merged = merge_adapter(nnx.clone(model), PLAIN[0].name, allow_uncalled=True)
    assert np.abs(merged(x) - before).max() > 0.1
    alone = only_adapter(absorbed("o"), PLAIN[0].name)
    np.testing.assert_allclose(merge_adapter(alone, PLAIN[0].name)(x), before, rtol=1e-5, atol=1e-6)


class TiedBack(nnx.Module):
    """A layer that runs, and whose weight is read for the way back."""

    def __init__(self):
        self.up = nnx.Linear(8, 4, use_bias=False, rngs=nnx.Rngs(0))

    def __call__(self, x):
        assert self.up.kernel.shape == (8, 4)  # reads no value
        return self.up(x) @ self.up.kernel[...].T


@pytest.mark.parametrize("transform", [lambda run: run, nnx.jit])
def test_a_layer_that_runs_while_its_weight_is_read_is_named_and_not_merged(transform):
    model, x = apply_lora(TiedBack(), PLAIN, targets="up"), normal(0, (4, 8))

    def within(call):
        @transform
        def run(model, x):
            with use_adapters(PLAIN, only=0, train=False):
                return call(model, x)

        return run(model, x)

    within(lambda model, x: model.up(x) * model.up.kernel.shape[0])  # warns of nothing
    merge_adapter(nnx.clone(model), PLAIN[0].name)
    with pytest.warns(UserWarning, match=r"\[lora.uncalled\] .*something else read their weights: up\."):
        within(lambda model, x: model(x))
    with pytest.raises(ConfigError, match=r"lora\.uncalled.*read their weights: up\."):
        merge_adapter(model, PLAIN[0].name)


def test_a_frozen_weight_is_set_in_a_context_as_outside():
    model = apply_lora(TiedBack(), PLAIN, targets="up")
    with use_adapters(PLAIN, only=0, train=False, allow_uncalled=True):
        model.up.kernel[...] = filled(2.0, 8, 4)
        assert isinstance(model.up.kernel, nnx.Param)
        model.up(normal(0, (4, 8)))
    np.testing.assert_array_equal(model.up.kernel[...], filled(2.0, 8, 4))


def test_parts_of_a_model_run_in_contexts_that_say_so():
    x = normal(0, (4, 8))
    model = apply_lora(
        nnx.Dict(encode=nnx.Linear(8, 8, rngs=nnx.Rngs(0)), decode=nnx.Linear(8, 8, rngs=nnx.Rngs(1))),
        PLAIN, targets="all-linear",
    )  # fmt: skip
    for part in ("encode", "decode"):
        with use_adapters(PLAIN, only=0, train=False, allow_uncalled=True):
            x = model[part](x)
    assert np.abs(merge_adapter(model, PLAIN[0].name)["decode"].kernel[...]).max() > 0  # both ran by now


@pytest.mark.parametrize("around", [contextlib.nullcontext, lambda: use_adapters(PLAIN, only=0, train=False)])
def test_tables_of_flax_show_an_adapted_model_in_and_out_of_a_context(around):
    model = absorbed("o")
    model.plain = nnx.Linear(8, 2, rngs=nnx.Rngs(3))  # so that flax wraps the calls of nnx.Linear, too
    before = nnx.tabulate(Absorbed(), jnp.ones((4, 8)), console_kwargs={"force_terminal": False})
    with around():
        text = nnx.tabulate(model, jnp.ones((4, 8)), console_kwargs={"force_terminal": False})
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    (row,) = [row for row in rows if len(row) > 2 and row[1] == "o"]
    assert row[2] == "LoRALinear"
    assert "4,8" in row[4]
    assert ["lora_a" in shown for shown in (before, text)] == [False, True]
    with use_adapters(PLAIN, only=0, train=False):  # what flax changed is as before
        model(jnp.ones((4, 8)))


def test_a_pickled_model_computes_the_same_where_its_classes_are_not_made_yet():
    model, x = absorbed("o"), normal(0, (4, 8))
    with use_adapters(PLAIN, only="med", train=False):
        want = np.asarray(model(x))
    stored = pickle.dumps(model.o)
    exchanged_class.cache_clear()
    model.o = pickle.loads(stored)
    assert isinstance(model.o, nnx.Linear)
    with use_adapters(PLAIN, only="med", train=False):
        np.testing.assert_array_equal(np.asarray(model(x)), want)


@pytest.mark.parametrize(
    "change",
    [
        lambda law, med: [med, law],
        lambda law, med: [replace(law, alpha=9.0), med],
        lambda law, med: [law, replace(med, rank=1, alpha=1)],
    ],
    ids=["order", "scale", "rank"],
)
def test_adapters_of_a_context_are_those_of_the_model(x, change):
    model = model_of(PLAIN)
    run(model, x, [replace(spec, seed=9, dropout=0.5) for spec in PLAIN], only="med", train=False)
    with pytest.raises(RunError, match=r"lora\.other-adapters"):
        run(model, x, change(*PLAIN), only="med")
