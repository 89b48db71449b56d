"""A session: a base model on its devices, its compiled programs, and a place for each adapter.

Only the session and its parts use devices. A run opens one with the adapters of its job; others may join, and those
that have ended keep their places. A service opens one with free places, in which adapters start and stop. One loop runs
slots of either: of a plan (`Batches`) or of windows (`WindowPlanner`).

For adapters that fit into no free place, new stages for all adapters replace the old ones, on the same frozen weights.
The states of the old adapters are gathered first and loaded onto the new stages, where new ones start; they stay
bitwise equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from lorafusion_jax.checkpoint.warm_start import read_warm_starts
from lorafusion_jax.config.join import select_adapters
from lorafusion_jax.config.references import reference_of
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.stack import stack_of, without_places
from lorafusion_jax.data.prepare import Prepared
from lorafusion_jax.data.references import EVAL
from lorafusion_jax.data.tokenized_set import TokenizedSet
from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.peft.folder import Arrays
from lorafusion_jax.session.adapter_state import AdapterState
from lorafusion_jax.session.base import memory_warning, stages_for
from lorafusion_jax.session.calls import Capacity
from lorafusion_jax.session.distant_stage import AnyStage, local_stages
from lorafusion_jax.session.evaluation import Evaluation, evaluate
from lorafusion_jax.session.first_weights import starting_weights
from lorafusion_jax.session.judges import judge_in_place, judge_of_folder
from lorafusion_jax.session.links import Links
from lorafusion_jax.session.paging import PagedSession
from lorafusion_jax.session.places import PlaceWeights, check_state
from lorafusion_jax.session.processes import is_alone
from lorafusion_jax.session.references import (
    BASE_ALONE,
    References,
    SetPass,
    finish,
    open_passes,
    pass_over_batch,
    reference_passes,
    rollout_reference,
)  # fmt: skip
from lorafusion_jax.session.release import release_unused
from lorafusion_jax.session.state import gather, load_states, read_adapter, states_of
from lorafusion_jax.session.stream import stream_task
from lorafusion_jax.session.task import AdapterProgress, Task, tasks_of


def grow_stages(
    stages: Sequence[AnyStage], links: Links, config: JobConfig, weights: Mapping[int, Arrays]
) -> list[AnyStage]:
    """Returns stages with more adapters, the new ones at their first step. Collective over processes.

    Args:
        stages: with no work in flight. Their trainable arrays are deleted, so that the devices never hold both.
        config: of all adapters of the run.
        weights: initial weights of new adapters from a warm start, by position.
    """
    states = _states(stages, links)
    for stage in local_stages(stages).values():
        stage.lora, stage.constants, stage.sums, stage.optimizers, stage.totals = {}, {}, {}, {}, None
    more = stages_for(stages, config)
    specs = dict(more[0].occupied)
    starts = {number: weights[index] for number, index in enumerate(specs) if index in weights}
    lora = starting_weights(more[0].parts.leaves, list(specs.values()), starts)
    for stage in local_stages(more).values():
        stage.start(lora)
    # The states of new adapters are those that `start` gave them; old ones get theirs back.
    load_states(more, _states(more, links) | states)
    return more


def _states(stages: Sequence[AnyStage], links: Links) -> dict[str, AdapterState]:
    """Returns the states of all adapters, with copies of what a host array may view of a device array.

    Views would live on with the device arrays, one more at every addition.
    """
    states = states_of(gather(stages, links), {spec.name: place for place, spec in stages[0].occupied})
    return {name: replace(state, optimizer=jax.tree.map(np.array, state.optimizer)) for name, state in states.items()}


# jax's caches keep traces of all shapes, 3 MB for every addition. They belong to the whole process, so they are cleared
# seldom.
ADDITIONS_IN_CACHES = 16


class Session(PagedSession):
    """Adapters on the stages of a pipeline. Methods are called from one thread, unless they say otherwise.

    Of a job: call `open`, `start_all`, `load_states` to go on, and then `finish_loading`; `add` adds adapters. With
    free places: call `open_places`; `start` and `stop` adapters. Adapters that are not in a microbatch do not change.
    """

    def add(
        self,
        config: JobConfig,
        prepared: Prepared,
        weights: Mapping[int, Arrays],
        clocks: Mapping[str, AdapterProgress] | None = None,
    ) -> None:
        """Adds the last adapters of a job and starts them. Collective over processes.

        The state of the others stays bitwise equal. No work may be in flight. Adapters in free places compile nothing
        that is known of their shapes. For others every program compiles again, because the arrays of all adapters
        change their shapes.

        Args:
            config, prepared: of all adapters, the present ones first.
            weights: weights of new adapters by their number in the job, as in `start_all`.
            clocks: progress of the new adapters.
        """
        names = [adapter.name for adapter in config.adapters]
        assert names[: len(self.names)] == self.names
        self.executor.wait_dispatched()
        starts = {names[number]: arrays for number, arrays in weights.items()}
        tasks = tasks_of(select_adapters(config, names[len(self.names) :]), prepared, clocks)
        stack, grows = stack_of(config), self.needs_room(config)
        if self._stack.paged:
            self.tasks |= tasks
            self.config, self._held_out, self._bank.starts = config, None, {**self._bank.starts, **starts}
            return
        if not grows:
            self.config, self._held_out = config, None
            for name, task in tasks.items():
                self._put(stack.index[name], task, self._writer.first_weights(task, starts.get(name)))
            return
        by_place = {stack.index[name]: arrays for name, arrays in starts.items()}
        self.executor.replace_stages(grow_stages(self.stages, self.executor.links, config, by_place))
        self.tasks |= tasks
        self._arrange(config, stack)
        self._unstarted = [self.index[name] for name in tasks if name not in starts]
        self._start_from_base()
        self._additions += 1
        release_unused(caches=self._additions % ADDITIONS_IN_CACHES == 0)

    def needs_room(self, config: JobConfig) -> bool:
        """Whether adapters of a job do not all fit into places, so that adding them compiles every program."""
        return len(stack_of(config).config.adapters) > len(self._stack.config.adapters)

    def lacks_memory(self, config: JobConfig) -> str | None:
        """Returns why the devices cannot hold the adapters of a job; None if they can, or if it is unknown."""
        return memory_warning(config, self._model, self.stages[0].remat)

    def draw(self, task: Task) -> PlaceWeights:
        """Draws an adapter's first weights, or reads those of `lora.init_from`; from any thread.

        Those of an 8B take most of a second, in which the devices would wait if `start` drew them.
        """
        return self._writer.first_weights(task, read_warm_starts(task.config).get(0))

    def start(
        self,
        place: int,
        task: Task,
        state: AdapterState | None = None,
        first: PlaceWeights | None = None,
        *,
        sums: bool = False,
    ) -> None:
        """Starts an adapter in a free place. Others train on; nothing compiles for known shapes of adapters.

        The first adapter of other rank, targets or optimizer compiles its own step: a second or two; the first of
        another objective the loss. An adapter whose objective compares with a reference is `preparing` at first: what
        the reference says is computed between the slots of the others.

        Args:
            state: continue from there (None: from initial weights, or `lora.init_from`).
            first: what `draw` returned (None: it is called if it is needed).
            sums: continue the global batch that the state has begun; otherwise its samples run again.

        Raises:
            RunError: `session.place`, it is taken or too small; `session.segments`.
            CheckpointError: `state.data`, the state was trained on other data; `peft.other-base`.
        """
        if place not in range(len(self.places.ranks)) or place in self.index.values() or task.name in self.index:
            raise RunError("session.place", f"{task.name} cannot start in place {place}: it is taken.")
        if (factor := task.config.train.router_aux) != self.config.train.router_aux:
            raise RunError(
                "session.router-aux",
                "the loss of routers has one factor in a session.",
                why=f"train.router_aux is {factor:g} for {task.name} and {self.config.train.router_aux:g} here",
                fix="a session that was opened with the job's train.router_aux",
            )
        self._writer.check(place, task, self.free_places.tail.most_segments)
        reference = reference_of(task.adapter, [task.name]) if task.references is None else None
        if first is None and (state is None or reference is not None):
            first = self.draw(task)
        weights = first
        if state is not None:
            check_state(task, state)
            weights = PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer)
        assert weights is not None
        compared = self._writer.reference_weights(place, task, reference, first or weights)
        self.make_room(task)
        task.restart(0 if state is None else state.step)
        number = self._put(place, task, compared or weights)
        if sums and state is not None:
            self._write_sums(task, place, state)
        if reference is None:
            return
        task.status = "preparing"

        def take(references: References | None) -> None:
            if compared is not None:
                self._writer.write(place, task, weights, number)
            if references is not None:
                task.take_references(references[task.name])

        position = BASE_ALONE if compared is None else place
        passes = (self._pass_over(task, key, samples, position) for key, samples in task.source.sets.items())
        self.references.add(task.name, passes, take)

    def new_stream(
        self, name: str, *, rank: int, alpha: float = 32.0, seed: int = 0, targets: str | list[str] = "all-linear",
        owner: str = "",
    ) -> Task:  # fmt: skip
        """Returns the task of a training client, whose source is a `Stream`; `start` starts it.

        Args:
            alpha: the low-rank product is scaled by alpha / rank.
            targets: projections.
            owner: shares its turns between its adapters (empty: this adapter is an owner).

        Raises:
            ConfigError, ErrorList: the adapter is invalid.
        """
        tail, adapter = self.free_places.tail, {"rank": rank, "alpha": alpha, "seed": seed, "targets": targets}
        tokens = tail.limits.tiles * tail.limits.tile_tokens
        capacity = Capacity(tokens=tokens, vocab_size=self._model.vocab_size, num_outputs=self._model.num_outputs)
        return stream_task(self.config, name, capacity, owner=owner, calls_alone=tail.reproducible, **adapter)

    def restore(self, name: str, state: AdapterState, *, optimizer: bool = True) -> None:
        """Replaces the state of an adapter that trains, after all work issued so far.

        Args:
            optimizer: False: the optimizer begins anew, and sums of the state are left out.

        Raises:
            CheckpointError: `state.data`, or `state.shapes`, it belongs to an adapter of other rank or targets.
        """
        task, place = self.tasks[name], self.index[name]
        check_state(task, state)
        shapes = self.stages[0].parts.leaves.own_shapes([(place, task.spec)])[name]
        if {leaf: array.shape for leaf, array in state.weights.items()} != shapes:
            raise CheckpointError(
                "state.shapes",
                f"the state does not fit {name}.",
                why="its rank, its targets or its base differ",
                fix="a client with the rank and targets of the state",
            )
        self.steps.settle(name)
        weights = PlaceWeights(spec=task.spec, leaves=state.weights, optimizer=state.optimizer if optimizer else None)
        task.clock.step = state.step if optimizer else 0
        self._writer.write(place, task, weights, self._writer.number_objective(task))
        task.source.take_sums(exist=False)
        if optimizer:
            self._write_sums(task, place, state)

    def _pass_over(self, task: Task, key: str, samples: TokenizedSet, position: int) -> SetPass:
        return SetPass(
            adapter=task.name,
            key=key,
            samples=samples,
            slots=self.free_places.pack(task, samples),
            shape=self.free_places.sets_shape,
            tile_tokens=self.config.batch.tile_tokens,
            stages=self.executor.stages,
            position=position,
            state=self._writer.teacher_state(task),
            describe=self.executor.describe,
        )

    def stop(self, name: str) -> AdapterState:
        """Frees a place. Returns the state after the adapter's last step; a begun batch is dropped.

        Waits for the slots that were issued. An adapter that was still preparing has to prepare again.
        """
        self.drain()
        self.references.drop(name)
        state = self.read(name)()
        self.forget(name)
        return state

    def end_training(self, name: str) -> int:
        """Ends the training of an adapter after its last step that was issued; a begun batch is dropped.

        It keeps its place until `forget`. Others train on, also while it is read.

        Returns:
            The step that it comes to, unless the adapter fails before.
        """
        task = self.tasks[name]
        self.references.drop(name)
        if task.status in ("preparing", "running"):
            task.status = "leaving"
        return task.step + self.steps.num_waiting(name)

    def pause(self, name: str) -> None:
        """Gives an adapter no slots until `resume`, between two windows. A begun batch waits with its sums."""
        self._change(name, "running").pause()

    def resume(self, name: str) -> None:
        """Continues an adapter that is paused."""
        self._change(name, "paused").resume()

    def cancel(self, name: str, reason: str) -> None:
        """Ends an adapter at once, between two windows; a begun batch is left without its step."""
        self._change(name, "running", "paused").cancel(reason)

    def finish(self, name: str, reason: str = "") -> int:
        """Ends an adapter after the batch that it has begun, between two windows. Returns its last step."""
        self._change(name, "running")
        task = self.tasks[name]
        begun = task.cursor is not None and bool(task.cursor.done)
        step = task.step + self.steps.num_waiting(name) + begun
        task.end_at(step, reason)
        return step

    def _change(self, name: str, *statuses: str) -> AdapterProgress:
        clock = self.tasks[name].clock
        if clock.status not in statuses:
            raise RunError("session.status", f"{name} is {clock.status}.", why=f"only for one that is {statuses[0]}")
        return clock

    def read(self, name: str, *, optimizer: bool = True, sums: bool = False) -> Callable[[], AdapterState]:
        """Returns a function that waits for the state of an adapter, from any thread; all train on meanwhile.

        The state is that after the last step that was issued: it counts once `Task.step` has come to its step, and not
        if the adapter fails before. The devices copy it. Call the function before you start to read another state,
        because devices have memory for one. If they lack even that, this waits for the slots that were issued, and
        reads the state itself. Of an adapter that does not train any more they copy the weights alone.

        Args:
            optimizer: False: without its state, a third of the copy and of what is transferred.
            sums: with what a begun global batch has summed up; without, its samples run again.
        """
        assert name not in self.references, "the place may hold the weights of a reference"
        if (waiting := self._bank.get(name)) is not None:
            return lambda: waiting
        task, place = self.tasks[name], self.index[name]
        trains = task.status not in ("done", "leaving")
        if trains and not self._copies_states:
            self.drain()
        step = task.step + self.steps.num_waiting(name)
        parts = read_adapter(
            self.executor, place, name, optimizer=optimizer, sums=sums, copies=trains and self._copies_states
        )

        def wait() -> AdapterState:
            return AdapterState(step=step, data=task.source.digest, **parts())

        if is_alone() and (self._copies_states or not trains):
            return wait
        state = wait()  # with several processes it may be collective, so it cannot run in the background
        return lambda: state

    def forget(self, name: str) -> None:
        """Frees a place without reading its state. Waits for the slots that were issued while its adapter trains."""
        if self.tasks[name].status not in ("done", "leaving") or self.steps.num_waiting(name):
            self.drain()
        self.references.drop(name)
        self.tasks.pop(name).source.close()
        del self.index[name]
        self.executor.read_all(lambda stage: stage.optimizers.pop(name, None))

    def evaluate(self, name: str) -> Evaluation | None:
        """Evaluates an adapter, after all work issued so far, on its held-out data; None if it has none.

        It must be in a place, see `hold`.
        """
        task = self.tasks[name]
        samples = task.source.sets.get(EVAL)
        if samples is None:
            return None
        rows = self.assembler.held_out(*self._sets.pack_held_out(task, samples), name, samples, task.chosen)
        return evaluate(self.executor, self.index[name], task, samples, rows)

    def compute_references(
        self, prepared: Prepared, names: Sequence[str], on_progress: Callable[[str], None] = lambda text: None
    ) -> References:
        """Computes what the references of these adapters say of their samples. Waits; collective over processes.

        The adapters, and those that are their references, must be at their first step.
        """
        self.executor.wait_dispatched()
        with self.executor.blaming(None, None):
            passes = reference_passes(self.config, prepared, self.stages, names, self.executor.describe)
            return self.references.compute(passes, on_progress)

    def reference_logprobs(self, name: str, samples: TokenizedSet) -> Any:
        """Computes log p of the learned tokens of some samples, [T], under the reference of an adapter. Waits."""
        config = without_places(self.config.model_copy(update={"adapters": (self.tasks[name].adapter,)}))
        if self._rollout_references.get(name, ((), 0))[0] != self.stages:
            self._rollout_references[name] = self.stages, rollout_reference(config, self.stages)
        reference = self._rollout_references[name][1]
        with self.executor.blaming(None, None):
            return finish(reference.pass_over(config, samples, self.executor.describe).run(self.executor))

    def logprobs(self, name: str, samples: TokenizedSet) -> Any:
        """Computes log p of the learned tokens of some samples, [T], under an adapter as it is now. Waits.

        Its products are those of `reference_logprobs`: the two differ as the weights do, and not by rounding.
        """
        config = without_places(self.config.model_copy(update={"adapters": (self.tasks[name].adapter,)}))
        place, describe = self.index[name], self.executor.describe
        with self.executor.blaming(None, None):
            one_pass = pass_over_batch(config, samples, stages=self.stages, position=place, describe=describe)
            return finish(one_pass.run(self.executor))

    def scores(self, name: str, judge: str, samples: TokenizedSet) -> list[float]:
        """Computes what a reward adapter gives for each answer that an adapter has sampled. Waits.

        Args:
            judge: an adapter of the session, with the weights that it has now, or a PEFT folder.

        Raises:
            CheckpointError: as `judge_of_folder` has them.
        """
        config = without_places(self.config.model_copy(update={"adapters": (self.tasks[name].adapter,)}))
        if judge in self.index:
            opened = judge_in_place(self.stages, self.index[judge], self.executor.describe)
        else:
            if self._judges.get(judge, ((), 0))[0] != self.stages:
                self._judges[judge] = self.stages, judge_of_folder(config, self.stages, judge)
            opened = self._judges[judge][1]
        with self.executor.blaming(None, None):
            states = finish(opened.pass_over(config, samples).run(self.executor))
        return (states.astype(np.float64) @ opened.head_D).tolist()

    def open_passes(
        self, new: JobConfig, prepared: Prepared, names: Sequence[str], weights: Mapping[int, Arrays]
    ) -> list[SetPass]:
        """Makes the passes that compute the references of adapters before these join. Waits.

        They run on stages of their own on the same base, so that training may go on meanwhile. One process compiles
        them here, and may do so in any thread; several compile them with the first microbatch, all at once.

        Args:
            new: the adapters that are about to join.
            names: those of them that need references.
            weights: as in `start`, by number in `new`.
        """
        return open_passes(self.stages, new, prepared, names, weights)

    def take_data(
        self, config: JobConfig, prepared: Prepared, clocks: Mapping[str, AdapterProgress] | None = None
    ) -> None:
        """Replaces the data of the adapters: samples that have references now, or more of them.

        Args:
            clocks: progress of the adapters (None: as it is).
        """
        clocks = {name: task.clock for name, task in self.tasks.items()} if clocks is None else clocks
        self.tasks |= tasks_of(select_adapters(config, self.names), prepared, clocks)
        self._held_out = None
