"""Predictions of a plan: costs for the simulator, measured or default, and memory per stage. Starts no backend."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lorafusion_jax.checkpoint.base_model import base_directory
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.layout.extent import Extent, counts_of
from lorafusion_jax.layout.layer import RematPolicy
from lorafusion_jax.planning import memory, ranks
from lorafusion_jax.planning.memory.problem import FLOAT32
from lorafusion_jax.planning.network import Network, network_of, with_network
from lorafusion_jax.planning.pauses import Pauses, predicted_pauses
from lorafusion_jax.planning.rebalance import Moved, rebalanced
from lorafusion_jax.planning.stages import (
    SAMPLE_TOKENS,
    attention_elements,
    mean_over_layers,
    modelled_costs,
    row_weights,
    stage_layers,
    worth_in_layers,
)
from lorafusion_jax.readable import SETTINGS, read_text
from lorafusion_jax.report.format import count
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels.policy import HOPPER
from scheduling import (
    CostModel,
    CostParts,
    GatherCost,
    Plan,
    PlanError,
    default_cost_parts,
    read_cost_model,
    shared_parts,
    simulate,
    stages_from_parts,
)

HOPPERS = ("h200", "h100")
DEVICES = ("h200", "h100", "a100-40gb", "a100", "l40s", "a6000", "rtx6000-ada", "cpu")
_DRIVER, _FIRST_GPU = Path("/proc/driver/nvidia"), Path("/dev/nvidia0")
# Share of the gathering of `mesh.fsdp` that compute hides. A slot of 32B on two H200s takes 1.47 s
# (`benchmarks/results/end_to_end_h200_2026-11-29_two`), predicted 1.47 s if nothing is hidden, 1.30 s if all is.
HIDDEN_GATHERS = 0.0
ROOMY = 0.9  # share of a device's memory


def machine_gpu() -> str | None:
    """What the driver calls this machine's first GPU, "" where it does not say; None without one. Starts no backend."""
    for about in sorted(_DRIVER.glob("gpus/*/information")):
        if (model := re.search(r"^Model:\s*(.+?)\s*$", about.read_text(errors="replace"), re.MULTILINE)) is not None:
            return model[1]
    return "" if _FIRST_GPU.exists() else None


def known_device(gpu: str) -> str | None:
    """The device of `DEVICES` that a driver's name belongs to; None: its rates are not known.

    >>> [known_device(f"NVIDIA {name}") for name in ("H100 80GB HBM3", "RTX 6000 Ada Generation", "RTX A6000", "GH200")]
    ['h100', 'rtx6000-ada', 'a6000', None]
    >>> [known_device(f"NVIDIA A100-{form}") for form in ("SXM4-40GB", "PCIE-40GB", "SXM4-80GB")]
    ['a100-40gb', 'a100-40gb', 'a100']
    """
    words = re.sub(r"rtx 6000 ada", "rtx6000-ada", gpu.lower())
    words = re.sub(r"a100(?=.*(?<!\d)40gb)", "a100-40gb", words)
    return next((device for device in DEVICES if re.search(rf"(?<![a-z0-9]){device}(?![a-z0-9])", words)), None)


def this_device() -> str:
    """The default device for predictions: that of this machine, an H200 for a GPU whose rates are not known."""
    gpu = machine_gpu()
    return "cpu" if gpu is None else known_device(gpu) or DEVICES[0]


def machine_note() -> str:
    """What `this_device` saw, for a person."""
    gpu = machine_gpu()
    if gpu is None:
        return "this machine has no NVIDIA GPU"
    if known_device(gpu):
        return f"this machine has {gpu}"
    return f"this machine has {gpu or 'a GPU of unknown model'}, whose rates are not known: --device names another one"


def memory_of(device: str) -> int | None:
    """Memory of a known device; None for a CPU, where memory is not the limit."""
    return memory.DEVICE_BYTES.get(device)


def predicted_costs(
    config: JobConfig,
    model: ModelConfig,
    device: str,
    tokens: Mapping[str, int] | None = None,
    network: Network | None = None,
) -> CostModel:
    """Default costs of a job's stages on a device, from its rates.

    Args:
        tokens: of each adapter's samples (None: as many of each). Rows of large ranks cost more.
        network: of the run's processes (None: one process).
    """
    mesh, problem = config.mesh, memory.memory_problem(config, model)
    table, part = problem.outputs * model.hidden_size, problem.device_model
    parts = predicted_parts(part, device, config.base.quantize, table=table)
    parts = _with_ranks(parts, config, part, device, tokens)
    if mesh.tensor > 1:
        parts = shared_parts(parts, mesh.tensor)
    item = 4 if config.base.dtype == "float32" else 2
    layer_bytes = memory.kernel_bytes(problem)
    gather = GatherCost(layer_bytes=layer_bytes, table_bytes=item * table, devices=mesh.fsdp, hidden=HIDDEN_GATHERS)
    layers = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.largest)
    costs = stages_from_parts(parts, worth_in_layers(model, layers), gather=gather if mesh.fsdp > 1 else None)
    devices = f"one {device}" if mesh.tensor == 1 else f"{mesh.tensor} {device}"
    costs = dataclasses.replace(
        costs,
        source=f"default rates of {devices} per stage, {count(model.num_parameters)} parameters, nothing measured",
    )
    return with_network(costs, mesh, network, token_bytes=_token_bytes(config, model))


