"""What a layer keeps for backward in the memory model, against real layers and by hand."""

from dataclasses import replace
from importlib import import_module
from math import prod
from unittest import mock

import pytest
from memory_problems import FOUR, HOPPER, WIDE, problem
from shapes import GEMMA_4_E2B, LLAMA_8B

from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.families.delta_net import DeltaNet
from lorafusion_jax.families.experts import Experts, ParallelExperts, Router
from lorafusion_jax.families.latent_attention import LatentAttention
from lorafusion_jax.families.mlp import Mlp
from lorafusion_jax.families.pattern import LayerType
from lorafusion_jax.families.rope import Rope
from lorafusion_jax.layout.layer import EXPERTS, PATHS, REMAT_POLICIES
from lorafusion_jax.planning.memory import (
    kept_per_layer,
    stage_memory,
    working_memory,
)

S_COLUMNS = {"qkv": 64, "o": 16, "gate_up": 32, "down": 16}


def test_kept_tensors_by_hand():
    T = 64
    nothing = {"x_in": 2 * T * 24}
    gemm_inputs = nothing | {
        "q, k before their norms": 2 * T * 48,
        "q": 2 * T * 32,
        "k": 2 * T * 16,
        "v": 2 * T * 16,
        "attention": 2 * T * 32,
        "attention log-sum-exp": 4 * T * 4,
        "o_out": 2 * T * 24,
        "gate": 2 * T * 40,
        "up": 2 * T * 40,
        # each projection's rank is padded to 16, and their sum to a power of two
        **{f"S of {site}": 2 * T * columns for site, columns in S_COLUMNS.items()},
        **{f"dropout bits of {site}": T * 32 for site in ("qkv", "o", "gate_up", "down")},
    }
    assert kept_per_layer(problem(remat="nothing")) == nothing
    assert kept_per_layer(problem()) == gemm_inputs
    more = kept_per_layer(problem(remat="everything"))
    assert {name: size for name, size in more.items() if name not in gemm_inputs} == {
        "attention, for o_proj": 2 * T * 32,
        "input_layernorm out": 2 * T * 24,
        "input_layernorm scale": 4 * T,
        "post_attention_layernorm out": 2 * T * 24,
        "post_attention_layernorm scale": 4 * T,
        "silu(gate) · up": 2 * T * 40,  # the kernels do not serve an MLP as small as that
        "scales of their norms": 4 * T * 6,
    }


def test_gated_array_is_saved_unless_the_mlp_is_one_op():
    T, F = 8192, LLAMA_8B.intermediate_size

    def gated(**changes):
        kept = kept_per_layer(problem(LLAMA_8B, tokens=T, remat="everything", **changes), "mlp")
        return kept.get("silu(gate) · up")

    assert gated() is None
    assert gated(hopper=False) == 2 * T * F
    assert gated(item=4) == 4 * T * F
    for left_out in ("gate_proj", "up_proj", "down_proj"):
        targets = tuple(name for name in ("gate_proj", "up_proj", "down_proj") if name != left_out)
        some, rest = (AdapterSpec(name=name, rank=4, alpha=8, targets=targets) for name in "ab")
        assert gated(adapters=(some, rest)) == 2 * T * F
        rest = replace(rest, targets=(left_out,))
        assert gated(adapters=(some, rest)) is None  # together they have all three
    # 33: gate and up are called one by one; 256: plain products
    for ranks, size in (((32,), None), ((33,), 2 * T * F), ((16, 256), None), ((256, 256), 2 * T * F)):
        adapters = tuple(AdapterSpec(name=f"a{rank}", rank=rank, alpha=8) for rank in ranks)
        assert gated(adapters=adapters) == size


@pytest.mark.parametrize(("implementation", "arrays"), [(None, 1), ("pallas_triton", 0)])
def test_extra_ranks_make_the_gated_array_again_for_their_gradient(implementation, arrays):
    """Triton's kernels take all ranks: they have no extra ones."""

    def backward(rank):
        specs = tuple(AdapterSpec(name=f"a{rank_of}", rank=rank_of, alpha=8) for rank_of in (16, rank))
        given = problem(LLAMA_8B, tokens=8192, adapters=specs, implementation=implementation)
        return working_memory(given, 0)["backward"]

    per_rank = (backward(256) - backward(128)) / 128  # of a rank: its gradients
    assert backward(128) - backward(32) - 96 * per_rank == arrays * 2 * 8192 * LLAMA_8B.intermediate_size


