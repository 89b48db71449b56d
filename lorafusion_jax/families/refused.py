"""Families that people fine-tune and that are refused by name: what their layers have that no mechanism here has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

_DELTA_ATTENTION = "the memory of its delta nets decays by channel, and here it decays by head"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A family that is not read.

    Args:
        models: what people call it.
        names: each `model_type` and each architecture that config.json has.
        reason: one sentence, without its full stop.
    """

    models: str
    names: tuple[str, ...]
    reason: str


REFUSED = (
    Refused(
        models="Gemma 3n", names=("gemma3n", "gemma3n_text", "Gemma3nForCausalLM", "Gemma3nForConditionalGeneration"),
        reason="every layer predicts and corrects several streams of activations (AltUp), and here there is one stream",
    ),
    Refused(
        models="Mistral Large 4",
        names=("mistral_large4", "mistral_large4_text", "MistralLarge4ForConditionalGeneration"),
        reason="layers read the latents of keys and values of earlier layers, and here each layer has its own",
    ),
    Refused(models="Kimi-Linear", names=("kimi_linear", "KimiLinearForCausalLM"), reason=_DELTA_ATTENTION),
    Refused(models="Ling 3", names=("bailing_hybrid", "BailingHybridForCausalLM"), reason=_DELTA_ATTENTION),
    Refused(
        models="Ling 1", names=("bailing_moe", "BailingMoeForCausalLM"),
        reason="transformers has no class for it, so that there is nothing to compare results with",
    ),
    Refused(
        models="MiniMax-Text-01, MiniMax-M1",
        names=("minimax", "minimax_m1", "minimax_text_01", "MiniMaxForCausalLM", "MiniMaxM1ForCausalLM",
               "MiniMaxText01ForCausalLM"),
        reason="most layers have lightning attention, whose decay is fixed for each head, and no layer here is such",
    ),
    Refused(
        models="Dory", names=("dory", "DoryForCausalLM"),
        reason="some layers are run several times for each token, and here each is run once",
    ),
    Refused(
        models="Inkling 2 with loops",
        names=("inkling2_loop", "inkling2_loop_text", "Inkling2LoopForCausalLM",
               "Inkling2LoopForConditionalGeneration"),
        reason="some layers are run several times for each token, and here each is run once",
    ),
    Refused(
        models="Hy4", names=("hy_v4", "hy_v4_vl", "hy_v4_vl_text", "HYV4ForCausalLM", "HYV4VLForConditionalGeneration"),
        reason="every layer mixes several streams of activations (hyper-connections), and here there is one stream",
    ),
    Refused(
        models="Jamba", names=("jamba", "JambaForCausalLM"),
        reason="most layers are Mamba-1, whose state decays by channel, and here Mamba-2's decays by head",
    ),
)  # fmt: skip


def why_refused(raw: Mapping[str, Any]) -> str | None:
    """Says why the model of a config.json is refused, or returns None if its family is none of these."""
    names = raw.get("architectures") or [raw.get("model_type")]
    for family in REFUSED:
        if name := next((name for name in family.names if name in names), None):
            return f"{name} ({family.models}): {family.reason}"
    return None
