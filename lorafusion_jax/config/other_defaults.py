"""What axolotl, LLaMA-Factory and TRL train with where a file leaves a key out: their defaults, not ours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lorafusion_jax.config.other_programs import counterpart

# Of transformers' Trainer, on which all three stand.
_TRAINER = {
    "lr_scheduler_type": "linear", "warmup_steps": 0, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999,
    "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "num_train_epochs": 3, "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1, "seed": 42, "optim": "adamw_torch_fused",
}  # fmt: skip
_SAVES = "a run saves by time, save.every_minutes; save.every_steps counts steps"
ALL_OF_MESSAGES = "TRL learns every token of rows with messages; here their answers, unless data.loss is all"
_PEFT_TARGETS = ["q_proj", "v_proj"]
_OF_PEFT = "left out: PEFT chooses by the model, q_proj and v_proj for most; see lora.targets"
OF_ADAPTERS = ("adapter", "finetuning_type", "peft_type", "use_peft")  # keys that say what is trained
FACTORS = ("micro_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")  # of a batch, multiplied


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Another program, known by keys that only its files have.

    Attributes:
        keys: these keys.
        defaults: what it does where a key is left out, in its own names and values.
        preferences: what differs with an objective on pairs or labels.
        notes: left-out key → how the training differs here.
    """

    name: str
    keys: frozenset[str]
    defaults: Mapping[str, Any]
    preferences: Mapping[str, Any]
    notes: Mapping[str, str]

    def left_out(self, values: Mapping[str, Any], *, preferences: bool) -> dict[str, Any]:
        """Defaults for keys that a file does not have under this or another name."""
        present = {target_of(key) for key in values}
        defaults = dict(self.defaults) | (dict(self.preferences) if preferences else {})
        if self is LLAMA_FACTORY and isinstance(rank := values.get("lora_rank", defaults["lora_rank"]), int):
            defaults["lora_alpha"] = 2 * rank
        return {
            key: value
            for key, value in defaults.items()
            if key not in values and (key in FACTORS or target_of(key) not in present)
        }

    def left_out_notes(self, values: Mapping[str, Any]) -> list[tuple[str, str]]:
        """Notes for keys that a file does not have."""
        present = {target_of(key) for key in values if target_of(key) != "lora.kind"} - {None}
        if any(key in values for key in OF_ADAPTERS):
            present.add("lora.kind")
        return [(key, note) for key, note in self.notes.items() if key not in values and target_of(key) not in present]


def target_of(key: str) -> str | None:
    """The key of a job file that a key of another program sets; None if there is none."""
    match = counterpart(str(key))
    return SAME.get(str(key)) or (match.key if match else None)


SAME = {
    "seed": "seed", "weight_decay": "optim.weight_decay", "max_steps": "train.max_steps", "beta": "objective.beta",
    "max_length": "data.max_length", "optim": "optim.name",
}  # fmt: skip
TRL = Program(
    name="TRL",
    keys=frozenset({"dataset_name", "use_peft", "completion_only_loss", "assistant_only_loss", "dataset_train_split"}),
    defaults=_TRAINER | {
        "lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": _PEFT_TARGETS,
        "learning_rate": 2e-5, "max_length": 1024,
    },
    preferences={"learning_rate": 1e-6, "lora_dropout": 0.0, "beta": 0.1},
    notes={
        "lora_target_modules": _OF_PEFT, "save_steps": _SAVES, "assistant_only_loss": ALL_OF_MESSAGES,
        "use_peft": "left out: TRL trains the whole model; lora.kind is lora",
        "dtype": "left out: TRL keeps the base in float32; base.dtype is bfloat16",
    },
)  # fmt: skip
LLAMA_FACTORY = Program(
    name="LLaMA-Factory",
    keys=frozenset({"stage", "finetuning_type", "cutoff_len", "template", "lora_target", "dataset_dir", "do_train"}),
    defaults=_TRAINER | {
        "lora_rank": 8, "lora_dropout": 0.0, "lora_target": "all", "learning_rate": 5e-5, "cutoff_len": 2048,
    },
    preferences={"pref_beta": 0.1},
    notes={"save_steps": _SAVES},
)  # fmt: skip
AXOLOTL = Program(
    name="axolotl",
    keys=frozenset({"base_model", "sequence_len", "datasets", "micro_batch_size", "val_set_size", "adapter", "rl"}),
    defaults={key: value for key, value in _TRAINER.items() if key in ("seed", "max_grad_norm", "weight_decay")} | {
        "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "optimizer": "adamw_torch_fused",
        "lr_scheduler": "cosine", "warmup_ratio": 0.03, "num_epochs": 1, "micro_batch_size": 1,
        "gradient_accumulation_steps": 1, "sequence_len": 512, "excess_length_strategy": "drop", "lora_dropout": 0.0,
        "lora_target_modules": _PEFT_TARGETS,
    },
    preferences={"rl_beta": 0.1},
    notes={
        "lora_target_modules": _OF_PEFT, "saves_per_epoch": _SAVES,
        "adapter": "left out: axolotl trains the whole model; lora.kind is lora",
        "warmup_ratio": "left out: axolotl warms up over 3 % of the steps, at most 100",
        "lora_r": "left out: axolotl needs it; lora.rank is 16",
        "lora_alpha": "left out: axolotl needs it; lora.alpha is 32",
        "learning_rate": "left out: axolotl needs it; optim.lr is 2e-4",
    },
)  # fmt: skip
PROGRAMS = (TRL, LLAMA_FACTORY, AXOLOTL)


def program_of(values: Mapping[str, Any]) -> Program | None:
    """The program that a file was written for; None if its keys do not tell.

    >>> program_of({"base_model": "m", "sequence_len": 2048}).name
    'axolotl'
    """
    counts = [len(program.keys.intersection(map(str, values))) for program in PROGRAMS]
    best = max(counts)
    return PROGRAMS[counts.index(best)] if best and counts.count(best) == 1 else None
