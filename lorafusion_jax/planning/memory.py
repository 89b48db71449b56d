"""The memory model: bytes per stage, by purpose, before any device is used.

Everything is counted from shapes. `NOT_MODELLED` lists what only the compiler or driver knows.
T packed tokens · D model width · F MLP width · H heads · C head width · V vocabulary · S stages · A adapters · R rank
P places of a microbatch for adapters
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from lorafusion_jax.adapters.spec import AdapterSpec, bank_columns, bank_rank, common_rank
from lorafusion_jax.adapters.table import adapter_kind, leaves_of
from lorafusion_jax.config.model import ModelConfig
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.config.specs import adapter_specs
from lorafusion_jax.families.layer import Layer
from lorafusion_jax.layout.extent import Extent
from lorafusion_jax.layout.layer import HALVES, REMAT_POLICIES, Half, RematPolicy
from lorafusion_jax.objective.chunks import DEFAULT_CHUNK, chunk_rows
from lorafusion_jax.optim.table import optimizer
from lorafusion_jax.planning.blocks import block_layers
from lorafusion_jax.planning.stages import stage_layers
from lorafusion_jax.weights.table import NONE, stored_kind
from pallas_kernels import policy

GIB = 2**30
DEVICE_BYTES = {  # memory that the driver reports
    "h100": 79 * GIB,
    "h200": 140 * GIB,
    "a100": 79 * GIB,
    "l40s": 44 * GIB,
    "a6000": 47 * GIB,
    "rtx6000-ada": 47 * GIB,
}
USABLE = 0.92  # share of the device; the rest is for NOT_MODELLED
ALLOCATOR_USABLE = 0.97  # share of an allocator's limit (95 % of the device), which excludes CUDA and NCCL
# Less with fsdp: a backward pass gathers the weights of all layers of a program into one contiguous block, which a
# nearly full allocator cannot provide.
GATHERING = 0.05
NOT_MODELLED = (
    "copies and temporaries that the compiler adds",
    "fragmentation of the allocator",
    "CUDA, cuDNN and NCCL themselves (about 1 GiB)",
    "host memory",
)
FLOAT32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryProblem:
    """Everything that the memory of a run depends on.

    Args:
        model: shapes.
        adapters: in stacking order.
        optimizers: name of each adapter's optimizer.
        layers: layers of each stage.
        capacity_tokens: T.
        fsdp: number of devices that share the frozen weights of a stage.
        block_layers: layers per program (None: chosen).
        remat: rematerialisation policy of the layers.
        item: bytes per element of unquantised base weights and of activations.
        quantize: storage of the layers' projections, see `weights.table`.
        implementation: implementation of the LoRA ops (None: chosen).
        attention: implementation of attention (None: chosen).
        hopper: whether the devices are Hopper GPUs. On others XLA is the default.
        measured: implementations that measured fastest on the devices.
        tile_tokens: rows of a tile.
        loss_chunk: as in `objective.token_losses`.
    """

    model: ModelConfig
    adapters: tuple[AdapterSpec, ...]
    optimizers: tuple[str, ...]
    layers: tuple[Extent, ...]
    capacity_tokens: int
    fsdp: int = 1
    block_layers: int | None = None
    remat: RematPolicy = "gemm_inputs"
    item: int = 2
    quantize: str = NONE
    implementation: str | None = None
    attention: str | None = None
    hopper: bool = True
    measured: policy.Lookup = policy.nothing_measured
    tile_tokens: int = 128
    loss_chunk: int = DEFAULT_CHUNK

    @property
    def num_stages(self) -> int:
        return len(self.layers)

    @property
    def packed_bits(self) -> bool:
        """Whether the kernels run. They save dropout's bits instead of silu(gate) · up; the XLA ops do the reverse."""
        if self.implementation is not None:
            return self.implementation != policy.XLA
        calls = (
            site_shape(self, site).op_call for site, rank in _site_ranks(self, self.model.layer(0)).items() if rank
        )
        measured = [name for name in map(self.measured, calls) if name is not None]
        return any(name != policy.XLA for name in measured) if measured else self.hopper


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes on one device of a stage, by purpose."""

    frozen: int
    adapters: int
    sums: int
    optimizers: int
    kept: int
    batches: int
    working: int

    @property
    def total(self) -> int:
        return sum(getattr(self, name) for name in self.__dataclass_fields__)


def memory_problem(config: JobConfig, model: ModelConfig) -> MemoryProblem:
    """Builds the problem of a job. `train.remat: auto` counts as everything (see `choose_remat`)."""
    mesh, train = config.mesh, config.train
    tokens = config.batch.largest
    return MemoryProblem(
        model=model,
        adapters=tuple(adapter_specs(config)),
        optimizers=tuple(adapter.optim.name for adapter in config.adapters),
        layers=stage_layers(model, mesh.stages, mesh.layers, capacity_tokens=tokens),
        capacity_tokens=tokens,
        fsdp=mesh.fsdp,
        block_layers=train.block_layers,
        remat="everything" if train.remat == "auto" else train.remat,
        item=4 if config.base.dtype == "float32" else 2,
        quantize=config.base.quantize,
        implementation=train.implementation,
        tile_tokens=config.batch.tile_tokens,
        attention=train.attention,
        loss_chunk=train.loss_chunk,
    )


def stage_memory(problem: MemoryProblem) -> tuple[StageMemory, ...]:
    """Computes the peak memory on one device of each stage.

    Stage s of 1F1B holds weights and states, the saved tensors of S - s microbatches, and the working memory of its
    largest program.
    """
    return tuple(_stage(problem, stage) for stage in range(problem.num_stages))


def kept_per_layer(problem: MemoryProblem, half: Half | None = None, number: int = 0) -> dict[str, int]:
    """Bytes that one layer or half layer saves for one microbatch, by tensor.

    `nothing` saves the layer's input; `gemm_inputs` saves what elementwise operations cannot recompute; `everything`
    saves all residuals.

    Args:
        number: of the layer.
    """
    layer = problem.model.layer(number)
    T, item = problem.capacity_tokens, problem.item
    kept = {"x_in": item * T * problem.model.hidden_size}
    if problem.remat == "nothing":
        return kept
    for own in HALVES if half is None else (half,):
        alone = half == own
        kept |= _saved_tensors(problem, layer, own, alone=alone) | _saved_by_lora(problem, layer, own)
    return kept


def _saved_tensors(problem: MemoryProblem, layer: Layer, half: Half, *, alone: bool) -> dict[str, int]:
    fused = _attention_is_ours(problem, layer) if half == "attention" else _mlp_is_one_op(problem, layer)
    kept = {}
    for tensor in layer.saved:
        wanted = tensor.policy == "gemm_inputs" or problem.remat == "everything"
        left_out = (tensor.unfused and fused) or (tensor.entry and alone)
        if tensor.half == half and wanted and not left_out:
            item = FLOAT32 if tensor.float32 else problem.item
            kept[tensor.name] = item * problem.capacity_tokens * tensor.width
    return kept


def _saved_by_lora(problem: MemoryProblem, layer: Layer, half: Half) -> dict[str, int]:
    sites = [site for site, linears in layer.sites.items() if linears[0].half == half]
    ranks, bits = _site_ranks(problem, layer), _bits(problem, layer)
    rows = problem.item * problem.capacity_tokens
    kept = {f"S of {site}": rows * _columns_of_s(problem, layer, site) for site in sites if ranks[site]}
    kept |= {f"dropout bits of {site}": bits[site] for site in sites if site in bits}
    unscaled = [linear for site in sites for linear in layer.sites[site] if _scales_columns(problem, linear.name)]
    return kept | {f"unscaled {linear.name}": rows * linear.out_features for linear in unscaled}


def _scales_columns(problem: MemoryProblem, target: str) -> bool:
    """Whether an adapter multiplies the columns of a projection, whose backward needs them as they were."""
    return any(target in spec.targets and adapter_kind(spec.kind).column_scale for spec in problem.adapters)


def working_memory(problem: MemoryProblem, stage: int) -> dict[str, int]:
    """Temporary bytes of each program of a stage; the largest one counts."""
    m, T, item = problem.model, problem.capacity_tokens, problem.item
    D, V = m.hidden_size, m.vocab_size
    by_kind = [_layer_work(problem, stage, number) for number in _first_of_kinds(problem, stage)]
    programs = {name: max(work[name] for work in by_kind) for name in ("forward", "backward")}
    programs["update"] = 5 * max(_own_lora_bytes(problem, stage), default=0)  # gradient, changes, weights, states
    if stage == problem.num_stages - 1:
        rows = chunk_rows(T, V, problem.loss_chunk)
        head = item * D * V if problem.fsdp > 1 else 0
        # Logits and their gradient in float32, the gradient also in the model's dtype; rows, norm and its gradient.
        programs["loss"] = rows * V * (2 * FLOAT32 + item) + 3 * item * T * D + head
    return programs


def _first_of_kinds(problem: MemoryProblem, stage: int) -> list[int]:
    """Number of the first layer of each kind on a stage."""
    numbers: dict[int, int] = {}
    for piece in problem.layers[stage].pieces:
        numbers.setdefault(problem.model.kind_of(piece.layer), piece.layer)
    return list(numbers.values())


def _layer_work(problem: MemoryProblem, stage: int, number: int) -> dict[str, int]:
    """Temporary bytes of the programs of a layer."""
    layer, T, item = problem.model.layer(number), problem.capacity_tokens, problem.item
    D, F = problem.model.hidden_size, layer.mlp.inner
    query, key = layer.attention.queries, layer.attention.keys
    hand_over = 2 * item * T * D  # incoming and outgoing activations or gradients
    everything = kept_per_layer(replace(problem, remat="everything"), number=number)
    made_again = sum(everything.values()) - sum(kept_per_layer(problem, number=number).values())
    if _mlp_is_one_op(problem, layer):
        made_again += item * T * F  # silu(gate) · up: down reads it, nobody keeps it
    mlp = item * T * (3 * F + 2 * D)  # gradients of down's input, gate, up, and of x on both sides
    if _is_hoppers(problem, down := site_shape(problem, "down", number)) and policy.has_extra_ranks(down):
        mlp += item * T * F  # silu(gate) · up once more, for their gradient; or their part of the gradient of it
    attention = (
        item * T * (2 * query + 2 * key + 2 * D) + FLOAT32 * T * query
    )  # cuDNN sums dq in float32, ours does not
    view = _view_bytes(problem, layer)  # the adapters of a microbatch in one layer; their gradients take as much
    # Compiled for four H200s, a forward pass gathers layer by layer, a backward pass all layers of its program at once.
    gathered = layer_bytes(problem, number=number) if problem.fsdp > 1 else 0
    dequantised = _dequantised_bytes(problem, number)  # one layer at a time, because layers depend on each other
    together = block_layers(problem.block_layers, len(problem.layers[stage].pieces), fsdp=problem.fsdp)
    once = hand_over + made_again + dequantised
    return {
        "forward": once + view + gathered,
        "backward": once + max(mlp, attention) + _tile_sums(problem, layer) + 2 * view + together * gathered,
    }


def choose_remat(problem: MemoryProblem, device_bytes: int, *, usable: float = USABLE) -> RematPolicy:
    """Returns the fastest policy that fits every stage, or `nothing` if none does.

    Args:
        device_bytes: memory of the device, or with `usable=ALLOCATOR_USABLE` the limit of its allocator.
    """
    for remat in REMAT_POLICIES:
        if fits(replace(problem, remat=remat), device_bytes, usable=usable):
            return remat
    return "nothing"


def fits(problem: MemoryProblem, device_bytes: int, *, usable: float = USABLE) -> bool:
    """Whether every stage fits into the usable memory of a device."""
    if problem.fsdp > 1:
        usable -= GATHERING
    return max(stage.total for stage in stage_memory(problem)) <= usable * device_bytes


def advice(problem: MemoryProblem, device_bytes: int, *, tile_tokens: int = 128, usable: float = USABLE) -> str:
    """Suggests a setting with which the job fits; empty if it already fits.

    It suggests the largest capacity that fits or another remat policy, or more devices if the weights alone do not fit.
    """
    if fits(problem, device_bytes, usable=usable):
        return ""
    said: list[str] = []
    for remat in REMAT_POLICIES[REMAT_POLICIES.index(problem.remat) :]:
        tokens = largest_capacity(replace(problem, remat=remat), device_bytes, tile_tokens=tile_tokens, usable=usable)
        if tokens >= problem.capacity_tokens:
            return " or ".join([*said, f"train.remat: {remat}"])
        if tokens and not said:
            said = [f"batch.capacity_tokens: {tokens}"]
    return said[0] if said else "more mesh.stages or mesh.fsdp: the weights alone are too large"


def largest_capacity(
    problem: MemoryProblem, device_bytes: int, *, tile_tokens: int = 128, usable: float = USABLE
) -> int:
    """Returns the largest multiple of a tile, up to the problem's capacity, that fits; 0 if none does."""
    low, high = 0, problem.capacity_tokens // tile_tokens
    while low < high:
        middle = (low + high + 1) // 2
        if fits(replace(problem, capacity_tokens=middle * tile_tokens), device_bytes, usable=usable):
            low = middle
        else:
            high = middle - 1
    return low * tile_tokens


