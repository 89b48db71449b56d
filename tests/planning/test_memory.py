"""The memory model of weights and stages against real arrays and hand-computed sizes, and its advice."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
from memory_problems import ADAPTERS, FOUR, HOPPER, TINY, problem
from shapes import LLAMA_8B, LLAMA_70B

from benchmarks.end_to_end_inputs import GPT_OSS_20B
from lorafusion_jax.adapters.spec import TARGETS, AdapterSpec
from lorafusion_jax.config.schema import JobConfig
from lorafusion_jax.layout.extent import Extent, extents
from lorafusion_jax.layout.layer import REMAT_POLICIES
from lorafusion_jax.models import ModelConfig
from lorafusion_jax.planning.memory import (
    ALLOCATOR_USABLE,
    DEVICE_BYTES,
    GIB,
    advice,
    choose_remat,
    fits,
    kept_per_layer,
    largest_capacity,
    memory_problem,
    most_halves,
    stage_memory,
    trainable_parameters,
    working_memory,
)


def real_sizes(item):
    """Bytes of the frozen leaves of a real decoder and of a stage's trainable ones, from shapes."""
    import jax.numpy as jnp
    from flax import nnx

    from lorafusion_jax.config.schema import TrainSettings
    from lorafusion_jax.models import Decoder
    from lorafusion_jax.session.parts import Parts

    dtype = {2: jnp.bfloat16, 4: jnp.float32}[item]
    model = nnx.eval_shape(lambda: Decoder(TINY, ADAPTERS, dtype=dtype, rngs=nnx.Rngs(0)))
    _, _, frozen = nnx.split(model, nnx.LoRAParam, ...)
    parts = Parts(model=TINY, specs=ADAPTERS, settings=TrainSettings(), dtype=dtype)
    return (
        sum(prod(leaf.shape) * leaf.dtype.itemsize for _, leaf in nnx.to_flat_state(frozen)),
        sum(4 * prod(shape) for shape in parts.leaves.lora_shapes(TINY.num_layers).values()),
    )


@pytest.mark.parametrize("item", [2, 4])
def test_one_stage_matches_the_decoder(item):
    frozen, lora = real_sizes(item)
    (stage,) = stage_memory(problem(item=item))
    assert (stage.frozen, stage.adapters, stage.sums) == (frozen, lora, lora)


def test_adapters_are_held_at_their_own_ranks_and_targets():
    """In four of a large job's ranks, 2.6 times less than padded to the largest."""
    ranks = {"a8": (8, ("q_proj", "v_proj")), "a16": (16, TARGETS), "a64": (64, TARGETS[:4]), "a128": (128, TARGETS)}
    adapters = tuple(
        AdapterSpec(name=name, rank=rank, alpha=8, targets=targets) for name, (rank, targets) in ranks.items()
    )
    (stage,) = stage_memory(problem(LLAMA_8B, adapters))
    shapes = LLAMA_8B.layer(0).linear_shapes()
    elements = 32 * sum(rank * sum(sum(shapes[name]) for name in targets) for rank, targets in ranks.values())
    assert stage.adapters == stage.sums == 4 * elements
    assert stage.optimizers == 2 * 4 * elements
    assert trainable_parameters(problem(LLAMA_8B, adapters)) == elements


def test_a_pass_holds_the_adapters_of_one_microbatch():
    """Never more than it has tiles, whatever the job has."""
    ten = tuple(AdapterSpec(name=f"a{index}", rank=4, alpha=8) for index in range(10))
    tiles = {"tokens": 64, "tile_tokens": 16, "remat": "everything"}
    four, many = (working_memory(problem(adapters=ten[:count], **tiles), 0) for count in (4, 10))
    assert (four["forward"], four["backward"]) == (many["forward"], many["backward"])
    three = working_memory(problem(adapters=ten[:3], **tiles), 0)
    view = 4 * 4 * sum(k + n for k, n in TINY.layer(0).linear_shapes().values())
    assert four["forward"] - three["forward"] == view
    assert four["backward"] - three["backward"] == 2 * view


