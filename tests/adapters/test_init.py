"""Initial weights depend on the adapter's own seed and the place, never on company."""

import numpy as np
import pytest

from lorafusion_jax.modules import AdapterSpec, init_adapter, init_bank, init_leaves

PATH = "layers.3.self_attn.q_proj"
LAW = AdapterSpec(name="law", rank=4, alpha=8, seed=7)
MED = AdapterSpec(name="med", rank=16, alpha=8, seed=8)
SQL = AdapterSpec(name="sql", rank=2, alpha=8, seed=9, targets=("v_proj",))


def test_alone_and_among_others_the_weights_are_the_same_bits():
    a_alone, b_alone = init_bank([LAW], PATH, 32, 24).values()
    a_joint, b_joint = init_bank([MED, SQL, LAW], PATH, 32, 24).values()
    assert a_joint.shape == (3, 32, 16)
    assert b_joint.shape == (3, 16, 24)
    np.testing.assert_array_equal(a_joint[2, :, :4], a_alone[0])
    np.testing.assert_array_equal(b_joint[2, :4], b_alone[0])


def test_beyond_the_own_rank_and_outside_the_targets_all_is_zero():
    a, b = init_bank([MED, SQL, LAW], PATH, 32, 24).values()
    assert a[0].all()
    assert not a[1].any()
    assert not a[2, :, 4:].any()
    assert not b.any()


def test_a_is_uniform_between_plus_and_minus_one_over_root_k():
    a = init_adapter(AdapterSpec(name="a", rank=64, alpha=1), PATH, 1024, 8)["lora_a"]
    bound = 1 / 32
    # 65536 draws: the mean of U(-c, c) has a standard error of c / sqrt(3 * 65536) = 0.0023 c, the share in a tenth of
    # the range one of 0.0012; the limits are five of them.
    assert np.abs(a).max() <= bound
    assert abs(a.mean()) < 0.012 * bound
    shares = np.histogram(a, bins=10, range=(-bound, bound))[0] / a.size
    assert np.abs(shares - 0.1).max() < 0.006


@pytest.mark.parametrize(
    "other",
    [
        init_adapter(AdapterSpec(name="law", rank=4, alpha=8, seed=8), PATH, 32, 24),
        init_adapter(LAW, "layers.13.self_attn.q_proj", 32, 24),
        init_adapter(LAW, "layers.3.self_attn.v_proj", 32, 24),
    ],
    ids=["seed", "layer", "projection"],
)
def test_every_seed_and_place_draws_its_own(other):
    assert (init_adapter(LAW, PATH, 32, 24)["lora_a"] != other["lora_a"]).mean() > 0.99


def test_the_draw_is_fixed_for_ever():
    a = init_adapter(LAW, PATH, 32, 24)["lora_a"]
    # Written down from the first version: runs started with an older version resume with the same weights.
    np.testing.assert_array_equal(a[0], np.float32(FIRST_ROW))


def test_stacked_and_unrolled_layers_get_the_same_weights():
    shapes = {"lora_a": (2, 8, 4), "lora_b": (2, 4, 6)}
    unrolled = init_leaves(
        [LAW, SQL], {f"layers.{n}.mlp.up_proj.{leaf}": shape for n in range(3) for leaf, shape in shapes.items()}
    )
    stacked = init_leaves([LAW, SQL], {f"layers.mlp.up_proj.{leaf}": (3, *shape) for leaf, shape in shapes.items()})
    for name, array in stacked.items():
        for layer in range(3):
            np.testing.assert_array_equal(array[layer], unrolled[name.replace("layers.", f"layers.{layer}.")])


FIRST_ROW = [-0.08838611, 0.09653963, -0.052998967, -0.15214391]
