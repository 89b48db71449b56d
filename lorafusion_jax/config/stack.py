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
from lorafusion_jax.config.references import reference_of
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
        paged: adapters take the places in turn; those in `index` are the first ones.
    """

    config: JobConfig
    index: Mapping[str, int]
    objectives: tuple[Chosen, ...]
    stand_ins: range = range(0)
    places: Places | None = None
    paged: bool = False

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
    if residents(config) is not None:
        return _paged_stack(config)
    if not config.train.places:
        return Stack(
            config=config,
            index={adapter.name: number for number, adapter in enumerate(config.adapters)},
            objectives=tuple(adapter.objective.chosen for adapter in config.adapters),
        )
    first = [adapter for adapter in config.adapters if not adapter.joined]
    places = Places.of(config.train.places, dropout=any(adapter.lora.dropout for adapter in first))
    # No adapter of the run can have these names.
    stacked = [
        *first,
        *(stand_in.model_copy(update={"name": f"({stand_in.name})"}) for stand_in in stand_in_adapters(places)),
    ]
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
    return Stack(
        config=config.model_copy(update={"adapters": tuple(stacked)}),
        index=index,
        objectives=_different_objectives(config),
        stand_ins=stand_ins,
        places=places,
    )


def _different_objectives(config: JobConfig) -> tuple[Chosen, ...]:
    objectives: list[Chosen] = []
    for adapter in config.adapters:
        objective = adapter.objective.chosen
        objectives += [] if any(objective.same_as(other) for other in objectives) else [objective]
    return tuple(objectives)


def residents(config: JobConfig) -> int | None:
    """Returns how many adapters of a run are on the devices at a time; None if all are."""
    count = config.train.resident
    return count if count is not None and count < sum(not adapter.joined for adapter in config.adapters) else None


def _paged_stack(config: JobConfig) -> Stack:
    """Returns the stack of a run whose adapters take places in turn. Any choice of so many adapters fits into them.

    Raises:
        ConfigError: `resident.adapter`, an adapter needs more than a place.
    """
    available, names = model_targets(config), [adapter.name for adapter in config.adapters]
    specs = {adapter.name: adapter_spec(adapter, available) for adapter in config.adapters}
    first = [specs[adapter.name] for adapter in config.adapters if not adapter.joined]
    ranks, heads = sorted(spec.rank for spec in first)[-(residents(config) or 0) :], list[Head]()
    for spec in first:
        heads += [] if spec.head is None or spec.head in heads else [spec.head]
    places = Places(
        ranks=tuple(ranks),
        kinds=(place_kind(first[0]),) * len(ranks),
        dropout=any(spec.dropout for spec in first),
        heads=tuple(heads),
        targets=tuple(dict.fromkeys(target for spec in first for target in spec.targets)),
    )
    for adapter in config.adapters:
        reference = reference_of(adapter, names)
        if reference is not None and reference.kind == "adapter":
            why = "its reference is the state of an adapter, which would have to stay on the devices"
        elif adapter.rollout.is_on:
            why = "it samples its rows, for which it would have to stay on the devices"
        else:
            why = places.refuses(specs[adapter.name])
        if why:
            raise ConfigError(
                "resident.adapter",
                f"{adapter.name} cannot take turns with others in {len(ranks)} places.",
                why=why,
                fix="leave train.resident out, or train the adapter in a job of its own",
            )
    stacked = [place.model_copy(update={"name": f"({place.name})"}) for place in stand_in_adapters(places)]
    started = {spec.name: spec.rank for spec in first[: len(ranks)]}
    return Stack(
        config=config.model_copy(update={"adapters": tuple(stacked)}),
        index=places.arrange(started, {}),
        objectives=_different_objectives(config),
        stand_ins=range(len(stacked)),
        places=places,
        paged=True,
    )


def without_places(config: JobConfig) -> JobConfig:
    """Returns the job without places that adapters join or take in turn."""
    return config.model_copy(update={"train": config.train.model_copy(update={"places": {}, "resident": None})})


OF_SESSIONS = {
    "batch": {"capacity_tokens", "tile_tokens"},
    "train": {"remat", "block_layers", "parts", "implementation", "attention", "loss_chunk", "router_aux"},
}


def check_session(config: JobConfig) -> None:
    """Refuses settings that need the data of a run.

    Raises:
        ConfigError: `session.auto`; see `check_session_settings`.
    """
    if config.auto:
        message = f"{', '.join(config.auto)} is auto, which looks at the data of a run."
        why = "a service or a training client has no data when it starts"
        raise ConfigError("session.auto", message, why=why, fix="give it a value")
    check_session_settings(config.batch, config.train)


def check_session_settings(*sections: BatchSettings | TrainSettings) -> None:
    """Refuses what only a run has: its plan says when an adapter needs its place, and calls and jobs come unforeseen.

    Raises:
        ConfigError: `session.train`, `session.batch`.
    """
    for settings in sections:
        section = "batch" if isinstance(settings, BatchSettings) else "train"
        defaults = type(settings)()
        for key in sorted(settings.model_fields_set - OF_SESSIONS[section]):
            if getattr(settings, key) != getattr(defaults, key):
                message = f"{section}.{key} is of runs: a service or a training client has no plan."
                raise ConfigError(f"session.{section}", message, **_of_runs(key))


def _of_runs(key: str) -> dict[str, str]:
    """Why a session has no such setting, and what to do."""
    if key in ("places", "resident"):
        return {
            "why": "adapters there hold their place from start to stop, also with reproducible results",
            "fix": "leave it out, and say the number of places: serve --places RANK:NUMBER, training_client(places=…)",
        }
    if key == "global_samples":
        return {
            "why": "a step takes the rows of the calls before it, or of its job's own batches",
            "fix": "leave it out",
        }
    return {"why": "jobs and calls say themselves how far they train, and what they evaluate", "fix": "leave it out"}


def session_config(
    base: BaseSettings,
    mesh: MeshSettings,
    places: Places,
    *,
    batch: BatchSettings,
    train: TrainSettings,
    directory: str,
) -> JobConfig:
    """Returns a job whose adapters fill every place: it has the session's programs and memory.

    Raises:
        ConfigError: see `check_session_settings`.
    """
    if train.resident or train.places:  # what else is of runs changes nothing: who opens a session for a user checks it
        check_session_settings(train)
    return JobConfig(
        base=base,
        mesh=mesh,
        batch=batch,
        train=train,
        directory=directory,
        adapters=tuple(stand_in_adapters(places)),
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


def stand_in_adapters(places: Places) -> list[AdapterConfig]:
    """Returns an adapter for each place, of its kind and rank on all of its targets."""

    def stand_in(place: int, rank: int, kind: str) -> AdapterConfig:
        if kind == ON_EXPERTS:
            lora = LoraSettings(rank=rank, dropout=0.0, targets=[ALL_LINEAR, ALL_EXPERTS])
        else:
            dropout = 0.05 if places.dropout and adapter_kind(kind).dropout else 0.0
            targets = ALL_LINEAR if places.targets is None else list(places.targets)
            lora = LoraSettings(kind=kind, rank=rank, dropout=dropout, targets=targets)
        return AdapterConfig(name=place_name(place), data=DataSettings.model_validate({"train": "-"}), lora=lora)

    return [stand_in(place, *sizes) for place, sizes in enumerate(zip(places.ranks, places.kinds, strict=True))]