def most_halves(problem: MemoryProblem, room: int) -> list[int]:
    """Number of half layers that fit each stage in `room` bytes, for any first half; at least two."""

    stop = problem.layers[-1].stop

    def size(stage: int, halves: int) -> int:
        own = [Extent(first, first + halves) for first in (0, 1) if first + halves <= stop]
        of = [(*problem.layers[:stage], each, *problem.layers[stage + 1 :]) for each in own]
        return max(_stage(replace(problem, layers=layers), stage).total for layers in of)

    possible = range(3, stop + 1)
    return [
        2 + bisect_right(possible, room, key=lambda halves, stage=stage: size(stage, halves))
        for stage in range(problem.num_stages)
    ]


def own_parameters(problem: MemoryProblem) -> int:
    """Trainable numbers of all adapters, each at its own rank and targets."""
    return sum(sum(_own_lora_bytes(problem, stage)) for stage in range(problem.num_stages)) // FLOAT32


def _stage(problem: MemoryProblem, stage: int) -> StageMemory:
    in_flight = problem.num_stages - stage
    pieces = problem.layers[stage].pieces
    kept = sum(sum(kept_per_layer(problem, piece.half, piece.layer).values()) for piece in pieces)
    own = _own_lora_bytes(problem, stage)
    slopes = problem.item * problem.capacity_tokens * problem.model.hidden_size if _is_last(problem, stage) else 0
    return StageMemory(
        frozen=_frozen_bytes(problem, stage),
        adapters=sum(own) + _constant_bytes(problem, stage),
        sums=sum(own),
        optimizers=sum(
            round(optimizer(name).states_per_weight * size) for name, size in zip(problem.optimizers, own, strict=True)
        ),
        kept=in_flight * kept + slopes,
        # eight int32 or float32 per row, and rotary tables
        batches=in_flight * FLOAT32 * problem.capacity_tokens * (8 + 2 * _rope_channels(problem.model)),
        working=max(working_memory(problem, stage).values()),
    )


