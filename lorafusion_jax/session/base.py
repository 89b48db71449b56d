"""Loads the base model of a job onto the stages of its mesh, and tells its figures for records and events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from lorafusion_jax.adapters.check import check_kind
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.checkpoint.base_weights import tie_problems
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import place_specs, residents, stack_of
from lorafusion_jax.data.model_fit import longest_texts
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.errors import ConfigError, LoraFusionError, RunError, raise_all
from lorafusion_jax.families.per_layer_input import TABLE as INPUT_TABLE
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import REMAT_POLICIES, RematPolicy
from lorafusion_jax.models import ModelConfig, open_frozen
from lorafusion_jax.models.loading import Weight
from lorafusion_jax.objective.batch import check_loss
from lorafusion_jax.peft.folder import check_folder_of
from lorafusion_jax.planning.blocks import block_layers
from lorafusion_jax.planning.checks import tensor_problems
from lorafusion_jax.planning.memory import (
    ALLOCATOR_USABLE,
    MemoryProblem,
    advice,
    choose_remat,
    fits,
    memory_problem,
    stage_memory,
)
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.session.base_cache import BaseFiles, CachedBase, open_cache
from lorafusion_jax.session.distant_stage import AnyStage, DistantStage, local_stages
from lorafusion_jax.session.executor import Executor
from lorafusion_jax.session.leaves import HEAD_ROWS
from lorafusion_jax.session.mesh import VOCABULARY, StageMesh, stage_meshes
from lorafusion_jax.session.move import transfer
from lorafusion_jax.session.parts import Parts
from lorafusion_jax.session.processes import any_process, same_on_all
from lorafusion_jax.session.stage import Stage
from lorafusion_jax.session.stage_weights import StageWeights, cut
from pallas_kernels import config_store
from pallas_kernels.device import device_kind, is_hopper

EMBEDDING = "embed_tokens"
STAND_INS = 0.05  # share of a device for placeholder weights: one layer, embedding and head


def check_mesh(config: JobConfig) -> None:
    """Checks that a job's mesh fits the machine and the model. Reads no data.

    Raises:
        CheckpointError: the model is missing.
        ConfigError, ErrorList: `mesh.devices`, `mesh.processes`, `mesh.stages`, `mesh.layers`, `mesh.tensor`.
    """
    check_on_mesh(config)
    mesh = config.mesh
    stage_meshes(mesh.stages, mesh.data, mesh.fsdp, mesh.tensor)
    if mesh.stages > 1 or mesh.layers is not None or mesh.tensor > 1:
        stage_layers(ModelConfig.from_hf(base_directory(config)), mesh.stages, mesh.layers)


def check_on_mesh(config: JobConfig) -> None:
    """Checks that the mesh of a run can do what its adapters need: those that join it, too.

    Raises:
        ConfigError, ErrorList: `mesh.processes`, `mesh.tensor`.
    """
    texts = (
        ("train.samples", config.train.samples, "train.samples: 0, and lorafusion generate RUN afterwards"),
        ("rollout", any(a.rollout.is_on for a in config.adapters), "one process with all devices of a host"),
        ("eval.score", any(a.eval.score is not None for a in config.adapters), "leave out eval.score"),
    )
    why = "tokens go from the last stage to the first"
    errors: list[LoraFusionError] = [
        ConfigError("mesh.processes", f"{key} needs a run of one process.", why=why, fix=fix)
        for key, is_on, fix in texts
        if is_on and jax.process_count() > 1
    ]
    if config.mesh.stages > 1 or config.mesh.tensor > 1:
        errors += tensor_problems(config, ModelConfig.from_hf(base_directory(config)))
    raise_all(errors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Stages, those of this process with placeholder weights, and a function that reads the base model.

    Attributes:
        roomy: whether devices have memory to run on the placeholders while the weights are read.
        read: (progress) reads the weights of this process's stages onto its devices, and calls `progress` with the
            bytes of each tensor.
        cached: the cache of its quantised kernels, which `read` uses.
    """

    stages: list[AnyStage]
    roomy: bool
    read: Callable[[Callable[[int], None]], list[StageWeights]]
    cached: CachedBase

    def give(self, weights: Sequence[StageWeights]) -> None:
        """Gives the stages the weights that were read."""
        for stage, stage_weights in zip(local_stages(self.stages).values(), weights, strict=True):
            stage.replace_base(stage_weights)


def load_stages(config: JobConfig, prepared: Prepared, specs: Sequence[AdapterSpec]) -> list[Stage]:
    """Loads the base model, each stage's layers directly onto its devices. Does not start the adapters.

    All stages are in this process.

    Raises:
        LoraFusionError: see `open_base`.
    """
    base = open_base(config, prepared, specs)
    base.give(base.read(lambda size: None))
    return list(local_stages(base.stages).values())


