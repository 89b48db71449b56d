"""Converts a configuration file of axolotl, LLaMA-Factory or TRL to a job file."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from lorafusion_jax.adapters.spec import resolve_targets
from lorafusion_jax.config.auto import AUTO, CAPACITY
from lorafusion_jax.config.chat_templates import NAMED, is_template
from lorafusion_jax.config.dataset_info import FILE, LABELS, PAIRS, ROWS, read_dataset_info
from lorafusion_jax.config.other_defaults import ALL_OF_MESSAGES, FACTORS, OF_ADAPTERS, program_of, target_of
from lorafusion_jax.config.other_programs import ALWAYS_PACKED, counterpart
from lorafusion_jax.config.run_sections import HELD_OUT_LOSS
from lorafusion_jax.config.schema import BatchSettings
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean, quoted
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.layout.layer import PATHS
from lorafusion_jax.objective.choose import choose, unknown_objective

SECTIONS = (
    *("base", "data", "lora", "optim", "objective", "early_stop", "epochs", "seed"),
    *("batch", "mesh", "save", "train", "report"),
)
OPTIMIZERS = {"adamw": "adamw", "lion": "lion", "adafactor": "adafactor", "sgd": "sgd"}
KINDS = {"lora": "lora", "qlora": "lora", "true": "lora", "dora": "dora", "vera": "vera", "pissa": "pissa"}
OBJECTIVES = ("dpo", "ipo", "kto", "orpo", "simpo", "cpo")
SOURCE_KEYS = ("path", "split", "data_files", "ds_type")  # of an entry of a list of data sets
ROW_KEYS = ("type", "field", "message", "role", "chat_template", "columns", "train_on", "format")  # they begin so
FORMAT = (
    "rows are known by their columns; data.columns and data.chat_template say otherwise; see lorafusion data preview"
)
ALPACA = (
    "data.chat_template: alpaca frames rows so, but for '### Input:'; without it the base's template does, or nothing"
)
NO_CONFIGURATION = "a configuration of a set cannot be named; write its rows into a file"
LOSSES = ("loss_type", "loss_weights")  # TRL's DPO has lists of them
SCHEDULES = {"cosine": "cosine", "linear": "linear", "constant": "constant", "constant_with_warmup": "constant"}


@dataclass(slots=True, kw_only=True)
class Converted:
    """A job, and what of the other file is not in it.

    Attributes:
        job: sections of a job file.
        notes: (key of the other file, why it has no counterpart or how it differs).
        program: whose file it is; empty if its keys do not tell.
        defaults: whose defaults are written for keys that the file leaves out, and which keys.
    """

    job: dict[str, Any] = field(default_factory=dict)
    notes: list[tuple[str, str]] = field(default_factory=list)
    program: str = ""
    defaults: str = ""

    def set(self, key: str, value: Any) -> None:
        section, _, name = key.partition(".")
        if name:
            self.job.setdefault(section, {})[name] = value
        else:
            self.job[section] = value

    def text(self, title: str) -> str:
        """The job as a commented file."""
        lines = [f"# {title}", *textwrap.wrap(self.defaults, 110, initial_indent="# ", subsequent_indent="#   ")]
        if self.notes:
            lines += [
                "# Not carried over, or with another meaning:",
                *(f"#   {key}: {note}" for key, note in self.notes),
            ]
        for section in (*SECTIONS, "adapters"):
            if section in self.job:
                lines.append(yaml.safe_dump({section: self.job[section]}, sort_keys=False, allow_unicode=True).rstrip())
        return "\n".join(lines) + "\n"


def convert(values: Mapping[str, Any], name: str, where: str = "FILE") -> Converted:
    """Converts the settings of another program.

    Args:
        values: of the other file.
        name: of the adapter, if it fits.
        where: the file, for errors, and for what lies beside it.

    Raises:
        ConfigError, ErrorList: `config.not-convertible`, the file names no base model or no data, or is a job file; or
            `dataset_info.json` says of its data what our settings cannot say.
    """
    if "adapters" in values and "base" in values:
        message, fix = f"{where} is a job file of lorafusion already.", f"lorafusion check {quoted(where)}"
        raise ConfigError("config.not-convertible", message, fix=fix)
    result = Converted()
    values = {key: value for key, value in values.items() if value is not None}  # as if it were left out
    _objective(values, result)
    values = _with_defaults(values, result)
    done = {*FACTORS, *_named_sets(values, Path(where).parent, result)}
    for key, value in values.items():
        if key in done:
            continue
        match = counterpart(str(key))
        target = target_of(str(key))
        if target is None or target == "--out":
            note = match.note if match else "no counterpart is known"
            result.notes.append((str(key), f"--out {note}" if target else note))
            continue
        take = TAKERS.get(target, _plain)
        try:
            take(result, str(key), target, value)
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError):
            result.notes.append((str(key), f"{shortened(value)} is not a value of this key"))
    _batch(values, result)
    _early_stop(result)
    _capacity(result)
    missing = [
        key for key in ("base", "data") if {"base": "model", "data": "train"}[key] not in result.job.get(key, {})
    ]
    if missing:
        words = {"base": "base model (base_model, model_name_or_path)", "data": "data (datasets, dataset)"}
        raise ConfigError(
            "config.not-convertible",
            f"{where} names no {' and no '.join(words[key] for key in missing)}.",
            fix="lorafusion init > jobs.yaml shows what a job file needs",
        )
    if "objective" not in result.job:
        result.job.get("optim", {}).pop("beta", None)
    train = {"train": result.job["data"].pop("train")}
    if "eval" in result.job["data"]:
        train["eval"] = result.job["data"].pop("eval")
    if not result.job["data"]:
        del result.job["data"]
    result.job["adapters"] = [{"name": adapter_name(name), "data": train}]
    return result


def _with_defaults(values: Mapping[str, Any], result: Converted) -> Mapping[str, Any]:
    """The file with the defaults of its program for what it leaves out."""
    program = program_of(values)
    if program is None:
        result.defaults = "Which program the file is of is not clear: keys that it leaves out have our defaults."
        return values
    result.program = program.name
    defaults = program.left_out(values, preferences="objective" in result.job)
    result.defaults = f"Read as a file of {program.name}, with its defaults for {', '.join(defaults) or 'nothing'}."
    result.notes += program.left_out_notes(values)
    return {**values, **defaults}


def adapter_name(name: str) -> str:
    letters = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "._-") else "-" for letter in name)
    return letters.strip("._-")[:100] or "adapter"


def _number(value: Any) -> Any:
    """YAML reads 2e-4 as a text."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _plain(result: Converted, key: str, target: str, value: Any) -> None:
    if target.startswith("objective.") and "objective" not in result.job:
        result.notes.append((key, "belongs to a preference objective, which the file does not ask for"))
        return
    if isinstance(value, dict | list):
        result.notes.append((key, f"{target} takes one value"))
        return
    result.set(target, _number(value))


