"""Adapter kinds from another package that do not resemble LoRA: other tensors, constant ones, column factors."""

from __future__ import annotations

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_jobs
from flax import nnx
from live_sessions import open_session, start
from live_sessions import run as run_session
from more_cases import nightly
from safetensors.numpy import load_file
from small_jobs import exported, largest_difference

from lorafusion_jax.cli.main import run
from lorafusion_jax.config import load_config
from lorafusion_jax.data.prepare import prepare
from lorafusion_jax.modules import AdapterSpec, LoRAContext, LoRALinear, apply_lora, use_adapters
from lorafusion_jax.session import Task

pytestmark = pytest.mark.usefixtures("kept_programs")

SOURCE = """
import numpy as np

from lorafusion_jax.extend import AdapterKind, Leaf


def ones(draw, shape):
    return np.ones(shape, np.float32)


def zeros(draw, shape):
    return np.zeros(shape, np.float32)


def spread(draw, shape):
    return (draw(int(np.prod(shape))).reshape(shape) - 0.5) / 2


# x (down · diag) up, with the tensors in another order
BENT = AdapterKind(
    leaves=(
        Leaf(name="up", axes=("R", "N"), init=zeros),
        Leaf(name="diag", axes=("R",), init=ones, decay=False),
        Leaf(name="down", axes=("K", "R"), init=spread, lr_group="down"),
    ),
    low_rank=lambda its, sizes: (its["down"] * its["diag"], its["up"]),
)

# One constant basis for all projections, signs that are constant, too, and only the rows after them are trained.
LEAN = AdapterKind(
    leaves=(
        Leaf(name="basis", axes=("K", "R"), init=spread, trainable=False, shared=True),
        Leaf(name="signs", axes=("R",), init=lambda draw, shape: np.sign(draw(shape[0]) - 0.5), trainable=False),
        Leaf(name="rows", axes=("R", "N"), init=zeros),
    ),
    low_rank=lambda its, sizes: (its["basis"] * its["signs"], its["rows"]),
)


def nothing(its, sizes):
    return sizes.np.zeros((sizes.K, sizes.R)), sizes.np.zeros((sizes.R, sizes.N))


# Beside A B, columns are louder by what is trained, times their norm in W. It starts from W, too.
def louder(kernel, its, sizes):
    return 1 + (its["loud"] - its["first"]) * (kernel * kernel).sum(0) ** 0.5


LOUD = Leaf(name="loud", axes=("N",), init=zeros, peft_name="loud_vector")
FIRST = Leaf(name="first", axes=("N",), init=zeros, trainable=False, peft_name="loud_first.vector")
FALL = Leaf(name="fall", axes=("K", "R"), init=spread, peft_name="fall.weight")
RISE = Leaf(name="rise", axes=("R", "N"), init=zeros, peft_name="rise.weight")


def start(kernel, its, sizes):
    return {"loud": abs(kernel).max(0), "first": abs(kernel).max(0)}


GAIN = AdapterKind(
    leaves=(LOUD, FIRST, FALL, RISE), low_rank=lambda its, sizes: (its["fall"], its["rise"]), column_scale=louder,
    start=start, scaled=("rise",),
    peft={"peft_type": "GAIN", "gain_of": "W", "gain_dropout": lambda spec: spec.dropout},
)


# Singular vectors of W stay as they are, and what is trained is R x R between them.
def singular(kernel, its, sizes):
    left, size, right = sizes.np.linalg.svd(kernel, full_matrices=False)
    return {"left": left[:, : sizes.R] * size[: sizes.R], "right": right[: sizes.R]}


CORE = AdapterKind(
    leaves=(
        Leaf(name="left", axes=("K", "R"), init=zeros, trainable=False),
        Leaf(name="core", axes=("R", "R"), init=zeros),
        Leaf(name="right", axes=("R", "N"), init=zeros, trainable=False),
    ),
    low_rank=lambda its, sizes: (its["left"] @ its["core"], its["right"]), start=singular,
)
MERGED = AdapterKind(
    leaves=(LOUD, FALL, RISE), low_rank=GAIN.low_rank, column_scale=lambda kernel, its, sizes: 1 + its["loud"]
)
NO_PEFT = AdapterKind(leaves=(LOUD,), low_rank=nothing, shift=lambda its, sizes: its["loud"])
WRONG = {
    "squared": AdapterKind(leaves=(Leaf(name="all", axes=("K", "K"), init=zeros),), low_rank=nothing),
    "raises": AdapterKind(leaves=(LOUD,), low_rank=lambda its, sizes: (its["quiet"], its["loud"])),
    "misshapen": AdapterKind(leaves=BENT.leaves, low_rank=lambda its, sizes: (its["down"].T, its["up"])),
    "taken": AdapterKind(leaves=(Leaf(name="lora_a", axes=("N",), init=ones), LOUD), low_rank=nothing),
    "shared": AdapterKind(leaves=(Leaf(name="all", axes=("K",), init=ones, shared=True), LOUD), low_rank=nothing),
    "padding": AdapterKind(
        leaves=BENT.leaves, low_rank=lambda its, sizes: (its["down"] + 1.0, its["up"] + its["diag"][:, None] + 1.0)
    ),
    "halved": AdapterKind(
        leaves=(FALL, RISE), low_rank=GAIN.low_rank,
        peft={"peft_type": "HALF", "lora_alpha": lambda spec: spec.alpha / 2},
    ),
}
SQUARED, RAISES, MISSHAPEN, TAKEN, SHARED, PADDING, HALVED = WRONG.values()
"""
GROUP = "lorafusion_jax.adapter_kinds"
KINDS = {"bent": "BENT", "lean": "LEAN", "gain": "GAIN", "merged": "MERGED", "no_peft": "NO_PEFT"}
KINDS |= {"core": "CORE"}
WRONG = ("squared", "raises", "misshapen", "taken", "shared", "padding", "halved")
FEW = ("bent", "gain", "merged")  # of every run: each compiles for some seconds
TOYS = (*FEW, "lean", "core")  # whose shared constants and square leaves VeRA and pipeline/test_own_rank.py have, too
TWO_BY_TWO = {"stages": 2, "data": 2}
RANKS = {"bent": 3, "lean": 5, "gain": 2, "merged": 2, "plain": 4, "core": 2}
SCALES = {
    "gain": {
        "rslora": True,
        "alpha": 3,
        "alpha_pattern": {"1.self_attn.q_proj": 5},
        "rank_pattern": {"1.self_attn.q_proj": 1},
    }
}