def predicted_parts(model: ModelConfig, device: str, quantize: str = NONE, *, table: int | None = None) -> CostParts:
    """Default costs of a mean layer and of the ends of a model on a device, at rank 16.

    Args:
        quantize: storage of the layers' projections, see `weights.table`.
        table: elements of the head on the device (None: all).
    """
    kind = None if device == "cpu" else stored_kind(quantize)
    return default_cost_parts(
        device,
        layer_parameters=mean_over_layers(model, partial(row_weights, hopper=device in HOPPERS, kind=kind)),
        table_parameters=model.num_outputs * model.hidden_size if table is None else table,
        hidden_size=model.hidden_size,
        attention_width=_attention_width(model),
        mlp_width=round(sum(layer.gated_elements for layer in model.layers) / model.num_layers),
    )


def _attention_width(model: ModelConfig) -> int:
    """H · C, less where layers have windows: as if samples had the typical length."""
    elements = mean_over_layers(model, lambda layer: attention_elements(layer, SAMPLE_TOKENS))
    return round(elements / SAMPLE_TOKENS)


def _with_ranks(
    parts: CostParts, config: JobConfig, model: ModelConfig, device: str, tokens: Mapping[str, int] | None
) -> CostParts:
    """The same costs, with what ranks above 16 take where Hopper's kernels run."""
    rates = ranks.RATES.get(device)
    if rates is None or config.base.dtype == "float32" or config.train.implementation not in (None, HOPPER):
        return parts
    extra_s = ranks.seconds_per_token(adapter_specs(config), model, rates, tokens)
    forward, backward = parts.layer.forward, parts.layer.backward
    layer = dataclasses.replace(
        parts.layer,
        forward=dataclasses.replace(forward, token_s=forward.token_s + ranks.FORWARD_SHARE * extra_s),
        backward=dataclasses.replace(backward, token_s=backward.token_s + (1 - ranks.FORWARD_SHARE) * extra_s),
    )
    return dataclasses.replace(parts, layer=layer)


def adapter_tokens(prepared: Prepared) -> dict[str, int]:
    """Tokens of each adapter's samples, all epochs counted."""
    return {name: int(data.stream_tokens().sum()) for name, data in prepared.adapters.items()}


def measured_costs(
    config: JobConfig, model: ModelConfig | None, file: Path, network: Network | None = None
) -> CostModel:
    """Reads costs from a file of `lorafusion profile`, of one host, and checks that they are for this job.

    Raises:
        PlanError: the file is not a cost model, or was measured with other layers, capacity, model, `mesh.fsdp`,
            `mesh.tensor` or `train.remat`; `auto` accepts every policy.
    """
    mesh = config.mesh
    if model is None:
        costs = read_costs(file, [1.0] * mesh.stages)
    else:
        layers = stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=config.batch.largest)
        costs = read_costs(file, worth_in_layers(model, layers))
        costs.check_layers(counts_of(layers))
    costs.check_capacity(*config.batch.sizes)
    costs.check_measured_with(
        measured_with(
            dtype=config.base.dtype,
            quantize=config.base.quantize,
            parameters=None if model is None else model.num_parameters,
            fsdp=mesh.fsdp,
            tensor=mesh.tensor,
            remat=None if config.train.remat == "auto" else config.train.remat,
        )
    )
    return costs if model is None else with_network(costs, mesh, network, token_bytes=_token_bytes(config, model))


def _token_bytes(config: JobConfig, model: ModelConfig) -> int:
    """Bytes of a token's activations between layers."""
    return (4 if config.base.dtype == "float32" else 2) * model.hidden_size


def read_costs(file: Path, layers: Sequence[float]) -> CostModel:
    """Reads a cost model for stages of these layers.

    Raises:
        PlanError: `plan.cost-format`; `plan.cost` for another number of stages.
    """
    try:
        text = read_text(file, SETTINGS)
    except (OSError, UnicodeDecodeError) as problem:
        raise PlanError("plan.cost-format", f"{file} cannot be read as text.", why=str(problem)) from None
    return read_cost_model(text, layers)


def measured_with(
    *, dtype: str, quantize: str, parameters: int | None, fsdp: int, tensor: int, remat: RematPolicy | None
) -> dict[str, str | int]:
    """Settings other than layers and capacity that stage times depend on, as stored in a cost model.

    Args:
        parameters: number of parameters of the base model, which identifies it independent of its path (None: unknown).
        remat: rematerialisation policy (None: any).
    """
    settings = {
        "base.dtype": dtype,
        "base.quantize": quantize,
        "base parameters": parameters,
        "mesh.fsdp": fsdp,
        "mesh.tensor": None if tensor == 1 else tensor,
        "train.remat": remat,
    }
    return {name: value for name, value in settings.items() if value is not None}