def _rope_channels(model: ModelConfig) -> int:
    return sum(rope.channels or model.head_dim for rope in model.ropes)


def _is_last(problem: MemoryProblem, stage: int) -> bool:
    return stage == problem.num_stages - 1


def _frozen_bytes(problem: MemoryProblem, stage: int) -> int:
    """Bytes of the tables at both ends. A tied table is shared if one stage has both ends."""
    m = problem.model
    table = _share((m.vocab_size, m.hidden_size), problem.fsdp)
    tables = int(stage == 0) + int(_is_last(problem, stage))
    if m.tie_embeddings and problem.num_stages == 1:
        tables = 1
    pieces = problem.layers[stage].pieces
    layers = sum(layer_bytes(problem, piece.half, problem.fsdp, piece.layer) for piece in pieces)
    norm = m.hidden_size if _is_last(problem, stage) else 0
    return layers + problem.item * (tables * table + norm)


def layer_bytes(problem: MemoryProblem, half: Half | None = None, fsdp: int = 1, number: int = 0) -> int:
    """Stored bytes of the frozen tensors of a layer or half layer, on one of the devices that share them."""
    layer = problem.model.layer(number)
    shapes, kernels = layer.frozen_shapes(half), layer.kernel_shapes(half)
    others = sum(_share(shape, fsdp) for name, shape in shapes.items() if name not in kernels)
    return problem.item * others + kernel_bytes(problem, half, fsdp, number)