def open_base(
    config: JobConfig,
    prepared: Prepared | None,
    specs: Sequence[AdapterSpec] | None = None,
    later: JobConfig | None = None,
    base_files: BaseFiles | None = None,
) -> Base:
    """Checks the base model and makes the stages of a job's mesh. Does not start the adapters.

    Placeholders have the shapes and shardings of the weights, so the stages can compile while the weights are read.
    They take the memory of one layer, embedding and head.

    Args:
        prepared: data of the adapters, to check it against the base (None: it is checked elsewhere).
        specs: the adapters (None: those of the job).
        later: the job with all adapters that will join later, which must fit into memory.
        base_files: digests of the base's files, to use the cache of quantised weights (None: it is not used).

    Raises:
        CheckpointError: the model is incomplete, not implemented, or computes differently at this sample length.
        ConfigError: the mesh does not fit the machine or the model.
    """
    if prepared is not None:
        check_adapters(config, prepared)
    directory, train, mesh = base_directory(config), config.train, config.mesh
    model = ModelConfig.from_hf(directory)
    model.check_router_loss(train.router_aux)
    meshes = stage_meshes(mesh.stages, mesh.data, mesh.fsdp, mesh.tensor)
    layers = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.largest)
    dtype = jnp.dtype(config.base.dtype)

    local = [stage for stage, stage_mesh in enumerate(meshes) if stage_mesh.is_local]
    shared = mesh.stages > 1 and model.tie_embeddings  # the first and the last stage have the embedding

    def stage_of(name: str) -> int:
        stage = _stage_of(name, model, layers)
        return len(meshes) - 1 if stage not in local and shared and name.startswith(EMBEDDING) else stage

    def sharding_of(name: str, shape: tuple[int, ...]):
        mesh = meshes[stage_of(name)]
        return mesh.columns(shape) if name == INPUT_TABLE else mesh.weight(shape, _tensor_axis(name, model))

    def parted(frozen: Mapping[str, Weight]) -> list[StageWeights]:
        weights = cut(frozen, model, layers, only=local)
        if shared and 0 in local and local[-1] == len(meshes) - 1:
            weights[-1].head = transfer(weights[-1].head, meshes[-1])
        return weights

    reader = open_frozen(directory, dtype=dtype, quantize=config.base.quantize, sharding=sharding_of)
    raise_all(list(tie_problems(directory)))
    full_reader, tensors = reader, [tensor for tensor in reader.tensors if stage_of(tensor.leaf_name) in local]
    reader = replace(reader, tensors=tensors)
    remat = fitting_remat(later or config, model) if train.remat == "auto" else train.remat
    stand_ins = dict(zip(local, parted(reader.stand_ins()), strict=True))
    places = [(stand_ins.get(stage, extent), meshes[stage]) for stage, extent in enumerate(layers)]
    stages = _stages(config, model, specs, remat, places)
    roomy = _has_room_to_start(config, model, remat)
    cache = open_cache(config, full_reader, base_files, tensors)  # last: it opens a file
    return Base(stages=stages, roomy=roomy, read=lambda progress: parted(cache.read(progress)), cached=cache)


def check_adapters(config: JobConfig, prepared: Prepared) -> None:
    """Checks that the base can train the adapters of a job, before loading.

    Raises:
        CheckpointError: the base computes differently at this sample length.
        ConfigError: `objective.broken`, `kind.broken`, `kind.no-peft`.
    """
    directory = base_directory(config)
    model = ModelConfig.from_hf(directory)
    sizes = {"D": model.hidden_size, "V": model.vocab_size}
    for adapter in config.adapters:
        data = prepared.adapters[adapter.name]
        for fields in sorted(data.train.fields | (data.eval.fields if data.eval else frozenset())):
            check_loss(adapter.objective.chosen, numbers=fields.numbers, values=fields.values, sizes=sizes)
    sizes_of: dict[str, dict] = {}
    for spec in adapter_specs(config):
        shapes = [linear.shape for linear in model.linears if linear.name in spec.targets]
        sizes_of.setdefault(spec.kind, {}).update(dict.fromkeys((*shape, spec.rank) for shape in shapes))
    for kind, shapes_of_kind in sizes_of.items():
        check_kind(kind, shapes_of_kind)
    for kind, rslora in dict.fromkeys((spec.kind, spec.rslora) for spec in adapter_specs(config)):
        check_folder_of(kind, rslora=rslora)
    longest = max(int(longest_texts(prepared.adapters[adapter.name].train).max()) for adapter in config.adapters)
    model.check_length(longest, where=str(directory))


