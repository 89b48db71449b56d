"""Supervised fine-tuning by calls: two adapters of one base, each with its own learning rate, share microbatches.

`python examples/calls/sft.py` runs on a CPU in a minute.
"""

from __future__ import annotations

import json
from itertools import islice

import lorafusion_jax as lf
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory

STEPS, ROWS = 4, 16
EXAMPLES = examples_directory()
SMALL = {"batch": {"capacity_tokens": 512, "tile_tokens": 32}, "train": {"block_layers": 1}}


def read_data(tokenizer) -> list[lf.Datum]:
    """Questions and answers; only the answers have weights. Position i predicts token i + 1."""
    data = []
    with open(EXAMPLES / "data" / "ask.jsonl", encoding="utf-8") as lines:
        for line in islice(lines, ROWS):
            question, answer = json.loads(line)["messages"][:2]
            prompt = tokenizer.encode(f"Question: {question['content']}\nAnswer: ")
            tokens = prompt + tokenizer.encode(answer["content"])
            weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            data.append(lf.Datum(model_input=tokens[:-1], loss_fn_inputs=inputs))
    return data


def main() -> dict[float, list[float]]:
    """Returns the mean losses of each learning rate."""
    data = read_data(load_tokenizer(EXAMPLES / "base"))
    learned = sum(sum(datum.loss_fn_inputs["weights"]) for datum in data)
    rates = (3e-3, 3e-4)
    first = lf.training_client(EXAMPLES / "base", rank=8, targets=["q_proj", "v_proj"], places={8: 2}, **SMALL)
    with first, first.new_client(rank=8) as second:
        losses: dict[float, list[float]] = {rate: [] for rate in rates}
        for _ in range(STEPS):
            calls = []
            for client, rate in zip((first, second), rates, strict=True):  # none waits for another
                calls.append(client.forward_backward(data, "cross_entropy"))
                client.optim_step(learning_rate=rate, grad_clip_norm=1e3)
            for rate, call in zip(rates, calls, strict=True):
                losses[rate].append(call.result().metrics["loss:sum"] / learned)
    return losses


if __name__ == "__main__":
    for rate, values in main().items():
        print(f"rate {rate:g}: " + " ".join(f"{value:.3f}" for value in values))
