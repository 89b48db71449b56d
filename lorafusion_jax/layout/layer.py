"""The parts of a decoder layer as plain numbers: linears, norms, and the tensors that forward can save for backward.

Mechanisms of `families` list their parts with these records, and a layer is made of mechanisms. `models` builds modules
from the description, `planning` counts bytes and operations, `checkpoint` derives PEFT names, and its linears are the
possible LoRA targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

Half = Literal["attention", "mlp"]
HALVES: tuple[Half, Half] = ("attention", "mlp")
RematPolicy = Literal["everything", "gemm_inputs", "nothing"]
REMAT_POLICIES: tuple[RematPolicy, ...] = ("everything", "gemm_inputs", "nothing")  # fastest first
# Checkpoint names of S and of dropout's bits in the LoRA ops, and of outputs before their columns are multiplied.
LORA_CHECKPOINTS = ("lora_s", "lora_bits", "unscaled")
# Paths of the projections of all families, by name.
LINEAR_ATTENTION = "linear_attn"
GLOBAL_ATTENTION = "global_attn"  # attention of other widths than that of most layers; "self_attn" in files
PARALLEL = "parallel"  # experts beside an MLP, with norms of their own; "experts" in files
WIDE_MLP = "wide_mlp"  # an MLP of another width than that of most layers; "mlp" in files
PER_LAYER = "per_layer"  # what adds a layer's input of its own; its projections are the layer's in files
PER_LAYER_NAMES = ("per_layer_input_gate", "per_layer_projection")
_SAVED = {
    f"{GLOBAL_ATTENTION}.": "self_attn.", f"{WIDE_MLP}.": "mlp.", f"{PER_LAYER}.": "",
    "block_sparse_moe.shared_mlp.": "shared_mlp.",
}  # fmt: skip
MAMBA, SHORT_CONVOLUTION = "mamba", "conv"
ATTENTION = "attention"  # in GPT-NeoX
ATTN = "attn"  # in GPT-2
MIXER = "mixer"  # what layers of one half have: a mixer, an MLP or experts
FEED_FORWARD = "feed_forward"  # an MLP or experts in some families
BLOCK = "block_sparse_moe"  # experts where they are no `mlp`
SHARED_MLP = "shared_mlp"  # the MLP of all rows there, beside experts or alone
MIXERS = ("self_attn", LINEAR_ATTENTION, MAMBA, SHORT_CONVOLUTION, MIXER)  # modules in files of which a layer has one
PATHS: Mapping[str, str] = {
    name: f"{module}.{name}"
    for module, names in {
        "self_attn": (
            "q_proj", "k_proj", "v_proj", "qkv_proj", "q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj",
            "o_proj",
        ),
        ATTENTION: ("query_key_value", "dense", "attention_query_key_value", "attention_dense"),
        ATTN: ("c_attn", "attn_c_proj"),
        MAMBA: ("in_proj",),
        LINEAR_ATTENTION: (
            "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "g_proj",
            "b_proj", "a_proj",
        ),
        "mlp": (
            "gate_proj", "up_proj", "gate_up_proj", "down_proj", "c_fc", "c_proj", "dense_h_to_4h",
            "dense_4h_to_h", "mlp_c_fc", "mlp_c_proj", "experts_gate_up_proj", "experts_down_proj",
        ),
        FEED_FORWARD: ("w1", "w3", "w2"),
        SHARED_MLP: ("input_linear", "output_linear"),
    }.items()
    for name in names
} | {name: name for name in PER_LAYER_NAMES}  # fmt: skip
# What PEFT's names begin with in place of "model.", by projection.
GPT_2 = "transformer."
ROOTS: Mapping[str, str] = {
    **dict.fromkeys(("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"), "gpt_neox."),
    **dict.fromkeys(("c_attn", "attn_c_proj", "mlp_c_fc", "mlp_c_proj"), GPT_2),
}
# Projections of GPT-2 and Ling whose names others have, too → their paths in files. Here their names have the module.
RENAMED: Mapping[str, str] = {
    name: name.replace("_", ".", 1)
    for name in ("attn_c_proj", "mlp_c_fc", "mlp_c_proj", "attention_query_key_value", "attention_dense")
}
# PEFT's names of the embedding where it is not this one: by that beginning, in models of layers of one half, of Ling.
EMBEDDING = "embed_tokens"
LING = "attention_"  # names of attention's projections begin so
EMBEDDINGS: Mapping[str, str] = {"gpt_neox.": "embed_in", GPT_2: "wte", MIXER: "embeddings", LING: "word_embeddings"}
SUMMED_SITES = ("o", "down")  # tensor parallelism adds up the outputs of their projections over devices
FUSED = ("qkv_proj", "gate_up_proj")
# Modules of an MLP beside the experts of a layer.
BESIDE = ("mlp.shared_experts", "mlp.shared_expert", f"{MIXER}.shared_experts", f"{FEED_FORWARD}.shared_expert")
# Projections of which every expert has its own → PEFT's name of the parameter that holds them all.
EXPERTS: Mapping[str, str] = {
    "experts_gate_up_proj": "mlp.experts.gate_up_proj",
    "experts_down_proj": "mlp.experts.down_proj",
}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a Llama


def saved_path(path: str) -> str:
    """Returns the path of a projection in PEFT.

    >>> saved_path("layers.5.global_attn.q_proj"), saved_path("per_layer.per_layer_projection")
    ('layers.5.self_attn.q_proj', 'per_layer_projection')
    """
    for module, saved in _SAVED.items():
        path = path.replace(module, saved, 1)
    return path


def peft_path(path: str) -> str:
    """Returns the path of a projection in PEFT, from that of `saved_path`.

    >>> peft_path("layers.5.attn.attn_c_proj"), peft_path("layers.5.self_attn.q_proj")
    ('h.5.attn.c_proj', 'layers.5.self_attn.q_proj')
    """
    name = path.rpartition(".")[2]
    renamed = f"{path.rpartition('.')[0].rpartition('.')[0]}.{RENAMED[name]}" if name in RENAMED else path
    return f"h.{renamed.removeprefix('layers.')}" if ROOTS.get(name) == GPT_2 else renamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A projection y = x W + b with W [in, out].

    Args:
        name: name as a LoRA target and in PEFT.
        module: part of the layer that owns it, as in Hugging Face checkpoints.
        site: projections of one site read the same input, so they share S = x A and dropout.
        in_features: equal for all projections of a site.
        bias: whether it has b.
        experts: E, number of experts that each have such a projection (0: it is not one of experts).
        active: experts that a row passes through.
        is_target: whether adapters may be on it; PEFT refuses some projections.
    """

    name: str
    module: str
    half: Half
    site: str
    in_features: int
    out_features: int
    bias: bool = False
    experts: int = 0
    active: int = 0
    is_target: bool = True

    @property
    def path(self) -> str:
        """Path in the layer: "self_attn.q_proj"."""
        return f"{self.module}.{self.name}"

    @property
    def shape(self) -> tuple[int, int]:
        """(in, out), of one expert."""
        return self.in_features, self.out_features

    @property
    def kernel_shape(self) -> tuple[int, int]:
        """(in, out) of the stored kernel. Those of experts lie one below the other: [E · in, out]."""
        return max(self.experts, 1) * self.in_features, self.out_features

    @property
    def split_axis(self) -> int:
        """Axis of the kernel that tensor parallelism splits: 0 (in) if it reads what split projections made, else 1."""
        return 0 if self.site in SUMMED_SITES else 1

    @property
    def row_shape(self) -> tuple[int, int]:
        """(in, out) of a kernel with the products of a row: those of its experts together."""
        return max(self.active, 1) * self.in_features, self.out_features


