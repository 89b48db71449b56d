"""Cost model of pipeline stages: linear in tokens and in squared sample lengths, measured or from device rates."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np

from scheduling.errors import PlanError

# Links between the stages of a pipeline, and what a message over one costs.


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCost:
    """Seconds from the end of a pass until its activations, or their gradients, are on the other stage.

    A link sends one message at a time in each direction. The next one starts when the last has left, after
    `token_s · tokens`; the latency `fixed_s` of one passes while the next is sent.

    >>> LinkCost(fixed_s=1.0, token_s=0.5).seconds(4)
    (3.0, 2.0)
    """

    fixed_s: float = 0.0
    token_s: float = 0.0

    def __post_init__(self):
        for name, value in asdict(self).items():
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
                raise PlanError("plan.cost", f"{name} of a link must be a number of seconds, not {value!r}")

    def seconds(self, tokens: float) -> tuple[float, float]:
        """Seconds until a message arrives, and those in which it occupies the link."""
        occupied_s = self.token_s * tokens
        return self.fixed_s + occupied_s, occupied_s


SCHEMA = "lorafusion.cost/1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """Seconds of one forward or backward pass of one stage: max(floor, fixed + token · tokens + square · Σ length²).

    The floor is the time of concurrent work, for example of gathering weights.
    """

    fixed_s: float = 0.0
    token_s: float = 0.0
    square_s: float = 0.0
    floor_s: float = 0.0

    def __post_init__(self):
        _check_costs(self)

    def seconds(self, tokens: float, squares: float) -> float:
        return max(self.floor_s, self.fixed_s + self.token_s * tokens + self.square_s * squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Costs of one pipeline stage: its two passes, and one adapter's optimizer step."""

    forward: PassCost
    backward: PassCost
    update_s: float = 0.0

    def __post_init__(self):
        _check_costs(self)

    @staticmethod
    def from_dict(data: dict[str, Any]) -> StageCost:
        """Reads the output of `dataclasses.asdict`; raises KeyError or TypeError for anything else."""
        passes = {name: PassCost(**data[name]) for name in ("forward", "backward")}
        return StageCost(**passes, update_s=data["update_s"])


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Costs of the events of a run.

    Args:
        stages: one entry per stage. A single entry serves any number of stages.
        transfer_s: fixed part of sending activations to the next stage.
        transfer_token_s: part per token of the microbatch.
        links: from each stage to the next, where they differ (empty: all take the two above).
        source: origin of the figures, shown with every prediction.
        capacity_tokens: sizes of the measured microbatches (None: any size). Measurements of one size cannot separate
            fixed costs from costs per token, so they serve that size only; those of several serve all between them.
        layers: layers of each measured stage, e.g. (20, 20.5) (None: any).
        measured_with: other settings that the times depend on, e.g. {"mesh.fsdp": 2}. A name with a dot is a setting of
            the job file. Settings that are not listed may have any value.
    """

    stages: tuple[StageCost, ...]
    transfer_s: float = 0.0
    transfer_token_s: float = 0.0
    source: str = ""
    capacity_tokens: int | tuple[int, ...] | None = None
    layers: tuple[float, ...] | None = None
    measured_with: dict[str, str | int] = field(default_factory=dict[str, str | int], hash=False)  # unhashable
    links: tuple[LinkCost, ...] = ()

    def __post_init__(self):
        _check_costs(self)
        if not self.stages:
            raise PlanError("plan.cost", "a cost model needs at least one stage")

    def stage(self, index: int) -> StageCost:
        return self.stages[index % len(self.stages)]

    def link(self, stage: int) -> LinkCost:
        """The link from a stage to the next."""
        return self.links[stage] if self.links else LinkCost(fixed_s=self.transfer_s, token_s=self.transfer_token_s)

    def check_stages(self, num_stages: int) -> None:
        """Checks that the costs serve this number of stages.

        Raises:
            PlanError: `plan.cost`.
        """
        if len(self.stages) not in (1, num_stages) or (self.links and len(self.links) != num_stages - 1):
            raise PlanError(
                "plan.cost",
                f"the costs are for {len(self.stages)} stages, the plan has {num_stages}",
                fix="measure again with this mesh.stages, or use costs of parts, which serve any mesh",
            )

    def check_capacity(self, *tokens: int) -> None:
        """Checks that microbatches of these sizes were measured, or larger and smaller ones.

        Raises:
            PlanError: `plan.cost`.
        """
        capacity = self.capacity_tokens
        if capacity is None:
            return
        measured_sizes = (capacity,) if isinstance(capacity, int) else capacity
        if min(tokens) < min(measured_sizes) or max(tokens) > max(measured_sizes):
            of_costs, of_plan = (" and ".join(map(str, sizes)) for sizes in (measured_sizes, tokens))
            setting = tokens[0] if len(tokens) == 1 else f"[{','.join(map(str, tokens))}]"
            raise PlanError(
                "plan.cost",
                f"the costs are for microbatches of {of_costs} tokens, the plan has {of_plan}",
                fix=f"measure again with batch.capacity_tokens={setting}",
            )

    def check_layers(self, layers: Sequence[float]) -> None:
        """Checks that stages of these layers were measured.

        Raises:
            PlanError: `plan.cost`.
        """
        if self.layers not in (None, tuple(layers)):
            of_costs, of_plan = ("[" + ",".join(f"{count:g}" for count in of) + "]" for of in (self.layers, layers))
            raise PlanError(
                "plan.cost",
                f"the costs are for stages of {of_costs} layers, the plan has {of_plan}",
                fix=f"measure again with mesh.stages={len(layers)} 'mesh.layers={of_plan}'",
            )

    def check_measured_with(self, wanted: Mapping[str, str | int]) -> None:
        """Checks that the times were measured with these settings.

        Args:
            wanted: as `measured_with`. Settings that only one of the two names are not compared.

        Raises:
            PlanError: `plan.cost`, with every difference.
        """
        differing = [name for name in wanted if self.measured_with.get(name, wanted[name]) != wanted[name]]
        if differing:
            had, want = (", ".join(f"{name}={of[name]}" for name in differing) for of in (self.measured_with, wanted))
            settings = [f"{name}={wanted[name]}" for name in differing if "." in name]
            raise PlanError(
                "plan.cost",
                f"the costs were measured with {had}, the job has {want}",
                fix=" ".join(["measure this job again: lorafusion profile JOBS", *settings]),
            )

    def to_json(self) -> str:
        values = asdict(self)
        if not self.links:
            del values["links"]
        return json.dumps({"schema": SCHEMA, **values}, indent=1, allow_nan=False) + "\n"

    @staticmethod
    def from_json(text: str) -> CostModel:
        """Reads the output of `to_json`.

        Raises:
            PlanError: `plan.cost-format`, not a cost model of this version.
        """
        try:
            data = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}")
            stages, layers = tuple(map(StageCost.from_dict, data.pop("stages"))), data.pop("layers", None)
            measured_with = dict(data.pop("measured_with", {}))
            layers = None if layers is None else tuple(layers)
            sizes: Any = data.pop("capacity_tokens", None)
            sizes = sizes if sizes is None or isinstance(sizes, int) else tuple(map(int, sizes))
            links = tuple(LinkCost(**link) for link in data.pop("links", ()))
            return CostModel(
                stages=stages,
                layers=layers,
                measured_with=measured_with,
                capacity_tokens=sizes,
                links=links,
                **data,
            )
        except PlanError:
            raise
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise PlanError("plan.cost-format", "this is not a cost model", why=repr(error)) from None


class Measurement(NamedTuple):
    """One timed pass of one stage."""

    stage: int
    kind: Literal["forward", "backward"]
    tokens: int
    squares: int
    seconds: float


def fit_cost_model(
    measurements: Iterable[Measurement],
    *,
    update_s: float = 0.0,
    transfer_token_s: float = 0.0,
    source: str = "measured",
) -> CostModel:
    """Fits each stage's passes to measurements by non-negative least squares.

    >>> seconds = {n: 1e-3 + 2e-6 * n for n in (1, 50, 99)}
    >>> times = [Measurement(0, kind, n, n * n, s) for n, s in seconds.items() for kind in ("forward", "backward")]
    >>> round(fit_cost_model(times).stages[0].forward.token_s, 9)
    2e-06
    """
    by_pass: dict[tuple[int, str], list[Measurement]] = {}
    for measurement in measurements:
        if not math.isfinite(measurement.seconds) or measurement.seconds < 0:
            raise PlanError("plan.cost", f"a pass of stage {measurement.stage} took {measurement.seconds!r} s")
        by_pass.setdefault((measurement.stage, measurement.kind), []).append(measurement)
    stages = sorted({stage for stage, _ in by_pass})
    passes = [(stage, kind) for stage in range(len(stages)) for kind in ("forward", "backward")]
    if not stages or any(key not in by_pass for key in passes):
        raise PlanError("plan.cost", "measure forward and backward of every stage", where=f"stages seen: {stages}")
    fits = {key: fit_pass([(m.tokens, m.squares, m.seconds) for m in by_pass[key]]) for key in passes}
    return CostModel(
        stages=tuple(
            StageCost(forward=fits[stage, "forward"], backward=fits[stage, "backward"], update_s=update_s)
            for stage in range(len(stages))
        ),
        transfer_token_s=transfer_token_s,
        source=source,
    )


def fit_pass(measured: Sequence[tuple[int, int, float]]) -> PassCost:
    """Fits (tokens, squares, seconds) by non-negative least squares, over all subsets of the three coefficients."""
    features = np.array([(1.0, tokens, squares) for tokens, squares, _ in measured])
    seconds = np.array([second for _, _, second in measured])
    best, best_error = np.zeros(3), float(seconds @ seconds)
    for count in (1, 2, 3):
        for columns in combinations(range(3), count):
            part = features[:, columns]
            scale = np.abs(part).max(axis=0)
            answer = np.linalg.lstsq(part / np.where(scale > 0, scale, 1), seconds, rcond=None)[0]
            error = float(np.sum((part / np.where(scale > 0, scale, 1) @ answer - seconds) ** 2))
            if (answer >= 0).all() and error < best_error * (1 - 1e-9):
                best, best_error = np.zeros(3), error
                best[list(columns)] = answer / np.where(scale > 0, scale, 1)
    return PassCost(fixed_s=float(best[0]), token_s=float(best[1]), square_s=float(best[2]))


def _check_costs(cost: PassCost | StageCost | CostModel) -> None:
    for name in (entry.name for entry in fields(cost)):
        value = getattr(cost, name)
        if name.endswith("_s") and not (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0):
            raise PlanError("plan.cost", f"{name} must be a number of seconds, not {value!r}")
