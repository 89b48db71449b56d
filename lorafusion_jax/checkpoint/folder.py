"""The folder of a run: its layout, and checks before a run starts or continues.

config.yaml  plan.json  run.json       current configuration, plan, versions and digests
metrics.jsonl  events.jsonl            metrics and state changes
run.lock                               the process that trains the run
start.json                             phase of a start, until training begins
state/<slot>/                          checkpoints
adapters/<name>/step-000250/           PEFT folders; `latest` links to the newest, `best` to the best held-out one
control/                               pending requests

config.yaml and plan.json change in one step, which is the rename of run.json. The new files are written first, beside
the old ones, under names with their digests. Then run.json is replaced, which names these digests: the change is there,
and whole. At last each new file takes its place. Whoever reads in between, or after a kill, takes the file that
run.json names, wherever it is.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from pydantic import ValidationError

from lorafusion_jax.checkpoint import run_record
from lorafusion_jax.checkpoint.begun_folder import PLAN, START, read_start
from lorafusion_jax.checkpoint.run_lock import held_by, run_lock
from lorafusion_jax.checkpoint.saved_states import slots_of
from lorafusion_jax.config.load import dump_config, read_resolved
from lorafusion_jax.config.read import is_job_file
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.values import BEGUN
from lorafusion_jax.digests import Damage, find_damage, has_digests
from lorafusion_jax.errors import (
    CheckpointError,
    ConfigError,
    LoraFusionError,
    did_you_mean_path,
    first_few,
    quoted,
    raise_all,
)
from lorafusion_jax.files import PART, remove_folder, replace_text, sync
from lorafusion_jax.new_folder import remove_leftovers
from lorafusion_jax.readable import PLAN as MOST_PLAN
from lorafusion_jax.readable import SETTINGS, has_file, has_folder, open_text, read_text
from scheduling import Plan, PlanOutline, outline_from_lines

MOST_RUNS = 6  # that an error offers
NEXT = ".next"  # suffix of the hidden names


def current_file(folder: Path, name: str, digest: str) -> Path:
    """Returns where the file with this digest is; `folder / name` if nothing is left to do."""
    prepared = _prepared(folder, name, digest)
    return prepared if prepared.is_file() else folder / name


def change_files(
    folder: Path, texts: Mapping[str, str], digests: Mapping[str, str], commit: Callable[[], None]
) -> None:
    """Replaces files of a run together.

    Args:
        texts: name → new content.
        digests: name → digest, as run.json names it after `commit`.
        commit: replaces run.json.
    """
    for name, text in texts.items():
        replace_text(_prepared(folder, name, digests[name]), text)
    sync(folder)  # before run.json names them
    commit()
    complete_change(folder, digests)


def complete_change(folder: Path, digests: Mapping[str, str]) -> None:
    """Completes a change that was committed, and removes what was prepared for one that was not.

    Args:
        digests: name → digest, as run.json names it.
    """
    for name, digest in digests.items():
        if (prepared := current_file(folder, name, digest)) != folder / name:
            prepared.replace(folder / name)
    for leftover in folder.glob(f".*{NEXT}"):
        leftover.unlink()


def _prepared(folder: Path, name: str, digest: str) -> Path:
    return folder / f".{name}.{digest}{NEXT}"


CONFIG, RECORD, TIMELINE = "config.yaml", "run.json", "timeline.json"
LATEST, BEST = "latest", "best"
_STEP = re.compile(r"step-(\d+)")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run."""

    path: Path

    @classmethod
    def of(cls, folder: str | Path) -> RunFolder:
        """Returns the paths of a folder that a user names.

        Raises:
            ConfigError: `run.no-folder`; `Path("")` would be the current folder.
        """
        if isinstance(folder, str) and not folder.strip():
            fix = "a folder, e.g. runs/first; . is the current folder"
            raise ConfigError("run.no-folder", "the name of the run folder is empty.", fix=fix)
        return cls(Path(folder))

    @property
    def state(self) -> Path:
        return self.path / "state"

    @property
    def plan_file(self) -> Path:
        return self.path / PLAN

    @property
    def record_file(self) -> Path:
        return self.path / "run.json"

    def adapter_step(self, name: str, step: int) -> Path:
        return self.path / "adapters" / name / f"step-{step:06d}"

    def exported(self, name: str) -> list[Path]:
        """Returns the exported folders of an adapter, oldest first."""
        folders = (self.path / "adapters" / name).glob("step-*")
        return sorted((folder for folder in folders if _STEP.fullmatch(folder.name)), key=step_of)

    def latest(self, name: str) -> Path | None:
        """Returns the newest exported folder of an adapter."""
        return next(reversed(self.exported(name)), None)

    def best(self, name: str) -> Path | None:
        """Returns the exported folder with the best held-out result; None if there is none."""
        home = self.path / "adapters" / name
        with suppress(OSError):
            target = home / os.readlink(home / BEST)
            return target if target in self.exported(name) else None
        return None

    def exported_step(self, name: str, step: int | None, *, best: bool = False) -> Path | None:
        """Returns the exported folder of a step, of the best held-out result, or else the newest one.

        Raises:
            ConfigError: `export.options`, a step and the best one.
        """
        if best and step is not None:
            raise ConfigError("export.options", "--step and --best name two steps.", fix="one of them")
        return self.best(name) if best else self.latest(name) if step is None else self.adapter_step(name, step)

    def damaged_adapters(self, steps: Mapping[str, int]) -> list[Damage]:
        """Damaged files of exported folders, one step of each adapter; a folder that is not there is not damaged."""
        folders = [self.adapter_step(name, step) for name, step in steps.items()]
        return [damage for folder in folders if has_digests(folder) for damage in find_damage(folder)]

    def must_be_new(self, plan: Plan) -> None:
        """Checks that no run would be overwritten.

        Raises:
            CheckpointError: the folder already holds this run (`run.exists`) or one with another plan
                (`run.other-plan`).
        """
        self.must_have_its_plan()
        if self.plan_file.exists():
            other = self.read_plan().digest
            if other != plan.digest:
                raise CheckpointError(
                    "run.other-plan",
                    f"{self.path} holds a run of another plan.",
                    why=f"its plan is {other}, this one is {plan.digest}",
                    fix="choose another --out, or continue that run with lorafusion resume",
                )
            raise CheckpointError(
                "run.exists",
                f"{self.path} already holds this run.",
                fix=f"lorafusion resume {quoted(self.path)}   or another --out",
            )

    def must_have_its_plan(self) -> None:
        """Checks that the folder does not hold files of a run without its plan.

        Raises:
            CheckpointError: `run.no-plan`.
        """
        if has_file(self.plan_file) or not has_folder(self.path):
            return
        files = [
            name
            for name, present in {
                "state/": slots_of(self.state),
                "adapters/": list(self.path.glob("adapters/*/step-*")),
                "metrics.jsonl": (self.path / "metrics.jsonl").exists(),
            }.items()
            if present
        ]
        if files:
            raise CheckpointError(
                "run.no-plan",
                f"{self.path} holds {' and '.join(files)} of a run whose plan.json is missing.",
                why="without its plan a run cannot continue, and files of another run would mix with its files",
                fix="restore plan.json from a copy. For a new run, move the folder away or choose another --out",
            )

    def create(self, config: JobConfig, plan: Plan, record: dict) -> None:
        """Creates a run folder; see `must_be_new`."""
        self.must_be_new(plan)
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(config, record)
        replace_text(self.plan_file, plan.to_json())  # written last: its presence marks a complete folder

    def lock(self) -> AbstractContextManager[None]:
        """Prevents other processes from training this run; see `run_lock`."""
        self.must_have_its_plan()
        self._require(PLAN)  # otherwise the lock file would be created in a folder without a run
        return run_lock(self.path)

    def read_config(self) -> JobConfig:
        self._require(CONFIG)
        return read_resolved(self._current(CONFIG))

    @contextmanager
    def naming_changed_settings(self) -> Iterator[None]:
        """Adds to errors within that config.yaml is not as the run wrote it: they may come from damage.

        Raises:
            ErrorList: with `run.config-changed`.
        """
        try:
            yield
        except LoraFusionError as problem:
            record_digest = run_record.file_digest(self.read_record(), CONFIG)
            if record_digest is None or record_digest == run_record.text_digest(
                read_text(self._current(CONFIG), SETTINGS)
            ):
                raise
            config_error = CheckpointError(
                "run.config-changed",
                f"{self.path / CONFIG} is not as this run wrote it.",
                fix="restore it from a copy, unless you changed it and the errors above tell what is wrong",
            )
            raise_all([*getattr(problem, "errors", [problem]), config_error])

    def write_config(self, config: JobConfig, record: dict) -> None:
        """Replaces run.json and the current settings, which it also holds, in one step."""
        self._change(record, config)

    def write_timeline(self, text: str) -> None:
        """Replaces timeline.json. It is removed first, so that a crash cannot leave an old one."""
        (self.path / TIMELINE).unlink(missing_ok=True)
        self.write_record(run_record.with_file_digest(self.read_record(), TIMELINE, text))
        replace_text(self.path / TIMELINE, text)

    def write_move(
        self,
        plan: Plan,
        slot: int,
        changes: Sequence[dict[str, Any]] = (),
        *,
        record: dict | None = None,
        config: JobConfig | None = None,
    ) -> None:
        """Replaces the plan of a run from `slot` on, and its settings, in one step: all or nothing is there.

        Both plans are equal up to `slot`, so earlier checkpoints belong to both.

        Args:
            changes: rows of the changes of adapters at `slot`.
            record: the other entries of run.json (None: they stay).
            config: the settings from here on (None: they stay).
        """
        record = self.read_record() if record is None else record
        move = {"slot": slot, "stages": plan.num_stages, "replicas": plan.data_parallel, "plan": plan.digest}
        move |= {"changes": list(changes)} if changes else {}
        moves = [*(_cap_changes(before, slot) for before in record.get("moves", [])), move]
        (self.path / TIMELINE).unlink(missing_ok=True)  # its slots may differ from those of the new plan
        self._change(record | {"moves": moves}, config, plan)

    def _change(self, record: dict, config: JobConfig | None = None, plan: Plan | None = None) -> None:
        texts = {} if plan is None else {PLAN: plan.to_json()}
        if config is not None:
            texts |= {CONFIG: dump_config(config)}
            record = run_record.with_file_digest(record, CONFIG, texts[CONFIG])
            record |= {"config": config.model_dump(mode="json")}
        change_files(self.path, texts, _digests(record), lambda: self.write_record(record))

    def complete_change(self) -> None:
        """Completes a change of plan and settings in which a process was killed; call it while holding `lock`.

        Raises:
            CheckpointError: run.json is missing or damaged.
        """
        complete_change(self.path, _digests(self.read_record()))

    def moves(self) -> list[dict[str, Any]]:
        """Returns the moves up to the current plan, in order."""
        return self.read_record().get("moves", [])

    def read_plan(self) -> Plan:
        """Reads the plan.

        Raises:
            CheckpointError: it is missing (`run.missing`, `run.no-plan`) or damaged (`run.plan`).
        """
        return self._read_plan_file(lambda file: Plan.from_json(file.read()))

    def read_outline(self) -> PlanOutline:
        """Reads the adapters of the plan and the number of its slots, but not the slots, which may be millions.

        Raises:
            CheckpointError: as `read_plan`. Damage among the slots is not noticed.
        """
        return self._read_plan_file(outline_from_lines)

    def _read_plan_file[T](self, read: Callable[[TextIO], T]) -> T:
        self.must_have_its_plan()
        self._require(PLAN)
        try:
            with io.TextIOWrapper(open_text(self._current(PLAN), MOST_PLAN), encoding="utf-8") as file:
                return read(file)
        except (OSError, ValueError, RecursionError) as problem:
            raise CheckpointError(
                "run.plan",
                f"{self.plan_file} is damaged.",
                why=str(problem).splitlines()[0],
                fix="restore it from a copy, or choose another --out for a new run. Adapters that were exported to "
                f"{self.path / 'adapters'} stay as they are, and lora.init_from can start from them",
            ) from None

    def read_record(self) -> dict:
        """Reads run.json; see `run_record.read`."""
        self._require(RECORD)
        return run_record.read(self.record_file)

    def check_record_file(self) -> None:
        """Checks that run.json is unchanged since it was written.

        Raises:
            CheckpointError: `run.record`.
        """
        if (why := self.record_damage()) is not None:
            raise run_record.damaged(self.record_file, why)

    def record_damage(self) -> str | None:
        """Returns what is wrong with the bytes of run.json."""
        self._require(RECORD)
        return run_record.find_damage(self.record_file)

    def recorded_config(self) -> JobConfig:
        """Returns the settings in run.json.

        Raises:
            CheckpointError: `run.record`.
        """
        config = self.read_record()["config"]
        try:
            return JobConfig.model_validate(config, context=BEGUN)
        except ValidationError as problem:
            raise run_record.damaged(self.record_file, f"config: {problem.errors()[0]['msg']}") from None

    def write_record(self, record: dict) -> None:
        replace_text(self.record_file, run_record.to_text(record))

    def mark_latest(self, name: str, keep: int) -> None:
        """Links `latest` to the newest exported folder and removes all but the newest `keep` and the best one."""
        steps, best = self.exported(name), self.best(name)
        _link(steps[-1], LATEST)
        for step_folder in steps[:-keep]:
            if step_folder != best:
                remove_folder(step_folder)

    def remove_later(self, name: str, step: int) -> None:
        """Removes exported folders of steps after the last one of an adapter.

        A killed process left them after a checkpoint from which the adapter took fewer steps.
        """
        later = [folder for folder in self.exported(name) if step_of(folder) > step]
        if not later:
            return
        if self.best(name) in later:
            (self.path / "adapters" / name / BEST).unlink()
        _link(self.adapter_step(name, step), LATEST)
        for folder in later:
            remove_folder(folder)

    def mark_best(self, name: str, step: int, keep: int) -> None:
        """Links `best` to an exported folder; then as `mark_latest`."""
        _link(self.adapter_step(name, step), BEST)
        self.mark_latest(name, keep)

    def mark_exports(self, keep: int) -> None:
        """`mark_latest` for all adapters that were exported."""
        for home in (self.path / "adapters").glob("*"):
            if self.exported(home.name):
                self.mark_latest(home.name, keep)

    def remove_leftovers(self) -> None:
        """Removes temporary files of killed processes; call it while holding `lock`."""
        for parent in (self.path, self.state, *(self.path / "adapters").glob("*")):
            remove_leftovers(parent)

    def _current(self, name: str) -> Path:
        """Returns the file that run.json names."""
        with suppress(CheckpointError):  # without run.json there is only one
            return current_file(self.path, name, _digests(self.read_record()).get(name, ""))
        return self.path / name

    def _require(self, file: str) -> None:
        if not has_file(self.path / file):
            raise no_run(self.path, file)


