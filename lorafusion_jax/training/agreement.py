"""Compares what the processes of a run are about to train, before the first step.

Each process reads job, data and base from its own disk. If one of them read something else, sums over processes would
be wrong without a word. So all exchange digests, and whoever differs from the first process is named.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from lorafusion_jax.checkpoint.new_run import flat_settings
from lorafusion_jax.checkpoint.warm_start import warm_start_digests
from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.data.prepare import Prepared, prepare
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few
from lorafusion_jax.report.record import eval_digests, versions
from lorafusion_jax.session.processes import answers_of_all, is_alone, same_on_all, text_of_first
from lorafusion_jax.training.relayout import is_place
from scheduling import Plan

Facts = dict[str, str]  # what is compared → its value, or a digest

SHOWN = 8  # differences that a message names
HOST = "host"
NUMERICS = ("jax_default_matmul_precision", "jax_enable_x64")
ABSENT = "absent"


def job_facts(
    config: JobConfig,
    prepared: Prepared,
    base_files: Mapping[str, Mapping[str, str]],
    starting: JobConfig | None = None,
) -> Facts:
    """Returns what decides the results of a job: settings, data, weights, versions. Paths may differ between hosts.

    Args:
        base_files: from `base_digests`.
        starting: settings of the adapters that no checkpoint holds yet (None: of all). The warm starts of others may
            be gone.
    """
    settings = {key: str(value) for key, value in flat_settings(config).items() if not is_place(key)}
    facts = settings | {"the chat template": prepared.tokenizer.template_hash} | data_facts(prepared)
    facts |= warm_start_facts(config if starting is None else starting)
    for digests in base_files.values():
        facts |= {f"{file} of the base model": digest for file, digest in digests.items()}
    facts |= {f"the version of {name}": number for name, number in versions().items()}
    return facts | {name: str(getattr(jax.config, name)) for name in NUMERICS}


def data_facts(prepared: Prepared) -> Facts:
    """Returns the digests of the data of all adapters."""
    facts = {f"the data of {name}": digest for name, digest in prepared.digests().items()}
    return facts | {f"the held-out data of {name}": digest for name, digest in eval_digests(prepared).items()}


def warm_start_facts(config: JobConfig) -> Facts:
    """Returns the digests of the files of all warm starts."""
    return {
        f"{file} of the warm start of {name}": digest
        for name, digests in warm_start_digests(config).items()
        for file, digest in digests.items()
    }


def run_facts(record: Mapping[str, Any], plan: Plan, slots: Sequence[int], drop: Sequence[str]) -> Facts:
    """Returns from what a run continues: its folder may be on a disk of each host.

    Args:
        slots: of its checkpoints.
    """
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    checkpoints = ", ".join(map(str, slots))
    return {"run.json": digest, "plan.json": plan.digest, "state/": checkpoints, "--drop": ", ".join(drop)}


def check_agreement(facts: Facts) -> None:
    """Checks that all processes hold the same facts. Collective.

    Raises:
        CheckpointError: `processes.differ`, on all processes.
    """
    if is_alone() or same_on_all(_digest(facts)):
        return
    answers = answers_of_all(json.dumps(facts | {HOST: socket.gethostname()}))
    differing = list(differences([json.loads(answer) for answer in answers]))
    raise CheckpointError(
        "processes.differ",
        "the processes of this run would not train the same.",
        where="; ".join(dict.fromkeys(who for who, _ in differing)),
        why=first_few([difference for _, difference in differing], SHOWN, "; "),
        fix="give all hosts the same job, data, base model and versions, best from a shared disk, and start again",
    )


def disagreement_on(config: JobConfig, adapters: Sequence[AdapterConfig]) -> str:
    """Returns in what the files of new adapters differ between processes; empty if they do not. Collective.

    Args:
        adapters: what the first process has read and would add to the run.
    """
    if is_alone():
        return ""
    text = text_of_first(json.dumps([adapter.model_dump(mode="json") for adapter in adapters]))
    first_adapters = [AdapterConfig.model_validate(row, context=BEGUN) for row in json.loads(text)]
    facts: Facts = {}
    if first_adapters:
        only = config.model_copy(update={"adapters": tuple(first_adapters)})
        try:
            facts = data_facts(prepare(only)) | warm_start_facts(only)
        except (LoraFusionError, OSError) as problem:
            facts = {"reading its files": str(problem).splitlines()[0]}
    disagreements = differences([json.loads(answer) for answer in answers_of_all(json.dumps(facts))])
    return first_few([difference for _, difference in disagreements], SHOWN, "; ")


def differences(answers: Sequence[Facts]) -> Iterator[tuple[str, str]]:
    """Yields which process differs from the first, and in what.

    >>> list(differences([{"host": "a", "optim.lr": "0.1"}, {"host": "b", "optim.lr": "0.2"}]))
    [('process 1 on b', 'optim.lr is 0.1 on process 0 and 0.2 on process 1')]
    """
    first = answers[0]
    for number, facts in enumerate(answers[1:], 1):
        for name in dict.fromkeys((*first, *facts)):
            was, now = first.get(name, ABSENT), facts.get(name, ABSENT)
            if name == HOST or was == now:
                continue
            difference = f"{name} is {was} on process 0 and {now} on process {number}"
            yield f"process {number} on {facts.get(HOST, '?')}", _without_digests(difference, name, number, was, now)


def _without_digests(difference: str, name: str, number: int, *values: str) -> str:
    """Describes a difference without digests, which say nothing to a reader."""
    if not all(_is_digest(value) or value == ABSENT for value in values):
        return difference
    if ABSENT in values:
        return f"{name} is only on one of process 0 and process {number}"
    return f"{name} differs between process 0 and process {number}"


def _is_digest(text: str) -> bool:
    return len(text) in (0, 16, 64) and not set(text) - set("0123456789abcdef")


def _digest(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