@pytest.fixture(scope="module", autouse=True)
def _installed(install_for_module):
    install_for_module("toy_kind", SOURCE, {GROUP: KINDS | {name: name.upper() for name in WRONG}})


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    """job(names, **sections) → job file, always in the same folder. An adapter's kind is its name."""
    folder = tmp_path_factory.mktemp("job")
    rows = {name: small_jobs.write_rows(folder, name, 12, longest=16) for name in (*RANKS, "no_peft", *WRONG)}

    def make(*names: str, **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"kind": "lora" if name == "plain" else name, "rank": RANKS.get(name, 2), "dropout": 0.1}
                | ({} if name == "lean" else {"targets": ["q_proj"]})
                | SCALES.get(name, {}),
                "optim": {"lr": 0.02, "schedule": "constant", "weight_decay": 0.1}
                | ({"lr_ratio": {"down": 2}} if name == "bent" else {}),
            }
            for name in names
        ]
        return small_jobs.write_job(folder, tiny_base, adapters, **{"save": {"every_steps": 2}} | sections)

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    """A run of a few together."""
    out = tmp_path_factory.mktemp("runs") / "joint"
    assert run(["train", str(job(*FEW, "plain")), "--out", str(out)]) == 0
    return out


@pytest.fixture(scope="module")
def all_joint(job, tmp_path_factory):
    """A run of all of them together."""
    out = tmp_path_factory.mktemp("runs") / "all"
    assert run(["train", str(job(*TOYS, "plain")), "--out", str(out)]) == 0
    return out


