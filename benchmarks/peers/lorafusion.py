"""LoRAFusion's kernels inside PEFT's LoRA layers, from a checkout of the user's own; none of its code is here."""

from __future__ import annotations

import importlib.machinery
import sys
import types
from pathlib import Path
from typing import Any

ROWS = 128  # its kernels want multiples of this many rows


def _stub(name: str, **members: Any) -> None:
    """Stands in for a module that does not import here: its kernels for tensor memory need another Triton."""
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    module.__dict__.update(members)
    sys.modules[name] = module


def install(checkout: Path | None) -> None:
    """Makes every LoRA layer of PEFT call LoRAFusion's fused linear, with its settings for H100.

    Raises:
        FileNotFoundError: no checkout was named, or it is none.
    """
    if checkout is None or not (checkout / "lorafusion").is_dir():
        raise FileNotFoundError(f"--lorafusion {checkout}: not a checkout of LoRAFusion")
    sys.path.insert(0, str(checkout))
    for name in ("fused_lora_xw_sb_tma", "fused_lora_dyw_dsa_tma"):
        _stub(f"lorafusion.ops.triton_ops.{name}", **{name: None})
    _stub("lorafusion.ops.triton_ops.tma_utils", HAS_TMA_DESC=False)
    import lorafusion.utils.common as common  # type: ignore[import-not-found]

    common.get_device_short_name = lambda: "h100-80gb-hbm3"
    from lorafusion.ops.lora_v1 import fused_linear_lora  # type: ignore[import-not-found]
    from peft.tuners.lora import Linear

    def forward(self: Any, x: Any, *_: Any, **__: Any) -> Any:
        (name,) = self.lora_A
        return fused_linear_lora(
            x=x, linear_w=self.base_layer.weight, lora_a=self.lora_A[name].weight, lora_b=self.lora_B[name].weight,
            alpha=self.scaling[name], dropout_p=self.lora_dropout[name].p, linear_bias=None,
        )  # fmt: skip

    Linear.forward = forward
