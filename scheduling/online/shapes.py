"""Shapes of base models: a table of known models, and conversion of other descriptions."""

from __future__ import annotations

from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from scheduling.errors import PlanError

# The scheduler never imports the product; a test compares these with the layer that is trained.
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of a decoder-only transformer, as far as time and memory depend on them.

    >>> round(resolve_base("llama-3.1-8b").parameters / 1e9, 1)
    8.0
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    head_dim: int = 128
    tie_embeddings: bool = False

    def __post_init__(self):
        for field in fields(ModelShape):  # a subclass may add a name
            value = getattr(self, field.name)
            if field.name != "tie_embeddings" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise PlanError("online.base", f"{field.name} of a base must be a positive whole number, not {value!r}")

    def linear(self, name: str) -> tuple[int, int]:
        """(in, out) features of one of the seven projections."""
        model, mlp = self.hidden_size, self.intermediate_size
        query, key = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        return {
            "q_proj": (model, query),
            "k_proj": (model, key),
            "v_proj": (model, key),
            "o_proj": (query, model),
            "gate_proj": (model, mlp),
            "up_proj": (model, mlp),
            "down_proj": (mlp, model),
        }[name]

    @property
    def layer_parameters(self) -> int:
        return sum(rows * columns for rows, columns in map(self.linear, LINEARS))

    @property
    def table_parameters(self) -> int:
        return self.vocab_size * self.hidden_size

    @property
    def parameters(self) -> int:
        """Parameters of layers and tables, without norms and biases."""
        return self.num_layers * self.layer_parameters + self.table_parameters * (1 if self.tie_embeddings else 2)


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        vocab_size=vocab,
        **more,
    )


SHAPES = {
    "llama-3.2-1b": _shape(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_embeddings=True),
    "llama-3.2-3b": _shape(3072, 8192, 28, 24, 8, 128256, tie_embeddings=True),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256),
    "llama-3.3-70b": _shape(8192, 28672, 80, 64, 8, 128256),
    "mistral-7b": _shape(4096, 14336, 32, 32, 8, 32768),
    "mistral-small-24b": _shape(5120, 32768, 40, 32, 8, 131072),
    "qwen2.5-0.5b": _shape(896, 4864, 24, 14, 2, 151936, head_dim=64, tie_embeddings=True),
    "qwen2.5-1.5b": _shape(1536, 8960, 28, 12, 2, 151936, tie_embeddings=True),
    "qwen2.5-3b": _shape(2048, 11008, 36, 16, 2, 151936, tie_embeddings=True),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 152064),
    "qwen2.5-14b": _shape(5120, 13824, 48, 40, 8, 152064),
    "qwen2.5-32b": _shape(5120, 27648, 64, 40, 8, 152064),
    "qwen2.5-72b": _shape(8192, 29568, 80, 64, 8, 152064),
    "qwen3-0.6b": _shape(1024, 3072, 28, 16, 8, 151936, tie_embeddings=True),
    "qwen3-4b": _shape(2560, 9728, 36, 32, 8, 151936, tie_embeddings=True),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, 151936),
    "qwen3-14b": _shape(5120, 17408, 40, 40, 8, 151936),
    "qwen3-32b": _shape(5120, 25600, 64, 64, 8, 151936),
}


def resolve_base(base: Any) -> ModelShape:
    """Returns the shape of a job's `base`: a name from the table, a `ModelShape`, or an object with its attributes.

    Raises:
        PlanError: `online.unknown-base`, `online.base`.
    """
    if isinstance(base, ModelShape):
        return base
    if isinstance(base, str):
        if base not in SHAPES:
            near = get_close_matches(base, SHAPES, n=3)
            raise PlanError(
                "online.unknown-base",
                f"no base {base!r} in the table of model shapes",
                fix=f"one of {', '.join(near or SHAPES)}, or an object with the sizes of a ModelShape",
            )
        return SHAPES[base]
    missing = [f.name for f in fields(ModelShape) if not hasattr(base, f.name)]
    if missing:
        raise PlanError(
            "online.base", f"a base of type {type(base).__name__} has no {', '.join(missing)}", fix="give a ModelShape"
        )
    return ModelShape(**{f.name: getattr(base, f.name) for f in fields(ModelShape)})


def base_name(base: Any) -> str:
    """Name of a base in tables and decisions: its own, or one of its sizes. Equal names mean equal bases."""
    if isinstance(base, str):
        return base
    if isinstance(base, ModelShape) and (name := getattr(base, "name", "")):
        return name
    shape = resolve_base(base)
    sizes = "x".join(str(getattr(shape, field.name)) for field in fields(shape))
    return f"{shape.parameters / 1e9:.3g}B-{sizes}"
