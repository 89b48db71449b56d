"""Makes golden/ppo.json: advantages, loss and gradients of TRL's PPO trainer on fixed rollouts.

TRL 1.16 has no PPO any more; 1.0 is the last major version that ships its trainer, in `trl.experimental`:

    python3.11 -m venv trl && trl/bin/pip install torch==2.13.0 peft==0.21.2 transformers==5.23.0 trl==1.0.0
    trl/bin/python tests/objective/make_ppo_golden.py

Runs `PPOTrainer.train` for one batch. Functions of its module that sample and run models give the fixed numbers
instead, and `masked_whiten` returns advantages as they are. All answers have the same length: behind a shorter one TRL
also counts a position of padding, and gives the reward to that.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from trl import __version__
from trl.experimental.ppo import ppo_trainer

ROWS, LENGTH, VOCABULARY = 4, 6, 11
SETTINGS = {"cliprange": 0.2, "cliprange_value": 0.15, "vf_coef": 0.3, "gamma": 0.9, "lam": 0.8, "kl_coef": 0.1}


def main() -> None:
    draw = np.random.default_rng(0)
    old, shape = -draw.uniform(0.5, 4, (ROWS, LENGTH)), (ROWS, LENGTH)
    given = {
        "old_logprobs": old, "old_values": draw.normal(size=shape),
        "reference": (old + draw.normal(0, 0.2, shape)).clip(max=-1e-3),
        "logprobs": (old + draw.normal(0, 0.3, shape)).clip(max=-1e-3),
        "values": draw.normal(size=shape), "rewards": draw.normal(size=ROWS),
    }  # fmt: skip
    theirs = run({name: torch.tensor(array) for name, array in given.items()})
    result = {"trl": __version__, "settings": SETTINGS, **{name: array.tolist() for name, array in given.items()}}
    text = json.dumps(result | {"theirs": theirs}, indent=1)
    (Path(__file__).parent / "golden" / "ppo.json").write_text(text + "\n")


def run(given: dict[str, torch.Tensor]) -> dict:
    logprobs, values = (given[name].clone().requires_grad_() for name in ("logprobs", "values"))
    numbers = torch.zeros(ROWS, LENGTH + 1, VOCABULARY, dtype=torch.float64)
    answers = iter([given["old_logprobs"], given["reference"], logprobs])  # sampled, of the reference, in training
    behind = torch.zeros(ROWS, 1, 1, dtype=torch.float64)
    scores = iter(
        [(torch.cat([given["old_values"][..., None], behind], 1), None, None), (None, given["rewards"], None)]
    )
    advantages: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []

    def as_it_is(values, mask, shift_mean=True):
        advantages.append(values)
        return values

    module = vars(ppo_trainer)
    module["selective_log_softmax"] = lambda *_: next(answers)
    module["get_reward"] = lambda *_: next(scores)
    module["masked_whiten"] = as_it_is
    module["unwrap_model_for_generation"] = lambda *_, **__: contextlib.nullcontext(MagicMock())
    tokens = torch.ones(ROWS, LENGTH + 1, dtype=torch.long)
    module["batch_generation"] = lambda *_: (tokens, numbers[:, 1:])
    output = SimpleNamespace(logits=numbers)
    is_policy = iter([False, True])  # the reference has logits alone
    with_values = output, torch.cat([values[..., None], behind], 1)
    module["forward"] = lambda *_: with_values if next(is_policy) else output

    def backward(loss):
        losses.append(loss)
        loss.backward()

    class Numpy:
        """Rows in the order of the batch."""

        random = SimpleNamespace(permutation=np.arange)

    module["np"] = Numpy
    accelerator = MagicMock(device="cpu", backward=backward, gather_for_metrics=lambda tensor: tensor)
    args = SimpleNamespace(
        **SETTINGS, response_length=LENGTH, temperature=1.0, num_ppo_epochs=1, num_mini_batches=1,
        gradient_accumulation_steps=1, num_total_batches=1, total_episodes=ROWS, batch_size=ROWS, local_batch_size=ROWS,
        local_mini_batch_size=ROWS, per_device_train_batch_size=ROWS, local_rollout_forward_batch_size=ROWS,
        logging_steps=None, eval_steps=None, save_steps=None, ds3_gather_for_generation=False, missing_eos_penalty=None,
        kl_estimator="k1", whiten_rewards=False, num_sample_generations=0,
    )  # fmt: skip
    trainer = MagicMock(
        args=args, accelerator=accelerator, dataloader=[{"input_ids": tokens[:, :1]}], stop_token_id=None,
        train_dataset_len=ROWS, processing_class=SimpleNamespace(pad_token_id=0, eos_token_id=2),
    )  # fmt: skip
    ppo_trainer.PPOTrainer.train(trainer)
    (loss,), (raw,) = losses, advantages
    return {
        "advantages": raw.tolist(),
        "loss": loss.item(),
        "gradients": {"logprobs": logprobs.grad.tolist(), "values": values.grad.tolist()},
    }


if __name__ == "__main__":
    main()
