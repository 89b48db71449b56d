"""The caches of conversations: what a turn has computed serves the next one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.generation.passes import Batch
from lorafusion_jax.generation.places import Places


class Conversation:
    """Caches of one sequence for each of some adapters, between two calls of a `Generator`.

    A prompt that begins with tokens of the last turn reads only the others. What the caches hold never changes answers:
    tokens that differ, other adapters, or more tokens than there is room for are read again from the first that does.
    """

    def __init__(self) -> None:
        self._batch: Batch | None = None
        self._places: Places | None = None
        self._room = 0
        self._tokens: dict[int, list[int]] = {}

    def take(self, places: Places, tokens: int) -> tuple[Batch, int] | None:
        """Hands the caches out, with their room, if they hold sequences of `tokens` tokens; `keep` brings them back."""
        batch, self._batch = self._batch, None
        if batch is not None and places == self._places and tokens <= self._room:
            return batch, self._room
        self._tokens = {}
        return None

    def keep(self, batch: Batch, places: Places, room: int, tokens: Mapping[int, list[int]]) -> None:
        """Takes caches after a turn.

        Args:
            room: tokens of a sequence at most.
            tokens: those that were written into the cache of each row, in order.
        """
        self._batch, self._places, self._room = batch, places, room
        self._tokens = {row: written for row, written in tokens.items() if len(written) <= room}

    def kept(self, row: int, prompt: Sequence[int], model: ModelConfig) -> int:
        """How many tokens of a row's prompt need not be read again. The last one is: its logits give the next token."""
        known, least = self._tokens.pop(row, []), len(prompt) - 1
        equal = next((n for n, (old, new) in enumerate(zip(known, prompt, strict=False)) if old != new), None)
        same = min(len(known), least) if equal is None else min(equal, least)
        windows = [window for layer in model.kinds if (window := getattr(layer.attention, "window", None)) is not None]
        if same < len(known) > min(windows, default=len(known)):
            return 0  # later tokens lie in slots of a window's earlier ones
        scalings = [rope.scaling for rope in model.ropes if rope.scaling and rope.scaling.kind == "longrope"]
        turned = [scaling.original_max_positions for scaling in scalings]  # longer sequences turn all keys otherwise
        return 0 if any(same <= most < len(prompt) for most in turned) else same
