"""Preferences by calls: a loss of your own compares two answers. `python examples/calls/dpo.py` runs on a CPU."""

from __future__ import annotations

import json

import jax.numpy as jnp

import lorafusion_jax as lf
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory

STEPS, PAIRS, BETA = 4, 8, 0.5
EXAMPLES = examples_directory()
SMALL = {"batch": {"capacity_tokens": 512, "tile_tokens": 32}, "train": {"block_layers": 1}}


def read_pairs(tokenizer) -> list[lf.Datum]:
    """Chosen and rejected rows take turns; only the answers count."""
    data = []
    lines = (EXAMPLES / "data" / "ask.jsonl").read_text(encoding="utf-8").splitlines()[:PAIRS]
    chats = [json.loads(line)["messages"] for line in lines]
    for (question, answer, *_), (_, other, *_) in zip(chats, chats[1:] + chats[:1], strict=True):
        prompt = tokenizer.encode(f"Question: {question['content']}\nAnswer: ")
        for text in (answer["content"], other["content"]):  # another question's answer is the rejected one
            tokens = prompt + tokenizer.encode(text)
            weights = [0.0] * (len(prompt) - 1) + [1.0] * (len(tokens) - len(prompt))
            inputs = {"target_tokens": tokens[1:], "weights": weights}
            data.append(lf.Datum(model_input=tokens[:-1], loss_fn_inputs=inputs))
    return data


def sums(data: list[lf.Datum], logprobs) -> jnp.ndarray:
    """log p of each answer, [pairs, 2]."""
    weights = [jnp.asarray(datum.loss_fn_inputs["weights"]) for datum in data]
    return jnp.stack([w @ jnp.asarray(p) for w, p in zip(weights, logprobs, strict=True)]).reshape(-1, 2)


def main() -> list[float]:
    """Returns the loss of each step."""
    data, losses = read_pairs(load_tokenizer(EXAMPLES / "base")), []
    with lf.training_client(EXAMPLES / "base", rank=8, targets=["q_proj", "v_proj"], **SMALL) as client:
        outputs = client.forward(data, "cross_entropy").result().loss_fn_outputs
        reference = sums(data, [output["logprobs"] for output in outputs])  # of the model before training

        def dpo(data, logprobs):
            ahead = sums(data, logprobs) - reference
            return jnp.logaddexp(0, -BETA * (ahead[:, 0] - ahead[:, 1])).mean(), {}  # -log sigmoid

        for _ in range(STEPS):
            loss = client.forward_backward_custom(data, dpo)
            client.optim_step(learning_rate=3e-3)
            losses.append(loss.result().metrics["loss:sum"])
    return losses


if __name__ == "__main__":
    print("loss of each step: " + " ".join(f"{value:.3f}" for value in main()))
