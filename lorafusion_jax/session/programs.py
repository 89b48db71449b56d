"""The compiled programs of one stage."""

from __future__ import annotations

from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.session.adapter_programs import AdapterPrograms
from lorafusion_jax.session.end_programs import EndPrograms
from lorafusion_jax.session.kind_programs import KindPrograms
from lorafusion_jax.session.layer_operands import LayerOperands
from lorafusion_jax.session.layer_programs import LayerPrograms
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.stage_columns import StageColumns


class StagePrograms:
    """Jitted functions of one stage.

    Args:
        parts: pieces of the model.
        stage: devices of the stage.
        extent: its layers.
        remat: rematerialisation policy.

    Attributes:
        columns: leaves of the stage.
        operands: reads layers inside programs.
        layers: passes through its layers.
        ends: embedding, head and losses.
        kinds: what adapter kinds compute from the frozen kernels.
        adapters: steps of one adapter, and reads and writes of its leaves.
    """

    def __init__(self, parts: Parts, stage: StageMesh, extent: Extent, remat: RematPolicy):
        self.columns = StageColumns(parts.leaves, extent)
        self.operands = LayerOperands(parts, stage, self.columns)
        self.layers = LayerPrograms(self.operands, remat)
        self.ends = EndPrograms(parts, stage, self.columns)
        self.kinds = KindPrograms(self.operands)
        self.adapters = AdapterPrograms(stage, self.columns)
