"""Adapters of very different ranks and targets in one job: nothing is stored for them but their own numbers."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_jobs
from mixed import assert_equal, read_trained

from lorafusion_jax.adapters.kind import Leaf
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.api.status import run_numbers
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.store import StateStore
from lorafusion_jax.config import load_config
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.prediction import predicted_parameters
from lorafusion_jax.session import leaves
from lorafusion_jax.session.leaves import LAYERS, Columns, add, all_columns, stack_adapters, take_adapter, view, windows
from lorafusion_jax.session.mesh import stage_meshes
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.programs import StagePrograms
from lorafusion_jax.session.stage_columns import Position
from lorafusion_jax.training import train
from lorafusion_jax.training.state import Progress

LAYER = ModelConfig(
    family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8,
).layer(0)  # fmt: skip
TARGETS = {"thin": ["down_proj"], "middle": ["q_proj", "down_proj"], "wide": ["q_proj", "v_proj"]}
RANKS = {"thin": 1, "middle": 8, "wide": 64}


class PowerCut(RuntimeError):
    pass


@pytest.fixture(scope="module")
def write(tmp_path_factory, tiny_base, kept_programs):
    """write(names) → job file of these adapters, always in the same folder."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = {name: small_jobs.write_rows(folder, name, 5, longest=8) for name in RANKS}

    def job(names, **sections):
        adapters = [
            {
                "name": name, "data": {"train": rows[name]}, "batch": {"global_samples": 3}, "seed": seed,
                "optim": {"lr": 1e-2, "eps": 1e-3},
                "lora": {"rank": RANKS[name], "alpha": 8, "dropout": 0.1, "targets": TARGETS[name]},
            }
            for seed, name in enumerate(RANKS)
            if name in names
        ]  # fmt: skip
        batch = {"capacity_tokens": 64, "tile_tokens": 16}
        return small_jobs.write_job(folder, tiny_base, adapters, batch=batch, **sections)

    return job


@pytest.fixture(scope="module")
def trained(write, tmp_path_factory):
    """A run, and the arrays of its first checkpoint."""
    run, saved, save = tmp_path_factory.mktemp("whole") / "run", [], StateStore.save

    def noted(self, slot, states, position):
        saved.append(states)
        save(self, slot, states, position)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateStore, "save", noted)
        assert train(load_config(write(RANKS, save={"every_steps": 1})), run).exit_code == 0
    assert any(state.sums for state in saved[0].values()), "no sums are under way"
    return run, saved[0]


def own_parameters(shape) -> int:
    widths = {"q_proj": 64, "v_proj": 48, "down_proj": 80}  # K + N
    return shape.num_layers * sum(RANKS[name] * sum(widths[target] for target in TARGETS[name]) for name in RANKS)


def test_what_is_stored_is_their_own(trained, write):
    config = load_config(write(RANKS))
    model = ModelConfig.from_hf(base_directory(config))
    expected, numbers = own_parameters(model), run_numbers(trained[0])
    assert numbers["own_parameters"] == expected
    assert numbers["stored"] == {"weights": expected, "gradients": expected, "moments": 2 * expected}
    assert numbers["stored_parameters"] <= 1.05 * expected
    predicted = predicted_parameters(config, model).to_json()
    assert predicted == {key: numbers[key] for key in predicted}


def test_a_checkpoint_holds_their_own_numbers_only(trained, tiny_base):
    size = sum(state.num_bytes for state in trained[1].values())
    assert size <= 1.01 * 4 * 4 * own_parameters(ModelConfig.from_hf(tiny_base))  # weights, sums and two moments


def test_joint_is_alone(trained, write, tmp_path):
    """Another packing, so sums come in another order."""
    assert train(load_config(write(["middle"])), tmp_path / "alone").exit_code == 0
    assert_equal(read_trained(trained[0]).of(["middle"]), read_trained(tmp_path / "alone"), 1e-5)


@pytest.mark.parametrize("form", [1, 3])
def test_a_checkpoint_of_another_format_is_refused_by_name(form):
    later = Progress.first({"law": 1}, stage_devices=1, plan="p").position() | {"form": form}
    with pytest.raises(CheckpointError, match=r"run\.later-version"):
        Progress.of(later)