def test_optimizers_see_an_adapter_at_its_own_rank():
    (stage,) = stage_memory(problem(optimizers=("adamw", "lion")))
    law = 5 * 4 * 4 * sum((24 + 32, 24 + 16, 24 + 16, 32 + 24, 24 + 40, 24 + 40, 40 + 24))
    med = 5 * 4 * 2 * ((24 + 32) + (40 + 24))
    assert stage.optimizers == 2 * law + med


def test_a_live_session_has_the_largest_state_twice():
    """Weights and optimizer state of one adapter, which are read while all train."""
    (stage,), (live,) = stage_memory(problem()), stage_memory(problem(copied_state=True))
    law = 5 * 4 * 4 * sum((24 + 32, 24 + 16, 24 + 16, 32 + 24, 24 + 40, 24 + 40, 40 + 24))
    assert stage.copies == 0
    assert live.copies == live.total - stage.total == 3 * law


def test_stages_share_the_layers_and_a_tied_table_lies_at_both_ends():
    (single,), three = stage_memory(problem()), stage_memory(problem(stages=3))
    table = 2 * 96 * 24
    assert sum(stage.frozen for stage in three) == single.frozen + table
    assert sum(stage.adapters for stage in three) == single.adapters


def test_stages_that_share_a_layer_hold_what_one_stage_holds():
    (single,) = stage_memory(problem(remat="everything"))
    table = 2 * 96 * 24
    for counts in ([2.5, 2.5], [1.5, 3.5]):
        two = stage_memory(replace(problem(remat="everything"), layers=extents(counts)))
        for name in ("adapters", "sums", "optimizers"):
            assert sum(getattr(stage, name) for stage in two) == getattr(single, name)
        assert sum(stage.frozen for stage in two) == single.frozen + table
        slopes = 2 * 64 * 24  # the loss's, on the last stage only; the first holds two microbatches
        assert two[0].kept / 2 + two[1].kept - slopes == single.kept - slopes


def test_fsdp_shards_frozen_weights():
    model = replace(LLAMA_8B, num_layers=2)
    (whole,), (part,) = (stage_memory(problem(model, FOUR, fsdp=n)) for n in (1, 4))
    norms = 2 * 4096 * 5
    assert part.frozen == (whole.frozen - norms) // 4 + norms
    assert (part.adapters, part.sums, part.optimizers) == (whole.adapters, whole.sums, whole.optimizers)
    assert part.working > whole.working  # layers are gathered before they run


@pytest.mark.parametrize("block", [1, 2, 4])
def test_a_backward_pass_gathers_all_layers_of_its_program(block):
    """By count at most 0.7 GB over what XLA allots backward for four H200s, never under it."""
    shapes = {"tokens": 6144, "fsdp": 4, "implementation": "xla", "block_layers": block}
    allotted = {1: 3.11e9, 2: 5.02e9, 4: 8.48e9}[block]  # bytes: memory_analysis() of the compiled program
    counted = working_memory(problem(LLAMA_70B, FOUR[:1], **shapes), 0)
    assert allotted < counted["backward"] < allotted + 0.7e9
    assert 1.7e9 < counted["forward"] < 2.7e9  # 1.6 to 1.7 GB at every block: one layer at a time


def test_the_xla_form_sums_up_over_tiles():
    """By hand: float32 dA and dB and the model's A and B of every tile, of the widest projections that share an input.
    One adapter is one tile, and the kernels add up as they go."""
    four = problem(LLAMA_8B, FOUR, tokens=131072, implementation="xla")
    tiles, rank = 131072 // 128, FOUR[0].rank
    counted = working_memory(four, 0)["backward"] - working_memory(replace(four, implementation=HOPPER), 0)["backward"]
    single = replace(four, adapters=FOUR[:1], optimizers=("adamw",))
    alone = (
        working_memory(single, 0)["backward"] - working_memory(replace(single, implementation=HOPPER), 0)["backward"]
    )
    assert counted - alone == tiles * 2 * rank * (4096 + 14336) * (4 + 2)


