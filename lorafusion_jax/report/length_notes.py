"""Warnings about settings that are longer than the run that they are for, so that they never take effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from lorafusion_jax.config.schema import AdapterConfig, JobConfig
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.report.format import exact


def length_notes(config: JobConfig, prepared: Prepared) -> Iterator[str]:
    """Yields what lies beyond the end of an adapter, or of the run."""
    steps = {adapter.name: _num_steps(adapter, prepared) for adapter in config.adapters}
    for adapter in config.adapters:
        yield from _of_adapter(adapter, prepared.adapters[adapter.name].epoch_samples, steps[adapter.name])
    longest, total = max(steps.values()), sum(steps.values())
    train, save = config.train, config.save
    if train.eval_every_steps is not None and train.eval_every_steps > longest and _has_eval(prepared):
        yield (
            f"train.eval_every_steps={exact(train.eval_every_steps)}, and no adapter takes more than {exact(longest)}: "
            "they are only evaluated at their start and end"
        )
    yield from _of_halving(config, prepared, longest)
    if train.max_steps is not None and train.max_steps > longest:
        yield f"train.max_steps={exact(train.max_steps)} has no effect: no adapter takes more than {exact(longest)}"
    if save.every_steps is not None and save.every_steps > total and save.every_minutes is None:
        yield f"save.every_steps={exact(save.every_steps)}, and all adapters take {exact(total)}: only the end is saved"


def _of_halving(config: JobConfig, prepared: Prepared, longest: int) -> Iterator[str]:
    first = config.halving.first_step
    if first is None:
        return
    sets = Counter(data.eval.digest for data in prepared.adapters.values() if data.eval is not None)
    if all(count < 2 for count in sets.values()):
        yield "halving compares adapters with the same held-out data, and no two of them have it: none will end early"
    elif first >= longest:
        yield (
            f"halving.first_step={exact(first)}, and no adapter takes more than {exact(longest)} steps: none will end "
            "early"
        )


def _of_adapter(adapter: AdapterConfig, rows: int, steps: int) -> Iterator[str]:
    if adapter.global_samples > rows:
        yield (
            f"{adapter.name}: batch.global_samples={exact(adapter.global_samples)}, and there are {exact(rows)} rows: "
            f"{exact(steps)} step{'s' if steps > 1 else ''} in all"
        )
    if 1 <= steps < adapter.optim.warmup:
        warmup = exact(int(adapter.optim.warmup))
        yield f"{adapter.name}: optim.warmup={warmup} steps, and it takes {exact(steps)}: the learning rate only rises"


def _num_steps(adapter: AdapterConfig, prepared: Prepared) -> int:
    data = prepared.adapters[adapter.name]
    return -(-len(data.order) // adapter.global_samples)


def _has_eval(prepared: Prepared) -> bool:
    return any(data.eval is not None for data in prepared.adapters.values())
