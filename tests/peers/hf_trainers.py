"""Trains adapters with transformers' Trainer and TRL's SFTTrainer in float64; runs where they are installed.

python hf_trainers.py start BASE FOLDER       writes a PEFT folder whose A and B are not zero
python hf_trainers.py train job.json FILE     Trainer: samples are given as tokens and what is learned of them
python hf_trainers.py sft job.json FILE       SFTTrainer: samples are given as rows, which it renders and masks

job.json has adapters: their base, start, rows or samples in order, global batch and optimizer settings. A global batch
is two rows at a time. FILE gets losses and norms of every step, and the weights after the last; of SFTTrainer also the
tokens and labels of every row.
"""

from __future__ import annotations

import json
import sys
import tempfile

import numpy as np
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

AT_ONCE = 2


class Watched:
    """A trainer that takes its rows in order and keeps the loss of every microbatch, which its log would round."""

    def _get_train_sampler(self, dataset=None):
        return SequentialSampler(self.train_dataset if dataset is None else dataset)

    def training_step(self, *args, **kwargs):
        loss = super().training_step(*args, **kwargs)
        self.losses = [*getattr(self, "losses", []), (self.state.global_step, loss.item())]
        return loss


class WatchedTrainer(Watched, Trainer):
    pass


class WatchedSFT(Watched, SFTTrainer):
    pass


def start(base: str, folder: str) -> None:
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
    )
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(folder)


def settings_of(adapter: dict, out: str) -> dict:
    optim = adapter["optim"]
    schedule = {"lr_scheduler_type": optim["schedule"]}
    if optim.get("min_lr_ratio"):
        schedule = {
            "lr_scheduler_type": "cosine_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": optim["min_lr_ratio"]},
        }
    return schedule | {
        "output_dir": out, "per_device_train_batch_size": AT_ONCE, "num_train_epochs": 1, "learning_rate": optim["lr"],
        "gradient_accumulation_steps": adapter["batch"] // AT_ONCE, "optim": "adamw_torch", "adam_beta2": optim["b2"],
        "weight_decay": optim["weight_decay"], "max_grad_norm": optim["clip"], "warmup_steps": 0, "use_cpu": True,
        "bf16": False, "report_to": [], "save_strategy": "no", "logging_steps": 1, "gradient_checkpointing": False,
        "remove_unused_columns": False, "disable_tqdm": True,
    }  # fmt: skip


def collate(rows: list[dict]) -> dict[str, torch.Tensor]:
    """Pads to the longest row, as DataCollatorForSeq2Seq does."""
    longest = max(len(row["input_ids"]) for row in rows)
    filled = {"input_ids": 0, "labels": -100}
    batch = {key: [row[key] + [fill] * (longest - len(row[key])) for row in rows] for key, fill in filled.items()}
    batch["attention_mask"] = [[1] * len(row["input_ids"]) + [0] * (longest - len(row["input_ids"])) for row in rows]
    return {key: torch.tensor(value) for key, value in batch.items()}


def labels_of(tokens: list[int], mask: list[int]) -> list[int]:
    return [token if learned else -100 for token, learned in zip(tokens, mask, strict=True)]


def trained(adapter: dict, kind: str, out: str) -> dict[str, np.ndarray]:
    model = AutoModelForCausalLM.from_pretrained(adapter["base"], dtype=torch.float64, attn_implementation="eager")
    model = PeftModel.from_pretrained(model, adapter["start"], is_trainable=True).double()
    results = {}
    if kind == "train":
        rows = [{"input_ids": tokens, "labels": labels_of(tokens, mask)} for tokens, mask in adapter["samples"]]
        trainer = WatchedTrainer(
            model=model, args=TrainingArguments(**settings_of(adapter, out)), train_dataset=Dataset.from_list(rows),
            data_collator=collate,
        )  # fmt: skip
    else:
        args = SFTConfig(
            **settings_of(adapter, out), max_length=None, packing=False, **adapter["sft"], dataset_num_proc=None
        )
        trainer = WatchedSFT(
            model=model, args=args, train_dataset=Dataset.from_list(adapter["rows"]),
            processing_class=AutoTokenizer.from_pretrained(adapter["base"]),
        )  # fmt: skip
        for number, row in enumerate(trainer.train_dataset):
            batch = trainer.data_collator([row])
            results[f"tokens {number}"] = batch["input_ids"][0].numpy()
            results[f"labels {number}"] = batch["labels"][0].numpy()
    trainer.train()
    losses = np.zeros(trainer.state.global_step)
    for step, loss in trainer.losses:
        losses[step] += loss
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    weights = {
        name.replace(".default", ""): w.detach().numpy() for name, w in model.named_parameters() if "lora" in name
    }
    return results | weights | {"losses": losses, "norms": np.array(norms)}


def main() -> None:
    if sys.argv[1] == "start":
        start(*sys.argv[2:])
        return
    with open(sys.argv[2], encoding="utf-8") as file:
        job = json.load(file)
    results = {}
    with tempfile.TemporaryDirectory() as out:
        for name, adapter in job.items():
            results |= {f"{name}/{key}": array for key, array in trained(adapter, sys.argv[1], out).items()}
    np.savez(sys.argv[3], **results)


if __name__ == "__main__":
    main()