def test_stages_hold_as_many_halves_as_fit():
    four = problem(LLAMA_70B, FOUR, stages=4, tokens=6144)
    sizes = [stage.total for stage in stage_memory(four)]
    room = sizes[0]  # the fullest: four microbatches in flight
    first, second, third, last = most_halves(four, room)
    assert first == 40
    assert 40 < second < third < last
    for stage, halves in enumerate((first, second, third, last)):
        for start in (0, 1):
            layers = list(four.layers)
            layers[stage] = Extent(start, start + halves)
            assert stage_memory(replace(four, layers=tuple(layers)))[stage].total <= room
            layers[stage] = Extent(start, start + halves + 1)
        assert halves == 160 or stage_memory(replace(four, layers=tuple(layers)))[stage].total > room
    assert most_halves(four, 0) == [2] * 4
    assert most_halves(four, 1 << 60) == [160] * 4  # never more than the model has


def test_fsdp_programs_leave_a_margin():
    """What ran out of memory on four H200s: no 8.4 GB in one piece, though the sum of all would have fitted."""
    four = problem(LLAMA_70B, FOUR[:1], tokens=6144, fsdp=4, implementation="xla")
    (stage,) = stage_memory(four)
    allocator = int(143.2e9)
    assert stage.total < ALLOCATOR_USABLE * allocator
    assert choose_remat(four, allocator, usable=ALLOCATOR_USABLE) == "nothing"
    less = replace(four, capacity_tokens=4096)
    assert choose_remat(less, allocator, usable=ALLOCATOR_USABLE) == "gemm_inputs"


def test_the_job_says_which_attention():
    config = JobConfig(
        base={"model": "random"}, adapters=({"name": "law", "data": {"train": "x"}},), train={"attention": "cudnn"}
    )
    assert memory_problem(config, LLAMA_8B).attention == "cudnn"


def test_earlier_stages_hold_more_microbatches():
    model = replace(TINY, num_layers=8, tie_embeddings=False)
    stages = stage_memory(problem(model, stages=4))
    microbatch_bytes = 2 * sum(kept_per_layer(problem(model)).values())
    assert [stage.kept for stage in stages[:3]] == [4 * microbatch_bytes, 3 * microbatch_bytes, 2 * microbatch_bytes]
    assert stages[3].kept == microbatch_bytes + 2 * 64 * 24  # and the slopes of the loss


def test_the_frozen_70b_keeps_one_gigabyte_per_layer():
    # From the shapes: 11 T D in bfloat16, 1.14 GB at 6144 tokens, and 4 % for LoRA's S, dropout's bits, log-sums.
    tensors = kept_per_layer(problem(LLAMA_70B, FOUR, tokens=6144))
    plain = sum(size for name, size in tensors.items() if not name.startswith(("S of", "dropout", "attention log")))
    assert plain == pytest.approx(1.14e9, rel=0.02)
    assert sum(tensors.values()) / plain == pytest.approx(1.039, abs=1e-3)


def test_70b_in_four_stages_repeats_no_product_on_h200():
    wanted = problem(LLAMA_70B, FOUR, stages=4, tokens=6144)
    assert choose_remat(wanted, DEVICE_BYTES["h200"]) == "gemm_inputs"
    assert choose_remat(wanted, DEVICE_BYTES["h100"]) == "nothing"


def test_an_allocators_limit_is_used_almost_fully():
    wanted = problem(LLAMA_70B, FOUR, stages=4, tokens=6144)
    limit = int(0.95 * DEVICE_BYTES["h200"])
    assert choose_remat(wanted, limit) == "nothing"  # as if it were a smaller device
    assert choose_remat(wanted, limit, usable=ALLOCATOR_USABLE) == "gemm_inputs"


