"""An adapter kind from another package: LoRA with a trainable scale per output column."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_jobs
from flax import nnx
from more_cases import nightly
from safetensors.numpy import load_file

from lorafusion_jax.cli.main import run
from lorafusion_jax.modules import AdapterSpec, LoRAContext, apply_lora, use_adapters

SOURCE = """
import numpy as np

from lorafusion_jax.adapters.kind import LORA_A, LORA_B, AdapterKind, Leaf


def ones(draw, shape):
    return np.ones(shape, np.float32)


COLUMNS = Leaf(name="column_scale", axes=("N",), init=ones)
SCALED = AdapterKind(
    leaves=(LORA_A, LORA_B, COLUMNS),
    low_rank=lambda leaves: (leaves["lora_a"], leaves["lora_b"] * leaves["column_scale"][:, None, :]),
)
"""


ONE_LINEAR = {"targets": ["q_proj"]}  # smaller programs


@pytest.fixture(scope="module", autouse=True)
def _installed(install_for_module):
    install_for_module("toy_kind", SOURCE, {"lorafusion_jax.adapter_kinds": {"scaled": "SCALED"}})


@pytest.fixture(scope="module")
def job(tmp_path_factory, tiny_base):
    """job({name: kind}, **sections) → job file, always in the same folder."""
    folder = tmp_path_factory.mktemp("job")
    ranks = {"toy": 2, "plain": 4}
    rows = {name: small_jobs.write_rows(folder, name, 12, longest=20) for name in ranks}

    def make(kinds: dict[str, str], **sections):
        adapters = [
            {
                "name": name,
                "data": {"train": rows[name], "eval": rows[name]},
                "batch": {"global_samples": 4},
                "lora": {"kind": kind, "rank": ranks[name], "dropout": 0.1},
                "optim": {"lr": 0.02, "schedule": "constant"},
            }
            for name, kind in kinds.items()
        ]
        return small_jobs.write_job(folder, tiny_base, adapters, **sections)

    return make


@pytest.fixture(scope="module")
def joint(job, tmp_path_factory):
    """A run of both kinds together."""
    out = tmp_path_factory.mktemp("runs") / "joint"
    both = job({"toy": "scaled", "plain": "lora"}, lora=ONE_LINEAR)
    assert run(["train", str(both), "--out", str(out)]) == 0
    return out


def trained(folder, name):
    return load_file(folder / "adapters" / name / "latest" / "adapter_model.safetensors")


def test_trains_with_lora_to_equivalent_peft_folders(joint):
    rows = [json.loads(line) for line in (joint / "metrics.jsonl").read_text().splitlines()]
    evals = [row["eval_loss"] for row in rows if row["kind"] == "eval" and row["adapter"] == "toy"]
    assert evals[-1] < evals[0]

    from lorafusion_jax.training.verify import verify_exports

    for check in verify_exports(joint).values():
        assert check.delta < 1e-5 * check.trained  # B times the column's scale, rounded once more


@pytest.mark.parametrize("mesh", [nightly({}), {"data": 2}, nightly({"stages": 2, "data": 2})], ids=str)
def test_joint_equals_separate_training(joint, job, tmp_path, mesh):
    """Another packing and another layout, so sums come in another order."""
    alone = tmp_path / "alone"
    toy = job({"toy": "scaled"}, mesh=mesh, lora=ONE_LINEAR)
    assert run(["train", str(toy), "--out", str(alone), "adapters.toy.data.eval=null"]) == 0
    ours, theirs = trained(joint, "toy"), trained(alone, "toy")
    assert max(float(np.abs(ours[key] - theirs[key]).max() / np.abs(theirs[key]).max()) for key in ours) < 1e-5


def test_it_cannot_go_on_from_a_peft_folder(joint, job, tmp_path, capsys):
    latest = joint / "adapters" / "plain" / "latest"
    again = job({"toy": "scaled"}, lora=ONE_LINEAR)
    assert run(["train", str(again), "--out", str(tmp_path / "second"), f"adapters.toy.lora.init_from={latest}"]) == 2
    assert "error[peft.kind]" in capsys.readouterr().err
    assert not (tmp_path / "second").exists()


def test_works_in_an_nnx_model():
    specs = [
        AdapterSpec(name="toy", rank=2, alpha=4, kind="scaled", targets=(".*",)),
        AdapterSpec(name="plain", rank=3, alpha=3, targets=(".*",)),
    ]
    model = apply_lora(nnx.Linear(8, 6, rngs=nnx.Rngs(0)), specs)
    keys = iter(jax.random.split(jax.random.key(0), 4))
    model.lora_b[...] = jax.random.normal(next(keys), (2, 3, 6)).at[0, 2:].set(0)
    model.column_scale[...] = jax.random.normal(next(keys), (2, 6))
    x = jax.random.normal(next(keys), (4, 8))
    table = jnp.array([0, 1, 0, 1])

    def forward(model, x):
        with use_adapters(LoRAContext.of(specs, table)):
            return model(x)

    a, b, columns, w = (
        np.float64(leaf[...]) for leaf in (model.lora_a, model.lora_b, model.column_scale, model.kernel)
    )
    factors = np.stack([2 * columns[0], np.ones(6)])
    want = [
        x_K @ w + model.bias[...] + (x_K @ a[k] @ b[k]) * factors[k]
        for x_K, k in zip(np.float64(x), table, strict=True)
    ]
    np.testing.assert_allclose(forward(model, x), np.stack(want), rtol=1e-5, atol=1e-5)

    def gradient(model):
        loss = lambda model: (forward(model, x)[1::2] ** 2).sum()  # noqa: E731 (rows of the plain adapter)
        return nnx.grad(loss, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)

    before = gradient(model)
    model.column_scale[...] = jnp.array(model.column_scale[...]).at[0].set(jnp.nan)
    after = gradient(model)
    for name in ("lora_a", "lora_b"):
        np.testing.assert_array_equal(after[name][...][1], before[name][...][1])


def test_memory_counts_its_tensors(job, capsys):
    held = {}
    for kind in ("lora", "scaled"):
        assert run(["plan", str(job({"toy": kind})), "--json"]) == 0
        held[kind] = json.loads(capsys.readouterr().out)["memory"]["stages"][0]
    widths = 32 + 32  # q, down
    assert held["scaled"]["adapters"] - held["lora"]["adapters"] == 4 * 2 * widths


def test_an_unknown_kind_is_refused(job, capsys):
    assert run(["check", str(job({"toy": "scald"}))]) == 2
    assert "did you mean 'scaled'" in capsys.readouterr().err
