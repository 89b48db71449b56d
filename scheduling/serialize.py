"""Plans as readable JSON with one line per slot, schema version, digest and statistics. The round trip is exact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from scheduling.errors import PlanError
from scheduling.types import MOST_SAMPLES, AdapterJob, Layout, SampleRef, Slot

SCHEMA = "lorafusion.plan/1"
LARGEST = 2**53  # of the numbers of a plan
MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError)  # what reading another shape raises
SLOTS = '"slots": ['  # the line of the file after which there are only slots
SETTINGS = ("capacity_tokens", "num_stages", "data_parallel", "tile_tokens", "seed", "lower_bound")


class PlanContent(NamedTuple):
    """The content of a plan file. Its statistics are derived."""

    settings: dict[str, int]
    jobs: tuple[AdapterJob, ...]
    slots: tuple[Slot, ...]
    stopped: tuple[tuple[str, int], ...]
    earlier: tuple[Layout, ...]
    smaller: tuple[int, ...]


class PlanOutline(NamedTuple):
    """What a plan file says before its slots."""

    digest: str
    num_slots: int
    jobs: tuple[AdapterJob, ...]


def lines_to_json(lines: list[str], digest: str, statistics: dict[str, float]) -> str:
    """Writes a plan, with its statistics for readers of the file."""
    head = [
        "{",
        f'"schema": {_dump(SCHEMA)},',
        f'"digest": {_dump(digest)},',
        f'"statistics": {_dump(statistics)},',
    ]
    return "\n".join(head + lines) + "\n}\n"


def lines_digest(lines: list[str]) -> str:
    """sha256 of the lines of the file that hold content; the derived statistics are excluded."""
    return hashlib.sha256("\n".join([SCHEMA, *lines]).encode()).hexdigest()


def content_from_json(text: str) -> PlanContent:
    """Reads a plan.

    Raises:
        PlanError: `plan.format`; `plan.schema`; `plan.digest`, the file was edited after it was written.
    """
    data = _parse(text)
    try:
        content = PlanContent(
            settings={name: _read_setting(data["settings"], name) for name in SETTINGS},
            jobs=tuple(_job_from(job) for job in data["jobs"]),
            slots=_slots_from(data["slots"], data.get("slot_capacities")),
            stopped=tuple((_text(name), _number(slot)) for name, slot in data["stopped"]),
            earlier=tuple(Layout(*map(_number, layout)) for layout in data.get("earlier", ())),
            smaller=tuple(map(_capacity, data.get("smaller", ()))),
        )
        digest = lines_digest(content_lines(content))  # names that UTF-8 cannot say are misshapen, too
    except PlanError:
        raise
    except MISSHAPEN as error:
        raise _misshapen(error) from None
    if digest != data.get("digest"):
        raise PlanError(
            "plan.digest",
            "the plan was changed after it was written: its digest does not match its content",
            where=f"digest {str(data.get('digest'))[:12]}, content {digest[:12]}",
            fix="plan again instead of editing a plan",
        )
    return content


def outline_from_lines(lines: Iterable[str]) -> PlanOutline:
    """Reads the lines of a plan file up to its slots, which are nearly all of it. Does not check the digest.

    Raises:
        PlanError: `plan.format`; `plan.schema`.
    """
    head: list[str] = []
    end = ""
    for line in lines:
        if line.startswith(SLOTS):
            end = "}"
            break
        head.append(line)
    text = "".join(head)
    data = _parse(text.rstrip().removesuffix(",") + end if end else text)
    try:
        return PlanOutline(
            digest=_text(data["digest"]),
            num_slots=_number(data["statistics"]["slots"]),
            jobs=tuple(_job_from(job) for job in data["jobs"]),
        )
    except PlanError:
        raise
    except MISSHAPEN as error:
        raise _misshapen(error) from None


def _parse(text: str) -> Any:
    try:
        data: Any = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits
        raise PlanError("plan.format", "this is not a plan: broken JSON", why=str(error)) from None
    schema = _schema_of(data)
    if schema != SCHEMA:
        raise PlanError(
            "plan.schema", f"this is not a plan of version {SCHEMA}: its schema is {schema!r}", fix="plan again"
        )
    return data


def _misshapen(error: Exception) -> PlanError:
    return PlanError("plan.format", "the plan's JSON has missing or misshapen parts", why=repr(error))


def content_lines(content: PlanContent) -> list[str]:
    """The lines of the file that hold content."""
    jobs = [
        {field: getattr(job, field) for field in ("name", "global_batch", "epochs", "weight", "max_batches")}
        | ({"cuts": job.cuts} if job.cuts else {})  # few are extended
        for job in content.jobs
    ]
    lines = [f'"settings": {_dump({name: content.settings[name] for name in SETTINGS})},']
    lines += [f'"earlier": {_dump(content.earlier)},'] if content.earlier else []  # usually empty
    lines += [f'"smaller": {_dump(content.smaller)},'] if content.smaller else []
    if any(slot.capacity_tokens for slot in content.slots):
        lines += [f'"slot_capacities": {_dump([slot.capacity_tokens for slot in content.slots])},']
    lines += [f'"stopped": {_dump(content.stopped)},', '"jobs": [']
    lines += _comma_separated(
        [
            f'{_dump(entries)[:-1]},"sample_tokens":{_numbers(job.sample_tokens)}}}'
            for job, entries in zip(content.jobs, jobs, strict=True)
        ]
    )
    lines += ["],", SLOTS]
    names = {job.name: _dump(job.name) for job in content.jobs}
    lines += _comma_separated(
        [f"[{','.join(_samples(part, names) for part in slot.replicas)}]" for slot in content.slots]
    )
    return [*lines, "]"]


def _samples(refs: tuple[SampleRef, ...], names: dict[str, str]) -> str:
    """Groups consecutive samples of one batch: [adapter, epoch, batch, [samples]].

    Args:
        names: as JSON.
    """
    groups: list[tuple[str, int, int, list[int]]] = []
    last_name, last_epoch, last_batch = "", -1, -1
    numbers: list[int] = []
    for name, epoch, batch, number in refs:
        if batch != last_batch or name != last_name or epoch != last_epoch or not numbers:
            last_name, last_epoch, last_batch, numbers = name, epoch, batch, []
            groups.append((name, epoch, batch, numbers))
        numbers.append(number)
    texts = (
        f"[{names.get(name) or _dump(name)},{epoch},{batch},{_numbers(numbers)}]"
        for name, epoch, batch, numbers in groups
    )
    return f"[{','.join(texts)}]"


def _numbers(values: Sequence[int]) -> str:
    """A list of numbers as JSON, four times as fast as by the library."""
    return f"[{','.join(map(str, values))}]"


def _job_from(values: dict[str, Any]) -> AdapterJob:
    job = AdapterJob(**values)
    for number in (job.global_batch, job.epochs, job.max_batches, *job.cuts, max(job.sample_tokens, default=0)):
        if number is not None:
            _number(number)
    if job.num_samples > MOST_SAMPLES:
        raise ValueError(f"{job.name} has {job.num_samples} samples, more than {MOST_SAMPLES}")
    return job


def _slots_from(slots: list[Any], capacities: list[Any] | None) -> tuple[Slot, ...]:
    """Reads slots; plans of one capacity do not list those of their slots."""
    sizes = [None] * len(slots) if capacities is None else [capacity and _capacity(capacity) for capacity in capacities]
    return tuple(_slot_from(replicas, capacity) for replicas, capacity in zip(slots, sizes, strict=True))


def _slot_from(replicas: list[list[list[Any]]], capacity_tokens: int | None) -> Slot:
    return Slot(
        capacity_tokens=capacity_tokens,
        replicas=tuple(
            tuple(
                SampleRef(_text(adapter), _number(epoch), _number(batch), _number(sample))
                for adapter, epoch, batch, samples in part
                for sample in samples
            )
            for part in replicas
        ),
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an adapter's name is {value!r}")
    return value


def _schema_of(data: Any) -> Any:
    try:
        return data.get("schema")
    except AttributeError:
        return type(data).__name__


def _capacity(value: Any) -> int:
    if _number(value) < 1:
        raise ValueError(f"a capacity is {value}")
    return value


def _read_setting(settings: dict[str, Any], name: str) -> int:
    value = _number(settings[name])
    if value < (name not in ("seed", "lower_bound")):  # the others are sizes and counts
        raise ValueError(f"{name} is {value}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or abs(value) > LARGEST:
        raise TypeError(f"{str(value)[:40]!r} is no number of a plan")
    return value


def _comma_separated(lines: list[str]) -> list[str]:
    return [line + "," for line in lines[:-1]] + lines[-1:]


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