def test_logits_are_counted_on_the_last_stage_only():
    two = problem(LLAMA_8B, FOUR, stages=2, tokens=8192)
    assert "loss" not in working_memory(two, 0)
    rows = 1024  # an eighth of the microbatch
    assert working_memory(two, 1)["loss"] == rows * 128256 * 10 + 3 * 2 * 8192 * 4096


def test_saving_less_never_needs_more_memory():
    for stages in (1, 4):
        peaks = [
            max(stage.total for stage in stage_memory(problem(LLAMA_8B, FOUR, stages, 8192, remat=remat)))
            for remat in REMAT_POLICIES
        ]
        assert peaks == sorted(peaks, reverse=True)


def test_advice_fits_and_is_the_best_of_its_kind():
    tight = problem(LLAMA_70B, FOUR, stages=4, tokens=8192)
    h200 = DEVICE_BYTES["h200"]
    assert not fits(tight, h200)
    text = advice(tight, h200)
    tokens = int(text.split("batch.capacity_tokens: ")[1].split()[0])
    assert tokens == largest_capacity(tight, h200)
    assert fits(replace(tight, capacity_tokens=tokens), h200)
    assert not fits(replace(tight, capacity_tokens=tokens + 128), h200)
    assert text.endswith("or train.remat: nothing")
    assert fits(replace(tight, remat="nothing"), h200)
    assert advice(replace(tight, capacity_tokens=tokens), h200) == ""


def test_too_large_weights_need_more_devices():
    whole = problem(LLAMA_70B, FOUR, tokens=1024)
    assert advice(whole, 79 * GIB) == "more mesh.stages or mesh.fsdp: the weights alone are too large"
    assert choose_remat(whole, 79 * GIB) == "nothing"


def test_gpt_oss_20b_trains_on_a_gpu_of_80_gb():
    """42 GB of weights, and what four adapters of attention save of 8 192 tokens, with no product computed twice."""
    adapters = tuple(replace(spec, targets=("q_proj", "k_proj", "v_proj", "o_proj")) for spec in FOUR)
    whole = problem(ModelConfig(**GPT_OSS_20B), adapters, tokens=8192, implementation="xla", attention="xla")
    (stage,) = stage_memory(whole)
    assert stage.frozen / 1e9 == pytest.approx(41.8, abs=0.1)
    assert choose_remat(whole, 74 * GIB) != "nothing"


def test_the_job_says_whether_routers_have_a_loss():
    adapters = ({"name": "law", "data": {"train": "x"}},)
    for factor in (0.0, 0.001):
        config = JobConfig(base={"model": "random"}, adapters=adapters, train={"router_aux": factor})
        assert memory_problem(config, LLAMA_8B).balanced == (factor > 0)


@pytest.mark.parametrize(
    ("tokens", "meshes"),
    [
        (131072, {"": 82, "tensor 2": 62, "tensor 4": 52, "tensor 8": 48, "stages 4": 68}),
        (262144, {"": 146, "tensor 2": 114, "tensor 4": 99, "tensor 8": 91, "stages 4": 132}),
        (393216, {"": 210, "tensor 2": 167, "tensor 4": 145, "tensor 8": 134, "stages 4": 195}),
    ],
)
def test_devices_that_share_layers_hold_longer_samples(tokens, meshes):
    """The table of docs/pages/several-gpus.md."""
    page = (Path(__file__).parents[2] / "docs/pages/several-gpus.md").read_text()
    peaks = {}
    for name in meshes:
        axis, _, count = name.partition(" ")
        mesh = {axis: int(count)} if name else {}
        peaks[name] = max(
            stage.total for stage in stage_memory(problem(LLAMA_8B, FOUR, tokens=tokens, remat="nothing", **mesh))
        )
    assert {name: round(peak / GIB) for name, peak in peaks.items()} == meshes
    assert f"| {tokens:,} | ".replace(",", " ") + " | ".join(map(str, meshes.values())) + " |" in page