@dataclass(frozen=True, slots=True, kw_only=True)
class Norm:
    """A norm.

    Args:
        path: path in the layer.
        width: size of its weight.
        bias: whether it has one; the leaf is then [2, width], the weight and the bias.
    """

    path: str
    half: Half
    width: int
    bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the leaf."""
        return (2, self.width) if self.bias else (self.width,)


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenArray:
    """A frozen tensor that is neither a projection nor a norm, such as the table of a router.

    Args:
        path: path of the leaf in the layer, "mlp.gate.weight".
        shape: as in Hugging Face checkpoints.
        float32: float32 in every model dtype.
        by_head: whether its first axis counts heads.
    """

    path: str
    half: Half
    shape: tuple[int, ...]
    float32: bool = False
    by_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A tensor that forward may save for backward, in addition to the input of the layer or half.

    Args:
        width: elements per row.
        checkpoint: its checkpoint name in forward, for remat policies. Only the policy "everything" saves tensors
            without one.
        float32: float32 in every model dtype.
        unfused: saved only if no single op runs the core of this half (attention, or the whole MLP).
        entry: a piece that is only this half saves its own input instead.
        input_of: a linear whose adapters alone need it, for their gradients.
        experts: E and k, if its rows are copies for the k of E experts, sorted and padded; `width` is that of all k.
    """

    name: str
    half: Half
    width: int
    checkpoint: str | None = None
    float32: bool = False
    unfused: bool = False
    entry: bool = False
    input_of: str | None = None
    experts: tuple[int, int] | None = None

    @property
    def policy(self) -> RematPolicy:
        """The most economical policy that saves it."""
        return "gemm_inputs" if self.checkpoint else "everything"


