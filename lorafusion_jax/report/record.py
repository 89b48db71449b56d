"""run.json: what made a run, so that it can be checked and repeated."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import CheckpointError
from scheduling import Plan

PACKAGES = ("lorafusion-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
SCHEMA = 1


def versions() -> dict[str, str]:
    """Versions of what computes; "-" where a package is not installed as one."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "-"
    return found


def make_record(config: JobConfig, prepared: Prepared, plan: Plan) -> dict:
    """Collects versions, digests and seeds at the start of a run; the device is added when it is known."""
    return {
        "schema": SCHEMA,
        "plan": plan.digest,
        "data": prepared.digests(),
        "template": prepared.tokenizer.template_hash,
        "seeds": {adapter.name: adapter.seed for adapter in config.adapters},
        "versions": versions(),
    }


def check_record(record: dict, prepared: Prepared, plan: Plan) -> None:
    """Makes sure that a resumed run meets the data and plan that it started with.

    Raises:
        CheckpointError: `run.other-plan` or `run.data-changed`.
    """
    if record.get("plan") != plan.digest:
        raise CheckpointError(
            "run.other-plan",
            "plan.json is not the plan that this run was started with.",
            why=f"the run has {record.get('plan')}, the file {plan.digest}",
        )
    changed = [name for name, digest in prepared.digests().items() if record.get("data", {}).get(name) != digest]
    if changed:
        raise CheckpointError(
            "run.data-changed",
            f"the data of {', '.join(changed)} changed since the run was started.",
            fix="restore the files, or start a new run with lorafusion train",
        )