def _note(text: str) -> Callable[..., None]:
    def take(result: Converted, key: str, target: str, value: Any) -> None:
        result.notes.append((key, text))

    return take


def _dtype(result: Converted, key: str, target: str, value: Any) -> None:
    if str(value) in ("float32", "torch.float32"):
        result.set(target, "float32")
    elif value not in (True, "auto", "bfloat16", "torch.bfloat16"):
        result.notes.append((key, "base.dtype is bfloat16 or float32"))


def _quantize(result: Converted, key: str, target: str, value: Any) -> None:
    bits = (
        {"load_in_4bit": 4, "load_in_8bit": 8}.get(key) if value is True else value if key == "quantization_bit" else 0
    )
    kinds = {4: "nf4", 8: "int8"}
    if bits in kinds:
        result.set(target, kinds[bits])


def _data(result: Converted, key: str, target: str, value: Any) -> None:
    if isinstance(value, int | float):  # a share, or a number of rows
        if 0 < value < 1:
            result.set(target, float(value))
        elif value:
            result.notes.append((key, "data.eval is a share of the rows, or a file"))
        return
    sets = value if isinstance(value, list) else str(value).split(",")
    if not sets:
        return
    of_info = key in _keys_of_names(result)
    if of_info:
        result.notes.append((key, f"a name of {FILE}, which is not there: write the file that it stands for"))
    sources = list(dict.fromkeys(path for entry in sets for path in _paths(entry, as_it_is=of_info)))
    result.set(target, sources[0] if len(sources) == 1 else sources)
    notes = [note for entry in sets if isinstance(entry, dict) for note in _entry_notes(key, entry)]
    result.notes += dict.fromkeys(notes)


