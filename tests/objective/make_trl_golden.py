"""Makes golden/trl.npz: losses of TRL's trainers over 20 steps of AdamW, first gradients, and adapters at the end.

Needs an environment with the versions below, on a CPU:

    python3.11 -m venv trl && trl/bin/pip install torch==2.13.0 peft==0.21.2 transformers==5.23.0 trl==1.16.0
    trl/bin/python tests/objective/make_trl_golden.py
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import trl_case as case
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

ROOT = Path(__file__).parents[2]
os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
PACKAGES = ("torch", "peft", "transformers", "trl")
COMMON = {
    "per_device_train_batch_size": case.BATCH, "report_to": [], "use_cpu": True, "bf16": False, "fp16": False,
    "gradient_checkpointing": False, "save_strategy": "no", "logging_strategy": "no", "remove_unused_columns": False,
}  # fmt: skip


def base_model(folder: Path, *, head: bool = False):
    settings = {"dtype": torch.float32, "attn_implementation": "eager"}
    if head:
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, **settings)
    return AutoModelForCausalLM.from_pretrained(folder, **settings)


def make_model(name: str, base, adapter: Path):
    """Returns a model with the adapter of a case."""
    if name == "pissa":
        config = LoraConfig(
            r=case.RANK, lora_alpha=case.ALPHA, target_modules=list(case.TARGETS), init_lora_weights="pissa"
        )
        return get_peft_model(base, config)
    model = PeftModel.from_pretrained(base, adapter, is_trainable=True)
    if name == "fa":
        for key, value in model.named_parameters():
            value.requires_grad_("lora_B" in key)
    return model


def make_trainer(name: str, folder: Path, adapter: Path, rows: Dataset, out: str):
    """Returns TRL's trainer of a case."""
    head = case.CASES[name][2]["name"] == "reward"
    model = make_model(name, base_model(folder, head=head), adapter)
    settings = dict(case.CASES[name][2])
    kind, reference = settings.pop("name"), settings.pop("reference", None)
    common = COMMON | {"output_dir": out}
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = {"model": model, "processing_class": tokenizer, "train_dataset": rows}
    explicit = {"ref_model": base_model(folder)} if reference == "base" else {}
    if kind in ("dpo", "ipo"):
        from trl import DPOConfig, DPOTrainer

        losses = settings.get("loss", "ipo" if kind == "ipo" else "sigmoid")
        args = DPOConfig(
            **common, max_length=None, beta=settings.get("beta", 0.1),
            loss_type=losses if isinstance(losses, list) else [losses], loss_weights=settings.get("loss_weights"),
            label_smoothing=settings.get("label_smoothing", 0.0),
        )  # fmt: skip
        return DPOTrainer(args=args, **explicit, **given)
    if kind == "kto":
        from trl import KTOConfig, KTOTrainer

        args = KTOConfig(
            **common, max_length=None, desirable_weight=settings["desirable_weight"],
            train_sampling_strategy="sequential",
        )  # fmt: skip
        return KTOTrainer(args=args, **explicit, **given)
    if kind in ("cpo", "simpo"):
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        extra = (
            {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": settings["beta"], "simpo_gamma": settings["gamma"]}
            if kind == "simpo"
            else {"loss_type": "sigmoid", "cpo_alpha": 1.0}
        )
        return CPOTrainer(args=CPOConfig(**common, max_length=512, **extra), **given)
    if kind == "reward":
        from trl import RewardConfig, RewardTrainer

        args = RewardConfig(
            **common, max_length=None, disable_dropout=True, center_rewards_coefficient=settings.get("center")
        )
        return RewardTrainer(args=args, **given)
    if kind == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(args=ORPOConfig(**common, max_length=512), **given)
    if kind in ("dft", "sft"):
        from trl import SFTConfig, SFTTrainer

        loss = "dft" if kind == "dft" else "nll"
        args = SFTConfig(**common, max_length=None, loss_type=loss, packing=False)
        return SFTTrainer(args=args, **given)
    from trl import GRPOConfig, GRPOTrainer

    extra = {
        "grpo": {"loss_type": "dapo"},
        "grpo_sequence": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    }[name]
    args = GRPOConfig(**common, num_generations=2, beta=0.0, temperature=1.0, **extra)
    given["train_dataset"] = Dataset.from_list([{"prompt": "a"}] * case.ROWS)
    return GRPOTrainer(args=args, reward_funcs=lambda completions, **_: [0.0] * len(completions), **given)


def sampled_batches(rows: list[dict]):
    """Yields inputs of GRPOTrainer's loss for rows that hold their advantages."""

    def padded(lists: list[list], dtype, *, left: bool) -> torch.Tensor:
        width = max(map(len, lists))
        return torch.tensor(
            [[0] * (width - len(row)) + row if left else row + [0] * (width - len(row)) for row in lists], dtype=dtype
        )

    for start in range(0, len(rows), case.BATCH):
        part = rows[start : start + case.BATCH]
        prompts, completions = [row["prompt_ids"] for row in part], [row["completion_ids"] for row in part]
        yield {
            "prompt_ids": padded(prompts, torch.long, left=True),
            "prompt_mask": padded([[1] * len(ids) for ids in prompts], torch.long, left=True),
            "completion_ids": padded(completions, torch.long, left=False),
            "completion_mask": padded([[1] * len(ids) for ids in completions], torch.long, left=False),
            "advantages": torch.tensor([row["advantage"] for row in part]),
            "old_per_token_logps": padded([row["old_logprobs"] for row in part], torch.float32, left=False),
            "num_items_in_batch": torch.tensor(sum(map(len, completions))),
        }


def run_case(name: str, folder: Path, adapter: Path, out: str) -> dict[str, np.ndarray]:
    rows_of, _, settings = case.CASES[name]
    rows = rows_of()
    if settings["name"] == "kto":  # a group of consecutive rows is one sample
        groups = case.order(case.ROWS // case.BATCH, 1)
        chosen = [number for group in groups for number in range(group * case.BATCH, (group + 1) * case.BATCH)]
    else:
        chosen = case.order(case.ROWS, case.BATCH)
    ordered = [rows[number] for number in chosen]
    trainer = make_trainer(name, folder, adapter, Dataset.from_list(ordered), out)
    model = trainer.model
    trainer.current_gradient_accumulation_steps = 1
    if settings["name"] in ("grpo", "cispo"):
        trainer.args.steps_per_generation = 1
        batches = sampled_batches(ordered)
    else:
        batches = DataLoader(trainer.train_dataset, batch_size=case.BATCH, collate_fn=trainer.data_collator)
    model.train()
    trained = {key: value for key, value in model.named_parameters() if value.requires_grad}
    start = {key: value.detach().clone() for key, value in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=case.LR, weight_decay=0.0)
    losses, result = [], {}
    for inputs in batches:
        optimizer.zero_grad()
        # SFTTrainer multiplies by the table of the head itself, and fails where rows of it are trained.
        loss = model(**inputs).loss if name == "tokens" else trainer.compute_loss(model, inputs)
        loss.backward()
        if not losses:
            result |= {f"{name}/gradient/{_plain(key)}": value.grad.numpy().copy() for key, value in trained.items()}
        losses.append(loss.item())
        optimizer.step()
    if name == "pissa":  # the signs of singular vectors are arbitrary: products are compared
        return {f"{name}/losses": np.array(losses)} | {
            f"{name}/moved/{_plain(key).removesuffix('.lora_A.weight')}": _moved(key, trained, start)
            for key in trained
            if "lora_A" in key
        }
    result |= {f"{name}/end/{_plain(key)}": value.detach().numpy().copy() for key, value in trained.items()}
    return result | {f"{name}/losses": np.array(losses)}


def _moved(key: str, end: dict, start: dict) -> np.ndarray:
    """How far the product of A and B has moved."""
    other = key.replace("lora_A", "lora_B")
    return (end[other] @ end[key] - start[other] @ start[key]).detach().numpy()


def _plain(key: str) -> str:
    key = key.replace(".default", "").replace(".modules_to_save", "").replace("base_model.model.model.layers.", "")
    return key.replace("magnitude_vector.weight", "magnitude_vector")


def main(names: list[str]) -> None:
    torch.manual_seed(0)
    target = Path(__file__).parent / "golden" / "trl.npz"
    made = dict(np.load(target)) if target.exists() and names else {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        for name in names or case.CASES:
            base = case.write_model(folder / name / "base", ROOT / "examples" / "base", template=case.CASES[name][1])
            head = case.CASES[name][2]["name"] == "reward"
            kind = name if name in case.KINDS else "lora"
            adapter = case.write_adapter(folder / name / "start", base, head=head, kind=kind)
            made |= run_case(name, base, adapter, str(folder / name / "out"))
            print(name, made[f"{name}/losses"][[0, 1, -1]], flush=True)
    made["versions"] = np.array([f"{package} {importlib.metadata.version(package)}" for package in PACKAGES])
    np.savez_compressed(target, **made)


if __name__ == "__main__":
    main(sys.argv[1:])
