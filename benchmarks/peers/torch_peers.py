"""LoRA training in torch, one adapter after another: transformers + PEFT with defaults, and in the best known set-up.

    python -m benchmarks.peers.torch_peers --model 8b --variant packed --out results

Needs torch >= 2.11 (`varlen_attn`), transformers, peft and liger-kernel; no jax. Rank 16 on all linear layers, alpha
32, dropout 0.1, bfloat16, fused AdamW, gradients clipped to 1, random weights and tokens, nothing recomputed unless
said.

    default       padded microbatches of `--rows` samples, SDPA, no Liger: what the documentation shows
    checkpointed  the same with gradient checkpointing and twice the rows
    packed        samples of a batch packed without padding, variable-length flash attention, Liger's norms, rotary
                  embedding, SwiGLU and fused loss
    packed_full   the same, every microbatch filled as if several adapters shared it: an upper bound
    compiled, compiled_full   packed and packed_full, decoder layers through torch.compile with dynamic lengths,
                              Liger for the loss alone
    checkpointed_packed   packed, with gradient checkpointing: for long samples (`--sample TOKENS`)
    nf4           packed, on a base in bitsandbytes' nf4 with double quantisation (QLoRA)
    lorafusion, lorafusion_full   packed and packed_full with LoRAFusion's kernels (`--lorafusion CHECKOUT`)
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention.varlen import varlen_attn

from benchmarks.harness import add_row, command_line
from benchmarks.measured_code import write_measured
from benchmarks.peers import lorafusion
from benchmarks.peers.packing import Microbatch, full_steps, global_batches, pack, padded
from benchmarks.workloads import LONGEST, SHAPES, WORKLOADS

VARIANTS = (
    "default", "checkpointed", "packed", "packed_full", "compiled", "compiled_full", "checkpointed_packed", "nf4",
    "lorafusion", "lorafusion_full",
)  # fmt: skip
WARM_UP = 2  # steps before the clock starts
OPTIONS = inspect.signature(varlen_attn).parameters  # they differ between versions of torch
CAUSAL: dict[str, Any] = {"is_causal": True} if "is_causal" in OPTIONS else {"window_size": (-1, 0)}
GROUPED: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in OPTIONS else {}
TINY_SCALE, TINY_LONGEST = 0.05, 96


class Documents:
    """Where the documents of the present microbatch end: attention and positions ask for it."""

    ends: torch.Tensor
    longest: int

    def set(self, lengths: Microbatch, device: torch.device) -> torch.Tensor:
        """Takes the lengths in row order and returns the positions [1, T]."""
        self.longest = max(lengths)
        self.ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        return torch.cat([torch.arange(length, device=device) for length in lengths])[None]


def register_packed_attention(documents: Documents) -> None:
    """Makes `packed` an attention of transformers: causal within each document of one long row."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    def attend(module: Any, q: Any, k: Any, v: Any, mask: Any, **_: Any) -> tuple[torch.Tensor, None]:
        q, k, v = (part[0].transpose(0, 1).contiguous() for part in (q, k, v))  # [T, heads, width]
        if not GROUPED:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], 1) for part in (k, v))
        ends, longest = documents.ends, documents.longest
        return varlen_attn(q, k, v, ends, ends, longest, longest, **CAUSAL, **GROUPED)[None], None

    AttentionInterface.register("packed", attend)
    AttentionMaskInterface.register("packed", lambda *_, **__: None)


def quantise(base: Any) -> None:
    """Puts every linear layer but the head into nf4, as transformers does when it loads a base for QLoRA."""
    import bitsandbytes as bnb

    for parent in base.model.modules():
        for name, linear in list(parent.named_children()):
            if type(linear) is torch.nn.Linear:
                quantised = bnb.nn.Linear4bit(
                    linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                    compress_statistics=True, quant_type="nf4", device="meta",
                )  # fmt: skip
                quantised.weight = bnb.nn.Params4bit(
                    linear.weight.data.cpu(), requires_grad=False, compress_statistics=True, quant_type="nf4"
                )
                device = linear.weight.device
                setattr(parent, name, quantised.to(device))  # moving it quantises
    base.is_loaded_in_4bit = True  # PEFT asks for it


