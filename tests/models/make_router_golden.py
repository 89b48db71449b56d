"""Writes what transformers computes of small models with the load-balancing loss of their routers, in float32.

    reference/bin/python tests/models/make_router_golden.py      # the environment of make_golden.py

Each file of golden_router/ belongs to the model and the adapter of golden/ with its name: the loss of the routers, the
loss with it, and the gradients of the adapter.
"""

from __future__ import annotations

from pathlib import Path

GOLDEN, OUT = (Path(__file__).parent / name for name in ("golden", "golden_router"))
FACTOR = 0.5
# Top-k of a softmax and weights that are not normalised; softmax of the chosen; layers of an MLP, and delta nets.
CASES = ("qwen3_moe_unnormalised", "gpt_oss", "qwen3_next_dense")


def write_case(case: str) -> None:
    import numpy as np
    import peft
    import torch
    import transformers
    from safetensors.numpy import load_file, save_file

    config = transformers.AutoConfig.from_pretrained(GOLDEN / case)
    config._attn_implementation, config._experts_implementation = "eager", "eager"
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / case, config=config, dtype=torch.float32).eval()
    model.router_aux_loss_coef = FACTOR
    adapted = peft.PeftModel.from_pretrained(model, GOLDEN / case / "adapter", is_trainable=True)
    tokens = torch.from_numpy(load_file(GOLDEN / case / "expected.safetensors")["tokens"].astype(np.int64))[None]
    result = adapted(tokens, attention_mask=torch.ones_like(tokens), labels=tokens, output_router_logits=True)
    result.loss.backward()
    array = lambda x: x.detach().numpy().astype(np.float32)  # noqa: E731
    expected = {"routers": array(result.aux_loss), "loss": array(result.loss)}
    for path, parameter in adapted.named_parameters():
        if "lora_" in path:
            expected[f"grad.{path.replace('.default', '')}"] = array(parameter.grad)
    OUT.mkdir(exist_ok=True)
    save_file(expected, OUT / f"{case}.safetensors")


if __name__ == "__main__":
    for name in CASES:
        write_case(name)