@pytest.mark.parametrize(("implementation", "columns"), [(None, 16 + 64), ("pallas_triton", 128)])
def test_saved_s_has_the_columns_of_its_kernels(implementation, columns):
    specs = tuple(AdapterSpec(name=f"a{rank}", rank=rank, alpha=8) for rank in (16, 80))
    given = problem(LLAMA_8B, tokens=8192, adapters=specs, implementation=implementation, remat="everything")
    assert kept_per_layer(given)["S of down"] == 2 * 8192 * columns


def test_the_gated_array_is_working_memory_where_it_is_not_kept():
    def of(remat, **changes):
        return problem(LLAMA_8B, tokens=8192, remat=remat, **changes)

    gated, hand_over = 2 * 8192 * LLAMA_8B.intermediate_size, 2 * 2 * 8192 * LLAMA_8B.hidden_size
    hand_over += (
        4 * 2 * 4 * sum(map(sum, LLAMA_8B.layer(0).linear_shapes().values()))
    )  # both adapters, padded to rank 4
    everything = sum(kept_per_layer(of("everything")).values())
    for remat in REMAT_POLICIES:
        again = everything - sum(kept_per_layer(of(remat)).values())
        assert working_memory(of(remat), 0)["forward"] == hand_over + again + gated
    assert working_memory(of("everything", hopper=False), 0)["forward"] == hand_over


def real_kept(wanted, half=None):
    """Bytes that the executor's forward pass of one layer returns, and the layer's input; from shapes alone."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    from lorafusion_jax.config.schema import TrainSettings
    from lorafusion_jax.data.assemble import BalanceRows, Microbatch
    from lorafusion_jax.models.stream import Stream
    from lorafusion_jax.session.layer_programs import Split
    from lorafusion_jax.session.parts import Parts

    T = wanted.capacity_tokens
    settings = TrainSettings(implementation=wanted.implementation, attention=wanted.attention)
    parts = Parts(model=wanted.model, specs=wanted.adapters, settings=settings, dtype=jnp.bfloat16)
    whole = jax.ShapeDtypeStruct
    frozen = {name: whole(shape, jnp.bfloat16) for name, shape in parts.frozen_shapes(half).items()}
    count, rank = len(wanted.adapters), max(spec.rank for spec in wanted.adapters)
    lora = {}
    for linear in wanted.model.layer(0).linears_of(half):
        k, n = linear.shape
        stack = (count, linear.experts) if linear.experts else (count,)
        lora |= {f"{linear.path}.lora_a": (*stack, k, rank), f"{linear.path}.lora_b": (*stack, rank, n)}
    lora = {name: whole(shape, jnp.float32) for name, shape in lora.items()}
    sizes = {"segment_offsets": 9, "segment_lengths": 8, "tile_adapter": T // 128, "adapters": count}
    kinds = {"row_key": jnp.uint32, "weights": jnp.float32}
    rows = {name: whole((sizes.get(name, T),), kinds.get(name, jnp.int32)) for name in Microbatch._fields}
    counted = BalanceRows(whole((8,), jnp.int32), whole((8,), jnp.float32)) if wanted.balanced else None
    batch = Microbatch(**rows | {"lora": None, "balance": counted})

    def forward(frozen, lora, x, batch, of_layers):
        run = lambda given, lora, x: parts.layer(given[0], lora, x, given[1], given[2])  # noqa: E731
        split = Split(run, wanted.remat, wanted.model.layer(0).checkpoints)
        inputs = parts.inputs.of_batch(batch, dropout=True)
        inputs = inputs._replace(layers=replace(inputs.layers, of_layers=of_layers))
        return split.forward((frozen, inputs, jnp.int32(0)), lora, x)

    x, own = whole((T, wanted.model.hidden_size), jnp.bfloat16), wanted.model.input_width
    of_layers = whole((wanted.model.num_layers, T, own), jnp.bfloat16) if own else None
    carried = x if counted is None else (x, whole((2, 8, wanted.model.experts.count), jnp.float32))
    if (mixer := wanted.model.layer(0).attention) and getattr(mixer, "sharing", "none") == "reads":
        pair = (whole((T, mixer.kv_heads, mixer.head_dim), jnp.bfloat16),) * 2
        carried = Stream(x, {mixer.module: pair})
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    on_hopper = mock.patch.object(import_module("lorafusion_jax.models.attention.api"), "on_hopper", return_value=True)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)), on_hopper:  # it asks the real device
        _, kept = jax.eval_shape(forward, frozen, lora, carried, batch, of_layers)
    return sum(prod(leaf.shape) * leaf.dtype.itemsize for leaf in (x, *kept))


@pytest.mark.parametrize(
    ("implementation", "attention"), [("xla", "xla"), (HOPPER, "xla"), (HOPPER, HOPPER), (HOPPER, None)]
)
@pytest.mark.parametrize("remat", REMAT_POLICIES)
def test_a_real_layer_saves_the_counted_bytes(remat, implementation, attention):
    """Within 0.1 %: rows marked bad and dropout's keys, a few bytes a row, are not in the table."""
    wanted = problem(WIDE, FOUR, tokens=1024, remat=remat, implementation=implementation, attention=attention)
    assert sum(kept_per_layer(wanted).values()) == pytest.approx(real_kept(wanted), rel=1e-3)