def kernel_bytes(problem: MemoryProblem, half: Half | None = None, fsdp: int = 1, number: int = 0) -> int:
    """The kernels' part of `layer_bytes`."""
    kernels, kind = problem.model.layer(number).kernel_shapes(half).values(), stored_kind(problem.quantize)
    if kind is None:
        return problem.item * sum(_share(shape, fsdp) for shape in kernels)
    arrays = (array for k, n in kernels for array in kind.arrays(k, n).values())
    return sum(array.item * _share(array.shape, fsdp) for array in arrays)


def _dequantised_bytes(problem: MemoryProblem, number: int) -> int:
    """One layer's kernels, made to be used: in the model's dtype, or in another order of their bytes, next to the
    widest input in as few bytes, where they multiply as they are."""
    kind = stored_kind(problem.quantize)
    if kind is None:
        return 0
    if kind.operand is None:
        return kernel_bytes(replace(problem, quantize=NONE), number=number)
    inner = problem.model.layer(number).mlp.inner
    return kernel_bytes(problem, number=number) + problem.capacity_tokens * inner


def _share(shape: Sequence[int], fsdp: int) -> int:
    """Elements of a tensor on one device; matrices are sharded along an axis that divides."""
    split = len(shape) > 1 and any(size % fsdp == 0 for size in shape)
    return prod(shape) // fsdp if split else prod(shape)