def _runs_in(folder: Path) -> list[str]:
    return [entry.name for entry in sorted(folder.iterdir()) if any((entry / file).is_file() for file in (PLAN, START))]


def no_run(path: Path, file: str) -> CheckpointError:
    """The error of a path that is no run folder, or not yet, because it has no such file."""
    if (start := read_start(path)) is not None:
        if held_by(path)["alive"] is False:
            message = f"{path} is a run that ended while it started: {start['phase']}."
            fix = f"lorafusion train again, with --out {quoted(path)} or another"
        else:
            message = f"{path} is a run that is still starting: {start['phase']}."
            fix = f"lorafusion status {quoted(path)} --watch; Ctrl-C where it was started stops it"
        return CheckpointError("run.starting", message, fix=fix)
    with suppress(OSError):
        if path.is_dir() and (inner := _runs_in(path)):
            runs = [str(path / name) for name in inner]
            message, fix = f"{path} is not a run folder, but holds runs.", f"one of {first_few(runs, MOST_RUNS)}"
            return CheckpointError("run.missing", message, fix=fix)
        runs = _runs_in(path.absolute().parent)
        fix = did_you_mean_path(path, runs)
        if runs and not path.exists():
            fix = fix or f"one of {first_few([str(path.with_name(run)) for run in runs], MOST_RUNS)}"
        if fix:
            return CheckpointError("run.missing", f"{path} is not a run folder.", where=str(path.parent), fix=fix)
    if has_file(path) and has_file(path.parent / PLAN):
        return CheckpointError("run.missing", f"{path} is a file of a run.", fix=f"its folder: {quoted(path.parent)}")
    if is_job_file(path):
        fix = f"the folder of its run, or lorafusion train {quoted(path)} --out runs/NAME"
        return CheckpointError("run.missing", f"{path} is a job file, not the folder of a run.", fix=fix)
    why = f"it has no {file}" if has_folder(path) else "it is a file" if has_file(path) else "there is no such folder"
    fix = "start a run: lorafusion train jobs.yaml --out runs/NAME"
    return CheckpointError("run.missing", f"{path} is not a run folder: {why}.", fix=fix)


def _digests(record: dict) -> dict[str, str]:
    """Returns name → digest of the files that change together with run.json."""
    moves = record.get("moves", ())
    digests = {PLAN: moves[-1]["plan"] if moves else record.get("plan"), CONFIG: record.get("files", {}).get(CONFIG)}
    return {name: digest for name, digest in digests.items() if isinstance(digest, str)}


def _cap_changes(move: dict[str, Any], slot: int) -> dict[str, Any]:
    """Returns a move with its changes at `slot` at the latest, because the run is planned again from there."""
    if "changes" not in move:
        return move
    return move | {"changes": [change | {"slot": min(change["slot"], slot)} for change in move["changes"]]}


def _link(exported: Path, name: str) -> None:
    """Replaces a link beside an exported folder."""
    link, target = exported.parent / f".{name}{PART}", exported.parent / name
    link.unlink(missing_ok=True)
    os.symlink(exported.name, link)
    if target.is_dir() and not target.is_symlink():  # a copy of the run made a folder of the link
        remove_folder(target)
    link.replace(target)


def step_of(exported: Path) -> int:
    """Returns the step of an exported folder from its name."""
    match = _STEP.fullmatch(exported.name)
    assert match, exported
    return int(match[1])