SPECS = (
    AdapterSpec(name="wide", rank=6, alpha=8, targets=("q_proj", "up_proj")),
    AdapterSpec(name="thin", rank=1, alpha=8, targets=("q_proj",)),
    AdapterSpec(name="middle", rank=3, alpha=8, targets=("q_proj",)),
)
Q = f"{LAYERS}self_attn.q_proj."


@pytest.mark.parametrize("large_window", [0, 2**20], ids=["one by one", "at once"])
@pytest.mark.parametrize("leaf", ["lora_a", "lora_b"])
def test_a_microbatch_sees_its_adapters_and_adds_to_them_alone(monkeypatch, leaf, large_window):
    """Thin and wide are in it, in places 0 and 2; place 1 is empty. Middle's numbers are not finite."""
    monkeypatch.setattr(leaves, "LARGE_WINDOW", large_window)
    columns, rng = all_columns(SPECS, LAYER.linears), np.random.default_rng(0)
    at, inside = columns[Q + leaf], (lambda rank: (5, rank)) if leaf == "lora_a" else (lambda rank: (rank, 5))
    own_weights = [{Q + leaf: rng.normal(size=(2, *inside(spec.rank))).astype(np.float32)} for spec in SPECS]
    own_weights[2][Q + leaf][:] = np.nan
    arrays = stack_adapters({Q + leaf: at}, own_weights, {Q + leaf: (2, *inside(10))})
    assert arrays[Q + leaf].shape == (2, *inside(10))
    window = windows(columns, jnp.array([1, -1, 0]))[list(columns).index(Q + leaf)]
    seen = np.asarray(jax.jit(view, static_argnums=1)(arrays[Q + leaf], at, jnp.int32(1), window))
    wanted = np.zeros((3, *inside(6)), np.float32)
    wanted[0][: 1 if leaf == "lora_b" else None, : 1 if leaf == "lora_a" else None] = own_weights[1][Q + leaf][1]
    wanted[2] = own_weights[0][Q + leaf][1]
    np.testing.assert_array_equal(seen, wanted)

    gradient = rng.normal(size=seen.shape).astype(np.float32)
    gradient[1] = np.nan
    if leaf == "lora_a":
        gradient[0, :, 1:] = np.nan  # beyond its own rank
    program = jax.jit(lambda sums, *given: add(sums, at, *given))
    added = program(arrays[Q + leaf][None], jnp.int32(1), window, gradient)
    after = [
        take_adapter({Q + leaf: at}, {Q + leaf: np.asarray(added)}, index, ((Q + leaf, spec.rank),), lead=2)[Q + leaf][
            0
        ]
        for index, spec in enumerate(SPECS)
    ]
    np.testing.assert_array_equal(after[2], own_weights[2][Q + leaf])
    for index, column in ((1, 0), (0, 2)):
        rank = SPECS[index].rank
        mine = gradient[column][:, :rank] if leaf == "lora_a" else gradient[column][:rank]
        np.testing.assert_array_equal(
            after[index], own_weights[index][Q + leaf] + np.stack([np.zeros_like(mine), mine])
        )


def test_a_leaf_of_rank_by_rank_holds_each_adapter_at_its_own():
    """Thin (1) and wide (4) are in a microbatch. Beyond thin's rank its place holds what a larger one left there."""
    core = Leaf(name="core", axes=("R", "R"), init=lambda draw, shape: np.zeros(shape, np.float32))
    at = Columns(leaf=core, first=(0, 1, 3), width=(1, 2, 4))
    assert at.shape({}) == (7, 4)
    rng = np.random.default_rng(1)
    own_weights = [{"core": rng.normal(size=(2, width, width)).astype(np.float32)} for width in at.width]
    arrays = stack_adapters({"core": at}, own_weights, {"core": (2, 7, 4)})
    for index, width in enumerate(at.width):
        own_columns = (("core", width),)
        for taken in (
            take_adapter({"core": at}, arrays, index, own_columns),
            leaves.take(arrays, {"core": at}, own_columns, jnp.array([at.first[index]])),
        ):
            np.testing.assert_array_equal(taken["core"], own_weights[index]["core"])
    arrays["core"][:, 0, 1:] = np.nan
    window = jnp.array([[0, 3], [1, 4]])
    seen = np.asarray(jax.jit(view, static_argnums=1)(arrays["core"], at, jnp.int32(1), window))
    wanted = np.zeros((2, 4, 4), np.float32)
    wanted[0, :1, :1], wanted[1] = own_weights[0]["core"][1], own_weights[2]["core"][1]
    np.testing.assert_array_equal(seen, wanted)
    added = add(np.zeros((1, 2, 7, 4), np.float32), at, jnp.int32(1), window, jnp.ones((2, 4, 4)))
    assert np.asarray(added).sum() == 1 + 4 * 4
    put = leaves.put(arrays, {"core": at}, jnp.array([1]), {"core": jnp.full((2, 2, 2), 7.0)})["core"]
    assert (np.asarray(put) == 7).sum() == 2 * 2 * 2


