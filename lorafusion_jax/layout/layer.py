"""The description of a decoder layer: linears, norms, halves, and the tensors that forward can save for backward.

It is the only description of a layer. `models` builds modules from it, `planning` counts bytes and operations,
`checkpoint` derives PEFT names, and its linears are the possible LoRA targets.
D model width · F MLP width · H heads · K key heads · C head width
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal, Protocol

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, Half] = ("attention", "mlp")
RematPolicy = Literal["everything", "gemm_inputs", "nothing"]
REMAT_POLICIES: tuple[RematPolicy, ...] = ("everything", "gemm_inputs", "nothing")  # fastest first
LORA_CHECKPOINTS = ("lora_s", "lora_bits")  # checkpoint names of S and of dropout's bits in the LoRA ops


class Shape(Protocol):
    """The sizes of a model that a layer depends on; `ModelConfig` implements it."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...


Width = Callable[[Shape], int]
Switch = Callable[[Shape], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection y = x W + b with W [in, out].

    Args:
        name: name as a LoRA target and in PEFT.
        module: part of the layer that owns it, as in Hugging Face checkpoints.
        site: projections of one site read the same input, so they share S = x A and dropout.
        out_features: function of the model.
        in_features: function of the model; equal for all projections of a site.
        bias: whether a model has b.
    """

    name: str
    module: str
    half: Half
    site: str
    in_features: Width
    out_features: Width
    bias: Switch

    @property
    def path(self) -> str:
        """Path in the layer: "self_attn.q_proj"."""
        return f"{self.module}.{self.name}"

    def shape(self, model: Shape) -> tuple[int, int]:
        """(in, out)."""
        return self.in_features(model), self.out_features(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A root-mean-square norm.

    Args:
        path: path in the layer.
        width: size of its weight.
        present: whether a model has it.
    """

    path: str
    half: Half
    width: Width
    present: Switch


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that forward may save for backward, in addition to the input of the layer or half.

    Args:
        width: elements per row.
        policy: the most economical policy that saves it.
        checkpoint: its checkpoint name in forward, for remat policies.
        float32: float32 in every model dtype.
        unfused: saved only if no single op runs the core of this half (attention, or the whole MLP).
        present: whether a model has it.
    """

    name: str
    half: Half
    width: Width
    policy: RematPolicy
    checkpoint: str | None = None
    float32: bool = False
    unfused: bool = False
    present: Switch = lambda model: True


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class LayerSpec:
    """A layer in order of execution: attention, then the MLP. A stage boundary may lie between the two."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    saved: tuple[SavedTensor, ...]

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names of the projections, which are the possible LoRA targets."""
        return tuple(linear.name for linear in self.linears)

    @cached_property
    def modules(self) -> tuple[str, ...]:
        """The modules that own projections: "self_attn", "mlp"."""
        return tuple(dict.fromkeys(linear.module for linear in self.linears))

    @cached_property
    def sites(self) -> Mapping[str, tuple[Linear, ...]]:
        """Projections that share an input, in order of execution."""
        names = dict.fromkeys(linear.site for linear in self.linears)
        return {name: tuple(linear for linear in self.linears if linear.site == name) for name in names}

    @cached_property
    def checkpoints(self) -> tuple[str, ...]:
        """Checkpoint names that the policy `gemm_inputs` saves.

        Backward recomputes everything else from them without a matrix product: norm outputs, rotated heads and
        silu(gate) · up.
        """
        named = [tensor.checkpoint for tensor in self.saved if tensor.policy == "gemm_inputs" and tensor.checkpoint]
        return (*dict.fromkeys(named), *LORA_CHECKPOINTS)

    def linear(self, name: str) -> Linear:
        """The projection with this name."""
        return self._by_name[name]

    def norm(self, path: str) -> Norm:
        """The norm at this path."""
        return next(norm for norm in self.norms if norm.path == path)

    def site_index(self, name: str) -> int:
        """Index of a projection's site in the layer; dropout keys depend on it."""
        return list(self.sites).index(self.linear(name).site)

    def half_of(self, leaf: str) -> Half:
        """The half that owns a leaf: "self_attn.q_proj.kernel", with or without the prefix "layers.".

        Raises:
            ValueError: no part of the layer has such a leaf.
        """
        path = leaf.removeprefix("layers.").rpartition(".")[0]
        if path not in self._halves:
            raise ValueError(f"no part of a decoder layer has the leaf {leaf!r} (parts: {', '.join(self._halves)})")
        return self._halves[path]

    def linears_of(self, half: Half | None) -> tuple[Linear, ...]:
        """The projections of a half, or of the layer."""
        return tuple(linear for linear in self.linears if half in (None, linear.half))

    def linear_shapes(self, model: Shape, half: Half | None = None) -> dict[str, tuple[int, int]]:
        """(in, out) of the projections, by name."""
        return {linear.name: linear.shape(model) for linear in self.linears_of(half)}

    def kernel_shapes(self, model: Shape, half: Half | None = None) -> dict[str, tuple[int, int]]:
        """Shapes of the projections' kernels by leaf name. These leaves can be stored quantised."""
        return {f"{linear.path}.kernel": linear.shape(model) for linear in self.linears_of(half)}

    def frozen_shapes(self, model: Shape, half: Half | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of all frozen leaves of the layer or of a half: kernels, biases, norms."""
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.linears_of(half):
            shapes[f"{linear.path}.kernel"] = linear.shape(model)
            if linear.bias(model):
                shapes[f"{linear.path}.bias"] = (linear.out_features(model),)
        norms = (norm for norm in self.norms if half in (None, norm.half) and norm.present(model))
        return shapes | {f"{norm.path}.weight": (norm.width(model),) for norm in norms}

    def num_parameters(self, model: Shape) -> int:
        """Number of frozen weights of one layer."""
        return sum(map(prod, self.frozen_shapes(model).values()))

    @cached_property
    def _by_name(self) -> dict[str, Linear]:
        return {linear.name: linear for linear in self.linears}

    @cached_property
    def _halves(self) -> dict[str, Half]:
        return {part.path: part.half for part in (*self.linears, *self.norms)}


def hidden(model: Shape) -> int:
    """D"""
    return model.hidden_size


def inner(model: Shape) -> int:
    """F"""
    return model.intermediate_size


def queries(model: Shape) -> int:
    """H · C"""
    return model.num_heads * model.head_dim


def keys(model: Shape) -> int:
    """K · C"""
    return model.num_kv_heads * model.head_dim


def _attention(name: str, site: str, inputs: Width, outputs: Width, bias: Switch) -> Linear:
    return Linear(
        name=name, module="self_attn", half="attention", site=site, in_features=inputs, out_features=outputs, bias=bias
    )


def _mlp(name: str, site: str, inputs: Width, outputs: Width) -> Linear:
    return Linear(
        name=name, module="mlp", half="mlp", site=site, in_features=inputs, out_features=outputs,
        bias=lambda model: model.mlp_bias,
    )  # fmt: skip


def _norm(path: str, half: Half, width: Width, present: Switch = lambda model: True) -> Norm:
    return Norm(path=path, half=half, width=width, present=present)


def _saved_tensor(name: str, half: Half, width: Width, checkpoint: str | None = None, **more) -> SavedTensor:
    policy: RematPolicy = "gemm_inputs" if checkpoint else "everything"
    return SavedTensor(name=name, half=half, width=width, policy=policy, checkpoint=checkpoint, **more)


LAYER = LayerSpec(
    linears=(
        _attention("q_proj", "qkv", hidden, queries, lambda model: model.qkv_bias),
        _attention("k_proj", "qkv", hidden, keys, lambda model: model.qkv_bias),
        _attention("v_proj", "qkv", hidden, keys, lambda model: model.qkv_bias),
        _attention("o_proj", "o", queries, hidden, lambda model: model.o_bias),
        _mlp("gate_proj", "gate_up", hidden, inner),
        _mlp("up_proj", "gate_up", hidden, inner),
        _mlp("down_proj", "down", inner, hidden),
    ),
    norms=(
        _norm("input_layernorm", "attention", hidden),
        _norm("self_attn.q_norm", "attention", lambda model: model.head_dim, lambda model: model.qk_norm),
        _norm("self_attn.k_norm", "attention", lambda model: model.head_dim, lambda model: model.qk_norm),
        _norm("post_attention_layernorm", "mlp", hidden),
    ),
    saved=(
        _saved_tensor("q", "attention", queries, "attention"),  # after rotary positions
        _saved_tensor("k", "attention", keys, "attention"),
        _saved_tensor("v", "attention", keys, "attention"),
        _saved_tensor("attention", "attention", queries, "attention"),
        _saved_tensor("attention log-sum-exp", "attention", lambda model: model.num_heads, "attention", float32=True),
        _saved_tensor(
            "q, k before their norms", "attention", lambda model: queries(model) + keys(model), "qk_in",
            present=lambda model: model.qk_norm,
        ),
        _saved_tensor("norm 1 out", "attention", hidden),
        _saved_tensor("norm 1 scale", "attention", lambda model: 1, float32=True),
        # Implementations with NaN isolation restore the isolated rows in another array.
        _saved_tensor("attention, for o_proj", "attention", queries, unfused=True),
        _saved_tensor(
            "scales of their norms", "attention", lambda model: model.num_heads + model.num_kv_heads, float32=True,
            present=lambda model: model.qk_norm,
        ),
        # Layer input + o_out is the input of the MLP; a piece that is only the MLP saves its own input.
        _saved_tensor("o_out", "mlp", hidden, "o_out"),
        _saved_tensor("gate", "mlp", inner, "gate"),
        _saved_tensor("up", "mlp", inner, "up"),
        _saved_tensor("norm 2 out", "mlp", hidden),
        _saved_tensor("norm 2 scale", "mlp", lambda model: 1, float32=True),
        _saved_tensor("silu(gate) · up", "mlp", inner, unfused=True),
    ),
)  # fmt: skip