@dataclass(frozen=True, kw_only=True)  # no __slots__: cached properties live in __dict__
class LayerSpec:
    """A layer in order of execution: attention, then the MLP. A stage boundary may lie between the two."""

    linears: tuple[Linear, ...]
    norms: tuple[Norm, ...]
    saved: tuple[SavedTensor, ...]
    arrays: tuple[FrozenArray, ...] = ()

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Names of the projections, which are the possible LoRA targets."""
        return tuple(linear.name for linear in self.linears if linear.is_target)

    @cached_property
    def sites(self) -> Mapping[str, tuple[Linear, ...]]:
        """Projections that share an input, in order of execution."""
        names = dict.fromkeys(linear.site for linear in self.linears)
        return {name: tuple(linear for linear in self.linears if linear.site == name) for name in names}

    @cached_property
    def checkpoints(self) -> tuple[str, ...]:
        """Checkpoint names that the policy `gemm_inputs` saves.

        Backward recomputes everything else from them without a matrix product: norm outputs, rotated heads and
        act(gate) · up.
        """
        names = [tensor.checkpoint for tensor in self.saved if tensor.checkpoint]
        return (*dict.fromkeys(names), *LORA_CHECKPOINTS)

    def linear(self, name: str) -> Linear:
        """The projection with this name."""
        return self._by_name[name]

    def norm(self, path: str) -> Norm | None:
        """The norm at this path; None if the layer has none there."""
        return next((norm for norm in self.norms if norm.path == path), None)

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
            raise ValueError(f"no part of this decoder layer has the leaf {leaf!r} (parts: {', '.join(self._halves)})")
        return self._halves[path]

    def linears_of(self, half: Half | None) -> tuple[Linear, ...]:
        """The projections of a half, or of the layer."""
        return tuple(linear for linear in self.linears if half in (None, linear.half))

    def linear_shapes(self, half: Half | None = None) -> dict[str, tuple[int, int]]:
        """(in, out) of the projections, by name; of one expert."""
        return {linear.name: linear.shape for linear in self.linears_of(half)}

    def kernel_shapes(self, half: Half | None = None) -> dict[str, tuple[int, int]]:
        """Shapes of the projections' kernels by leaf name. These leaves can be stored quantised."""
        return {f"{linear.path}.kernel": linear.kernel_shape for linear in self.linears_of(half)}

    def frozen_shapes(self, half: Half | None = None) -> dict[str, tuple[int, ...]]:
        """Shapes of all frozen leaves of the layer or of a half: kernels, biases, norms, other arrays."""
        shapes: dict[str, tuple[int, ...]] = {}
        for linear in self.linears_of(half):
            shapes[f"{linear.path}.kernel"] = linear.kernel_shape
            if linear.bias:
                stack = (linear.experts,) if linear.experts else ()
                shapes[f"{linear.path}.bias"] = (*stack, linear.out_features)
        shapes |= {array.path: array.shape for array in self.arrays if half in (None, array.half)}
        norms = (norm for norm in self.norms if half in (None, norm.half))
        return shapes | {f"{norm.path}.weight": norm.shape for norm in norms}

    @cached_property
    def split_axes(self) -> Mapping[str, int]:
        """Axes along which tensor parallelism splits frozen leaves. Every device has all of the other leaves."""
        axes = {f"{linear.path}.kernel": linear.split_axis for linear in self.linears}
        axes |= {f"{linear.path}.bias": 0 for linear in self.linears if linear.bias and linear.split_axis == 1}
        return axes | {array.path: 0 for array in self.arrays if array.by_head}

    @cached_property
    def num_parameters(self) -> int:
        """Number of frozen weights."""
        return sum(map(prod, self.frozen_shapes().values()))

    @cached_property
    def _by_name(self) -> dict[str, Linear]:
        return {linear.name: linear for linear in self.linears}

    @cached_property
    def _halves(self) -> dict[str, Half]:
        halves: dict[str, Half] = {array.path.rpartition(".")[0]: array.half for array in self.arrays}
        halves.update((part.path, part.half) for part in (*self.linears, *self.norms))
        return halves
