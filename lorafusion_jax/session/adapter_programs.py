"""The compiled programs of one adapter: the end of its global batch, its step, and what reads or writes its leaves.

Adapters of equal shapes share programs, see `leaves`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lorafusion_jax.config.schema import OptimSettings
from lorafusion_jax.optim.step import Hyper
from lorafusion_jax.optim.table import optimizer as find_optimizer
from lorafusion_jax.session import adapter_step
from lorafusion_jax.session import leaves as lv
from lorafusion_jax.session.adapter_step import BatchSummary, Totals
from lorafusion_jax.session.device_copy import InParts, cut, find_cuts
from lorafusion_jax.session.joined_leaves import JoinedLeaves
from lorafusion_jax.session.leaves import Leaves, Own, Place
from lorafusion_jax.session.mesh import StageMesh
from lorafusion_jax.session.stage_columns import StageColumns


class AdapterPrograms:
    """Jitted functions of one adapter on a stage. `own_columns` are its trainable leaves, see `leaves.own_columns`.

    Args:
        stage: devices of the stage.
        columns: leaves of the stage.

    Attributes:
        compiled: the programs in use, by name and by what they depend on.
    """

    def __init__(self, stage: StageMesh, columns: StageColumns):
        self._stage, self._columns = stage, columns
        self.compiled: dict[tuple[Hashable, ...], Any] = {}
        self._copied: dict[tuple[Hashable, ...], Any] = {}  # shapes of what `copy_state` copies
        self._joined: dict[tuple[Hashable, ...], JoinedLeaves] = {}
        self._optimizers: dict[tuple[Hashable, ...], Any] = {}  # their shapes

    def _jit(
        self, key: tuple[Hashable, ...], function: Callable, *, donate: tuple[int, ...] = (), out: Any = None
    ) -> Any:
        """Returns the program of a key; its results are on all devices, or as `out` says."""
        if key not in self.compiled:
            out = self._stage.everywhere if out is None else out
            self.compiled[key] = jax.jit(function, donate_argnums=donate, out_shardings=out)
        return self.compiled[key]

    def joined(self, own_columns: Own, optim: OptimSettings, lora: Leaves) -> JoinedLeaves:
        """Returns the vectors of an adapter's trainable leaves: those that its optimizer treats alike are joined."""
        elementwise = find_optimizer(optim.name).elementwise
        key = own_columns, elementwise, *optim.lr_ratios
        if key not in self._joined:
            self._joined[key] = JoinedLeaves.of(
                self._columns.trained,
                own_columns,
                {name: leaf.shape for name, leaf in lora.items()},
                lr_groups=optim.lr_ratios,
                apart=self._columns.twins if elementwise else lora.keys(),
            )
        return self._joined[key]

    def close_batch(
        self, own_columns: Own, joined: JoinedLeaves, adapter: Place, sums: Leaves, totals: Totals | None, alive: Array
    ):
        """Extracts an adapter's gradient from the sums and adds it up over replicas. Reads only its own columns.

        Returns:
            (gradient in vectors, BatchSummary, `JoinedLeaves.first_not_finite`, sums and totals with the adapter's part
            cleared)
        """
        close = partial(adapter_step.close_batch, self._columns.trained, own_columns, joined, self._columns.twins)
        everywhere, rows, devices = self._stage.everywhere, self._stage.by_replica, self._stage.by_device
        out = (everywhere, everywhere, everywhere, devices, rows)
        program = self._jit(("close", own_columns, *joined.names), close, donate=(1, 2), out=out)
        return program(adapter, sums, totals, alive)

    def join_twins(self, embed: Array, head: Array, summary: BatchSummary) -> tuple[Array, BatchSummary]:
        """Adds up the gradients of trained rows as embedding and as head, which is all of their gradient.

        Returns:
            (the sum; the summary of a stage with its part)
        """
        return self._jit(("join",), adapter_step.join_twins)(embed, head, summary)

    def step(
        self, own_columns: Own, joined: JoinedLeaves, optim: OptimSettings, adapter: Place, lora: Leaves,
        gradient: Leaves, optimizer: Any, alive: Array, summaries: Sequence[BatchSummary], numbers: Hyper,
    ):  # fmt: skip
        """Steps one adapter. Other adapters do not change.

        This step and all later ones are refused if a gradient, the loss or the norm is not finite on any stage, or if
        this stage would write a number that is not finite. What other stages would write is not known here. So with
        several stages the caller also gets the arrays from before the step, see `put_back`.

        Returns:
            (lora, optimizer, alive, `JoinedLeaves.first_not_finite`, the adapter's weights before the step in vectors;
            None with one stage)
        """
        alone = len(summaries) == 1
        # `joined` stands for the groups of learning rates, too: there is one of each kind.
        key = ("step", own_columns, optim.name, optim.clip > 0, joined, alone)
        step = partial(adapter_step.step, self._columns.trained, own_columns, joined, optim)
        # `alive` is not donated: it is a few bytes, and others wait for it to know that the step is done
        program = self._jit(key, step, donate=(1, 3) if alone else (1,))
        return program(adapter, lora, gradient, optimizer, alive, tuple(summaries), numbers)

    def put_back(
        self, own_columns: Own, joined: JoinedLeaves, adapter: Place, lora: Leaves, earlier: Leaves, alive: Array
    ):
        """Restores earlier weights of an adapter and marks it as not alive, so that later steps are refused.

        Returns:
            (lora, alive)
        """
        put_back = partial(adapter_step.put_back, self._columns.trained, joined)
        program = self._jit(("put back", own_columns, *joined.names), put_back, donate=(1,))
        return program(adapter, lora, earlier, alive)

    def revive(self, adapter: Place, alive: Array) -> Array:
        """Marks an adapter as alive."""
        program = self._jit(("revive",), lambda adapter, alive: alive.at[adapter.index].set(True))
        return program(adapter, alive)

    def write(
        self, own_columns: Own, adapter: Place, lora: Leaves, sums: Leaves, totals: Totals | None, alive: Array,
        new_weights: Leaves,
    ):  # fmt: skip
        """Writes an adapter's trainable leaves and clears its sums. Other adapters do not change.

        Returns:
            (lora, sums, totals, alive)
        """
        write = partial(adapter_step.write, self._columns.trained, own_columns)
        everywhere, rows, devices = self._stage.everywhere, self._stage.by_replica, self._stage.by_device
        out = (everywhere, devices, rows, everywhere)
        program = self._jit(("write", own_columns), write, donate=(1, 2, 3), out=out)
        return program(adapter, lora, sums, totals, alive, new_weights)

    def take(self, own_columns: Own, adapter: Place, lora: Leaves) -> Leaves:
        """Copies one adapter's leaves.

        One program serves all leaves, and all adapters of a shape. Slicing leaf by leaf compiled 45 programs for four
        adapters on two stages.
        """
        columns = self._columns.all
        program = self._jit(
            ("take", own_columns), lambda adapter, lora: lv.take(lora, columns, own_columns, adapter.first)
        )
        return program(adapter, lora)

    def take_sums(self, own_columns: Own, adapter: Place, sums: Leaves, totals: Totals | None) -> tuple[Leaves, Totals]:
        """Copies what an adapter has summed up since its last step: [devices, L, ...], and [replicas]."""
        take = partial(adapter_step.take_sums, self._columns.trained, own_columns)
        out = self._stage.by_device, self._stage.by_replica
        return self._jit(("take sums", own_columns), take, out=out)(adapter, sums, totals)

    def put_sums(
        self, adapter: Place, sums: Leaves, totals: Totals | None, new_sums: Leaves, new_totals: Totals
    ) -> tuple[Leaves, Totals | None]:
        """Writes what an adapter has summed up. Other adapters do not change."""
        key = ("put sums", tuple(new_sums), tuple(leaf.shape for leaf in new_sums.values()))
        out = self._stage.by_device, self._stage.by_replica
        program = self._jit(key, partial(adapter_step.put_sums, self._columns.trained), donate=(1, 2), out=out)
        return program(adapter, sums, totals, new_sums, new_totals)

    def copy_state(self, own_columns: Own, adapter: Place, leaves: Leaves, optimizer: Any) -> tuple[Any, Any]:
        """Copies one adapter's leaves and its optimizer state, each array as `InParts`.

        The leaves are in vectors, see `all_joined`.
        """
        columns = self._columns.all

        def state(adapter: Place, leaves: Leaves, optimizer: Any) -> tuple[Any, Any]:
            joined = self.all_joined(own_columns, leaves)
            return joined.join(lv.windows_of(leaves, columns, own_columns, adapter.first)), optimizer

        def copy(*arguments: Any) -> Any:
            return jax.tree.map(lambda leaf: cut(leaf, *_cuts(leaf)), state(*arguments))

        arguments = adapter, leaves, optimizer
        key = ("copy", own_columns, jax.tree.structure(optimizer))
        if key not in self._copied:
            self._copied[key] = jax.eval_shape(state, *arguments)
        parts = self._jit(key, copy)(*arguments)
        return jax.tree.map(lambda leaf, pieces: InParts(leaf.shape, pieces, _cuts(leaf)[0]), self._copied[key], parts)

    def all_joined(self, own_columns: Own, leaves: Leaves) -> JoinedLeaves:
        """Returns the vectors in which `copy_state` copies an adapter's leaves, constant ones included."""
        return JoinedLeaves.of(self._columns.all, own_columns, {name: leaf.shape for name, leaf in leaves.items()})

    def put(self, leaves: Leaves, first: Array, adapter_leaves: Leaves) -> Leaves:
        """Writes some leaves of one adapter, trainable or constant ones."""
        columns = self._columns.all
        program = self._jit(
            ("put",), lambda leaves, first, adapter_leaves: lv.put(leaves, columns, first, adapter_leaves)
        )
        return program(leaves, first, adapter_leaves)

    def zeros(self, own_columns: Own, adapter: Place, lora: Leaves) -> Leaves:
        """Returns zeros for an adapter's trainable leaves."""
        return jax.tree.map(jnp.zeros_like, self.take(own_columns, adapter, lora))

    def first_rows(self, table: Array, tokens: Sequence[int]) -> Array:
        """Returns rows of a token table, which an adapter starts from, float32 [1, D, C]."""
        program = self._jit(("rows", len(tokens)), lambda table, tokens: table[tokens].T.astype(jnp.float32)[None])
        return program(table, np.array(tokens, np.int32))

    def first_optimizer(self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves) -> Any:
        """Computes the initial optimizer state of one adapter with a compiled program."""
        key = ("first optimizer", own_columns, optim.name, *optim.lr_ratios)
        return self._jit(key, partial(self.init_optimizer, own_columns, optim))(adapter, lora)

    def optimizer_shapes(self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves) -> Any:
        """Returns the shapes of one adapter's optimizer state."""
        key = own_columns, optim.name, *optim.lr_ratios
        if key not in self._optimizers:
            self._optimizers[key] = jax.eval_shape(partial(self.init_optimizer, own_columns, optim), adapter, lora)
        return self._optimizers[key]

    def init_optimizer(self, own_columns: Own, optim: OptimSettings, adapter: Place, lora: Leaves) -> Any:
        """Returns the initial optimizer state of one adapter."""
        joined = self.joined(own_columns, optim, lora)
        return adapter_step.first_optimizer(self._columns.trained, own_columns, joined, optim, adapter, lora)


def _cuts(leaf: Any) -> tuple[int, int]:
    """How an array that every device has whole is cut."""
    return find_cuts(leaf.shape, leaf.shape, leaf.dtype.itemsize)