def test_all_kinds_learn_and_their_folders_compute_the_same(joint):
    assert_learned(joint, FEW)


@pytest.mark.nightly
def test_the_other_kinds_do_so_too(all_joint):
    assert_learned(all_joint, TOYS)


def assert_learned(joint, names) -> None:
    rows = [json.loads(line) for line in (joint / "metrics.jsonl").read_text().splitlines()]
    for name in names:
        evals = [row["eval_loss"] for row in rows if row["kind"] == "eval" and row["adapter"] == name]
        assert evals[-1] < evals[0]

    from lorafusion_jax.training.verify import verify_exports

    for check in verify_exports(joint).values():
        assert check.delta < 1e-5 * check.trained  # A times the diagonal, rounded once more


@pytest.mark.parametrize(
    ("name", "joint_of"), [("bent", "joint"), nightly("lean", "all_joint"), nightly("core", "all_joint")]
)
def test_a_kind_that_peft_lacks_is_exported_as_lora(name, joint_of, request):
    joint = request.getfixturevalue(joint_of)
    adapter_config = json.loads((joint / "adapters" / name / "latest" / "adapter_config.json").read_text())
    assert (adapter_config["peft_type"], adapter_config["r"], adapter_config["lora_alpha"]) == ("LORA", RANKS[name], 32)
    assert {key.rsplit(".", 2)[-2] for key in exported(joint, name)} == {"lora_A", "lora_B"}


def test_a_kind_with_a_form_in_peft_writes_its_own_tensors(joint):
    adapter_config = json.loads((joint / "adapters" / "gain" / "latest" / "adapter_config.json").read_text())
    assert (adapter_config["peft_type"], adapter_config["gain_of"], "use_dora" in adapter_config) == (
        "GAIN",
        "W",
        False,
    )
    # what gives it its scale and its dropout, as of LoRA
    lora = SCALES["gain"]
    assert [adapter_config[key] for key in ("r", "lora_alpha", "use_rslora", "gain_dropout")] == [2, 3, True, 0.1]
    assert [adapter_config[key] for key in ("alpha_pattern", "rank_pattern")] == [
        lora["alpha_pattern"],
        lora["rank_pattern"],
    ]
    prefix = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors = exported(joint, "gain")
    assert {key.removeprefix(prefix) for key in tensors if key.startswith(prefix)} == {
        ".loud_vector",
        ".loud_first.vector",
        ".fall.weight",
        ".rise.weight",
    }
    assert tensors[f"{prefix}.loud_vector"].shape == tensors[f"{prefix}.loud_first.vector"].shape


def test_constant_tensors_keep_their_initial_values(joint, tiny_base):
    base = load_file(tiny_base / "model.safetensors")
    for layer in range(2):
        first = exported(joint, "gain")[f"base_model.model.model.layers.{layer}.self_attn.q_proj.loud_first.vector"]
        np.testing.assert_array_equal(
            first, np.abs(np.float32(base[f"model.layers.{layer}.self_attn.q_proj.weight"])).max(1)
        )


@pytest.mark.nightly
def test_shared_constants_are_the_same_in_every_projection(all_joint):
    """A of `lean` is its basis times signs, whatever was trained."""
    tensors = exported(all_joint, "lean")
    columns = [np.abs(tensors[key]) for key in tensors if key.endswith("q_proj.lora_A.weight")]
    wide = [np.abs(tensors[key]) for key in tensors if key.endswith("down_proj.lora_A.weight")]
    for array in columns:
        np.testing.assert_array_equal(array, wide[0][:, : array.shape[1]])


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gain", {}),
        nightly("gain", {"stages": 2}),
        *(
            nightly(name, mesh)
            for name in TOYS
            for mesh in ({}, {"data": 2}, TWO_BY_TWO)
            if (name, mesh) != ("gain", {})
        ),
    ],
)
def test_joint_equals_separate_training(all_joint, job, tmp_path, name, mesh):
    """Another packing and another layout, so sums come in another order."""
    not_evaluated = f"adapters.{name}.data.eval=null"  # fewer programs
    assert run(["train", str(job(name, mesh=mesh)), "--out", str(tmp_path / "alone"), not_evaluated]) == 0
    assert largest_difference(exported(all_joint, name), exported(tmp_path / "alone", name)) < 1e-5