def _keys_of_names(result: Converted) -> tuple[str, ...]:
    """Keys of LLaMA-Factory with names of data sets."""
    return ("dataset", "eval_dataset") if result.program == "LLaMA-Factory" else ("dataset",)


def _named_sets(values: Mapping[str, Any], beside: Path, result: Converted) -> tuple[str, ...]:
    """Looks up data sets in `dataset_info.json`, and returns the keys that say them; none if there is no such file."""
    keys = [key for key in _keys_of_names(result) if isinstance(values.get(key), str | list) and values[key]]
    info = read_dataset_info(values.get("dataset_dir"), beside) if keys else None
    if info is None:
        return ()
    names_of = {}
    for key in keys:
        names = values[key] if isinstance(values[key], list) else values[key].split(",")
        names_of["data.train" if key == "dataset" else "data.eval"] = [str(name).strip() for name in names]
    objective = result.job.get("objective", {}).get("name", values.get("stage"))
    reads = LABELS if objective == "kto" else PAIRS if objective in (*OBJECTIVES, "rm") else ""
    settings, notes = info.settings(names_of, reads)
    for key, value in settings.items():
        result.set(key, value)
    result.notes += [(key, notes[target]) for key, target in zip(keys, names_of, strict=True)]
    return (*keys, "dataset_dir")


