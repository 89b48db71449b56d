"""What quantisation does to a base model: its loss on the users' data before and after, without any adapter."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

from lorafusion_jax.adapters.table import PLAIN
from lorafusion_jax.config.references import adapters_with_references
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.config.stack import without_places
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import with_references
from lorafusion_jax.session.session import Session
from lorafusion_jax.weights.table import NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseLoss:
    """The base model on the data of one adapter.

    Attributes:
        tokens: that the loss is a mean of.
        held_out: whether they are the adapter's held-out data; else its training data, where it has no other.
        before: of the base in `base.dtype`; None: the checkpoint comes quantised, so there is no other.
        after: of the base as the job stores it.
    """

    tokens: int
    held_out: bool
    before: float | None
    after: float

    @property
    def perplexities(self) -> tuple[float | None, float]:
        """exp(loss), before and after."""
        return None if self.before is None else math.exp(self.before), math.exp(self.after)


def base_losses(config: JobConfig, prepared: Prepared, *, comes_quantised: bool = False) -> dict[str, BaseLoss]:
    """Evaluates the base on the data of every adapter, with the adapter's own objective.

    Adapters are as they begin, which changes no output. The bases are loaded one after the other.

    Args:
        comes_quantised: the checkpoint, so that it is loaded once.

    Raises:
        LoraFusionError: see `Session.open`.
    """
    data = {
        name: dataclasses.replace(of_adapter, eval=of_adapter.train) if of_adapter.eval is None else of_adapter
        for name, of_adapter in prepared.adapters.items()
    }
    everything = dataclasses.replace(prepared, adapters=data)
    quantize = config.base.quantize
    after = _evaluate_base(config, everything, quantize)
    before = after if quantize == NONE else None if comes_quantised else _evaluate_base(config, everything, NONE)
    return {
        name: BaseLoss(
            tokens=int(of_adapter.eval.loss_mask.sum()),
            held_out=prepared.adapters[name].eval is not None,
            before=None if before is None else before[name],
            after=after[name],
        )
        for name, of_adapter in data.items()
        if of_adapter.eval is not None
    }


def _evaluate_base(config: JobConfig, prepared: Prepared, quantize: str) -> dict[str, float]:
    stored = config.model_copy(update={"base": config.base.model_copy(update={"quantize": quantize})})
    specs = [dataclasses.replace(spec, kind=PLAIN) for spec in adapter_specs(config)]
    session = Session.open(without_places(stored), prepared, specs)
    try:
        session.start_all({})
        session.finish_loading()
        references = session.compute_references(prepared, adapters_with_references(config))
        session.take_data(session.config, with_references(prepared, references))
        evaluations = {name: session.evaluate(name) for name in prepared.adapters}
        return {name: evaluation.loss for name, evaluation in evaluations.items() if evaluation is not None}
    finally:
        session.close()
