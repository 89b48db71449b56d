"""Commands of other programs that load exported adapters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.layout.layer import EXPERTS

VLLM_RANKS = (8, 16, 32, 64, 128, 256, 512)  # that `--max-lora-rank` takes


def commands(base: str, folders: Mapping[str, tuple[AdapterSpec, Path]], *, renamed_experts: bool = False) -> list[str]:
    """Returns the commands that load PEFT folders with the meaning that they were trained with.

    Both programs know one alpha of an adapter, and llama.cpp divides it by the rank even with rsLoRA. vLLM tells the
    projections of experts apart in a folder that has both; llama.cpp does not in all families.

    Args:
        base: folder or hub name of the base model.
        folders: the exported adapters by name.
        renamed_experts: see `Family.renamed_experts`. vLLM has them where they are published, and leaves adapters of
            other modules out without a word.

    >>> commands("org/base", {"law": (AdapterSpec(name="law", rank=12, alpha=24), Path("out/law"))})[0]
    'vllm serve org/base --enable-lora --max-lora-rank 16 --lora-modules law=out/law'
    """
    plain = {name: pair for name, pair in folders.items() if _is_plain(pair[0])}
    lines = []
    served = {name: pair for name, pair in plain.items() if not (renamed_experts and pair[0].on_experts)}
    if served and (rank := _served_rank(max(spec.rank for spec, _ in served.values()))) is not None:
        modules = " ".join(f"{name}={folder}" for name, (_, folder) in served.items())
        lines.append(f"vllm serve {base} --enable-lora --max-lora-rank {rank} --lora-modules {modules}")
    lines += [
        f"python convert_lora_to_gguf.py --base {base} {folder}"
        for spec, folder in plain.values()
        if not spec.rslora and not spec.on_experts
    ]
    return lines


def _is_plain(spec: AdapterSpec) -> bool:
    experts = [name for name in EXPERTS if name in spec.targets]
    others = spec.patterns is None and spec.head is None and spec.tokens is None
    return spec.kind == PLAIN and others and len(experts) in (0, len(EXPERTS))


def _served_rank(rank: int) -> int | None:
    return next((served for served in VLLM_RANKS if served >= rank), None)
