"""DPO in TRL: DPOTrainer with PEFT and Liger's layer kernels, one adapter, references known ahead.

    python -m benchmarks.peers.trl_dpo --model 8b --rows 2 --out results

Needs torch, transformers, peft, trl >= 1.16 and liger-kernel; no jax. Rank 16 on all linear layers, alpha 32, no
dropout, bfloat16, fused AdamW, random weights and tokens. A pair is two samples of the workload that share a third of
the shorter one as prompt. TRL 1.16 pads pairs, because its `padding_free` is switched off. The reference's
log-probabilities are columns of the data set, so its forward pass is not timed (`precompute_ref_log_probs`).
Writes peers.jsonl.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from typing import Any

import numpy as np
import torch

from benchmarks.harness import add_row, command_line
from benchmarks.measured_code import write_measured
from benchmarks.peers.torch_peers import TINY_LONGEST, TINY_SCALE, WARM_UP, build
from benchmarks.workloads import LONGEST, SHAPES, WORKLOADS, sample_lengths

BEGINNING = 1 / 3  # of the shorter sample of a pair: the prompt that both share


def pair_lengths(workload: str, pairs: int, scale: float, longest: int) -> list[tuple[int, int, int]]:
    """(prompt, chosen, rejected) tokens of pairs: two samples of the workload with one prompt."""
    draw = np.random.default_rng(WORKLOADS.index(workload))
    lengths = sample_lengths(draw, workload, 0, 2 * pairs, scale, longest)
    result = []
    for first, second in zip(lengths[::2], lengths[1::2], strict=True):
        prompt = max(1, int(min(first, second) * BEGINNING))
        result.append((prompt, max(1, first - prompt), max(1, second - prompt)))
    return result


def data_set(pairs: list[tuple[int, int, int]], vocab: int) -> Any:
    """Random tokens of the given lengths in the columns that TRL's collator reads."""
    from datasets import Dataset

    draw = np.random.default_rng(0)
    rows = []
    for prompt, chosen, rejected in pairs:
        ids = {
            name: draw.integers(3, vocab, count).tolist()
            for name, count in (("prompt_ids", prompt), ("chosen_ids", chosen), ("rejected_ids", rejected))
        }
        rows.append(ids | {"ref_chosen_logps": -10.0 * chosen, "ref_rejected_logps": -10.0 * rejected})
    return Dataset.from_list(rows)


def tokenizer() -> Any:
    """A tokenizer that is never asked to encode: the trainer wants one with an end and a padding token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "<unk>": 2}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def run(options: argparse.Namespace) -> dict:
    """Times optimizer steps after the warm-up."""
    from transformers import TrainerCallback
    from trl import DPOConfig, DPOTrainer

    tiny = options.model == "tiny"
    shape = SHAPES[options.model] | ({"num_layers": options.layers} if options.layers else {})
    steps = options.steps + WARM_UP
    pairs = pair_lengths(
        options.workload, steps * options.batch, TINY_SCALE if tiny else 1, TINY_LONGEST if tiny else LONGEST
    )
    model = build(shape, "sdpa", "", options.device)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0

    class Pairs(DPOTrainer):
        """Takes the rows as they are: tokens and references are in them."""

        def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
            return dataset

        def get_batch_samples(self, *given: Any, **named: Any) -> Any:
            batches, items = super().get_batch_samples(*given, **named)
            seen["tokens"] += sum(int(batch["attention_mask"].sum()) for batch in batches)
            seen["computed"] += sum(batch["attention_mask"].numel() for batch in batches)
            return batches, items

    seen = {"tokens": 0, "computed": 0}

    class Clock(TrainerCallback):
        began = ended = 0.0

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == WARM_UP or state.global_step == steps:
                if options.device == "cuda":
                    torch.cuda.synchronize()
                if state.global_step == WARM_UP:
                    seen.update(tokens=0, computed=0)
                    self.began = time.perf_counter()
                self.ended = time.perf_counter()

    clock = Clock()
    config = DPOConfig(
        output_dir=str(options.out / "trl"), per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.batch // options.rows, max_steps=steps, learning_rate=1e-5, bf16=not tiny,
        max_length=None, optim="adamw_torch_fused" if options.device == "cuda" else "adamw_torch",
        gradient_checkpointing=options.checkpointing, use_liger_kernel=options.device == "cuda", logging_steps=1000,
        save_strategy="no", report_to=[], max_grad_norm=1.0, use_cpu=options.device == "cpu",
        dataloader_num_workers=0,
    )  # fmt: skip
    trainer = Pairs(
        model=model, args=config, train_dataset=data_set(pairs, shape["vocab_size"]), processing_class=tokenizer(),
        callbacks=[clock],
    )  # fmt: skip
    trainer.precompute_ref_logps = True  # the columns hold the references
    trainer.train()
    seconds = clock.ended - clock.began
    return {
        "useful_tokens_per_s": round(seen["tokens"] / seconds, 1), "seconds": round(seconds, 3),
        "useful_tokens": seen["tokens"], "processed": seen["computed"], "rows": options.rows,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if options.device == "cuda" else None,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try")
    parser.add_argument("--workload", choices=WORKLOADS, default="mix")
    parser.add_argument("--batch", type=int, default=8, help="pairs of a global batch")
    parser.add_argument("--steps", type=int, default=6, help="timed optimizer steps")
    parser.add_argument("--rows", type=int, default=2, help="pairs of a microbatch")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    write_measured(options.out)
    row: dict[str, Any] = {
        "variant": "trl_dpo" + ("_checkpointed" if options.checkpointing else ""), "workload": options.workload,
        "global_batch": options.batch, "model": options.model,
    }  # fmt: skip
    row |= run(options)
    row |= {name: version(name) for name in ("torch", "transformers", "peft", "trl", "liger-kernel")}
    if options.device == "cuda":
        row["device"] = torch.cuda.get_device_name()
    add_row(options.out / "peers.jsonl", row)


if __name__ == "__main__":
    main()
