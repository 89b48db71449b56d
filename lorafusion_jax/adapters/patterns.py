"""Ranks, alphas and layers that differ between the projections of an adapter, in PEFT's words.

A path is that of a projection in PEFT's model, "model.layers.3.self_attn.q_proj", or of the text part of a multimodal
model, "model.language_model.layers.3.self_attn.q_proj".
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from lorafusion_jax.layout.layer import peft_path

# Of a path, in models of text and in multimodal ones, now and before transformers 5; our paths begin with "layers."
ROOTS = ("model.", "model.language_model.", "language_model.model.")
MOST_LETTERS, MOST_REPEATS = 500, 3  # of a pattern: matching takes a time that grows with a power of the repeats


@dataclass(frozen=True, slots=True, kw_only=True)
class Patterns:
    """What differs between the projections of an adapter.

    Attributes:
        rank, alpha: of projections that no pattern names.
        ranks, alphas: (pattern, number) in order. The first that matches the end of a path counts: a name, with or
            without parts of the path before it, or a regular expression.
        layers: that have the adapter (None: all).
        exclude: projections without it: names or ends of paths; or a regular expression for whole paths.
        roots: of the paths that patterns speak of; a folder has one.

    Example:
        >>> patterns = Patterns(rank=8, alpha=16, ranks=(("0.self_attn.q_proj", 2), (".*_proj", 4)), layers=(0, 2))
        >>> paths = [f"layers.{layer}.self_attn.q_proj" for layer in range(3)]
        >>> [patterns.rank_of(path) for path in paths], [patterns.has(path) for path in paths]
        ([2, 4, 4], [True, False, True])
    """

    rank: int
    alpha: float
    ranks: tuple[tuple[str, int], ...] = ()
    alphas: tuple[tuple[str, float], ...] = ()
    layers: tuple[int, ...] | None = None
    exclude: str | tuple[str, ...] = ()
    roots: tuple[str, ...] = ROOTS

    def has(self, path: str) -> bool:
        """Whether a projection has the adapter."""
        if self.layers is not None and int(path.split(".")[1]) not in self.layers:
            return False
        if isinstance(self.exclude, str):
            return not any(re.fullmatch(self.exclude, f"{root}{peft_path(path)}") for root in self.roots)
        return not any(f".{root}{peft_path(path)}".endswith(f".{name}") for name in self.exclude for root in self.roots)

    def rank_of(self, path: str) -> int:
        return next((rank for pattern, rank in self.ranks if matches(pattern, path, self.roots)), self.rank)

    def alpha_of(self, path: str) -> float:
        return next((alpha for pattern, alpha in self.alphas if matches(pattern, path, self.roots)), self.alpha)

    @property
    def largest_rank(self) -> int:
        """The largest rank that a projection may have."""
        return max([self.rank, *(rank for _, rank in self.ranks)])


def matches(pattern: str, path: str, roots: tuple[str, ...] = ROOTS) -> bool:
    """Whether a pattern names a projection, as in PEFT.

    >>> matches("q_proj", "layers.0.self_attn.q_proj"), matches("proj", "layers.0.self_attn.q_proj")
    (True, False)
    >>> matches("h.0.attn.c_proj", "layers.0.attn.attn_c_proj"), matches("mlp.c_proj", "layers.0.attn.attn_c_proj")
    (True, False)
    """
    return any(re.match(rf"(.*\.)?({pattern})$", f"{root}{peft_path(path)}") for root in roots)


def unusable_pattern(pattern: str) -> str | None:
    """Explains why a pattern is not matched; None if it is. Patterns of files must not take minutes to match.

    >>> unusable_pattern(r"layers\\.[0-3]\\..*_proj"), unusable_pattern("(a+)+")
    (None, 'a group that repeats can take forever to match')
    """
    try:
        re.compile(pattern)
    except re.error as problem:
        return f"it is no regular expression: {problem}"
    if len(pattern) > MOST_LETTERS:
        return f"it has more than {MOST_LETTERS} letters"
    if re.search(r"\)[*+{]", pattern):
        return "a group that repeats can take forever to match"
    if re.search(r"\(\?(?!:)|\\[1-9]", pattern):
        return "look-around, flags and references to groups are not supported"
    if len(re.findall(r"(?<!\\)[*+{]", pattern)) > MOST_REPEATS:
        return f"it repeats more than {MOST_REPEATS} times"
    return None
