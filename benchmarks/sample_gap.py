"""How far is log p of sampled tokens from that of a `forward` call on them, on a base that was trained?

    python -m benchmarks.sample_gap --out DIR      # the example's base, a minute on one GPU or a CPU

A row of `sample_gap.jsonl` for each dtype: the gap between sampler and `forward`, and that of `forward` with itself
where each row comes in a call of its own. Random weights spread p over the whole vocabulary, so log p moves as much as
the logits; a trained model is sure of many tokens, and log p of those hardly moves.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks.conditions import conditions
from benchmarks.harness import add_row, command_line
from lorafusion_jax.api.training import Datum, TrainingClient, training_client
from lorafusion_jax.examples import examples_directory

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 40, 32


def main() -> int:
    options = command_line(__doc__).parse_args()
    for dtype in ("bfloat16", "float32"):
        base = {"model": examples_directory() / "base", "dtype": dtype}
        with training_client(base, rank=16, batch={"capacity_tokens": 1024}) as client:
            add_row(options.out / "sample_gap.jsonl", {"dtype": dtype} | compared(client) | conditions())
    return 0


def compared(client: TrainingClient) -> dict[str, Any]:
    """Samples of an adapter that is not trained yet, at temperature 1, without stop tokens."""
    folder, prompts, data, sampled = examples_directory(), [], [], []
    tokenizer = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    for line in (folder / "data" / "ask.jsonl").read_text(encoding="utf-8").splitlines()[:PROMPTS]:
        text = "\n".join(message["content"] for message in json.loads(line)["messages"])
        prompts.append(tokenizer.encode(text).ids[:PROMPT_TOKENS])
    sampler = client.save_weights_and_get_sampling_client()
    for number, prompt in enumerate(prompts):
        settings = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "seed": number}
        for sample in sampler.sample(prompt, num_samples=4, sampling_params=settings).result():
            tokens = [*prompt, *sample.tokens]
            data.append((len(prompt), Datum(model_input=tokens[:-1], loss_fn_inputs={"target_tokens": tokens[1:]})))
            sampled.append(np.array(sample.logprobs))

    def forward(rows: Sequence[tuple[int, Datum]]) -> list[np.ndarray]:
        outputs = client.forward([datum for _, datum in rows]).result().loss_fn_outputs
        return [output["logprobs"][length - 1 :] for (length, _), output in zip(rows, outputs, strict=True)]

    together, alone = (np.concatenate(rows) for rows in (forward(data), [forward([row])[0] for row in data]))
    gaps, of_packing = np.abs(np.concatenate(sampled) - together), np.abs(alone - together)
    return {
        "tokens": len(gaps), "mean_logprob": float(together.mean()),
        "gap_median": float(np.median(gaps)), "gap_max": float(gaps.max()),
        "packing_gap_median": float(np.median(of_packing)), "packing_gap_max": float(of_packing.max()),
    }  # fmt: skip


if __name__ == "__main__":
    raise SystemExit(main())
