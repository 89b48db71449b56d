"""`use_adapters`: sets the adapter of each row for the LoRA layers of a model."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.errors import ConfigError, RunError, first_few
from lorafusion_jax.modules.context import LoRAContext
from lorafusion_jax.modules.plan import Calls, LoRAPlan


@dataclass(slots=True)
class _Use:
    context: LoRAContext
    adapters: Sequence[AdapterSpec] | None  # as the caller gave them; None: a context
    staged: bool  # entered while a jitted function was being traced
    seen: bool = False
    ran: dict[Calls, set[str]] = field(default_factory=dict)  # layers of each model
    read: dict[Calls, set[str]] = field(default_factory=dict)  # those whose weights something else read


# A function that the model itself jits is traced again for every use, so that its program cannot keep an old table.
_use_number = jax.make_user_context(default_value=None)
_current: ContextVar[_Use | None] = ContextVar("lorafusion_adapters", default=None)
SHOWN = 8  # layers that a message names
_INSIDE = "enter `use_adapters` inside the jitted function, and pass the table as an argument"


@contextmanager
def use_adapters(
    adapters: LoRAContext | Sequence[AdapterSpec], table: Any = None, *, allow_uncalled: bool = False, **options: Any
) -> Iterator[LoRAContext]:
    """Sets the adapter of each row for layers from `apply_lora`.

    Enter it inside the function that is jitted, with the table as an argument of that function:

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> from lorafusion_jax.modules import apply_lora
    >>> model = apply_lora(nnx.Linear(8, 4, rngs=nnx.Rngs(0)), specs := [
    ...     AdapterSpec(name="law", rank=2, alpha=4), AdapterSpec(name="med", rank=4, alpha=4)], targets=".*")
    >>> @nnx.jit
    ... def forward(model, x, adapter_of_example):
    ...     with use_adapters(specs, adapter_of_example):
    ...         return model(x)
    >>> forward(model, jnp.ones((3, 5, 8)), jnp.array([0, 1, 1])).shape
    (3, 5, 4)

    Its value is the context: `with use_adapters(specs, table) as context`, and `context.mean(losses).sum()` is a loss
    that trains each adapter as alone.

    Training with dropout needs the number of the step: `use_adapters(specs, table, step=step)`. For evaluation, use
    `use_adapters(specs, table, train=False)`. For one adapter for all rows, use `use_adapters(specs, only="law")`.

    Args:
        adapters: the adapters given to `apply_lora`, in the same order, or a context.
        table: adapter of each example (leading axis of the layers' inputs) or of each row, -1 for none.
        allow_uncalled: do not warn of adapted layers that do not run, as where only a part of the model does, or whose
            weights are read otherwise, as by a penalty.
        options: `step`, `train`, `only` and other options of `LoRAContext.of`.

    Raises:
        ConfigError: as in `LoRAContext.of`.
        RunError: `lora.context-outside-jit` or `lora.context-unused`, it was entered around a jitted function, which
            would keep the table of its first call; `lora.other-adapters`, their number, names, order, ranks or scales
            differ from the model's; `lora.table-rows`, the table has neither one entry per example nor one per row.

    Warns:
        UserWarning: an adapted layer never ran where others of its model did, or something else read its weight: its
            adapters have no effect there.
    """
    specs = None if isinstance(adapters, LoRAContext) else adapters
    use = _Use(_context(adapters, table, options), specs, staging())
    token = _current.set(use)
    try:
        with traced_anew():
            yield use.context
    finally:
        _current.reset(token)
    if not use.seen:
        raise RunError(
            "lora.context-unused",
            "no LoRA layer ran inside `use_adapters`.",
            why="a jitted function that is already compiled does not see it; a model with a merged adapter has none",
            fix=f"{_INSIDE}; unmerge_adapter(model) after a merge",
        )
    bypassed = [path for calls, ran in use.ran.items() for path in calls.bypassed(ran, use.read.get(calls, ()))]
    if bypassed and not allow_uncalled:
        warnings.warn(
            "[lora.uncalled] adapted layers never ran inside `use_adapters`, or something else read their weights: "
            f"{first_few(bypassed, SHOWN)}. Their adapters have no effect and no gradient there. "
            "fix: apply_lora(…, exclude=…); or use_adapters(…, allow_uncalled=True) where only a part of it runs",
            UserWarning,
            stacklevel=3,
        )


def context_of(plan: LoRAPlan, *, tabulated: bool = False) -> LoRAContext | None:
    """Returns the current context for an adapted layer, which runs; None outside of `use_adapters`.

    Args:
        tabulated: `nnx.tabulate` runs it, for its shapes only.

    Raises:
        RunError: see `use_adapters`.
    """
    if plan.calls is not None:
        plan.calls.ran.add(plan.path)
    use = _current.get()
    if use is None:
        return None
    if not tabulated:
        check_inside(use.staged)
    use.seen = True
    if plan.calls is not None:
        use.ran.setdefault(plan.calls, set()).add(plan.path)
    if different := _difference(use, plan.adapters):
        raise RunError(
            "lora.other-adapters",
            f"the context has {different[0]}, but the model has {different[1]}.",
            why="a number of the table would be that of another adapter, or train it with a scale that files of it do "
            "not have",
            fix="give use_adapters the adapters that apply_lora got, in the same order",
        )
    return use.context


def _difference(use: _Use, adapters: Sequence[AdapterSpec]) -> tuple[str, str] | None:
    """Returns how the adapters of a context and those of a model differ, in words; None: not in what must be equal.

    Dropout and seeds may differ: they are of one call, and no file of an adapter has them.
    """
    specs, count = use.adapters, len(use.context.scale)
    if count != len(adapters):
        return f"{count} adapters", f"{len(adapters)}"
    if specs is None or specs is adapters:
        return None
    names, model_names = ([spec.name for spec in some] for some in (specs, adapters))
    if names != model_names:
        return f"the adapters {', '.join(names)}", ", ".join(model_names)
    for spec, of_model in zip(specs, adapters, strict=True):
        if (spec.columns, spec.scale) != (of_model.columns, of_model.scale):
            return _size(spec), _size(of_model)
    return None


def _size(spec: AdapterSpec) -> str:
    return f"{spec.name} with rank {spec.rank} and scale {spec.scale:g}"


def note_reader(plan: LoRAPlan) -> Callable[[], None] | None:
    """Returns what notes that something other than a layer itself reads its weight; None outside of `use_adapters`."""
    use, calls = _current.get(), plan.calls
    if use is None or calls is None:
        return None

    def note() -> None:
        calls.read.add(plan.path)
        use.read.setdefault(calls, set()).add(plan.path)

    return note


def _context(adapters: LoRAContext | Sequence[AdapterSpec], table: Any, options: dict[str, Any]) -> LoRAContext:
    if not isinstance(adapters, LoRAContext):
        return LoRAContext.of(adapters, table, **options)
    if table is not None or options:
        names = [*(["table"] if table is not None else []), *options]
        raise ConfigError(
            "lora.table",
            f"a context holds all settings, so {', '.join(names)} would have no effect.",
            fix=f"LoRAContext.of(adapters, …, {', '.join(f'{name}=…' for name in names)})",
        )
    return adapters


@contextmanager
def traced_anew() -> Iterator[None]:
    """Makes jax trace functions again in its body, if a function is being traced."""
    with _use_number(object()) if staging() else nullcontext():
        yield


def check_inside(staged: bool) -> None:
    """Checks that a context from outside of a compiled function is not used inside it.

    Raises:
        RunError: `lora.context-outside-jit`.
    """
    if staging() and not staged:
        raise RunError(
            "lora.context-outside-jit",
            "the adapters were chosen outside the function that is compiled.",
            why="the compiled function, which may be one inside the model, would keep this table forever",
            fix=_INSIDE,
        )


def staging() -> bool:
    """Whether a function is being traced for compilation, so that new arrays are tracers. False under grad alone."""
    return isinstance(jnp.zeros(()), Tracer)
