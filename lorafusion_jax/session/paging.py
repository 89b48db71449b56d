"""Adapters that take turns in places: those without one wait in the bank, with all that training goes on from."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import nullcontext

import numpy as np

from lorafusion_jax.planning.turns import NextUses
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.bank import BYTES_AHEAD
from lorafusion_jax.session.distant_stage import local_stages
from lorafusion_jax.session.opened import OpenSession
from lorafusion_jax.session.places import PlaceWeights
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.stage_state import PlaceArrays
from lorafusion_jax.session.state import read_adapter
from lorafusion_jax.session.task import Task


class PagedSession(OpenSession):
    """What a session does to have more adapters than places, see `Session`."""

    def holds(self, names: Collection[str]) -> bool:
        """Whether all these adapters are in places."""
        return not self.is_paged or self.index.keys() >= set(names)

    @property
    def num_places(self) -> int:
        """How many adapters can be on the devices together."""
        return len(self._stack.config.adapters)

    def take_places(self, uses: NextUses, slot: int) -> None:
        """Brings the adapters of a slot into places, and those that come next. Collective over processes.

        One stage works on meanwhile. With more, a refused step is put back later, so that all slots end before.
        """
        stay = {name for name in self.index if self.steps.num_waiting(name)}  # until it is known whether they stepped
        if len(self.stages) == 1 and is_alone() and len(uses.adapters(slot) | stay) <= self.num_places:
            self.hold(uses.wanted(slot, self.index, self.num_places, stay))
        else:
            self.drain()
            with nullcontext() if self._spans is None else self._spans.pause("moving adapters"):
                self.hold(uses.wanted(slot, self.index, self.num_places))
        self.send_ahead(uses, slot)

    def hold(self, names_needed: Sequence[str]) -> None:
        """Brings adapters into places, where not all have one. Collective over processes.

        Those that leave their places for them wait in the bank with their sums. The results of all their steps are
        read; with several stages or processes no slot may be in flight.

        Args:
            names_needed: at most `num_places`. Those that have not joined yet are left out.
        """
        places = self._stack.places
        if not self.is_paged or places is None:
            return
        # Whoever else trains stays where there is room.
        still_training = [
            name for name in self.index if name not in names_needed and self.tasks[name].status == "running"
        ]
        names = [name for name in (*names_needed, *still_training) if name in self.tasks][: self.num_places]
        index = places.arrange({name: self.tasks[name].spec.rank for name in names}, self.index)
        coming = {name: place for name, place in index.items() if self.index.get(name) != place}
        leaving = [name for name, place in self.index.items() if place in coming.values() or name in coming]
        for name in leaving:
            self._leave(name)
        self.executor.wait_dispatched()  # the copies, too; what they are of is dropped next
        self._vacate(leaving)
        for name, place in coming.items():
            self._bring(name, place)

    def send_ahead(self, uses: NextUses, slot: int) -> None:
        """Begins to send the arrays of adapters that come to places next, while others train."""
        if self._stack.paged and is_alone():
            names = [name for name in uses.coming(slot, self.index, self.num_places) if name in self.tasks]
            self._bank.send(names[: self._most_copies()], self._send)

    def _send(self, name: str) -> tuple[PlaceWeights, list[PlaceArrays]]:
        weights = self._waiting_weights(self.tasks[name], self._bank.get(name))
        return weights, self._writer.send(self.tasks[name], weights)

    def _most_copies(self) -> int:
        """How many states of adapters may be on the devices beside those in places, on their way."""
        room = [
            min(BYTES_AHEAD, stage.free_bytes / 4) / stage.place_bytes for stage in local_stages(self.stages).values()
        ]
        return max(1, int(min(room)))

    def _leave(self, name: str) -> None:
        """Takes the state of an adapter into the bank. One that is at its first step has none."""
        task, begun = self.tasks[name], name in self.loop.begun
        self.loop.begun.discard(name)
        if not (task.step or begun):
            return
        copies = is_alone() and self._copies_states
        self._bank.make_room(self._most_copies())
        read = read_adapter(self.executor, self.index[name], name, optimizer=True, sums=begun, copies=copies)
        step, digest, alive = task.step, task.source.digest, task.status != "failed"

        def state() -> AdapterState:
            parts = read()
            sums = (*parts["sums"].values(), *parts["totals"].values())
            if not any(leaf.view(np.uint32).any() for leaf in sums):
                parts |= {"sums": {}, "totals": {}}
            return AdapterState(step=step, data=digest, alive=alive, **parts)

        if copies:
            self._bank.read(name, state)
        else:
            self._bank.keep({name: state()})

    def _bring(self, name: str, place: int) -> None:
        task, sent, state = self.tasks[name], self._bank.pop_sent(name), self._bank.pop(name)
        weights, arrays = (self._waiting_weights(task, state), None) if sent is None else sent
        self._put(place, task, weights, arrays)
        if state is not None:
            self._write_sums(task, place, state)

    def _waiting_weights(self, task: Task, state: AdapterState | None) -> PlaceWeights:
        if state is None:
            return self._writer.first_weights(task, self._bank.starts.get(task.name))
        return PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer)

    def _put(self, place: int, task: Task, weights: PlaceWeights, sent: Sequence[PlaceArrays] | None = None) -> int:
        """Writes an adapter into a free place. Returns the number of its objective."""
        number = self._writer.number_objective(task)
        self.tasks[task.name], self.index[task.name] = task, place
        self._writer.write(place, task, weights, number, sent)
        return number

    def _write_sums(self, task: Task, place: int, state: AdapterState) -> None:
        if state.sums:
            self.executor.read_all(lambda stage: stage.write_sums(place, state.sums, state.totals))
            task.source.take_sums(exist=True)
            self.loop.begun.add(task.name)
