"""Distillation by calls: a student learns, on its own samples, what another adapter of the same base says of them.

The advantage of a token is log p of the teacher minus its own. `python examples/calls/distillation.py` runs on a CPU.
"""

from __future__ import annotations

import numpy as np

import lorafusion_jax as lf
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory

ROUNDS, GROUP = 4, 16
BASE = examples_directory() / "base"
LESSONS = ["A set has no order.", "A list keeps its order.", "A dict maps keys to values."]
SMALL = {"batch": {"capacity_tokens": 1024, "tile_tokens": 32}, "train": {"block_layers": 1}}


def row(tokens: list[int], **inputs) -> lf.Datum:
    """Position i predicts token i + 1."""
    return lf.Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:], **inputs})


def train_teacher(teacher, tokenizer) -> None:
    for _ in range(8):
        teacher.forward_backward([row(tokenizer.encode(lesson)) for lesson in LESSONS], "cross_entropy")
        teacher.optim_step(learning_rate=1e-2).result()


def main() -> list[float]:
    """Returns the mean of log p of the student minus that of the teacher, by round: it estimates their divergence."""
    tokenizer, gaps = load_tokenizer(BASE), []
    prompts = [tokenizer.encode(lesson)[:2] for lesson in LESSONS]
    student = lf.training_client(BASE, rank=8, targets=["q_proj", "v_proj"], places={8: 2}, **SMALL)
    with student, student.new_client(rank=8) as teacher:
        train_teacher(teacher, tokenizer)
        for number in range(ROUNDS):
            sampler, texts = student.save_weights_and_get_sampling_client(), []
            for prompt in prompts:
                samples = sampler.sample(prompt, GROUP, max_tokens=8, seed=100 * number, temperature=1.0).result()
                texts += [(len(prompt) - 1, prompt + sample.tokens, sample.logprobs) for sample in samples]
            scored = teacher.forward([row(tokens) for _, tokens, _ in texts], "cross_entropy").result().loss_fn_outputs
            data, gap = [], []
            for (before, tokens, logprobs), output in zip(texts, scored, strict=True):
                drawn = np.pad(logprobs, (before, 0))
                advantages = np.where(np.arange(len(drawn)) < before, 0.0, output["logprobs"] - drawn)
                data.append(row(tokens, logprobs=drawn, advantages=advantages))
                gap.append(-advantages.sum())
            student.forward_backward(data, "importance_sampling")
            student.optim_step(learning_rate=1e-2).result()
            gaps.append(float(np.mean(gap)))
    return gaps


if __name__ == "__main__":
    print("gap of each round: " + " ".join(f"{value:.3f}" for value in main()))