@pytest.mark.parametrize("half", ["attention", "mlp"])
def test_half_a_real_layer_saves_the_counted_bytes(half):
    wanted = problem(WIDE, FOUR, tokens=1024, remat="everything", implementation=HOPPER)
    assert sum(kept_per_layer(wanted, half).values()) == pytest.approx(real_kept(wanted, half), rel=1e-3)


def test_other_attention_implementations_save_the_result_twice():
    def again(model=LLAMA_8B, tokens=1024, **changes):
        return "attention, for o_proj" in kept_per_layer(problem(model, tokens=tokens, remat="everything", **changes))

    assert not again()
    assert not again(hopper=False, attention=HOPPER)
    assert again(hopper=False)
    assert again(attention="cudnn")
    assert again(item=4)
    assert again(tokens=1024 + 64)
    assert again(replace(LLAMA_8B, head_dim=96))


def test_unused_tensors_are_not_saved():
    plain = (AdapterSpec(name="law", rank=4, alpha=8, targets=("down_proj",)),)
    names = kept_per_layer(problem(adapters=plain))
    assert {name for name in names if name.startswith(("S of", "dropout"))} == {"S of down"}
    assert not any(name.startswith("dropout") for name in kept_per_layer(problem(hopper=False)))


STRANGE = {
    "sandwich, GeGLU, caps": {
        "norms": "sandwich", "activation": "gelu_tanh", "attention_soft_cap": 20.0, "norm_offset": 1.0, "qk_norm": False
    },
    "fused, partial": {"fused": True, "qk_norm": False, "rope_channels": 64},
    "norms after, over all heads": {"norms": "post", "qk_norm": "full", "sliding_window": 128},
    "scaled sums": {"residual_scale": 0.22, "qk_norm": False},
    "latent attention": {
        "latent": LatentAttention(
            width=WIDE.hidden_size, heads=8, q_rank=384, kv_rank=256, plain_dim=64, rotary_dim=32, value_dim=64
        ),
        "head_dim": 32, "qk_norm": False,
    },
    "gated attention": {"attention_gate": True, "qk_norm": True},
    "gated delta net": {
        "delta_net": DeltaNet(width=WIDE.hidden_size, key_heads=4, value_heads=8, key_dim=64, value_dim=64),
        "pattern": (LayerType(linear=True),) * WIDE.num_layers, "qk_norm": False,
    },
    "experts": {
        "experts": Experts(
            width=WIDE.hidden_size, inner=64, count=6, active=2, shared_gate=True,
            shared=Mlp(width=WIDE.hidden_size, inner=96, module="mlp.shared_expert"),
        )
    },
    "wide experts": {"experts": Experts(width=WIDE.hidden_size, inner=512, count=8, active=4)},
    "limited experts with biases": {
        "experts": Experts(
            width=WIDE.hidden_size, inner=512, count=8, active=4, bias=True, interleaved=True, limit=7.0
        )
    },
    "inputs of their own": {
        "norms": "sandwich", "activation": "gelu_tanh", "qk_norm": True, "v_norm": True, "layer_scalar": True,
        "input_width": 256, "input_vocab": 512,
    },
    "experts beside an MLP": {
        "norms": "sandwich", "activation": "gelu_tanh", "qk_norm": False,
        "experts": ParallelExperts(
            width=WIDE.hidden_size, inner=512, count=8, active=4, router=Router(scaled=True), activation="gelu_tanh"
        ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGE)
@pytest.mark.parametrize("remat", ["gemm_inputs", "everything"])
def test_layers_of_other_families_save_the_counted_bytes(name, remat):
    """Within 2 %: "everything" has temporaries of a few rows that XLA may drop; of narrow experts, 5 %."""
    others = tuple(target for target in PATHS if target not in EXPERTS)
    on_experts = name in ("experts", "limited experts with biases")  # else what only their adapters need is not saved
    adapters = tuple(
        replace(spec, targets=tuple(PATHS), dropout=0.0) if on_experts else replace(spec, targets=others)
        for spec in FOUR
    )
    wanted = problem(
        replace(WIDE, **STRANGE[name]), adapters, tokens=1024, remat=remat, implementation="xla", attention="xla"
    )
    plain = problem(WIDE, adapters, tokens=1024, remat=remat, implementation="xla", attention="xla")
    for half in (None, "attention", "mlp"):
        counted = kept_per_layer(wanted, half)
        if half is not None and counted == kept_per_layer(plain, half):
            continue  # as in a plain layer: the whole one has it, and halves of those have a test
        assert sum(counted.values()) == pytest.approx(
            real_kept(wanted, half), rel=0.05 if name == "experts" else 0.02
        ), half


@pytest.mark.parametrize("sharing", ["gives", "reads"])
@pytest.mark.parametrize("remat", ["gemm_inputs", "everything"])
def test_layers_that_share_keys_save_the_counted_bytes(sharing, remat):
    """A reader keeps keys and values as attention takes them; the plan counts what passes between layers apart."""
    kinds = {
        name: LayerType(rope=Rope(), head_dim=128, sharing=name, wide=name == "reads") for name in ("gives", "reads")
    }
    others = [kind for name, kind in kinds.items() if name != sharing]
    pattern = (kinds[sharing], *others, *[LayerType(rope=Rope(), head_dim=128)] * (WIDE.num_layers - 2))
    model = replace(WIDE, **STRANGE["inputs of their own"] | {"pattern": pattern})
    others = tuple(replace(spec, targets=model.targets) for spec in FOUR)
    wanted = problem(model, others, tokens=1024, remat=remat, implementation="xla", attention="xla")
    assert sum(kept_per_layer(wanted).values()) == pytest.approx(real_kept(wanted), rel=0.02)


def test_keys_that_layers_share_and_their_inputs_are_counted_once():
    model = GEMMA_4_E2B
    wanted = problem(model, (FOUR[0],), tokens=4096)
    (stage,), rows = stage_memory(wanted), 2 * 4096
    table, mix, norm = 262144 * 35 * 256, 35 * 256 * 1536, 256
    assert model.num_parameters == sum(layer.num_parameters for layer in model.layers) + (
        table + mix + norm + 262144 * 1536 + 1536
    )
    assert stage.frozen == 2 * model.num_parameters
    keys = rows * 2 * (256 + 512)  # of a layer with a window and of a full one, each with one key head
    alone = stage_memory(replace(wanted, model=_without_sharing(model)))[0]
    kept = [sum(kept_per_layer(wanted, number=number).values()) for number in range(35)]
    assert stage.kept == sum(kept) + keys + rows * 1536 + keys  # between layers, and their gradients
    assert stage.batches - alone.batches == rows * 35 * 256
    assert working_memory(wanted, 0)["inputs"] == 2 * rows * 35 * 256


def _without_sharing(model):
    pattern = [replace(kind, sharing="none", wide=False) for kind in model.pattern]
    return replace(model, pattern=tuple(pattern), input_width=0, input_vocab=0)


@pytest.mark.parametrize("remat", ["gemm_inputs", "everything"])
def test_a_loss_of_routers_keeps_and_computes_arrays_of_rows_and_experts(remat):
    """Sums over the rows of each sequence are computed again: all rows of every sequence would be kept otherwise."""
    adapters = tuple(replace(spec, targets=("q_proj",)) for spec in FOUR)
    model = replace(WIDE, **STRANGE["wide experts"])
    plain = problem(model, adapters, tokens=1024, remat=remat, implementation="xla", attention="xla")
    balanced = replace(plain, balanced=True)
    rows_and_experts = 4 * 1024 * 8
    assert real_kept(balanced) - real_kept(plain) == rows_and_experts
    assert sum(kept_per_layer(balanced).values()) - sum(kept_per_layer(plain).values()) == rows_and_experts
    more, less = working_memory(balanced, 0), working_memory(plain, 0)
    for name in ("forward", "backward"):
        assert more[name] - less[name] == 3 * rows_and_experts
    dense = replace(balanced, model=WIDE)
    assert working_memory(dense, 0) == working_memory(replace(dense, balanced=False), 0)
