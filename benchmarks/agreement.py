"""Tables of how near results are to what they should equal: joint and separate training, transformers and PEFT."""

from __future__ import annotations

from benchmarks.csv_rows import Row, rows

JOINT = "joint_alone_h200_2026-11-27"
PARITY = "parity_cpu_2026-11-27/parity.csv"
LABELS = {
    "SmolLM3": "SmolLM3", "Olmo2": "OLMo 2", "Olmo3": "OLMo 3", "Granite": "Granite 3", "Phi3": "Phi-3, Phi-4",
    "SeedOss": "Seed-OSS", "Qwen3Moe": "Qwen3-MoE", "Qwen2Moe": "Qwen2-MoE", "Glm4Moe": "GLM-4.5", "GptOss": "gpt-oss",
    "Qwen3_5": "Qwen3.5", "Qwen3Next": "Qwen3-Next", "Qwen3_5Moe": "Qwen3.5 with experts", "DeepseekV3": "DeepSeek-V3",
    "Glm4MoeLite": "GLM-4.7-Flash", "Gemma2": "Gemma 2", "Gemma3": "Gemma 3", "Gemma4": "Gemma 4",
    "Gemma4Unified": "Gemma 4", "Ministral3": "Ministral 3",
}  # fmt: skip
DTYPES = ("bfloat16", "float32")


def joint_alone() -> str:
    """Of each tensor the step whose difference is nearest to its bound."""
    compared = rows(f"{JOINT}/joint_alone.csv")
    names = sorted({row["tensor"] for row in compared if row["tensor"].startswith("layers.")})
    lines = ["| gradient of | bfloat16: difference | bound | float32: difference | bound |", "|---" * 5 + "|"]
    for name in [*names, "loss"]:
        nearest = [
            max((row for row in compared if (row["dtype"], row["tensor"]) == (dtype, name)), key=of_bound)
            for dtype in DTYPES
        ]
        cells = [scientific(float(row[key])) for row in nearest for key in ("value", "bound")]
        lines.append(f"| {'the loss itself' if name == 'loss' else f'`{name}`'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def of_bound(row: Row) -> float:
    return float(row["value"]) / float(row["bound"])


def scientific(number: float) -> str:
    return f"{number:.1e}".replace("e-0", "e-") if number else "0"


def parity() -> str:
    """The worst of a family's models; a family's logits, loss and adapted logits are one number."""
    families: dict[str, list[Row]] = {}
    for row in rows(PARITY):
        families.setdefault(LABELS.get(row["family"], row["family"]), []).append(row)
    lines = [
        "| family | models | logits and loss, of the largest | gradients of the adapter, of each tensor's norm |",
        "|---|---|---|---|",
    ]
    for family, models in families.items():
        worst = (scientific(max(float(row[key]) for row in models)) for key in ("results", "gradients"))
        lines.append(f"| {family} | {len(models)} | {' | '.join(worst)} |")
    return "\n".join(lines)
