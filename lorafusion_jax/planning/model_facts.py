"""What the online scheduler has to know about bases, from the models: their layers, memory plan and rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.planning.memory import MemoryProblem, stage_memory
from lorafusion_jax.planning.prediction import predicted_parts
from lorafusion_jax.planning.stages import stage_layers, worth_in_layers
from lorafusion_jax.weights.table import NONE
from scheduling import CostModel, stages_from_parts
from scheduling.online import Job, StageBytes
from scheduling.online.facts import recomputed
from scheduling.online.shapes import LINEARS

OPTIMIZER = "adamw"  # of a job whose settings the scheduler does not know
TOO_MUCH = 1e30  # bytes
FEW, MANY = 2048, 8192  # tokens of two microbatches: bytes per token are those of the difference


class ModelFacts:
    """`scheduling.online.Facts` of models that a service trains.

    Args:
        models: name of a base → its model.
        quantize: storage of the layers' projections, see `weights.table`.
        places: by base, what adapters fit into that sessions have in memory, full or empty.
    """

    def __init__(
        self,
        models: Mapping[str, ModelConfig],
        quantize: str = NONE,
        places: Mapping[str, Sequence[AdapterSpec]] = MappingProxyType({}),
    ):
        self._models, self._quantize, self._places = dict(models), quantize, places
        self._fullest = cache(self._fullest_stage)

    def stage_costs(self, job: Job, device: str, num_stages: int, recompute: bool) -> CostModel:
        """Costs of the stages; see `Facts`."""
        model = self._models[job.base_name]
        parts = predicted_parts(model, device, self._quantize)
        layers = worth_in_layers(model, stage_layers(model, num_stages))
        return stages_from_parts(recomputed(parts) if recompute else parts, layers)

    def stage_bytes(self, job: Job, num_stages: int, recompute: bool) -> StageBytes:
        """Bytes of the fullest stage; see `Facts`. No microbatch fits where the base cannot be cut into stages."""
        if self._is_uncut(job, num_stages):
            return StageBytes(fixed=TOO_MUCH, token=1.0)
        remat: RematPolicy = "nothing" if recompute else "gemm_inputs"
        few, many = (self._fullest(job.base_name, num_stages, remat, tokens) for tokens in (FEW, MANY))
        token = (many - few) / (MANY - FEW)
        return StageBytes(fixed=many - MANY * token, token=token)

    def trainable_bytes(self, job: Job, num_stages: int) -> float:
        """Bytes of the job's weights, gradient and optimizer state on the stage that has most of them; 0 in a place."""
        if self._is_uncut(job, num_stages):
            return TOO_MUCH
        if any(job.rank <= spec.rank for spec in self._places.get(job.base_name, ())):
            return 0.0
        spec = _spec(job, self._models[job.base_name])
        stages = stage_memory(self._problem(job.base_name, num_stages, "gemm_inputs", FEW, (spec,)))
        return max(stage.adapters + stage.sums + stage.optimizers for stage in stages)

    def _is_uncut(self, job: Job, num_stages: int) -> bool:
        return num_stages > 1 and self._models[job.base_name].crossing is not None

    def _fullest_stage(self, base: str, num_stages: int, remat: RematPolicy, tokens: int) -> int:
        """Bytes with the places, if there are any; else without the weights that train, and with the working memory of
        an adapter of rank 16 on everything."""
        model = self._models[base]
        if places := self._places.get(base):
            return max(stage.total for stage in stage_memory(self._problem(base, num_stages, remat, tokens, places)))
        spec = AdapterSpec(name="typical", rank=16, alpha=16.0, targets=model.targets)
        stages = stage_memory(self._problem(base, num_stages, remat, tokens, (spec,)))
        return max(stage.total - stage.adapters - stage.sums - stage.optimizers for stage in stages)

    def _problem(
        self, base: str, num_stages: int, remat: RematPolicy, tokens: int, adapters: Sequence[AdapterSpec]
    ) -> MemoryProblem:
        model = self._models[base]
        return MemoryProblem(
            model=model,
            adapters=tuple(adapters),
            optimizers=(OPTIMIZER,) * len(adapters),
            layers=stage_layers(model, num_stages),
            capacity_tokens=tokens,
            remat=remat,
            quantize=self._quantize,
        )


def _spec(job: Job, model: ModelConfig) -> AdapterSpec:
    """The job's adapter; a job that names all projections of a plain decoder means all of the model."""
    of_model = tuple(name for name in model.targets if name in job.targets)
    targets = model.targets if set(job.targets) == set(LINEARS) or not of_model else of_model
    return AdapterSpec(name=job.name, rank=job.rank, alpha=float(job.rank), targets=targets)