def stages_for(
    stages: Sequence[AnyStage], config: JobConfig, specs: Sequence[AdapterSpec] | None = None
) -> list[AnyStage]:
    """Makes stages for other adapters on the same weights and devices. Does not start them.

    Args:
        specs: as in `open_base`.
    """
    places = [(stage.weights if isinstance(stage, Stage) else stage.extent, stage.mesh) for stage in stages]
    return _stages(config, stages[0].parts.model, specs, stages[0].remat, places)


def _stages(
    config: JobConfig,
    model: ModelConfig,
    specs: Sequence[AdapterSpec] | None,
    remat: RematPolicy,
    places: Iterable[tuple[StageWeights | Extent, StageMesh]],
) -> list[AnyStage]:
    """Makes the stages of a run.

    Args:
        places: weights of each stage, or only its layers if it is in another process.
    """
    stack, specs = stack_of(config), adapter_specs(config) if specs is None else specs
    parts = parts_of(config, model, specs)
    block, parameters = config.train.block_layers, max(layer.num_parameters for layer in model.kinds)

    def stage_with(weights: StageWeights | Extent, mesh: StageMesh) -> AnyStage:
        if isinstance(weights, Extent):
            return DistantStage(parts, weights, mesh, remat)
        layers = block_layers(block, len(weights.pieces), fsdp=mesh.fsdp, parameters=parameters)
        return Stage(parts, weights, mesh, stack.config.adapters, remat=remat, block=layers)

    stages = [stage_with(weights, mesh) for weights, mesh in places]
    for stage in stages:
        stage.vacant = stack.vacant
        for adapter, spec in zip(config.adapters, specs, strict=True):
            if (index := stack.index.get(adapter.name)) is not None and index in stack.stand_ins:
                stage.assign(index, adapter, spec)
    return stages


def parts_of(config: JobConfig, model: ModelConfig, specs: Sequence[AdapterSpec] | None = None) -> Parts:
    """Returns the pieces of a job's model; `specs` as in `open_base`."""
    stack, specs = stack_of(config), adapter_specs(config) if specs is None else specs
    by_position = dict(enumerate(place_specs(stack.config, stack.heads))) if stack.stand_ins else {}
    for adapter, spec in zip(config.adapters, specs, strict=True):
        if (index := stack.index.get(adapter.name)) is not None and index not in stack.stand_ins:
            by_position[index] = spec
    return Parts(
        model=model,
        specs=tuple(by_position[index] for index in range(len(by_position))),
        settings=config.train,
        dtype=jnp.dtype(config.base.dtype),
        objectives=stack.objectives,
        quantize=config.base.quantize,
        tensor=config.mesh.tensor,
    )


def fitting_remat(config: JobConfig, model: ModelConfig) -> RematPolicy:
    """Returns the fastest policy that fits into the devices; "everything" if their memory size is unknown (CPU)."""
    size, problem = device_bytes(), memory_problem_here(config, model)
    policy = "everything" if size is None else choose_remat(problem, size, usable=ALLOCATOR_USABLE)
    # Replicas must compile the same programs, so processes choose what fits on all of them.
    first = REMAT_POLICIES.index(policy)
    return next(remat for number, remat in enumerate(REMAT_POLICIES) if not any_process(first > number))


def _has_room_to_start(config: JobConfig, model: ModelConfig, remat: RematPolicy) -> bool:
    size, problem = device_bytes(), replace(memory_problem_here(config, model), remat=remat)
    return size is None or fits(problem, size, usable=ALLOCATOR_USABLE - STAND_INS)


def has_room_for_a_state(config: JobConfig, model: ModelConfig, remat: RematPolicy) -> bool:
    """Whether devices have memory for a copy of one adapter's state while all train, by count."""
    size = device_bytes()
    problem = replace(memory_problem_here(config, model), remat=remat, copied_state=True)
    return size is None or fits(problem, size, usable=ALLOCATOR_USABLE)


def memory_warning(config: JobConfig, model: ModelConfig, remat: RematPolicy) -> str | None:
    """Returns a warning, with advice, if memory on this machine will probably not suffice."""
    size, problem = device_bytes(), replace(memory_problem_here(config, model), remat=remat)
    if size is None or fits(problem, size, usable=ALLOCATOR_USABLE):
        return None
    totals = [stage.total for stage in stage_memory(problem)]
    fullest = max(range(len(totals)), key=totals.__getitem__)
    change = advice(problem, size, tile_tokens=config.batch.tile_tokens, usable=ALLOCATOR_USABLE)
    return (
        f"stage {fullest} needs {totals[fullest] / 1e9:.1f} GB by count and the device gives {size / 1e9:.1f}: "
        f"it may run out of memory. To make it fit: {change}"
    )