@pytest.mark.nightly  # tests/pipeline/test_own_rank.py has the arrays of such a place
def test_a_square_core_trains_in_a_place_that_held_a_larger_one(all_joint, job):
    def task(rank: int) -> Task:
        config = load_config(job("core"), [f"adapters.core.lora.rank={rank}", "adapters.core.data.eval=null"])
        return Task.of(config, prepare(config))

    session = open_session(task(2).config, {"core:4": 1}, ["q_proj"])
    try:
        for rank in (4, RANKS["core"]):
            start(session, task(rank))
            (state,) = run_session(session).values()
    finally:
        session.close()
    left, core = (state.weights[f"layers.self_attn.q_proj.{name}"] for name in ("left", "core"))
    assert core.shape == (2, 2, 2)
    for layer, a_KR in enumerate(left @ core):
        key = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"
        np.testing.assert_allclose(a_KR.T, exported(all_joint, "core")[key], rtol=1e-5, atol=1e-7)


def test_resumed_run_equals_uninterrupted_run(all_joint, job, tmp_path):
    from lorafusion_jax.training import train

    def power_cut(event) -> None:
        if event.kind == "step" and event.adapter == "gain" and event.step == 3:
            raise RuntimeError("power cut")

    with pytest.raises(RuntimeError, match="power cut"):
        train(load_config(job(*TOYS, "plain")), tmp_path / "cut", listeners=[power_cut])
    assert run(["resume", str(tmp_path / "cut")]) == 0
    for name in (*TOYS, "plain"):
        ours, theirs = exported(tmp_path / "cut", name), exported(all_joint, name)
        assert ours.keys() == theirs.keys()
        for key in ours:
            np.testing.assert_array_equal(ours[key], theirs[key])


def test_training_goes_on_from_a_folder_of_its_kind(joint, job, tmp_path, capsys):
    latest = joint / "adapters" / "gain" / "latest"
    begun = tmp_path / "begun"
    started = [f"adapters.gain.lora.init_from={latest}", "adapters.gain.optim.lr=1e-9", "adapters.gain.data.eval=null"]
    assert run(["train", str(job("gain")), "--out", str(begun), *started]) == 0
    for key, array in exported(joint, "gain").items():
        np.testing.assert_allclose(exported(begun, "gain")[key], array, rtol=1e-5)
    assert run(["export", str(joint), "gain", "--merge", "--to", str(tmp_path / "merged")]) == 0
    capsys.readouterr()

    latest = joint / "adapters" / "bent" / "latest"
    second = tmp_path / "second"
    assert run(["train", str(job("bent")), "--out", str(second), f"adapters.bent.lora.init_from={latest}"]) == 2
    assert "error[peft.kind]" in capsys.readouterr().err
    assert not second.exists()


