"""Everything that the memory of a run depends on."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import stack_of
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent, Piece
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.objective.chunks import DEFAULT_CHUNK
from lorafusion_jax.objective.protocol import DIVERGENCE
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.weights.table import NONE
from pallas_kernels import policy

FLOAT32 = 4  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProblem:
    """Everything that the memory of a run depends on.

    Args:
        model: shapes.
        adapters: in stacking order.
        optimizers: name of each adapter's optimizer.
        layers: layers of each stage.
        capacity_tokens: T.
        fsdp: number of devices that share the frozen weights of a stage.
        tensor: number of devices that compute a layer together.
        block_layers: layers per program (None: chosen).
        remat: rematerialisation policy of the layers.
        item: bytes per element of unquantised base weights and of activations.
        quantize: storage of the layers' projections, see `weights.table`.
        implementation: implementation of the LoRA ops (None: chosen).
        attention: implementation of attention (None: chosen).
        hopper: whether the devices are Hopper GPUs. On others XLA is the default.
        measured: implementations that measured fastest on the devices.
        tile_tokens: rows of a tile.
        loss_chunk: as in `objective.token_losses`.
        teacher: whether an objective compares distributions: microbatches then have the states of a teacher.
        balanced: whether the routers have a loss.
        copied_state: whether the state of one adapter is copied while all train, as in a live session.
    """

    model: ModelConfig
    adapters: tuple[AdapterSpec, ...]
    optimizers: tuple[str, ...]
    layers: tuple[Extent, ...]
    capacity_tokens: int
    fsdp: int = 1
    tensor: int = 1
    block_layers: int | None = None
    remat: RematPolicy = "gemm_inputs"
    item: int = 2
    quantize: str = NONE
    implementation: str | None = None
    attention: str | None = None
    hopper: bool = True
    measured: policy.Lookup = policy.nothing_measured
    tile_tokens: int = 128
    loss_chunk: int = DEFAULT_CHUNK
    teacher: bool = False
    balanced: bool = False
    copied_state: bool = False

    @property
    def device_model(self) -> ModelConfig:
        """What one device computes of the layers."""
        return self.model.part_of(self.tensor)

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding on one device, before fsdp: all where they do not divide."""
        return self._share_of(self.model.vocab_size)

    @property
    def outputs(self) -> int:
        """The same of the head."""
        return self._share_of(self.model.num_outputs)

    def _share_of(self, rows: int) -> int:
        return rows if rows % self.tensor else rows // self.tensor

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    def is_last(self, stage: int) -> bool:
        return stage == self.num_stages - 1

    def pieces(self, stage: int) -> list[tuple[Piece, int]]:
        """The layers and half layers of a stage: the first of each kind, with the number of them."""
        pieces = self.layers[stage].pieces
        kinds = [(self.model.kind_of(piece.layer), piece.half) for piece in pieces]
        first = dict(zip(reversed(kinds), reversed(pieces), strict=True))
        return [(first[kind], number) for kind, number in Counter(kinds).items()]


def memory_problem(config: JobConfig, model: ModelConfig) -> MemoryProblem:
    """Builds the problem of a job. `train.remat: auto` counts as everything (see `choose_remat`)."""
    mesh, train, stacked = config.mesh, config.train, stack_of(config).config
    tokens = config.batch.largest
    return MemoryProblem(
        model=model,
        adapters=tuple(adapter_specs(stacked)),
        optimizers=tuple(adapter.optim.name for adapter in stacked.adapters),
        layers=stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=tokens),
        capacity_tokens=tokens,
        fsdp=mesh.fsdp,
        tensor=mesh.tensor,
        block_layers=train.block_layers,
        remat="everything" if train.remat == "auto" else train.remat,
        item=4 if config.base.dtype == "float32" else 2,
        quantize=config.base.quantize,
        implementation=train.implementation,
        tile_tokens=config.batch.tile_tokens,
        attention=train.attention,
        loss_chunk=train.loss_chunk,
        teacher=any(DIVERGENCE in adapter.objective.chosen.needs for adapter in config.adapters),
        balanced=train.router_aux > 0,
    )
