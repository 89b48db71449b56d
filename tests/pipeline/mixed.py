"""A job whose adapters differ in everything that a layout must not change, and what its runs leave behind."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import small_jobs

from lorafusion_jax.peft.folder import read_adapter
from lorafusion_jax.report.recorder import read_rows
from lorafusion_jax.training import RunFolder

WORDS = (*small_jobs.WORDS[:12], "slot")

# Adam's eps is large enough not to magnify the rounding of gradients that are almost zero: what is compared is the
# pipeline, not the condition of an optimizer.
ADAPTERS = {
    "law": {
        "rows": 9,
        "lora": {"rank": 4, "alpha": 8, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
        "optim": {"lr": 1e-2, "eps": 1e-3, "clip": 0.1},
        "batch": {"global_samples": 3},
        "seed": 1,
    },
    "med": {  # on all linears
        "rows": 7,
        "lora": {"rank": 7, "alpha": 7, "dropout": 0.3, "rslora": True},
        "optim": {"name": "sgd", "lr": 1e-1, "momentum": 0.9, "weight_decay": 0.1},
        "batch": {"global_samples": 5},
        "seed": 2,
        "epochs": 2,
    },
    "chat": {  # ends long before the others
        "rows": 4,
        "lora": {"rank": 2, "alpha": 16, "dropout": 0.0, "targets": ["q_proj", "v_proj", "down_proj"]},
        "optim": {"name": "adafactor", "lr": 1e-2, "clip": 0.5, "schedule": "linear"},
        "batch": {"global_samples": 2},
        "seed": 3,
    },
    "code": {
        "rows": 9,
        "lora": {"rank": 2, "alpha": 4, "dropout": 0.05, "targets": ["o_proj", "gate_proj"]},
        "optim": {"name": "lion", "lr": 1e-4, "schedule": "constant"},
        "batch": {"global_samples": 8},
        "seed": 4,
    },
}


def write_mixed_job(folder: Path, base: Path, names=tuple(ADAPTERS), held_out=("law", "chat"), **sections) -> Path:
    """Writes the job and its data; sections are keyword arguments. Adapters in `held_out` are evaluated."""
    folder.mkdir(parents=True, exist_ok=True)
    adapters = []
    for name in names:
        entry = dict(ADAPTERS[name])
        for file, count in ((name, entry.pop("rows")), (f"{name}_eval", 3)):
            draw = random.Random(file)
            (folder / f"{file}.jsonl").write_text("".join(json.dumps(_row(draw)) + "\n" for _ in range(count)))
        data = {"train": f"{name}.jsonl"} | ({"eval": f"{name}_eval.jsonl"} if name in held_out else {})
        adapters.append({"name": name, "data": data, **entry})
    job = {
        "base": {"model": str(base), "dtype": "float32"},
        "data": {"max_length": 64},
        "batch": {"capacity_tokens": 64, "tile_tokens": 16},
        "train": {"log_every_s": 0, "plan_seconds": 0.1, "block_layers": 1},
        "adapters": adapters,
    }
    for name, values in sections.items():
        job[name] = job.get(name, {}) | values
    path = folder / "jobs.yaml"
    path.write_text(json.dumps(job))
    return path


def _row(draw: random.Random) -> dict:
    return {
        "prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 10))),
        "completion": " " + " ".join(draw.choices(WORDS, k=draw.randint(1, 10))),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a run leaves: losses in order of steps, and weights."""

    losses: dict[tuple[str, str, int], float]
    weights: dict[str, dict[str, np.ndarray]]

    def of(self, names) -> Trained:
        """Of these adapters only: who else trained makes no difference to them."""
        losses = {key: loss for key, loss in self.losses.items() if key[0] in names}
        return Trained(losses=losses, weights={name: self.weights[name] for name in names})

    def without_evaluations(self) -> Trained:
        losses = {key: loss for key, loss in self.losses.items() if key[1] != "eval"}
        return Trained(losses=losses, weights=self.weights)


def read_trained(folder: Path) -> Trained:
    rows = read_rows(folder / "metrics.jsonl")
    losses = {(row["adapter"], "step", row["step"]): row["loss"] for row in rows if row["kind"] == "step"}
    losses |= {(row["adapter"], "norm", row["step"]): row["grad_norm"] for row in rows if row["kind"] == "step"}
    losses |= {(row["adapter"], "eval", row["step"]): row["eval_loss"] for row in rows if row["kind"] == "eval"}
    weights = {}
    for path in sorted((folder / "adapters").iterdir()):
        _, arrays = read_adapter(RunFolder(folder).latest(path.name))
        weights[path.name] = {
            f"{key} {ab}": leaf for key, pair in arrays.items() for ab, leaf in zip("ab", pair, strict=True)
        }
    return Trained(losses=losses, weights=weights)


def assert_equal(actual: Trained, other: Trained, tolerance: float) -> None:
    """Losses one by one, weights of each adapter relative to their size; a tolerance of 0 means bit for bit."""
    assert actual.losses.keys() == other.losses.keys()
    for key, loss in actual.losses.items():
        assert abs(loss - other.losses[key]) <= tolerance * abs(loss), (key, loss, other.losses[key])
    assert actual.weights.keys() == other.weights.keys()
    for name, leaves in actual.weights.items():
        assert leaves.keys() == other.weights[name].keys()
        pairs = [(leaf, other.weights[name][key]) for key, leaf in leaves.items()]
        difference = sum(float(np.sum((np.float64(a) - np.float64(b)) ** 2)) for a, b in pairs) ** 0.5
        size = sum(float(np.sum(np.float64(b) ** 2)) for _, b in pairs) ** 0.5
        assert difference <= tolerance * size, (name, difference / size)