def test_merged_weights_compute_the_same(joint, tiny_base, tmp_path):
    from lorafusion_jax.peft.merge import merge_adapter as merge_folder

    merge_folder(tiny_base, joint / "adapters" / "gain" / "latest", tmp_path / "merged", kind="gain")
    before, after = load_file(tiny_base / "model.safetensors"), load_file(tmp_path / "merged" / "model.safetensors")
    tensors = exported(joint, "gain")
    key = "model.layers.1.self_attn.q_proj"
    w_KN = np.float64(before[f"{key}.weight"]).T
    louder = tensors[f"base_model.model.{key}.loud_vector"] - tensors[f"base_model.model.{key}.loud_first.vector"]
    low = np.float64(tensors[f"base_model.model.{key}.rise.weight"]) @ tensors[f"base_model.model.{key}.fall.weight"]
    want_KN = (w_KN + 5 / 1**0.5 * low.T) * (1 + louder * np.sqrt((w_KN**2).sum(0)))
    assert np.abs(low).max() > 1e-4  # so that the scale shows
    np.testing.assert_allclose(np.float64(after[f"{key}.weight"]).T, want_KN, rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(
        before["model.layers.1.mlp.up_proj.weight"], after["model.layers.1.mlp.up_proj.weight"]
    )


def test_a_kind_that_only_a_merge_can_hold_is_merged_and_not_exported(joint, job, tiny_base, tmp_path, capsys):
    assert run(["export", str(joint), "merged", "--to", str(tmp_path / "folder")]) == 2
    assert "error[peft.kind]" in capsys.readouterr().err
    assert run(["export", str(joint), "merged", "--merge", "--to", str(tmp_path / "model")]) == 0
    capsys.readouterr()
    before, after = load_file(tiny_base / "model.safetensors"), load_file(tmp_path / "model" / "model.safetensors")
    tensors = exported(joint, "merged")
    for layer in range(2):
        key = f"model.layers.{layer}.self_attn.q_proj"
        loud, fall, rise = (
            np.float64(tensors[f"base_model.model.{key}.{name}"])
            for name in ("loud_vector", "fall.weight", "rise.weight")
        )
        want_NK = (np.float64(before[f"{key}.weight"]) + 32 / 2 * rise @ fall) * (1 + loud)[:, None]
        np.testing.assert_allclose(np.float64(after[f"{key}.weight"]), want_NK, rtol=1e-5, atol=1e-6)
    latest = joint / "adapters" / "merged" / "latest"  # training goes on from it, too
    settings = [
        f"adapters.merged.lora.init_from={latest}",
        "adapters.merged.lora.alpha=5",
        "adapters.merged.data.eval=null",
    ]
    assert run(["train", str(job("merged")), "--out", str(tmp_path / "other"), *settings]) == 2
    assert "error[peft.other-settings]" in capsys.readouterr().err


def test_a_folder_without_its_scale_is_refused(joint, tmp_path):
    from lorafusion_jax.errors import LoraFusionError
    from lorafusion_jax.peft.folder import read_adapter

    latest = joint / "adapters" / "gain" / "latest"
    assert read_adapter(latest, "gain")[0].scale_at("layers.0.self_attn.q_proj") == pytest.approx(3 / 2**0.5)
    for key in ("lora_alpha", "use_rslora"):
        folder = tmp_path / key
        shutil.copytree(latest, folder)
        (folder / "SHA256SUMS").unlink()
        settings = json.loads((folder / "adapter_config.json").read_text())
        del settings[key]
        (folder / "adapter_config.json").write_text(json.dumps(settings))
        with pytest.raises(LoraFusionError, match=f"has no {key}"):
            read_adapter(folder, "gain")


def test_a_layer_of_its_own_and_an_nnx_model_compute_the_kind():
    specs = [
        AdapterSpec(name="bent", rank=2, alpha=4, kind="bent", targets=(".*",)),
        AdapterSpec(name="plain", rank=3, alpha=3, targets=(".*",)),
        AdapterSpec(name="gain", rank=1, alpha=3, kind="gain", targets=(".*",)),
    ]
    model = apply_lora(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), specs)
    layer = LoRALinear(8, 6, adapters=specs, use_bias=True, rngs=nnx.Rngs(0))
    layer.kernel[...] = model.kernel[...]
    keys = iter(jax.random.split(jax.random.key(0), 9))
    model.up[...] = jax.random.normal(next(keys), (3, 3, 6)).at[0, 2:].set(0).at[1:].set(0)
    model.lora_b[...] = jax.random.normal(next(keys), (3, 3, 6)).at[0].set(0).at[2].set(0)
    model.loud[...] = model.loud[...].at[2].add(jax.random.normal(next(keys), (6,)))
    model.rise[...] = model.rise[...].at[2, :1].set(jax.random.normal(next(keys), (1, 6)))
    model.diag[...] = model.diag[...].at[0, :2].set(jnp.array([0.5, -2.0]))
    for name in ("up", "diag", "down", "lora_a", "lora_b", "loud", "first", "fall", "rise"):
        getattr(layer, name)[...] = getattr(model, name)[...]
    x, table = jax.random.normal(next(keys), (6, 8)), jnp.array([0, 1, 2, 0, 1, 2])
    leaves = {name: np.float64(getattr(model, name)[...]) for name in ("up", "diag", "down", "lora_a", "lora_b")}
    w = np.float64(model.kernel[...])
    louder = 1 + np.float64(model.loud[...] - model.first[...])[2] * np.sqrt((w**2).sum(0))
    low = {
        0: 2 * (leaves["down"][0] * leaves["diag"][0]) @ leaves["up"][0],
        1: leaves["lora_a"][1] @ leaves["lora_b"][1],
        2: (w + 3 * np.float64(model.fall[...])[2] @ np.float64(model.rise[...])[2]) * louder - w,
    }
    want = np.stack([row @ (w + low[k]) for row, k in zip(np.float64(x), table.tolist(), strict=True)])

    @nnx.jit
    def forward(model, x):
        with use_adapters(LoRAContext.of(specs, table)):
            return model(x)

    np.testing.assert_allclose(forward(model, x), want, rtol=1e-5, atol=1e-5)
    computed = nnx.jit(lambda layer, x: layer(x, LoRAContext.of(specs, table)))(layer, x)
    np.testing.assert_allclose(computed, want, rtol=1e-5, atol=1e-5)

    @nnx.jit
    def gradient(model):
        loss = lambda model: (forward(model, x)[1::3] ** 2).sum()  # noqa: E731 (rows of the plain adapter)
        return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)

    before = gradient(model)
    for name in ("loud", "diag"):
        poisoned = getattr(model, name)[...]
        getattr(model, name)[...] = poisoned.at[2 if name == "loud" else 0].set(jnp.nan)
    after = gradient(model)
    for name in ("lora_a", "lora_b"):
        np.testing.assert_array_equal(after[name][...][1], before[name][...][1])


