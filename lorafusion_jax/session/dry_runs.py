"""Runs what a stage will run, without the other stages: to compile it or to time it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from lorafusion_jax.data.assemble import Microbatch
from lorafusion_jax.optim.step import hyper
from lorafusion_jax.session.move import first_of
from lorafusion_jax.session.parts import Carried
from lorafusion_jax.session.stage import Stage

NO_SLOT = -1  # slot of a pass outside of a plan


def time_passes(
    stage: Stage, batch: Microbatch, before_backward: Callable[[], None] = lambda: None
) -> tuple[float, float]:
    """Runs forward and backward without the other stages, with random inputs, and waits for them.

    The inputs are not zeros: products of zeros draw so little power that an H200 keeps a higher clock, and stages
    of a 70B model seemed 15 % faster than they were. But padding rows are as in a run, all alike and without a
    gradient: on random ones, plans with more padding seemed slower than they are. There is no pause before a pass,
    because an idle GPU cools and then runs at a higher clock.

    Returns:
        Seconds of forward and of backward.
    """
    activations = None if stage.weights.embed is not None else noise(stage, batch)
    gradient = None if stage.weights.head is not None else gradient_noise(stage, batch)
    jax.block_until_ready((activations, gradient))
    began = time.perf_counter()
    jax.block_until_ready(stage.forward(NO_SLOT, batch, activations))
    forward_s = time.perf_counter() - began
    before_backward()
    began = time.perf_counter()
    jax.block_until_ready(stage.backward(NO_SLOT, gradient))
    return forward_s, time.perf_counter() - began


def compile_steps(stage: Stage, num_stages: int, only: int | None = None) -> None:
    """Compiles the optimizer steps of all adapters by running them on temporary copies, and waits for them.

    Args:
        only: place of the only adapter to compile for.

    Waiting is necessary: later work does not depend on these copies, so one process could start a real all-reduce
    while another still runs one of these, and the two would be matched.
    """
    programs = stage.programs.adapters
    indices = stage.one_of_every_kind() if only is None else [only]
    optimizers = {index: _optimizer_to_compile(stage, index) for index in indices}
    lora, sums, totals, alive, optimizers = _copy((stage.lora, stage.sums, stage.totals, stage.alive, optimizers))
    for index, optimizer in optimizers.items():
        columns, optim, adapter = stage.own_columns[index], stage.settings[index].optim, stage.places[index]
        joined = stage.joined(index)
        if stage.vacant:  # an adapter like this one may join
            programs.first_optimizer(columns, optim, adapter, lora)
            zeros = programs.zeros(columns, adapter, lora)
            lora, sums, totals, alive = programs.write(columns, adapter, lora, sums, totals, alive, zeros)
        gradient, summary, _, sums, totals = programs.close_batch(columns, joined, adapter, sums, totals, alive)
        if twins := sorted(stage.programs.columns.twins & gradient.keys()):
            programs.join_twins(gradient[twins[0]], gradient[twins[-1]], summary)
        summaries = [summary._replace(metrics={})] * num_stages
        lora, _, alive, _, _ = programs.step(
            columns, joined, optim, adapter, lora, gradient, optimizer, alive, summaries, hyper(optim, 0.0)
        )
    jax.block_until_ready((lora, sums, totals, alive))


def try_evaluation(stage: Stage, batch: Microbatch) -> None:
    """Compiles an evaluation by running it without the other stages, and waits for it."""
    activations = None if stage.weights.embed is not None else noise(stage, batch)
    jax.block_until_ready(stage.evaluate(batch, None if activations is None else first_of(activations)))


def noise(stage: Stage, batch: Microbatch) -> Carried:
    """Returns random, normally distributed activations of a microbatch; all padding rows are alike."""
    return _draw(_random_activations, stage, batch)


def gradient_noise(stage: Stage, batch: Microbatch) -> Carried:
    """Returns random gradients of a microbatch's activations; those of padding rows are zero."""
    return _draw(_random_gradients, stage, batch)


def _optimizer_to_compile(stage: Stage, index: int) -> Any:
    if index in stage.vacant:
        optim, adapter = stage.settings[index].optim, stage.places[index]
        return stage.programs.adapters.first_optimizer(stage.own_columns[index], optim, adapter, stage.lora)
    return stage.optimizers[stage.all_names[index]]


def _copy(arrays: Any) -> Any:
    places = jax.tree.map(lambda leaf: leaf.sharding, arrays)
    return jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=places)(arrays)


def _draw(draw: Callable[..., Array], stage: Stage, batch: Microbatch) -> Carried:
    program = jax.jit(draw, static_argnums=(1, 2), out_shardings=stage.mesh.by_replica)
    x = program(batch.row_adapter, stage.parts.model.hidden_size, stage.parts.dtype)
    return x if batch.balance is None else (x, stage.programs.ends.no_choices(batch.balance.length))


def _random_activations(row_adapter: Array, width: int, dtype: Any) -> Array:
    x = jax.random.normal(jax.random.key(0), (*row_adapter.shape, width), dtype)
    return jnp.where(row_adapter[..., None] < 0, x[..., :1, :], x)


def _random_gradients(row_adapter: Array, width: int, dtype: Any) -> Array:
    x = jax.random.normal(jax.random.key(1), (*row_adapter.shape, width), dtype)
    return jnp.where(row_adapter[..., None] < 0, 0, x)