def better_layout(
    config: JobConfig,
    model: ModelConfig,
    layers: Sequence[Extent],
    seconds: Sequence[float],
    *,
    remat: RematPolicy,
    device_bytes: int | None = None,
) -> Moved | None:
    """Suggests layers per stage from measured stage times, within memory; None if that saves nothing.

    The memory of a stage may grow to that of the fullest stage, or to nine tenths of a device.

    Args:
        layers: layers per stage of the measured run.
        seconds: per stage, for the same microbatches.
        remat: rematerialisation policy of the run.
    """
    problem = dataclasses.replace(memory.memory_problem(config, model), layers=tuple(layers), remat=remat)
    fullest = max(stage.total for stage in memory.stage_memory(problem))
    room = max(fullest, int(ROOMY * (device_bytes or 0)))
    return rebalanced(layers, seconds, modelled_costs(model), most=memory.most_halves(problem, room))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPrediction:
    """What a plan will take at default rates.

    Attributes:
        seconds: of its slots.
        bubble_share: idle share of the stages between fill and drain; None of one stage.
        pauses: see `pauses.Pauses`.
    """

    seconds: float
    bubble_share: float | None
    pauses: Pauses

    @property
    def by_kind(self) -> dict[str, float]:
        """Seconds of slots, evaluations and saves."""
        seconds_of = {
            "seconds": self.seconds,
            "evaluation_s": self.pauses.evaluation_s,
            "saving_s": self.pauses.saving_s,
        }
        return {name: round(seconds, 3) for name, seconds in seconds_of.items()}


def predicted_run(config: JobConfig, prepared: Prepared, plan: Plan, *, processes: int = 1) -> RunPrediction:
    """What `lorafusion plan` says on this machine. Takes 0.06 ms a slot of four stages."""
    model, device = ModelConfig.from_hf(base_directory(config)), this_device()
    costs = predicted_costs(config, model, device, adapter_tokens(prepared), network_of(device, processes))
    timeline = simulate(plan, costs)
    pauses = predicted_pauses(config, model, prepared, plan, costs, duration_s=timeline.duration_s, device=device)
    bubbles = timeline.bubble_share if plan.num_stages > 1 else None
    return RunPrediction(seconds=timeline.duration_s, bubble_share=bubbles, pauses=pauses)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedParameters:
    """Numbers of parameters.

    Attributes:
        own_parameters: of all adapters.
        stored: what all stages hold of weights, gradients and moments, shares of other adapters' room included.
    """

    own_parameters: int
    stored: Mapping[str, int]

    @property
    def stored_most(self) -> int:
        """The larger number of weights and gradients."""
        return max(self.stored["weights"], self.stored["gradients"])


def predicted_parameters(config: JobConfig, model: ModelConfig) -> PredictedParameters:
    """The adapters' own parameters, and numbers that all stages hold for them."""
    problem = memory.memory_problem(config, model)
    stages = memory.stage_memory(problem)
    field_of = {"weights": "adapters", "gradients": "sums", "moments": "optimizers"}
    stored = {label: sum(getattr(stage, field) for stage in stages) // FLOAT32 for label, field in field_of.items()}
    return PredictedParameters(own_parameters=memory.trainable_parameters(problem), stored=stored)


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedMemory:
    """Memory per stage.

    Attributes:
        layers: of each stage; halves where a stage ends between attention and MLP.
        quantize: kind in which frozen weights are stored.
        device_bytes: memory of a device; None if it is unknown, and then so are `fits` and `advice`.
        advice: settings that make it fit; empty if it fits.
    """

    layers: Sequence[int | float]
    remat: RematPolicy
    quantize: str
    stages: Sequence[memory.StageMemory]
    device_bytes: int | None
    fits: bool | None
    advice: str | None

    def to_json(self) -> dict[str, Any]:
        numbers = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        stages = [{"total": stage.total} | dataclasses.asdict(stage) for stage in self.stages]
        return numbers | {"stages": stages, "not_modelled": list(memory.NOT_MODELLED)}


def predicted_memory(config: JobConfig, model: ModelConfig, device_bytes: int | None) -> PredictedMemory:
    """Predicts the memory of every stage, and whether it fits."""
    problem = memory.memory_problem(config, model)
    if config.train.remat == "auto" and device_bytes is not None:
        problem = dataclasses.replace(problem, remat=memory.choose_remat(problem, device_bytes))
    fits = advice = None
    if device_bytes is not None:
        fits = memory.fits(problem, device_bytes)
        advice = memory.advice(problem, device_bytes, tile_tokens=config.batch.tile_tokens)
    return PredictedMemory(
        layers=counts_of(problem.layers),
        remat=problem.remat,
        quantize=problem.quantize,
        stages=memory.stage_memory(problem),
        device_bytes=device_bytes,
        fits=fits,
        advice=advice,
    )