def _entry_notes(key: str, entry: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What an entry of a list of data sets says beside its source."""
    notes = []
    for name, value in entry.items():
        if name in SOURCE_KEYS or value is None:
            continue
        of_rows = str(name).startswith(ROW_KEYS)
        note = ALPACA if str(value).startswith("alpaca") else FORMAT if of_rows else "no counterpart is known"
        notes.append((f"{key}.{name}", NO_CONFIGURATION if name == "name" else note))
    return notes


def _paths(source: Any, *, as_it_is: bool) -> list[str]:
    """The sources of one entry of another program's list."""
    entry = source if isinstance(source, dict) else {"path": str(source).strip()}
    files = entry.get("data_files") or entry.get("path") or ""
    files = [str(file) for file in files] if isinstance(files, list) and files else [str(files)]
    if as_it_is or all(PurePosixPath(file).suffix in ROWS for file in files):
        return files
    split = f":{entry['split']}" if entry.get("split") else ""
    return [f"hf:{entry.get('path')}{split}"]


def _loss(result: Converted, key: str, target: str, value: Any) -> None:
    if key == "assistant_only_loss" and value is False:  # prompts of other rows stay unlearned
        result.notes.append((key, ALL_OF_MESSAGES))
        return
    learns_prompts = (
        value is True if key.startswith("train_on_") and key != "train_on_responses_only" else value is False
    )
    if learns_prompts:
        result.set(target, "all")


def _targets(result: Converted, key: str, target: str, value: Any) -> None:
    if key == "lora_target_linear":
        if value is True and "targets" not in result.job.get("lora", {}):
            result.set(target, "all-linear")
        return
    names = [str(name) for name in value] if isinstance(value, list) else [n.strip() for n in str(value).split(",")]
    if names in (["all"], ["all-linear"]):
        result.set(target, "all-linear")
    elif len(names) == 1 and any(letter in names[0] for letter in r"\(["):
        result.notes.append((key, "a regular expression: list the projections in lora.targets"))
    else:
        projections = [name.removeprefix("self_attn.").removeprefix("mlp.") for name in names]
        if unknown := [name for name in projections if not _is_projection(name)]:
            result.notes.append((key, f"no model that is trained here has {', '.join(unknown)}"))
        if projections_here := [name for name in projections if name not in unknown]:
            result.set(target, projections_here)


def _is_projection(name: str) -> bool:
    try:
        return bool(resolve_targets(name, tuple(PATHS)))
    except LoraFusionError:
        return False


def _init_from(result: Converted, key: str, target: str, value: Any) -> None:
    if value:
        result.set(target, str(value))


def _kind(result: Converted, key: str, target: str, value: Any) -> None:
    if key in OF_ADAPTERS:
        kind = KINDS.get(str(value).lower())
        if kind is None:
            result.notes.append((key, f"{shortened(value)} is not trained here; {target} is lora"))
    elif key.endswith("init_lora_weights"):
        kind = "pissa" if str(value).startswith("pissa") else "lora"
        if kind == "lora" and value is not True:
            result.notes.append((key, f"{shortened(value)} is not offered: A is drawn as PEFT does, and B is zero"))
    else:
        kind = ("pissa" if key == "pissa_init" else "dora") if value is True else "lora"
    if kind not in (None, "lora"):
        before = result.job.get("lora", {}).get("kind", kind)
        if before != kind:
            result.notes.append((key, f"{before} and {kind} are not trained together; {target} is {kind}"))
        result.set(target, kind)


def _schedule(result: Converted, key: str, target: str, value: Any) -> None:
    if value in SCHEDULES:
        result.set(target, SCHEDULES[value])
    else:
        result.notes.append((key, f"optim.schedule has no {value}; cosine is the default"))


def _optimizer(result: Converted, key: str, target: str, value: Any) -> None:
    name = next((optimizer_name for start, optimizer_name in OPTIMIZERS.items() if start in str(value).lower()), None)
    if name is None:
        result.notes.append((key, f"there is no {value}; adamw is the default"))
        return
    result.set(target, name)
    if str(value) not in (name, f"{name}_torch", f"{name}_torch_fused", f"{name}_hf"):
        result.notes.append((key, f"{value} is {name}: moments are float32, and only of the adapter"))


def _epochs(result: Converted, key: str, target: str, value: Any) -> None:
    """Trainers count parts of an epoch, too, and have -1 for no limit of steps."""
    value = _number(value)
    if value == int(value) and value >= 1:
        result.set(target, int(value))
    elif not (target == "train.max_steps" and value < 1):
        result.notes.append((key, f"{value:g}: {target} is a whole number, at least 1"))


def _template(result: Converted, key: str, target: str, value: Any) -> None:
    if key == "chat_template_path" or is_template(str(value)) or str(value) in NAMED:
        result.set(target, str(value))
    elif value not in ("tokenizer_default", "jinja", "default"):
        near = did_you_mean(str(value), list(NAMED))
        result.notes.append((key, f"no template is named {shortened(value)}: the base's own is used; {near or target}"))


def _on_long(result: Converted, key: str, target: str, value: Any) -> None:
    result.set(target, {"drop": "drop", "truncate": "cut", "raise": "error"}[str(value)])


def _steps(result: Converted, key: str, target: str, value: Any) -> None:
    value = _number(value)
    if isinstance(value, int | float) and value >= 1:
        result.set(target, int(value))
    else:
        result.notes.append((key, f"{target} counts optimizer steps"))


def _tensorboard(result: Converted, key: str, target: str, value: Any) -> None:
    names = value if isinstance(value, list) else [value]
    if True in names or "tensorboard" in names:
        result.set(target, True)
    for name in names:
        if name in ("wandb", "mlflow", "trackio"):
            result.notes.append((key, f"{name}: set report.{name} to the name of a project"))
        elif isinstance(name, str) and name not in ("none", "tensorboard"):
            result.notes.append((key, f"{name}: report has tensorboard, wandb, mlflow and trackio"))


def _wandb(result: Converted, key: str, target: str, value: Any) -> None:
    if value:
        result.set(target, str(value))


def _objective(values: Mapping[str, Any], result: Converted) -> None:
    objectives = [str(values.get(key, "")).lower() for key in ("pref_loss", "rl", "rlhf", "stage")]
    name = next((candidate for candidate in objectives if candidate in OBJECTIVES), None)
    if name is None and ("dpo" in objectives or any(isinstance(values.get(key), list) for key in LOSSES)):
        name = "dpo"
    if name is not None:
        result.set("objective.name", name)


def _objective_key(result: Converted, key: str, target: str, value: Any) -> None:
    if isinstance(value, list):
        result.set("objective.loss", value)
        return
    value = str(value).lower()
    if value in ("sft", "sigmoid") or value == result.job.get("objective", {}).get("name"):
        return
    if value == "dpo" and "objective" in result.job:
        return
    if key in ("pref_loss", "loss_type") and "objective" in result.job:
        result.set("objective.loss", value)
    else:
        name = "reward" if value == "rm" else value
        is_here = unknown_objective(name) is None
        advice = f"set objective: {name} and what it reads" if is_here else f"there is no objective {value}"
        result.notes.append((key, f"{advice}; as it stands the job trains answers, with sft"))


def _capacity(result: Converted) -> None:
    """Lets the planner choose microbatches for samples that are longer than the default ones."""
    longest, name = result.job.get("data", {}).get("max_length"), result.job.get("objective", {}).get("name", "sft")
    if not isinstance(longest, int) or unknown_objective(name) is not None:
        return
    objective = choose(name, {}, None)
    if longest * objective.num_segments > BatchSettings().largest:
        result.set(CAPACITY, AUTO)
        result.notes.append((CAPACITY, "auto: the planner takes a size that holds the longest samples"))


def _metric(result: Converted, key: str, target: str, value: Any) -> None:
    if value not in ("loss", HELD_OUT_LOSS):
        result.notes.append((key, f"{target} is {HELD_OUT_LOSS}, or eval_ and a metric of the objective"))


def _early_stop(result: Converted) -> None:
    """Leaves out an early stop that would have nothing to count."""
    job = result.job
    evaluated = "eval" in job.get("data", {}) and "eval_every_steps" in job.get("train", {})
    if "early_stop" in job and not evaluated:
        del job["early_stop"]
        result.notes.append(("early_stopping_patience", "early_stop needs data.eval and train.eval_every_steps"))


def _batch(values: Mapping[str, Any], result: Converted) -> None:
    counts = [values[key] for key in FACTORS if isinstance(values.get(key), int) and not isinstance(values[key], bool)]
    if not counts:
        return
    samples = 1
    for count in counts:
        samples *= max(count, 1)
    result.set("batch.global_samples", samples)
    packs = any(values.get(key) is True for key in ("sample_packing", "packing", "neat_packing"))
    note = f"samples per optimizer step on one device; {ALWAYS_PACKED}" if packs else "samples of one optimizer step"
    result.notes.append(
        (" x ".join(key for key in FACTORS if key in values), f"batch.global_samples {samples}: {note}")
    )


TAKERS: dict[str, Callable[[Converted, str, str, Any], None]] = {
    "base.dtype": _dtype,
    "early_stop.metric": _metric,
    "early_stop.patience": _steps,
    "base.quantize": _quantize,
    "data.train": _data,
    "data.eval": _data,
    "data.loss": _loss,
    "data.chat_template": _template,
    "data.on_long": _on_long,
    "epochs": _epochs,
    "train.max_steps": _epochs,
    "lora.targets": _targets,
    "lora.init_from": _init_from,
    "lora.kind": _kind,
    "optim.schedule": _schedule,
    "optim.name": _optimizer,
    "optim.min_lr_ratio": _note("optim.min_lr_ratio is a share of optim.lr"),
    "objective.name": _objective_key,
    "objective.loss_weights": lambda result, key, target, value: result.set(target, value),
    "train.remat": _note("train.remat chooses by memory; train.remat: nothing recomputes whole layers"),
    "train.eval_every_steps": _steps,
    "save.every_steps": _steps,
    "save.keep": _steps,
    "train.log_every_s": _note("metrics.jsonl has every step; train.log_every_s is in seconds"),
    "report.tensorboard": _tensorboard,
    "report.wandb": _wandb,
    "mesh.fsdp": _note("mesh.stages, mesh.data and mesh.fsdp describe the devices"),
    "batch.global_samples": _note("batch.global_samples counts the samples of an optimizer step"),
}


def title_of(path: Path) -> str:
    return f"Converted from {path.name}. lorafusion check tells what is still missing."