@pytest.mark.parametrize(
    ("places", "large_window", "kernels"),
    [(8, 0, {"dynamic_update_slice": 8}), (9, 0, {"scatter-add": 1}), (1, 2**20, {"scatter-add": 1})],
    ids=["few large windows", "many large windows", "a small window"],
)
def test_only_few_large_windows_are_added_one_by_one(monkeypatch, places, large_window, kernels):
    """More would make programs long: one kernel adds them all."""
    monkeypatch.setattr(leaves, "LARGE_WINDOW", large_window)
    name, at = next(iter(all_columns(SPECS, LAYER.linears).items()))
    whole = jax.ShapeDtypeStruct
    sums, window = whole((1, 2, 5, sum(at.width)), np.float32), whole((2, places), np.int32)
    gradient = whole((places, 5, at.widest), np.float32)
    assert name.endswith("lora_a")
    program = jax.make_jaxpr(lambda *given: add(given[0], at, *given[1:]))(sums, whole((), np.int32), window, gradient)
    primitives = Counter(equation.primitive.name for equation in program.eqns)
    assert {kind: primitives[kind] for kind in ("dynamic_update_slice", "scatter-add") if primitives[kind]} == kernels


def test_a_pass_costs_what_the_adapters_in_it_cost():
    """Operations of a layer, and bytes but for those of the smallest tables, with 64 adapters as with 4."""

    def costs(count):
        specs = tuple(AdapterSpec(name=f"a{index}", rank=2, alpha=4, dropout=0.1) for index in range(count))
        model = ModelConfig(
            family="llama", vocab_size=32, hidden_size=16, intermediate_size=32, num_layers=1, num_heads=2,
            num_kv_heads=1, head_dim=8,
        )  # fmt: skip
        parts = Parts(model=model, specs=specs, settings=TrainSettings(), dtype=jnp.float32)
        programs = StagePrograms(parts, stage_meshes()[0], Extent(0, 2), "everything")
        whole, T = jax.ShapeDtypeStruct, 64
        sizes = {"segment_offsets": 9, "segment_lengths": 8, "tile_adapter": 4, "adapters": 2}
        kinds = {"row_key": np.uint32, "weights": np.float32}
        batch = Microbatch(
            **{name: whole((1, sizes.get(name, T)), kinds.get(name, np.int32)) for name in Microbatch._fields}
        )._replace(samples=None, lora=None, balance=None)
        lora = {name: whole(shape, jnp.float32) for name, shape in parts.leaves.lora_shapes(1).items()}
        frozen = ({name: whole(shape, jnp.float32) for name, shape in parts.frozen_shapes().items()},)
        inputs = jax.eval_shape(programs.layers.inputs, batch)
        position = Position(*(whole((), np.int32),) * 3)
        block = (frozen, lora, position, whole((1, T, 16), jnp.float32), inputs)
        y, kept = jax.eval_shape(programs.layers.forward, *block)
        sums = {name: whole((1, *leaf.shape), leaf.dtype) for name, leaf in lora.items()}
        passes = (programs.layers.forward.lower(*block), programs.layers.backward.lower(*block, kept, y, sums))
        return [program.cost_analysis()["flops"] for program in passes]

    assert costs(64) == costs(4)
