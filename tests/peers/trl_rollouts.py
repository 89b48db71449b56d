"""Advantages, losses and gradients of TRL's own trainers on fixed rollouts. Runs in an environment with TRL."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer


def main() -> None:
    given = json.load(sys.stdin)
    tokenizer = AutoTokenizer.from_pretrained(Path(given["tokenizer"]))
    print(json.dumps({name: run(given, tokenizer, settings) for name, settings in given["cases"].items()}))


def run(given: dict, tokenizer, settings: dict) -> dict:
    trainer_of, config_of = (RLOOTrainer, RLOOConfig) if settings["trainer"] == "rloo" else (GRPOTrainer, GRPOConfig)
    group, completions, rewards = given["group"], given["completions"], given["rewards"]
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=1, **shape))
    with tempfile.TemporaryDirectory() as folder:
        args = config_of(
            output_dir=folder, report_to=[], use_cpu=True, per_device_train_batch_size=len(completions),
            num_generations=group, steps_per_generation=1, bf16=False, **settings["config"],
        )  # fmt: skip
        trainer = trainer_of(
            model=model, args=args, processing_class=tokenizer, reward_funcs=lambda completions, **_: rewards,
            peft_config=LoraConfig(r=1, target_modules=["q_proj"]),
            train_dataset=Dataset.from_list([{"prompt": "a"}] * len(completions)),
        )  # fmt: skip
    width = max(map(len, completions))

    def padded(rows: list[list[float]]) -> torch.Tensor:
        return torch.tensor([[*row, *[0.0] * (width - len(row))] for row in rows])

    old, logps = padded(given["old"]), padded(given["logprobs"]).requires_grad_()
    answers = iter([old, padded(given["reference"])] if settings["config"].get("beta") else [old])
    ids = [[5] for _ in completions]
    more = (None, None, None, None) if settings["trainer"] == "rloo" else (None, {}, None, None)
    texts = tokenizer.batch_decode(completions)
    generated = (ids, completions, texts) if settings["trainer"] == "rloo" else (ids, completions, None, texts, *more)
    trainer._generate = lambda prompts: generated
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (next(answers), torch.zeros_like(old), None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(completions))
    if settings["trainer"] != "rloo":
        inputs["old_per_token_logps"] = old
        inputs["num_items_in_batch"] = inputs["completion_mask"].sum()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (logps, torch.zeros_like(old), None)
    loss = trainer._compute_loss(trainer.model, inputs)
    loss.backward()
    gradient = [row[: len(ids)].tolist() for row, ids in zip(logps.grad, completions, strict=True)]
    return {"advantages": inputs["advantages"].tolist(), "loss": loss.item(), "gradient": gradient}


if __name__ == "__main__":
    main()