def check_tables(is_same_on_all: Callable[[str], bool] = same_on_all) -> None:
    """Checks that every process of a run has the same tuning table, because all must compile the same programs.

    Args:
        is_same_on_all: whether a text is the same on all processes; collective.
    Raises:
        RunError: `tune.processes-differ`.
    """
    kind = device_kind()
    digest = config_store.used_digest(kind)
    if not is_same_on_all(digest or "none"):
        raise RunError(
            "tune.processes-differ",
            f"the processes of this run have different tuning tables for the {kind}.",
            where=f"here: {digest[:12] or 'no table'}",
            why="all of them must compile the same programs",
            fix="lorafusion tune --share FILE on one machine and --use FILE on the others, or remove the tables",
        )


def memory_problem_here(config: JobConfig, model: ModelConfig) -> MemoryProblem:
    """The memory problem of a job, with the implementations that this machine's devices run."""
    measured = partial(config_store.fastest, device_kind())
    return replace(memory_problem(config, model), hopper=is_hopper(), measured=measured)


def device_bytes() -> int | None:
    """Returns the memory limit of a device's allocator; None if it is unknown (CPU)."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def _stage_of(name: str, model: ModelConfig, layers: Sequence[Extent]) -> int:
    head, _, numbered_leaf = name.partition(".")
    if head == "layers":
        number, _, leaf = numbered_leaf.partition(".")
        half = model.layer(int(number)).half_of(leaf)
        return next(stage for stage, extent in enumerate(layers) if extent.holds(int(number), half))
    return 0 if head == EMBEDDING or name in model.input_shapes else len(layers) - 1


def _tensor_axis(name: str, model: ModelConfig) -> int | None:
    """Returns the axis along which tensor parallelism splits a frozen tensor; None: it is whole everywhere."""
    head, _, numbered_leaf = name.partition(".")
    if head == "layers":
        number, _, leaf = numbered_leaf.partition(".")
        return model.layer(int(number)).split_axes.get(leaf)
    return VOCABULARY if head in (EMBEDDING, "lm_head") else None


@dataclass(frozen=True, slots=True)
class Facts:
    """Figures of the adapters on the stages of an executor, and of their base."""

    config: JobConfig
    executor: Executor

    @property
    def state_bytes(self) -> int:
        """Size of the state of a snapshot, with the copies of all replicas. Collective over processes."""
        return sum(self._by_stage(lambda stage: sum(leaf.nbytes for leaf in jax.tree.leaves(stage.trainable_arrays()))))

    def _by_stage[T](self, read: Callable[[Stage], T]) -> list[T]:
        local = self.executor.local_stages
        return self.executor.links.by_stage({index: read(stage) for index, stage in local.items()})

    @property
    def num_trainable(self) -> int:
        """Number of parameters of the adapters."""
        first = self.executor.stages[0]
        leaves, tied = first.parts.leaves, first.parts.model.tie_embeddings
        adapters = first.occupied
        if residents(self.config) is not None:  # the last place is the largest
            adapters = [(len(first.parts.specs) - 1, spec) for spec in adapter_specs(self.config)]
        return sum(
            math.prod(shape)
            for shapes in leaves.own_shapes(adapters).values()
            for name, shape in shapes.items()
            if leaves.columns[name].leaf.trainable and not (name == HEAD_ROWS and tied)
        )

    @property
    def stored(self) -> dict[str, int]:
        """Elements stored on the devices of one replica: weights, gradients, moments. Collective over processes."""
        counts = self._by_stage(lambda stage: stage.count_elements())
        return {kind: sum(of_stage[kind] for of_stage in counts) for kind in counts[0]}

    @property
    def num_frozen(self) -> int:
        return self._model.num_parameters  # not a sum over stages: a tied table is on two of them

    @property
    def layers(self) -> list[float]:
        """Number of layers of each stage."""
        return [stage.extent.count for stage in self.executor.stages]

    @property
    def remat(self) -> RematPolicy:
        return self.executor.stages[0].remat

    @property
    def memory_warning(self) -> str | None:
        return memory_warning(self.config, self._model, self.remat)

    @property
    def device(self) -> dict[str, str]:
        """Kind, platform and tuning table for run.json."""
        device = jax.devices()[0]
        table = config_store.used_digest(device.device_kind)
        return {"device": device.device_kind, "platform": device.platform, "tuning_table": table}

    @property
    def peak_bytes(self) -> int | None:
        """Peak memory in use on a device; None if the backend does not report it (CPU)."""
        return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

    @property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_hf(base_directory(self.config))
