"""Which adapter is where on the devices: those that a run begins with, places for more, and adapters that fit no place.

A place of a session or run is a stand-in among the adapters of a job: an adapter with the largest rank, all targets and
no data. So a job with stand-ins has the programs and the memory of the session or run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lorafusion_jax.adapters.kind import Head
from lorafusion_jax.adapters.spec import ALL_EXPERTS, ALL_LINEAR, AdapterSpec
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.config.places import ON_EXPERTS, Places, place_kind
from lorafusion_jax.config.schema import (
    AdapterConfig,
    BaseSettings,
    BatchSettings,
    DataSettings,
    JobConfig,
    LoraSettings,
    MeshSettings,
    TrainSettings,
)
from lorafusion_jax.config.specs import adapter_spec, adapter_specs, model_targets
from lorafusion_jax.errors import ConfigError
from lorafusion_jax.objective.protocol import SFT, Chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The adapters of a run in the order in which the devices hold them.

    Adapters that the run began with come first, then the places of `train.places`. An adapter that joined is in the
    first free place that holds it; if there is none, it is at the end. So adapters never move.

    Attributes:
        config: a job with an adapter at every position: those of the run, and the stand-in of every place.
        index: name of an adapter of the run → its position.
        stand_ins: positions of the places.
        objectives: of the adapters by position; of a run with places, the different ones.
        places: how large adapters in stand-ins may be.
    """

    config: JobConfig
    index: Mapping[str, int]
    objectives: tuple[Chosen, ...]
    stand_ins: range = range(0)
    places: Places | None = None

    @property
    def heads(self) -> tuple[Head, ...]:
        """Heads that every place has."""
        return () if self.places is None else self.places.heads

    @property
    def vacant(self) -> frozenset[int]:
        """Positions without an adapter of the run."""
        return frozenset(self.stand_ins) - frozenset(self.index.values())

    def number_of(self, chosen: Chosen) -> int:
        """Returns the number of an adapter's objective among those of a run with places."""
        return next(number for number, other in enumerate(self.objectives) if chosen.same_as(other))


def stack_of(config: JobConfig) -> Stack:
    """Returns where the adapters of a run are. It depends on those before each of them only."""
    if not config.train.places:
        return Stack(
            config=config,
            index={adapter.name: number for number, adapter in enumerate(config.adapters)},
            objectives=tuple(adapter.objective.chosen for adapter in config.adapters),
        )
    first = [adapter for adapter in config.adapters if not adapter.joined]
    places = Places.of(config.train.places, dropout=any(adapter.lora.dropout for adapter in first))
    # No adapter of the run can have these names.
    stacked = [*first, *(stand_in.model_copy(update={"name": f"({stand_in.name})"}) for stand_in in _stand_ins(places))]
    stand_ins = range(len(first), len(stacked))
    index = {adapter.name: number for number, adapter in enumerate(first)}
    available, used_places = model_targets(config), set[int]()
    if any(adapter_spec(adapter, available).on_experts for adapter in first):
        raise ConfigError(
            "places.experts",
            "train.places reserves places in a run with adapters of experts.",
            why="places have no experts",
            fix="leave train.places out",
        )
    for adapter in config.adapters:
        if not adapter.joined:
            continue
        spec = adapter_spec(adapter, available)
        place = None if places.refuses(spec) else places.find(place_kind(spec), spec.rank, used_places)
        if place is None:
            index[adapter.name] = len(stacked)
            stacked.append(adapter)
        else:
            index[adapter.name] = stand_ins[place]
            used_places.add(place)
    objectives: list[Chosen] = []
    for adapter in config.adapters:
        objective = adapter.objective.chosen
        objectives += [] if any(objective.same_as(other) for other in objectives) else [objective]
    return Stack(
        config=config.model_copy(update={"adapters": tuple(stacked)}),
        index=index,
        objectives=tuple(objectives),
        stand_ins=stand_ins,
        places=places,
    )


def without_places(config: JobConfig) -> JobConfig:
    """Returns the job without reserved places, for work that no adapter joins."""
    return config.model_copy(update={"train": config.train.model_copy(update={"places": {}})})


def session_config(
    base: BaseSettings,
    mesh: MeshSettings,
    places: Places,
    *,
    batch: BatchSettings,
    train: TrainSettings,
    directory: str,
) -> JobConfig:
    """Returns a job whose adapters fill every place: it has the session's programs and memory."""
    return JobConfig(
        base=base,
        mesh=mesh,
        batch=batch,
        train=train.model_copy(update={"places": {}}),
        directory=directory,
        adapters=tuple(_stand_ins(places)),
    )


def session_stack(config: JobConfig, places: Places) -> Stack:
    """Returns the stack of a `session_config`: places, and no adapter of a run."""
    return Stack(config=config, index={}, objectives=(SFT,), stand_ins=range(len(places.ranks)), places=places)


def place_specs(config: JobConfig, heads: Sequence[Head]) -> list[AdapterSpec]:
    """Returns the specifications of a job whose adapters are places with some heads to spare."""
    return [replace(spec, spare_heads=tuple(heads)) for spec in adapter_specs(config)]


def place_name(place: int) -> str:
    """Name of a place among the adapters of its session's programs."""
    return f"place-{place}"


def _stand_ins(places: Places) -> list[AdapterConfig]:
    def stand_in(place: int, rank: int, kind: str) -> AdapterConfig:
        if kind == ON_EXPERTS:
            lora = LoraSettings(rank=rank, dropout=0.0, targets=[ALL_LINEAR, ALL_EXPERTS])
        else:
            dropout = 0.05 if places.dropout and adapter_kind(kind).dropout else 0.0
            targets = ALL_LINEAR if places.targets is None else list(places.targets)
            lora = LoraSettings(kind=kind, rank=rank, dropout=dropout, targets=targets)
        return AdapterConfig(name=place_name(place), data=DataSettings.model_validate({"train": "-"}), lora=lora)

    return [stand_in(place, *sizes) for place, sizes in enumerate(zip(places.ranks, places.kinds, strict=True))]