def build(shape: dict[str, Any], attention: str, liger: str, device: str, *, nf4: bool = False) -> Any:
    """The base with random weights, and one adapter whose B is not zero, as after some training.

    Args:
        liger: "all" of Liger's kernels, its "loss" alone, or "" for none.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        layers = liger == "all"
        apply_liger_kernel_to_llama(rope=layers, rms_norm=layers, swiglu=layers, fused_linear_cross_entropy=True)
    config = LlamaConfig(
        vocab_size=shape["vocab_size"], hidden_size=shape["hidden_size"], intermediate_size=shape["intermediate_size"],
        num_hidden_layers=shape["num_layers"], num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"], head_dim=shape["head_dim"], max_position_embeddings=131072,
        attn_implementation=attention,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        base = LlamaForCausalLM(config)
    base.config.use_cache = False
    if nf4:
        quantise(base)
    return with_adapter(base).train()


def with_adapter(base: Any) -> Any:
    """Puts the adapter that is measured on a base: rank 16 on all linear layers; B is not zero."""
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.1, target_modules="all-linear", exclude_modules=["lm_head"],
        task_type="CAUSAL_LM",
    )  # fmt: skip
    model = get_peft_model(base, lora, autocast_adapter_dtype=False)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.01)
    return model


def packed_losses(model: Any, documents: Documents, microbatches: list[Microbatch], multiple: int) -> Iterator[Any]:
    """The loss of each microbatch as one row of documents; rows come in multiples that a kernel may want."""
    device, total = model.device, sum(map(sum, microbatches))
    for lengths in microbatches:
        real = sum(lengths)
        rest = -real % multiple
        positions = documents.set([*lengths, *([rest] if rest else [])], device)
        ids = torch.randint(0, model.config.vocab_size, (1, real + rest), device=device)
        labels = ids.clone()
        labels[:, real:] = -100
        yield model(input_ids=ids, position_ids=positions, labels=labels).loss * (real / total)


def padded_losses(model: Any, microbatches: list[Microbatch]) -> Iterator[Any]:
    """The loss of each microbatch as a padded rectangle."""
    device, total = model.device, sum(map(sum, microbatches))
    for lengths in microbatches:
        ids = torch.randint(0, model.config.vocab_size, (len(lengths), max(lengths)), device=device)
        seen = torch.arange(max(lengths), device=device) < torch.tensor(lengths, device=device)[:, None]
        out = model(input_ids=ids, attention_mask=seen.long(), labels=ids.masked_fill(~seen, -100))
        yield out.loss * (sum(lengths) / total)


def train(model: Any, steps: list[list[Microbatch]], losses: Callable[[list[Microbatch]], Iterator[Any]]) -> dict:
    """Optimizer steps over all microbatches; the clock runs after the warm-up."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=1e-4, fused=True)
    on_gpu = model.device.type == "cuda"
    began = 0.0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    for index, microbatches in enumerate(steps):
        if index == WARM_UP:
            if on_gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
        for loss in losses(microbatches):
            loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began
    timed = [lengths for step in steps[WARM_UP:] for lengths in step]
    useful = sum(map(sum, timed))
    return {
        "useful_tokens_per_s": round(useful / seconds, 1), "useful_tokens": useful, "seconds": round(seconds, 3),
        "microbatches": len(timed), "trainable": sum(weight.numel() for weight in weights),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1) if on_gpu else None,
    }  # fmt: skip


def run(options: argparse.Namespace) -> dict:
    """Measures one variant. Liger and LoRAFusion change classes for good, so a process runs one."""
    variant, tiny = options.variant, options.model == "tiny"
    shape = SHAPES[options.model] | ({"num_layers": options.layers} if options.layers else {})
    scale, longest = (TINY_SCALE, TINY_LONGEST) if tiny else (1, LONGEST)
    batches = global_batches(options.workload, options.batch, options.steps + WARM_UP, scale, longest)
    if options.sample:
        batches = [[options.sample]] * (options.steps + WARM_UP)
    packs = variant not in ("default", "checkpointed")
    documents = Documents()
    if packs:
        register_packed_attention(documents)
    # torch.compile cannot trace Liger's norm (an assertion of torch 2.11), and fuses norms, rope and gates itself.
    liger = "" if not packs else "loss" if variant.startswith("compiled") else "all"
    model = build(shape, "packed" if packs else "sdpa", liger, options.device, nf4=variant == "nf4")
    if variant.startswith("checkpointed"):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.enable_input_require_grads()
    if not packs:
        rows = options.rows * (2 if variant == "checkpointed" else 1)
        steps = [padded(batch, rows) for batch in batches]
        processed = sum(len(m) * max(m) for step in steps[WARM_UP:] for m in step)
        return train(model, steps, lambda batch: padded_losses(model, batch)) | {"rows": rows, "processed": processed}
    multiple = 1
    if variant.startswith("lorafusion"):
        lorafusion.install(options.lorafusion)
        multiple = lorafusion.ROWS
    if variant.startswith("compiled"):
        torch._dynamo.config.recompile_limit = 64  # a layer differs in what needs a gradient, and in lengths
        for layer in model.base_model.model.model.layers:
            layer.compile(dynamic=True)
    full = variant.endswith("_full")
    steps = full_steps(batches, options.capacity) if full else [pack(batch, options.capacity) for batch in batches]
    # Lengths differ from step to step: kernels are chosen and compiled here, by torch.compile for every step.
    warm = steps if variant.startswith("compiled") else steps[:WARM_UP] * 2
    if not options.sample:
        train(model, warm, lambda batch: packed_losses(model, documents, batch, multiple))
    row = train(model, steps, lambda batch: packed_losses(model, documents, batch, multiple))
    return row | {"processed": sum(-(-sum(m) // multiple) * multiple for step in steps[WARM_UP:] for m in step)}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", choices=("8b", "70b", "tiny"), default="8b", help="llama shapes")
    parser.add_argument("--layers", type=int, help="fewer layers than the model has, to try")
    parser.add_argument("--workload", choices=WORKLOADS, default="mix")
    parser.add_argument("--batch", type=int, default=8, help="samples of a global batch")
    parser.add_argument("--steps", type=int, default=12, help="timed optimizer steps")
    parser.add_argument("--sample", type=int, help="every step trains on one sample of so many tokens")
    parser.add_argument("--capacity", type=int, default=8192, help="tokens of a packed microbatch")
    parser.add_argument("--rows", type=int, default=2, help="samples of a padded microbatch")
    parser.add_argument("--variant", choices=VARIANTS, required=True)
    parser.add_argument("--lorafusion", type=Path, help="a checkout of LoRAFusion")
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    write_measured(options.out)
    row = {
        "variant": options.variant, "workload": options.workload, "global_batch": options.batch, "model": options.model,
        "sample": options.sample,
    } | run(options)  # fmt: skip
    row |= {"torch": torch.__version__, "transformers": version("transformers"), "peft": version("peft")}
    if options.device == "cuda":
        row["device"] = torch.cuda.get_device_name()
    add_row(options.out / "peers.jsonl", row)


if __name__ == "__main__":
    main()
