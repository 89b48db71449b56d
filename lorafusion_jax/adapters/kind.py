"""What an adapter kind is: its tensors, and how a projection uses them.

y = f · (x W + scale · (drop(x) A) B) + g + bias,  A and B from `low_rank`, f from `column_scale` (1 without it), g from
`shift` (0 without it)

Never imports jax, because planning needs sizes.
Axes: `K` in features · `N` out features · `R` rank · `E` experts · `D` model width · `V` vocabulary ·
`M` trainable tokens
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from types import ModuleType
from typing import Any, Literal

import numpy as np

from lorafusion_jax.layout.layer import EXPERTS

type Axis = Literal["K", "N", "R", "E", "D", "V", "M"] | int
type Draw = Callable[[int], np.ndarray]
type Tensors = Mapping[str, Any]  # leaf name -> array
PRIVATE = "lorafusion:"  # begins the type of a folder that PEFT cannot read


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """One tensor of an adapter, usually one per projection and layer.

    Args:
        name: e.g. "lora_a". A name means the same tensor in all kinds.
        axes: letters of its axes, or their sizes; K and N at most once.
        init: (draw, shape) → initial values. `draw(n)` returns n float32 numbers, uniform in [0, 1), that depend only
            on the adapter's seed, the projection and the leaf.
        trainable: False: constant in training, without gradient, optimizer state and decay.
        shared: one tensor for all layers and projections, which is not trained. Its K and N are the largest of the
            model; a projection sees its own first rows and columns.
        decay: whether weight decay applies.
        lr_group: name of the leaves whose learning rate is `optim.lr` times `optim.lr_ratio`.
        peft_name: the rest of its name in a PEFT folder after the projection's path, e.g. "lora_A.weight"; of a shared
            leaf the whole name. Tensors of two axes are stored transposed there. None: PEFT has no such tensor.

    Example:
        >>> Leaf(name="scale", axes=("N",), init=lambda draw, shape: np.ones(shape, np.float32)).shape(8, 4, 2)
        (4,)
    """

    name: str
    axes: tuple[Axis, ...]
    init: Callable[[Draw, tuple[int, ...]], np.ndarray]
    trainable: bool = True
    shared: bool = False
    decay: bool = True
    lr_group: str | None = None
    peft_name: str | None = None

    def shape(self, in_features: int, out_features: int, rank: int, experts: int = 0) -> tuple[int, ...]:
        """Shape of one adapter's tensor of a projection."""
        return self.shape_in({"K": in_features, "N": out_features, "R": rank, "E": experts})

    @property
    def of_experts(self) -> Leaf:
        """The same tensor of every expert, stacked."""
        return replace(self, axes=("E", *self.axes))

    def shape_in(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape of one adapter's tensor; `sizes` has the letters of its axes."""
        return tuple(axis if isinstance(axis, int) else sizes[axis] for axis in self.axes)

    def cut(self, array: Any, sizes: Mapping[str, int]) -> Any:
        """Cuts an array [..., *axes] down to smaller sizes of some axes."""
        cuts = [slice(None) if isinstance(axis, int) else slice(sizes.get(axis)) for axis in self.axes]
        return array if all(axis_slice == slice(None) for axis_slice in cuts) else array[(..., *cuts)]

    def at_rank(self, array: Any, rank: int) -> Any:
        """Cuts an array [..., *axes] down to a rank."""
        return self.cut(array, {"R": rank})


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """The tensors of an objective on final-normed states. Every adapter with the objective has its own.

    Attributes:
        name: of the objective.
        leaves: their axes are D, V and numbers.
        task: what adapter_config.json calls the task.

    Example:
        >>> zeros = lambda draw, shape: np.zeros(shape)
        >>> score = Leaf(name="score", axes=("D", 2), init=zeros, peft_name="score.weight")
        >>> head = Head(name="classify", leaves=(score,), task="SEQ_CLS")
        >>> list(head.by_key), head.modules
        (['classify.score.Dx2'], ['score'])
    """

    name: str
    leaves: tuple[Leaf, ...]
    task: str

    @property
    def by_key(self) -> dict[str, Leaf]:
        """The leaves by names that also tell heads of the same objective with other sizes apart."""
        return {f"{self.name}.{leaf.name}.{'x'.join(map(str, leaf.axes))}": leaf for leaf in self.leaves}

    @property
    def is_exported(self) -> bool:
        """Whether PEFT folders hold it; one without PEFT names serves training alone."""
        return any(leaf.peft_name for leaf in self.leaves)

    @property
    def modules(self) -> list[str]:
        """Names of the modules that PEFT saves for the head."""
        return list(dict.fromkeys((leaf.peft_name or "").partition(".")[0] for leaf in self.leaves))

    def num_parameters(self, sizes: Mapping[str, int], *, trainable: bool = True) -> int:
        """Number of parameters; `sizes` has D and V."""
        return sum(math.prod(leaf.shape_in(sizes)) for leaf in self.leaves if leaf.trainable == trainable)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What the functions of a kind know besides tensors.

    Attributes:
        K, N: in and out features of the projection.
        R: size of the leaves' axis R: the adapter's rank, or a larger one with zeros beyond the adapter's.
        scale: the adapter's alpha / r or alpha / sqrt(r).
        np: `numpy` for files, `jax.numpy` in training.
    """

    K: int
    N: int
    R: int
    scale: Any
    np: ModuleType | Any = np

    def constant(self, array: Any) -> Any:
        """The array without a gradient."""
        if self.np is np:
            return array
        from jax.lax import stop_gradient

        return stop_gradient(array)

    def product(self, x: Any, w: Any) -> Any:
        """x w in float32, with x in the dtype of the kernel w, so that w is read as it is."""
        if self.np is np:
            return x @ w
        return self.np.matmul(x.astype(w.dtype), w, precision="highest", preferred_element_type=np.float32)


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class AdapterKind:
    """A kind of adapter. Its functions get one adapter in one projection.

    They are traced by jax in training and called with numpy for files, so use operators, indexing and `sizes.np`. What
    a leaf has beyond an adapter's rank is zero, and must give zero columns of A and zero rows of B.

    Args:
        leaves: its tensors.
        low_rank: (tensors, sizes) → (A [K, C], B [C, N]), C = `columns` · R.
        columns: columns of A per rank.
        column_scale: (kernel [K, N] in float32, tensors, sizes) → f [N]. The columns of all of y but the bias are
            multiplied by it. None: f = 1, and nothing is compiled.
        prepare: (kernel, tensors, sizes) → more tensors for `column_scale`, without a gradient. They change only with
            the adapter's own tensors: a run computes them once after each of its steps, elsewhere every call does.
        prepared: what `prepare` returns; not trainable, without R.
        shift: (tensors, sizes) → [N], added to the columns of y. None: nothing is compiled. It is merged into a base
            whose projections have biases.
        start: (kernel, tensors, sizes) → the tensors whose initial values depend on the frozen kernel.
        fold: (kernel, tensors, sizes) → the kernel with the adapter merged into it, f · (kernel + scale · A B), where
            there is a better way to compute it. None: by the formula.
        scaled: names of the leaves by which the low-rank product is multiplied if all of them are: B of LoRA. Kinds
            that name none have the same rank and alpha in all projections.
        scale: (alpha, rank, rslora) → factor of the low-rank product, or a number, if alpha means nothing. None:
            alpha / r, or alpha / sqrt(r).
        peft: what adapter_config.json says of this kind, e.g. {"use_dora": True}; all leaves need their `peft_name`.
            None: PEFT has no such kind. Its folders hold LoRA, which is exact without `column_scale`; with one they
            hold its own tensors, which only this program reads and can merge. A function of the specification stands
            for a value that may differ in a folder that is read. Rank, alpha, rslora, patterns and dropout are
            written for every kind.
        dropout: whether it may have dropout of A's input.
        splits: whether `low_rank` of a part of K or N of all leaves is that part of A or B, so that devices may share a
            projection (`mesh.tensor`).
        starts_as_base: whether its first values change no bit of an output: A or B is zero, and columns are not scaled.

    Example:
        >>> from lorafusion_jax.adapters.lora import LORA
        >>> LORA.num_parameters(in_features=8, out_features=4, rank=2)
        24
    """

    leaves: tuple[Leaf, ...]
    low_rank: Callable[[Tensors, Sizes], tuple[Any, Any]]
    columns: int = 1
    column_scale: Callable[[Any, Tensors, Sizes], Any] | None = None
    prepare: Callable[[Any, Tensors, Sizes], Tensors] | None = None
    prepared: tuple[Leaf, ...] = ()
    shift: Callable[[Tensors, Sizes], Any] | None = None
    start: Callable[[Any, Tensors, Sizes], Tensors] | None = None
    fold: Callable[[Any, Tensors, Sizes], Any] | None = None
    scaled: tuple[str, ...] = ()
    scale: Callable[[float, int, bool], float] | float | None = None
    peft: Mapping[str, Any] | None = None
    dropout: bool = True
    splits: bool = False
    starts_as_base: bool = False

    @cached_property
    def names(self) -> frozenset[str]:
        return frozenset(leaf.name for leaf in (*self.leaves, *self.prepared))

    @property
    def in_peft(self) -> bool:
        """Whether a PEFT folder holds its tensors, so that training can continue from one."""
        return self.peft is not None

    @property
    def exportable(self) -> bool:
        """Whether an adapter can be written as a folder or a merged model that computes the same."""
        return self.in_peft or not self.changes_columns

    @property
    def merge_only(self) -> bool:
        """Whether PEFT has nothing that computes the same: its folders are for this program alone."""
        return str((self.peft or {}).get("peft_type", "")).startswith(PRIVATE)

    @property
    def alpha_matters(self) -> bool:
        """Whether alpha and rslora change the factor of the low-rank product, so that a folder must say them."""
        return self.scale is None or callable(self.scale)

    def with_form(self, name: str) -> AdapterKind:
        """The kind with names for the tensors of its folders, where PEFT has neither the kind nor the same as LoRA."""
        if self.exportable or self.shift is not None:
            return self
        leaves = tuple(replace(leaf, peft_name=leaf.peft_name or leaf.name) for leaf in self.leaves)
        return replace(self, leaves=leaves, peft={"peft_type": f"{PRIVATE}{name}"})

    @property
    def changes_columns(self) -> bool:
        """Whether the output of a projection is more than a low-rank product: its columns are scaled or shifted."""
        return self.column_scale is not None or self.shift is not None

    @property
    def shared(self) -> tuple[Leaf, ...]:
        return tuple(leaf for leaf in self.leaves if leaf.shared)

    @property
    def of_projections(self) -> tuple[Leaf, ...]:
        """The leaves of which every projection has its own."""
        return tuple(leaf for leaf in self.leaves if not leaf.shared)

    def leaves_at(self, path: str) -> tuple[Leaf, ...]:
        """The leaves of a projection, given by its name or path. Those of experts have one more axis.

        >>> from lorafusion_jax.adapters.lora import LORA
        >>> [leaf.axes for leaf in LORA.leaves_at("layers.0.mlp.experts_down_proj")]
        [('E', 'K', 'R'), ('E', 'R', 'N')]
        """
        leaves = self.of_projections
        return tuple(leaf.of_experts for leaf in leaves) if path.rpartition(".")[2] in EXPERTS else leaves

    def num_parameters(
        self,
        *,
        in_features: int,
        out_features: int,
        rank: int,
        trainable: bool | None = True,
        padded: int | None = None,
    ) -> int:
        """Number of parameters of one adapter in one projection.

        Args:
            trainable: False: those that are constant in training; None: all. Shared tensors are not counted.
            padded: size of the second axis R of leaves that have two, where adapters are stored together (None: rank).
        """
        counted = [leaf for leaf in self.of_projections if trainable in (None, leaf.trainable)]
        second = rank if padded is None else padded
        return sum(
            math.prod(leaf.shape(in_features, out_features, rank)) * second ** (times - 1) // rank ** (times - 1)
            for leaf in counted
            for times in [max(leaf.axes.count("R"), 1)]
        )

    def factors(self, kernel: Any, tensors: Tensors, sizes: Sizes) -> Any:
        """Returns `column_scale`, with what it needs prepared, if it is not among the tensors."""
        assert self.column_scale is not None
        if self.prepare is not None and not all(leaf.name in tensors for leaf in self.prepared):
            prepared = self.prepare(kernel, tensors, sizes)
            tensors = {**tensors, **{name: sizes.constant(array) for name, array in prepared.items()}}
        return self.column_scale(kernel, tensors, sizes)

    def merge(self, kernel: Any, tensors: Tensors, sizes: Sizes) -> Any:
        """Merges one adapter into a kernel [K, N]."""
        return (self.fold or self.merge_by_formula)(kernel, tensors, sizes)

    def merge_by_formula(self, kernel: Any, tensors: Tensors, sizes: Sizes) -> Any:
        """f · (W + scale · A B), what a projection computes."""
        a_KC, b_CN = self.low_rank(tensors, sizes)
        merged = kernel + sizes.scale * (a_KC @ b_CN)
        return merged if self.column_scale is None else merged * self.factors(kernel, tensors, sizes)