def test_only_trained_tensors_have_gradients_and_optimizer_states(job, capsys):
    assert run(["plan", str(job("lean")), "--json"]) == 0
    held = json.loads(capsys.readouterr().out)["memory"]["stages"][0]
    rank, widths = RANKS["lean"], 32 + 32  # q, down
    rows, signs, basis = 2 * rank * widths, 2 * 2 * rank, 48 * rank  # down has the most inputs
    assert held["sums"] == 4 * rows
    assert held["optimizers"] == 2 * held["sums"]
    assert held["adapters"] == 4 * (rows + signs + basis)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("squared", "K and N at most once"),
        ("raises", "KeyError: 'quiet'"),
        ("misshapen", "A of low_rank has the shape"),
        ("taken", "lora_a is the name of another tensor in a built-in kind"),
        ("shared", "all is shared and trainable"),
        ("padding", "beyond an adapter's rank"),
        ("halved", "do not say all of an adapter"),
    ],
)
def test_a_broken_kind_is_named_before_anything_is_loaded(job, tmp_path, capsys, kind, words):
    assert run(["train", str(job(kind)), "--out", str(tmp_path / "run")]) == 2
    err = capsys.readouterr().err
    assert "error[kind.broken]" in err
    assert words in " ".join(err.split())
    assert "from toy_kind" in " ".join(err.split())
    assert not (tmp_path / "run").exists()


def test_a_kind_that_cannot_be_exported_is_refused_before_step_1(job, tmp_path, capsys):
    assert run(["train", str(job("no_peft")), "--out", str(tmp_path / "run")]) == 2
    assert "error[kind.no-peft]" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_kind_is_refused(job, capsys):
    assert run(["check", str(job("plain")), "adapters.plain.lora.kind=bnt"]) == 2
    assert "did you mean 'bent'" in capsys.readouterr().err
