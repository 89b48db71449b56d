"""What the online scheduler has to know about bases, from the models: their layers, memory plan and rates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from types import MappingProxyType

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.config.places import Places, class_name, place_kind
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_spec
from lorafusion_jax.config.stack import stand_in_adapters
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.planning.memory import MemoryProblem, StageMemory, memory_problem, stage_memory
from lorafusion_jax.planning.prediction import predicted_parts
from lorafusion_jax.planning.stages import stage_layers, worth_in_layers
from scheduling import CostModel, stages_from_parts
from scheduling.online import Job, StageBytes
from scheduling.online.facts import recomputed
from scheduling.online.shapes import LINEARS

OPTIMIZER = "adamw"
TOO_MUCH = 1e30  # bytes
FEW, MANY = 2048, 8192  # tokens of two microbatches: bytes per token are those of the difference


class ModelFacts:
    """`scheduling.online.Facts` of models that a service trains.

    Args:
        models: name of a base → its model.
        sessions: by base, the job of a session with all of its places, which are in memory, full or empty.
    """

    def __init__(self, models: Mapping[str, ModelConfig], sessions: Mapping[str, JobConfig] = MappingProxyType({})):
        self._models, self._sessions = dict(models), sessions
        self._problems = {
            name: memory_problem(sessions[name], model) if name in sessions else _typical_problem(model)
            for name, model in models.items()
        }
        self._place_kinds = {name: {place_kind(spec) for spec in p.adapters} for name, p in self._problems.items()}
        self._fullest, self._adapter_bytes = cache(self._fullest_stage), cache(self._bytes_of_adapter)

    def stage_costs(self, job: Job, device: str, num_stages: int, recompute: bool) -> CostModel:
        """Costs of the stages; see `Facts`."""
        base, model = job.base_name, self._models[job.base_name]
        parts = predicted_parts(model, device, self._problems[base].quantize)
        layers = worth_in_layers(model, stage_layers(model, num_stages))
        return stages_from_parts(recomputed(parts) if self._remat(base, recompute) == "nothing" else parts, layers)

    def stage_bytes(self, jobs: Sequence[Job], num_stages: int, recompute: bool) -> StageBytes:
        """Bytes of the fullest stage; see `Facts`. No microbatch fits where the base cannot be cut into stages."""
        if self._is_uncut(jobs[0], num_stages):
            return StageBytes(fixed=TOO_MUCH, token=1.0)
        base = jobs[0].base_name
        remat, kinds = self._remat(base, recompute), tuple(sorted({job.kind for job in jobs} - self._place_kinds[base]))
        few, many = (self._fullest(base, num_stages, remat, tokens, kinds) for tokens in (FEW, MANY))
        token = (many - few) / (MANY - FEW)
        return StageBytes(fixed=many - MANY * token, token=token)

    def trainable_bytes(self, jobs: Sequence[Job], num_stages: int) -> float:
        """Bytes of the adapters for which the session has no place; see `Facts`."""
        if self._is_uncut(jobs[0], num_stages):
            return TOO_MUCH
        base, total = jobs[0].base_name, 0.0
        specs = self._problems[base].adapters if base in self._sessions else ()
        unused = sorted((spec.rank, place_kind(spec)) for spec in specs)
        for job in sorted(jobs, key=lambda job: -job.rank):
            smallest = next((size for size in unused if size[0] >= job.rank and size[1] == job.kind), None)
            if smallest is None:
                total += self._adapter_bytes(base, num_stages, job.kind, job.rank, job.targets)
            else:
                unused.remove(smallest)
        return total

    def _is_uncut(self, job: Job, num_stages: int) -> bool:
        return num_stages > 1 and self._models[job.base_name].crossing is not None

    def _remat(self, base: str, recompute: bool) -> RematPolicy:
        """What the session was told to save, if it was told; else what the scheduler asks about."""
        remat = self._sessions[base].train.remat if base in self._sessions else "auto"
        return remat if remat != "auto" else "nothing" if recompute else "gemm_inputs"

    def _fullest_stage(
        self, base: str, num_stages: int, remat: RematPolicy, tokens: int, kinds: tuple[str, ...]
    ) -> int:
        """Bytes with the places of a session, and programs of more kinds; without one, without the weights that train.

        The products of DoRA, for example, are stored for backward once an adapter of that kind is there.
        """
        problem = self._problems[base]
        more = tuple(_spec(kind, 1, LINEARS, self._models[base]) for kind in kinds)
        problem = replace(
            problem,
            adapters=(*problem.adapters, *more),
            optimizers=(*problem.optimizers, *[OPTIMIZER] * len(more)),
            remat=remat,
            capacity_tokens=tokens,
        )
        stages = self._stages(problem, num_stages)
        if base in self._sessions:
            return max(stage.total for stage in stages)
        return max(stage.total - stage.adapters - stage.sums - stage.optimizers for stage in stages)

    def _bytes_of_adapter(self, base: str, num_stages: int, kind: str, rank: int, targets: tuple[str, ...]) -> float:
        """Bytes of an adapter's weights, gradient and optimizer state on the stage that has most of them."""
        spec = _spec(kind, rank, targets, self._models[base])
        stages = self._stages(replace(self._problems[base], adapters=(spec,), optimizers=(OPTIMIZER,)), num_stages)
        return max(stage.adapters + stage.sums + stage.optimizers for stage in stages)

    @staticmethod
    def _stages(problem: MemoryProblem, num_stages: int) -> Sequence[StageMemory]:
        return stage_memory(replace(problem, layers=stage_layers(problem.model, num_stages)))


def _typical_problem(model: ModelConfig) -> MemoryProblem:
    """With the working memory of an adapter of rank 16 on everything."""
    spec = AdapterSpec(name="typical", rank=16, alpha=16.0, targets=model.targets)
    return MemoryProblem(model=model, adapters=(spec,), optimizers=(OPTIMIZER,), layers=(), capacity_tokens=FEW)


def _spec(kind: str, rank: int, targets: tuple[str, ...], model: ModelConfig) -> AdapterSpec:
    """A job's adapter; a job that names all projections of a plain decoder means all of the model.

    A place that is made for another kind has all projections.
    """
    if kind != PLAIN:
        return adapter_spec(stand_in_adapters(Places.of({class_name(kind, rank): 1}))[0], model.targets)
    of_model = tuple(name for name in model.targets if name in targets)
    of_model = model.targets if set(targets) == set(LINEARS) or not of_model else of_model
    return AdapterSpec(name="job", rank=rank, alpha=float(rank), targets=of_model)
