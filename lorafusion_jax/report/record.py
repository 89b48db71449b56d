"""run.json: versions, digests and seeds of a run, so that it can be checked and repeated."""

from __future__ import annotations

import platform
from collections.abc import Collection, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.digests import digest_of
from lorafusion_jax.errors import CheckpointError
from lorafusion_jax.peft.read_config import CONFIG_FILE
from lorafusion_jax.peft.settings import TENSOR_FILE
from scheduling import Plan

PACKAGES = ("lorafusion-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SCHEMA = 2  # from 2 on, all files of a run have digests


def versions() -> dict[str, str]:
    """Versions of the packages that compute; "-" if a package is not installed."""
    version_by_package = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            version_by_package[name] = version(name)
        except PackageNotFoundError:
            version_by_package[name] = "-"
    return version_by_package


def make_record(
    config: JobConfig, prepared: Prepared, plan: Plan, base_files: dict, warm_starts: dict[str, dict[str, str]]
) -> dict:
    """Collects versions, digests and seeds at the start of a run. The device is added later.

    Args:
        base_files: from `base_digests`.
        warm_starts: adapter that continues from a PEFT folder → digests of its files.
    """
    return {
        "schema": SCHEMA,
        "plan": plan.digest,
        "data": prepared.digests(),
        "eval": eval_digests(prepared),
        "compared_by": compared_by(config),
        "scored_by": scored_by(config),
        "template": prepared.tokenizer.template_hash,
        "seeds": {adapter.name: adapter.seed for adapter in config.adapters},
        "versions": versions(),
        "base_files": base_files,
        "base_quantize": config.base.quantize,
        "warm_starts": warm_starts,
    }


def other_versions(record: dict) -> str | None:
    """Names packages whose version has changed since the run started."""
    before, now = record.get("versions", {}), versions()
    changes = [
        f"{name} was {before[name]} and is {now[name]}" for name in now if before.get(name, now[name]) != now[name]
    ]
    return f"{', '.join(changes)}: results may differ by rounding from here on" if changes else None


def other_table(record: dict, now: str) -> str | None:
    """Says whether other measurements than at the start of the run decide its kernels.

    Args:
        now: digest of the tuning table in use; empty without one.
    """
    if record.get("tuning_table", now) == now:  # none before a model has been loaded
        return None
    return "another tuning table than before decides the kernels: results may differ by rounding from here on"


def check_record(record: dict, prepared: Prepared, plan: Plan, saved_with: str | None = None) -> None:
    """Checks that a resumed run has the data that it started with, and one of its own plans.

    Args:
        saved_with: digest of the plan of its newest checkpoint, which may be an earlier one: planning again keeps the
            slots that have run.

    Raises:
        CheckpointError: `run.other-plan` or `run.data-changed`.
    """
    plans = [record.get("plan"), *(move["plan"] for move in record.get("moves", ()))]
    if plan.digest != plans[-1] or (saved_with or plan.digest) not in plans:
        raise CheckpointError(
            "run.other-plan",
            "plan.json is not the plan of this run.",
            why=f"the run has {plans[-1]}, the file {plan.digest}"
            if plan.digest != plans[-1]
            else f"its checkpoint is of plan {saved_with}",
            fix="restore the run's plan.json from a copy, or choose another --out for a new run",
        )
    for key, label, now in (
        ("data", "data", prepared.digests()),
        ("eval", "held-out data", eval_digests(prepared)),
    ):
        before = record[key]
        adapters = [name for name in now if before.get(name) != now[name]]
        if adapters:
            raise CheckpointError(
                "run.data-changed",
                f"the {label} of {', '.join(adapters)} changed since the run started.",
                fix="restore the files, or start a new run with lorafusion train",
            )


def compared_by(config: JobConfig) -> dict[str, dict[str, Any]]:
    """Adapter → the metric that tells how good it is, and whether it rises."""
    settings = {adapter.name: adapter.early_stop for adapter in config.adapters}
    return {name: {"metric": stop.metric, "rises": stop.rises} for name, stop in settings.items()}


def scored_by(config: JobConfig) -> dict[str, dict[str, str]]:
    """Adapter → digests of the files that reward and score its answers: functions, tools and reward adapters."""
    names = {adapter.name for adapter in config.adapters}
    return {
        adapter.name: {file: _digest(Path(config.directory) / file) for file in sorted(_scoring_files(adapter, names))}
        for adapter in config.adapters
    }


def _scoring_files(adapter: AdapterConfig, names: Collection[str]) -> Iterator[str]:
    rollout = adapter.rollout
    for text in filter(None, [*rollout.functions, rollout.tool, adapter.eval.score]):
        yield text.rpartition(":")[0]
    for judge in (reward.value for reward in rollout.reward if reward.kind == "adapter" and reward.value not in names):
        yield from (f"{judge}/{file}" for file in (CONFIG_FILE, TENSOR_FILE))


def _digest(file: Path) -> str:
    try:
        return digest_of(file.resolve())
    except OSError:
        return ""


def other_scores(record: dict, config: JobConfig) -> str | None:
    """Names the files of rewards and scores that have changed since the run started."""
    now, before = scored_by(config), record.get("scored_by", {})
    changed = dict.fromkeys(
        file for name, files in now.items() for file in files if before.get(name, files).get(file) != files[file]
    )
    if not changed:
        return None
    return f"{', '.join(changed)} changed since the run started: rewards and scores are of the new files from here on"


def eval_digests(prepared: Prepared) -> dict[str, str]:
    """Adapter → digest of its held-out data; "" if it has none."""
    return {name: "" if data.eval is None else data.eval.digest for name, data in prepared.adapters.items()}
