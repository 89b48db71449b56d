"""Reinforcement learning by calls: sample, reward, train, and again. Tokens stay tokens: nothing is encoded twice.

The reward is the share of small letters in an answer. `python examples/calls/rl.py` runs on a CPU in a minute.
"""

from __future__ import annotations

import statistics

import lorafusion_jax as lf
from lorafusion_jax.data.tokenizer import load_tokenizer
from lorafusion_jax.examples import examples_directory

ROUNDS, GROUP = 4, 16
BASE = examples_directory() / "base"
QUESTIONS = ["What does os.path.join do?", "What is a set?", "How do I sort a list?"]
SMALL = {"batch": {"capacity_tokens": 1024, "tile_tokens": 32}, "train": {"block_layers": 1}}


def reward(text: str) -> float:
    return sum(letter.islower() or letter == " " for letter in text) / max(len(text), 1)


def datum_of(prompt: list[int], sample, advantage: float) -> lf.Datum:
    """The prompt's positions have no advantage. Position i predicts token i + 1."""
    before = len(prompt) - 1
    inputs = {
        "target_tokens": [*prompt[1:], *sample.tokens],
        "logprobs": [0.0] * before + sample.logprobs,
        "advantages": [0.0] * before + [advantage] * len(sample.tokens),
    }
    return lf.Datum(model_input=[*prompt, *sample.tokens[:-1]], loss_fn_inputs=inputs)


def main() -> list[float]:
    """Returns the mean reward of each round."""
    tokenizer, rewards = load_tokenizer(BASE), []
    with lf.training_client(BASE, rank=8, targets=["q_proj", "v_proj"], **SMALL) as client:
        for number in range(ROUNDS):
            sampler, data, values = client.save_weights_and_get_sampling_client(), [], []
            for question in QUESTIONS:
                prompt = tokenizer.encode(question)
                settings = {"max_tokens": 16, "seed": 100 * number, "temperature": 1.0}
                samples = sampler.sample(prompt, GROUP, **settings).result()
                scores = [reward(tokenizer.decode(sample.tokens)) for sample in samples]
                mean = statistics.mean(scores)
                data += [datum_of(prompt, *pair) for pair in zip(samples, (s - mean for s in scores), strict=True)]
                values += scores
            client.forward_backward(data, "importance_sampling")
            client.optim_step(learning_rate=5e-3).result()
            rewards.append(statistics.mean(values))
    return rewards


if __name__ == "__main__":
    print("mean reward of each round: " + " ".join(f"{value:.3f}" for value in main()))
