"""Draws the rows of adapters that sample them: with the weights that they have at a drained slot, before it enters.

A batch is a function of the weights, the prompts, and the adapter's seed, so a resumed run draws the same. What was
drawn is also kept in the run folder, because rewards may differ a second time: `rollouts/<slot>.json`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from lorafusion_jax.config.schema import AdapterConfig
from lorafusion_jax.data.assemble import mix64
from lorafusion_jax.data.prepare import AdapterData, tokenizer_of
from lorafusion_jax.data.rollouts import PromptRow, RolloutData, samples_of
from lorafusion_jax.data.tokenizer import Tokenizer
from lorafusion_jax.errors import CheckpointError, LoraFusionError, RunError
from lorafusion_jax.files import naming, replace_text
from lorafusion_jax.generation.engine import ROWS, Request
from lorafusion_jax.generation.sampling import Sampling
from lorafusion_jax.log_file import with_crc, without_crc
from lorafusion_jax.report.console import shown_prompt
from lorafusion_jax.report.events import AdapterSampled, Listener, PhaseBegun
from lorafusion_jax.rollout.drawn import Drawn, Turns
from lorafusion_jax.rollout.functions import Functions
from lorafusion_jax.rollout.rewards import rewards_of
from lorafusion_jax.session.session import Session
from lorafusion_jax.training.job import Job
from lorafusion_jax.training.state import Progress
from lorafusion_jax.training.text_samples import LiveGenerator

ASKED, ANSWERED = "ask", "answer"
SHOWN = 2  # answers of a batch that the run's events and its report have
type Asked = tuple[str, int, int]  # adapter, batch, lag


class Rollouts:
    """Draws and rewards batches, and fills the data of their adapters with them.

    Args:
        folder: `rollouts` of the run.
    """

    def __init__(
        self,
        job: Job,
        session: Session,
        progress: Progress,
        folder: Path,
        listener: Listener,
        generator: LiveGenerator,
    ):
        self._job, self._session, self._progress, self._emit = job, session, progress, listener
        self._folder, self._generator = folder, generator
        self._functions: dict[str, Functions] = {}
        self._first_slot = progress.slot
        self._saved: deque[dict[str, int]] = deque()  # steps at the saves that are kept
        self._begun = {
            (ref.adapter, ref.batch) for slot in job.plan.slots[: progress.slot] for ref in slot.samples
        }  # before this process
        self._stored: dict[int, list[Drawn]] = {}
        if not any(data.rollout for data in job.prepared.adapters.values()):
            return
        for path in sorted(folder.glob("*.json")):
            self._stored[int(path.stem)] = _read(path)
        for slot, batches in self._stored.items():
            for batch in batches if slot < progress.slot else ():
                if batch.adapter in progress.adapters and batch.batch >= progress.adapters[batch.adapter].step:
                    self._fill(batch)

    def due(self, slot: int) -> bool:
        """Whether rows of a slot are not drawn yet."""
        return bool(self._due(slot))

    def draw(self, slot: int) -> None:
        """Draws what the next slot needs, at a drained pipeline; and with it what other adapters need soon.

        An adapter whose rewards fail stops with its last weights; others train on.
        """
        self._forget()
        keys = [*self._due(slot), *self._soon(slot)]
        stored = self._stored.get(slot, [])
        is_stored = [batch.key for batch in stored] == keys
        if not is_stored:
            for name, batch, _ in keys:
                if (name, batch) in self._begun:
                    raise self._missing(name, batch)
            self._emit(PhaseBegun(slot=slot, text=f"{', '.join(name for name, _, _ in keys)} sample"))
            stored = self._draw_each(keys, slot)
            self._folder.mkdir(exist_ok=True)
            replace_text(self._path(slot), with_crc(json.dumps([batch.row() for batch in stored])))
            self._stored[slot] = stored
        for batch in stored:
            self._fill(batch)
            if not (is_stored and slot == self._first_slot):  # the events have them
                self._show(batch, slot)

    def evaluate(self, name: str) -> tuple[float, int]:
        """Returns the mean reward of greedy answers to the held-out prompts, and the number of their tokens.

        Raises:
            LoraFusionError: as `draw` has them.
        """
        prompts = self._rollout_of(name).held_out
        answers = self._answers({name: prompts}, {name: [Sampling(max_tokens=1)] * len(prompts)}, greedy=True)[name]
        self._reward(name, prompts, answers)
        rewards = [answer.reward for answer in answers if answer.reward is not None]
        return float(np.mean(rewards)) if rewards else float("nan"), sum(len(answer.tokens) for answer in answers)

    def saved(self) -> None:
        """Deletes files that no checkpoint needs; call it after each save."""
        self._saved.append({name: adapter.step for name, adapter in self._progress.adapters.items()})
        while len(self._saved) > self._job.config.save.keep:
            self._saved.popleft()
        if len(self._saved) < self._job.config.save.keep:
            return
        steps = self._saved[0]
        for slot, batches in list(self._stored.items()):
            if all(batch.batch < steps.get(batch.adapter, 0) for batch in batches):
                self._path(slot).unlink(missing_ok=True)
                del self._stored[slot]

    def close(self) -> None:
        """Ends the processes of functions."""
        for functions in self._functions.values():
            functions.close()

    def _due(self, slot: int) -> list[Asked]:
        refs = dict.fromkeys((ref.adapter, ref.batch) for ref in self._job.plan.slots[slot].samples)
        return [self._asked(name, batch) for name, batch in refs if self._lacks(name, batch)]

    def _lacks(self, name: str, batch: int) -> bool:
        data = self._job.prepared.adapters[name]
        is_running = name in self._progress.adapters and self._progress.adapters[name].status == "running"
        return data.rollout is not None and is_running and batch not in data.rollout.batches

    def _asked(self, name: str, batch: int) -> Asked:
        return name, batch, batch - self._progress.adapters[name].step

    def _soon(self, slot: int) -> Iterator[Asked]:
        """The next batch of every other adapter, as far as its lag allows."""
        due = {name for name, _, _ in self._due(slot)}
        for name, adapter in self._progress.adapters.items():
            data = self._job.prepared.adapters[name]
            if name in due or data.rollout is None or adapter.status != "running" or adapter.stop_pending:
                continue
            lag = self._config_of(name).rollout.lag
            batch = next((n for n in range(adapter.step, adapter.num_steps) if n not in data.rollout.batches), None)
            if batch is not None and batch - adapter.step <= lag:
                yield self._asked(name, batch)

    def _forget(self) -> None:
        for name, adapter in self._progress.adapters.items():
            rollout = self._job.prepared.adapters[name].rollout
            if rollout is not None:
                for batch in [number for number in rollout.batches if number < adapter.step]:
                    del rollout.batches[batch]

    def _draw_each(self, batches: Sequence[Asked], slot: int) -> list[Drawn]:
        """Draws batches together. If that fails, each alone, and those that fail stop their adapters."""
        try:
            answers = self._draw_together(batches)
        except LoraFusionError as problem:
            if len(batches) == 1:
                self._session.steps.fail(batches[0][0], _in_one_line(problem), slot)
                return []
            return [drawn for batch in batches for drawn in self._draw_each([batch], slot)]
        drawn: list[Drawn] = []
        for name, batch, lag in batches:
            try:
                prompts = self._prompts(name, batch)
                self._reward(name, prompts, answers[name])
                drawn_batch = Drawn(adapter=name, batch=batch, lag=lag, answers=answers[name])
                self._refer(drawn_batch, prompts)
                drawn.append(drawn_batch)
            except LoraFusionError as problem:
                self._session.steps.fail(name, _in_one_line(problem), slot)
        return drawn

    def _draw_together(self, batches: Sequence[Asked]) -> Mapping[str, list[Turns]]:
        prompts = {name: self._prompts(name, batch) for name, batch, _ in batches}
        settings = {
            name: [
                Sampling(max_tokens=1, seed=mix64(mix64(mix64(self._config_of(name).seed) ^ batch) ^ number))
                for number in range(len(prompts[name]))
            ]
            for name, batch, _ in batches
        }
        return self._answers(prompts, settings)

    def _answers(
        self,
        prompts: Mapping[str, Sequence[PromptRow]],
        settings: Mapping[str, Sequence[Sampling]],
        *,
        greedy: bool = False,
    ) -> dict[str, list[Turns]]:
        """Draws answers to all prompts of all adapters, turn by turn.

        Args:
            settings: of each prompt, of which the seed counts.
        """
        answers = {name: [Turns.empty() for _ in rows] for name, rows in prompts.items()}
        active = [(name, number) for name, rows in prompts.items() for number in range(len(rows))]
        for turn in range(max(self._config_of(name).rollout.turns for name in prompts)):
            requests = [
                Request(
                    tokens=[*prompts[name][number].tokens, *answers[name][number].tokens],
                    adapter=self._session.index[name],
                    sampling=self._sampling(name, settings[name][number].seed, turn, greedy=greedy),
                    where=f"a prompt of {name}",
                )
                for name, number in active
            ]
            generator = self._generator()
            self._session.executor.wait_dispatched()
            with self._session.executor.blaming(None, None, list(prompts)):
                outputs = generator(requests, most=ROWS)
            replies: dict[tuple[str, int], int | None] = {}
            for (name, number), request, answer in zip(active, requests, outputs, strict=True):
                turns = answers[name][number]
                turns.add(answer.drawn_tokens, answer.drawn_logprobs)
                turns.texts.append(generator.text(request, answer))
                turns.ended = answer.end == "stop"
                if turn + 1 < self._config_of(name).rollout.turns and answer.end != "context":
                    replies[name, number] = answer.end_token
            active = self._reply(prompts, answers, replies)
            if not active:
                break
        return answers

    def _sampling(self, name: str, seed: int, turn: int, *, greedy: bool) -> Sampling:
        rollout = self._config_of(name).rollout
        return Sampling(
            max_tokens=rollout.max_tokens,
            temperature=0.0 if greedy else rollout.temperature,
            stop=rollout.stop,
            seed=mix64(seed ^ turn),
        )

    def _reply(
        self,
        prompts: Mapping[str, Sequence[PromptRow]],
        answers: Mapping[str, Sequence[Turns]],
        ends: Mapping[tuple[str, int], int | None],
    ) -> list[tuple[str, int]]:
        """Asks the tools; adds what they say. Returns the answers that go on."""
        active: list[tuple[str, int]] = []
        for name in dict.fromkeys(name for name, _ in ends):
            config = self._config_of(name)
            numbers = [number for other, number in ends if other == name]
            turns = [[prompts[name][number].row, answers[name][number].texts] for number in numbers]
            assert config.rollout.tool is not None
            replies = self._functions_of(name).call("tool", config.rollout.tool, {"turns": turns})
            if not isinstance(replies, list) or len(replies) != len(numbers):
                raise RunError("rollout.function", f"{config.rollout.tool} gave no answer to each turn.")
            tokenizer = tokenizer_of(config, self._job.prepared.tokenizer)
            for number, reply in zip(numbers, replies, strict=True):
                if reply is not None:
                    tokens = reply_tokens(tokenizer, reply, ends[name, number])[: config.rollout.tool_tokens]
                    answers[name][number].add(tokens, None)
                    active.append((name, number))
        return active

    def _reward(self, name: str, prompts: Sequence[PromptRow], answers: Sequence[Turns]) -> None:
        texts = [answer.texts[-1] for answer in answers]

        def scores_by(judge: str) -> list[float]:
            sampled = [answer.sampled for answer in answers]
            samples = samples_of(prompts, sampled, np.zeros(len(answers)), self._data_of(name).train.report)
            return self._session.scores(name, judge, samples)

        parts = self._config_of(name).rollout.reward
        rewards = rewards_of(parts, prompts, texts, self._functions_of(name), scores_by)
        for answer, reward in zip(answers, rewards.tolist(), strict=True):
            answer.reward = None if np.isnan(reward) else reward

    def _refer(self, drawn: Drawn, prompts: Sequence[PromptRow]) -> None:
        """Adds what the reference says, if the objective compares with one."""
        name, chosen = drawn.adapter, self._config_of(drawn.adapter).objective.chosen
        if not chosen.compares:
            return
        samples = drawn.samples(prompts, self._data_of(name).train.report)
        in_reward = chosen.objective.reward_kl is not None or chosen.objective.advantages == "none"
        policy = self._session.logprobs(name, samples) if in_reward else None
        drawn.take_reference(samples, self._session.reference_logprobs(name, samples), policy)

    def _fill(self, drawn: Drawn) -> None:
        name = drawn.adapter
        data, prompts = self._data_of(name), self._prompts(name, drawn.batch)
        batch = drawn.to_batch(self._config_of(name), prompts, data.train.report)
        self._rollout_of(name).batches[drawn.batch] = batch

    def _show(self, drawn: Drawn, slot: int) -> None:
        prompts = self._prompts(drawn.adapter, drawn.batch)
        group = self._config_of(drawn.adapter).rollout.group
        some = range(0, len(prompts), group)[:SHOWN]
        self._emit(
            AdapterSampled(
                slot=slot,
                adapter=drawn.adapter,
                step=drawn.batch,
                prompts=[shown_prompt(prompts[number].prompt) for number in some],
                texts=[" ⏎ ".join(drawn.answers[number].texts) for number in some],
                rewards=[drawn.answers[number].reward for number in some],
            )
        )

    def _prompts(self, name: str, batch: int) -> list[PromptRow]:
        """The prompt of each sample of a global batch."""
        data, starts = self._data_of(name), self._data_of(name).batch_starts(self._config_of(name).global_samples)
        stop = starts[batch + 1] if batch + 1 < len(starts) else len(data.order)
        return [self._rollout_of(name).prompts[row] for row in data.order[starts[batch] : stop].tolist()]

    def _functions_of(self, name: str) -> Functions:
        if name not in self._functions:
            self._folder.mkdir(exist_ok=True)
            folder = Path(self._job.config.directory)
            self._functions[name] = Functions(self._config_of(name).rollout, folder, self._folder / f"{name}.log")
        return self._functions[name]

    def _config_of(self, name: str) -> AdapterConfig:
        return self._job.config.adapter(name)

    def _data_of(self, name: str) -> AdapterData:
        return self._job.prepared.adapters[name]

    def _rollout_of(self, name: str) -> RolloutData:
        rollout = self._data_of(name).rollout
        assert rollout is not None
        return rollout

    def _path(self, slot: int) -> Path:
        return self._folder / f"{slot:08d}.json"

    def _missing(self, name: str, batch: int) -> CheckpointError:
        return CheckpointError(
            "rollout.missing",
            f"{name}: the answers of step {batch + 1} are gone, and a part of them is trained.",
            where=str(self._folder),
            fix="restore the folder from a copy, or resume from an earlier checkpoint",
        )


def _in_one_line(problem: LoraFusionError) -> str:
    return f"[{problem.code}] {problem.what}" + (f" fix: {problem.fix}" if problem.fix else "")


def _read(path: Path) -> list[Drawn]:
    """Reads a file of drawn batches.

    Raises:
        CheckpointError: `rollout.damaged`.
    """
    try:
        with naming(path):
            return [Drawn.of(row) for row in json.loads(without_crc(path.read_text(encoding="utf-8")))]
    except (ValueError, TypeError, KeyError, AttributeError) as problem:
        raise CheckpointError(
            "rollout.damaged",
            f"{path} is not what a run wrote.",
            why=str(problem),
            fix="restore it from a copy; without it a run draws again what is not in training yet",
        ) from None


def reply_tokens(tokenizer: Tokenizer, reply: str, end_token: int | None) -> list[int]:
    """Encodes a reply after an answer: through the chat template as a user's message, where there is one.

    Args:
        end_token: that ended the answer; it is not encoded again.

    Raises:
        TemplateProblem: the template cannot render it.
    """
    template = tokenizer.chat_template
    if template is None:
        return tokenizer.encode(reply)
    turns = [{"role": "user", "content": ASKED}, {"role": "assistant", "content": ANSWERED}]
    replied = [*turns, {"role": "user", "content": reply}]
    begun = template.render(template.with_arguments(turns))
    conversation = template.render(template.with_arguments(replied), add_generation_prompt=True)
    if not conversation.startswith(begun):  # a template that writes earlier turns anew, such as without their thoughts
        return tokenizer.encode(reply)
    following = conversation[begun.rindex(ANSWERED) + len(ANSWERED) :]
    tokens = tokenizer.encode(following)
    return tokens[1:] if tokens[:1] == [end_token] else tokens