def _view_bytes(problem: MemoryProblem, layer: Layer) -> int:
    """What a layer's program sees of the adapters in one microbatch: float32, padded to the widest of a projection.

    No microbatch has more adapters than tiles; how many a plan puts together is not known here.
    """
    leaves = leaves_of(tuple(spec.kind for spec in problem.adapters))
    padded = sum(
        prod(leaf.shape(k, n, rank))
        for name, (k, n) in layer.linear_shapes().items()
        if (rank := bank_rank(problem.adapters, name))
        for leaf in leaves
    )
    return FLOAT32 * min(len(problem.adapters), max(problem.capacity_tokens // problem.tile_tokens, 1)) * padded


def _tile_sums(problem: MemoryProblem, layer: Layer) -> int:
    """What the XLA form has of every tile in backward: dA and dB in float32 before they are added up, and A and B of
    its adapter. A microbatch of one adapter is one tile; the kernels add up as they go."""
    if problem.packed_bits or len(problem.adapters) == 1:
        return 0
    tiles = problem.capacity_tokens // problem.tile_tokens
    sites = (
        sum(bank_columns(problem.adapters, linear.name) * sum(linear.shape) for linear in linears)
        for linears in layer.sites.values()
    )
    return tiles * (FLOAT32 + problem.item) * max(sites)


def _own_lora_bytes(problem: MemoryProblem, stage: int, *, trainable: bool = True) -> list[int]:
    """Trainable tensors of a stage's layers in float32, per adapter, at its own rank, targets and kind.

    Args:
        trainable: False: those that are constant in training.
    """
    model = problem.model
    pieces = [model.layer(piece.layer).linear_shapes(piece.half) for piece in problem.layers[stage].pieces]

    def own(spec: AdapterSpec) -> int:
        kind = adapter_kind(spec.kind)
        shapes = [piece[name] for piece in pieces for name in spec.targets if name in piece]
        return sum(
            kind.num_parameters(in_features=k, out_features=n, rank=spec.rank, trainable=trainable) for k, n in shapes
        )

    return [FLOAT32 * own(spec) for spec in problem.adapters]


def _constant_bytes(problem: MemoryProblem, stage: int) -> int:
    """Tensors of the adapters that training does not change; shared ones are on every stage once."""
    shapes = problem.model.layer(0).linear_shapes().values()
    largest = max(k for k, _ in shapes), max(n for _, n in shapes)
    shared = sum(
        prod(leaf.shape(*largest, spec.rank)) for spec in problem.adapters for leaf in adapter_kind(spec.kind).shared
    )
    return sum(_own_lora_bytes(problem, stage, trainable=False)) + FLOAT32 * shared


def _site_ranks(problem: MemoryProblem, layer: Layer) -> dict[str, int]:
    return {
        site: sum(bank_columns(problem.adapters, linear.name) for linear in linears)
        for site, linears in layer.sites.items()
    }


def _attention_is_ours(problem: MemoryProblem, layer: Layer) -> bool:
    """Whether our own attention kernels run: they are selected and support these sizes and scores."""
    m = layer.attention
    sizes = {"rows": problem.capacity_tokens, "heads": m.heads, "key_heads": m.kv_heads, "width": m.head_dim}
    measured = problem.measured(policy.attention_call(**sizes, dtype=_dtype(problem)))
    chosen = problem.attention or measured or (policy.HOPPER if problem.hopper else policy.XLA)
    if chosen != policy.HOPPER or m.soft_cap is not None:
        return False
    return policy.attention_unsupported_reason(**sizes, dtype=_dtype(problem)) is None


def _mlp_is_one_op(problem: MemoryProblem, layer: Layer) -> bool:
    """Whether the kernels run the whole MLP. Their backward recomputes silu(gate) · up from gate and up."""
    inside = [linear.name for linear in layer.linears_of("mlp")]
    scaled = any(_scales_columns(problem, name) for name in inside)
    if not problem.packed_bits or not layer.mlp.as_one_op or scaled:
        return False
    number = problem.model.layers.index(layer)
    gate_up, down = (site_shape(problem, site, number) for site in ("gate_up", "down"))
    return policy.mlp_is_fused(gate_up, down, problem.implementation, hopper=problem.hopper, measured=problem.measured)


def site_shape(problem: MemoryProblem, site: str, number: int = 0) -> policy.LinearShape:
    """The op call of a site of a layer, as the kernels' policy knows it."""
    linears = problem.model.layer(number).sites[site]
    return policy.LinearShape(
        rows=problem.capacity_tokens,
        in_features=linears[0].in_features,
        out_features=tuple(linear.out_features for linear in linears),
        ranks=tuple(bank_columns(problem.adapters, linear.name) for linear in linears),
        tile=problem.tile_tokens,
        adapters=len(problem.adapters),
        least_rank=common_rank([spec.columns for spec in problem.adapters]) or 0,
        dropout=any(spec.dropout for spec in problem.adapters),
        dtype=_dtype(problem),
    )


def _is_hoppers(problem: MemoryProblem, shape: policy.LinearShape) -> bool:
    """Whether Hopper's backend serves a call. No other one splits ranks."""
    device = {"hopper": problem.hopper, "measured": problem.measured}
    return (problem.implementation or policy.preferred(shape, **device)[0]) == policy.HOPPER


def _dtype(problem: MemoryProblem) -> str:
    return "bfloat16" if problem.item == 2 else "float32"


def _columns_of_s(problem: MemoryProblem, layer: Layer, site: str) -> int:
    """Of all projections of a site together: the kernels pad them, and Hopper's have the extra ranks in blocks."""
    if not problem.packed_bits:
        return _site_ranks(problem, layer)[site]
    shape = site_shape(problem, site, problem.model.layers.index(layer))
    return policy.columns_of_s(shape) if _is_hoppers(problem, shape) else shape.joint_rank


def _bits(problem: MemoryProblem, layer: Layer) -> dict[str, int]:
    """Bytes of the packed keep bits of each dropout site, in blocks of 256 columns."""
    if not problem.packed_bits or not any(spec.dropout for spec in problem.adapters):
        return {}
    ranks = _site_ranks(problem, layer)
    return {
        site: problem.capacity_tokens * -(-linears[0].in_features // 256) * 32
        for site, linears in layer.sites.items()
        if ranks[site]
    }
