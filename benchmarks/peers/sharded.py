"""LoRA training in torch over several cards, one adapter after another: FSDP2, PEFT and Liger, without padding.

    python -m torch.distributed.run --standalone --nproc-per-node 2 \
        -m benchmarks.peers.sharded --model 32b --variant checkpointed --out results

Each card is a replica that holds a share of every layer of the base (`fully_shard` for each decoder layer, gathered
again in backward). A global batch is split into as many microbatches as a multiple of the cards, of even sizes, so that
no card waits for a longer one. Everything else is as in `torch_peers.py`.

    packed         nothing recomputed; `--capacity` has to leave room for the activations of all layers
    checkpointed   every layer recomputed, with larger microbatches
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.harness import add_row, command_line
from benchmarks.measured_code import write_measured
from benchmarks.peers.packing import Microbatch, global_batches, pack
from benchmarks.peers.torch_peers import (
    TINY_LONGEST,
    TINY_SCALE,
    WARM_UP,
    Documents,
    packed_losses,
    padded_losses,
    register_packed_attention,
    train,
    with_adapter,
)
from benchmarks.workloads import LONGEST, SHAPES, WORKLOADS


def even_microbatches(lengths: Sequence[int], capacity: int, ranks: int) -> list[Microbatch]:
    """Packs a batch into a multiple of `ranks` microbatches of about the same size, none above the capacity if it can.

    Example:
        >>> even_microbatches([5, 3, 4, 2], capacity=8, ranks=2)
        [[5, 2], [4, 3]]
    """
    count = -(-len(pack(lengths, capacity)) // ranks) * ranks
    while True:
        bins: list[Microbatch] = [[] for _ in range(min(count, len(lengths)))]
        for length in sorted(lengths, reverse=True):
            min(bins, key=sum).append(length)
        if max(map(sum, bins)) <= capacity or count >= len(lengths):
            return bins
        count += ranks


def build(shape: dict[str, Any], device: torch.device, *, checkpointed: bool, liger: bool) -> Any:
    """A base of random weights and its adapter, sharded before the weights exist: one card never holds the whole."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama, apply_liger_kernel_to_qwen2

        (apply_liger_kernel_to_qwen2 if shape["family"] == "qwen2" else apply_liger_kernel_to_llama)()
    config = AutoConfig.for_model(
        shape["family"], vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"],
        intermediate_size=shape["intermediate_size"], num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"], num_key_value_heads=shape["num_kv_heads"], head_dim=shape["head_dim"],
        max_position_embeddings=131072, use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, attn_implementation="packed" if liger else "sdpa")
        model = with_adapter(base)
    if checkpointed:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in base.model.layers:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device=device)
    torch.manual_seed(dist.get_rank())
    for name, weight in model.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(weight)
        elif name.endswith("bias"):
            torch.nn.init.zeros_(weight)
        else:
            torch.nn.init.normal_(weight, std=0.02)
    rotary = base.model.rotary_emb
    with device:
        base.model.rotary_emb = type(rotary)(config)  # its buffers were on `meta`, too
    return model.train()


def run(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Measures one variant; the row counts the tokens of all cards."""
    rank, ranks, tiny = dist.get_rank(), dist.get_world_size(), options.model == "tiny"
    shape = SHAPES[options.model] | ({"num_layers": options.layers} if options.layers else {})
    scale, longest = (TINY_SCALE, TINY_LONGEST) if tiny else (1, LONGEST)
    on_gpu = device.type == "cuda"
    documents = Documents()
    if on_gpu:
        register_packed_attention(documents)
    model = build(shape, device, checkpointed=options.variant == "checkpointed", liger=on_gpu)
    batches = global_batches(options.workload, options.batch, options.steps + WARM_UP, scale, longest)
    steps = [even_microbatches(batch, options.capacity, ranks) for batch in batches]
    totals = {id(step): sum(map(sum, step)) for step in steps}

    def losses(step: list[Microbatch]) -> Any:
        """Those of this card, so scaled that the mean of the cards' gradients is that of the global batch."""
        mine = step[rank::ranks]
        of_card = packed_losses(model, documents, mine, 1) if on_gpu else padded_losses(model, mine)
        factor = ranks * sum(map(sum, mine)) / totals[id(step)]
        return (loss * factor for loss in of_card)

    train(model, steps[:WARM_UP] * 2, losses)
    row = train(model, steps, losses)
    tokens = sum(totals[id(step)] for step in steps[WARM_UP:])
    longest_card = max(max(map(sum, step)) for step in steps)
    return row | {
        "useful_tokens_per_s": round(tokens / row["seconds"], 1), "useful_tokens": tokens, "gpus": ranks,
        "microbatches": sum(len(step) for step in steps[WARM_UP:]), "largest_microbatch": longest_card,
    }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=("8b", "32b", "70b", "tiny"), default="32b")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try")
    parser.add_argument("--workload", choices=WORKLOADS, default="mix")
    parser.add_argument("--batch", type=int, default=8, help="samples of a global batch")
    parser.add_argument("--steps", type=int, default=6, help="timed optimizer steps")
    parser.add_argument("--capacity", type=int, default=8192, help="most tokens of a microbatch")
    parser.add_argument("--variant", choices=("packed", "checkpointed"), required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    device = torch.device(options.device, int(os.environ["LOCAL_RANK"]) if options.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    row = {
        "variant": f"fsdp2_{options.variant}", "workload": options.workload, "global_batch": options.batch,
        "model": options.model, "capacity": options.capacity,
    }  # fmt: skip
    try:
        row |= run(options, device)
        row |= {"torch": torch.__version__, "transformers": version("transformers"), "peft": version("peft")}
        if dist.get_rank() == 0:
            write_measured(options.out)
            add_row(options.out / "peers.jsonl", row)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
