"""Counted work of a layer against hand counts."""

import pytest

from pallas_kernels.cost import H200, Cost, LayerCost, add_up, product
from pallas_kernels.cost_ops import MlpCost, SiblingsCost

T, K, N, R = 8192, 4096, 14336, 16


def test_products_count_two_operations_and_each_tensor_once():
    cost = product(rows=T, inner=K, columns=N)
    assert cost.flops == 2 * T * K * N
    assert cost.bytes == 2 * (T * K + K * N + T * N)
    assert cost.floor_s(H200) == pytest.approx(cost.flops / H200.flops)  # bound by arithmetic
    assert product(rows=T, inner=K, columns=R).floor_s(H200) > 2 * T * K / H200.bytes  # bound by memory


def test_lora_adds_three_passes_over_x_and_dy_and_little_arithmetic():
    layer = LayerCost(tokens=T, in_features=K, out_features=N, rank=R)
    frozen = sum(cost.flops for cost in layer.frozen)
    assert layer.total.flops - frozen == 6 * T * R * (K + N)
    extra = layer.total.bytes - sum(cost.bytes for cost in layer.frozen)
    streams = 2 * T * (2 * K + N)
    assert streams < extra < 1.1 * streams
    assert 1.02 < layer.floor_s(H200) / layer.frozen_floor_s(H200) < 1.06


def test_dropout_costs_bits_only():
    plain = LayerCost(tokens=T, in_features=K, out_features=N, rank=R)
    dropped = LayerCost(tokens=T, in_features=K, out_features=N, rank=R, dropout=True)
    assert dropped.total.bytes - plain.total.bytes == 4 * T * K // 8  # written once, read three times
    assert dropped.total.flops == plain.total.flops


def test_split_graph_moves_a_third_less_than_the_plain_form():
    layer = LayerCost(tokens=T, in_features=4096, out_features=4096, rank=R, dropout=True)
    assert layer.total.bytes < 0.65 * layer.naive_bytes


def layer(columns=N, rank=R, inner=K, **changes):
    return LayerCost(tokens=T, in_features=inner, out_features=columns, rank=rank, **changes)


def test_rank_zero_is_the_frozen_layer():
    none = layer(rank=0, dropout=True)
    assert none.total == add_up(none.frozen)
    assert none.floor_s(H200) == none.frozen_floor_s(H200)


def test_one_sibling_is_a_layer():
    for changes in ({}, {"dropout": True, "adapters": 3, "item": 4}, {"rank": 0, "dropout": True}):
        single = layer(**changes)
        also = SiblingsCost(
            tokens=T, in_features=K, out_features=(N,), ranks=(single.rank,),
            **{name: value for name, value in changes.items() if name != "rank"},
        )  # fmt: skip
        assert sorted(also.passes.values(), key=repr) == sorted(single.passes.values(), key=repr)
        assert also.frozen == single.frozen


def test_siblings_read_x_once_for_s_and_once_for_da():
    """q of rank 16, k without LoRA, v of rank 8; three adapters."""
    q, kv, a, ranks = 4096, 1024, 3, 16 + 8
    op = SiblingsCost(tokens=T, in_features=K, out_features=(q, kv, kv), ranks=(16, 0, 8), adapters=a, dropout=True)
    bits, x = T * K // 8, 2 * T * K
    assert op.passes == {
        "bits": Cost(flops=0, bytes=bits),
        "down": Cost(flops=2 * T * K * ranks, bytes=x + bits + 2 * a * K * ranks + 2 * T * ranks),
        "da": Cost(flops=2 * T * K * ranks, bytes=x + bits + 2 * T * ranks + 4 * a * K * ranks),
        "forward 0": Cost(flops=2 * T * q * (K + 16), bytes=x + 2 * K * q + 2 * T * q + 2 * T * 16 + 2 * a * 16 * q),
        "forward 1": Cost(flops=2 * T * kv * K, bytes=x + 2 * K * kv + 2 * T * kv),
        "forward 2": Cost(flops=2 * T * kv * (K + 8), bytes=x + 2 * K * kv + 2 * T * kv + 2 * T * 8 + 2 * a * 8 * kv),
        "dsdb 0": Cost(flops=4 * T * q * 16, bytes=2 * T * q + 2 * a * 16 * q + 4 * T * 16 + 4 * a * 16 * q),
        "dsdb 2": Cost(flops=4 * T * kv * 8, bytes=2 * T * kv + 2 * a * 8 * kv + 4 * T * 8 + 4 * a * 8 * kv),
        "dx 0": Cost(
            flops=2 * T * K * (q + ranks),
            bytes=2 * T * q + 2 * K * q + x + 2 * T * ranks + 2 * a * K * ranks + bits,
        ),
        "dx 1": Cost(flops=2 * T * K * kv, bytes=2 * T * kv + 2 * K * kv + 2 * x),  # reads the sum, writes the next
        "dx 2": Cost(flops=2 * T * K * kv, bytes=2 * T * kv + 2 * K * kv + 2 * x),
    }
    assert op.total == add_up(op.passes.values())
    apart = [linear for linear in op.layers if linear.rank]
    saved = sum(linear.total.bytes for linear in op.layers) - op.total.bytes
    # S, dA; the bits of one op instead of two (written once, read three times); for dx the two sums are read
    assert saved == (len(apart) - 1) * (2 * x + 4 * bits) - 2 * x
    assert op.total.flops == sum(linear.total.flops for linear in op.layers)


def test_the_low_rank_part_of_dx_is_in_the_widest_product_with_lora():
    op = SiblingsCost(tokens=T, in_features=K, out_features=(N, 1024, 4096), ranks=(0, R, R))
    frozen = dict(zip(("dx 0", "dx 1", "dx 2"), op.frozen[3:], strict=True))
    assert [name for name in frozen if op.passes[name] != frozen[name]] == ["dx 2"]
    assert op.passes["dx 2"].flops - frozen["dx 2"].flops == 2 * T * K * 2 * R


def test_the_mlp_fuses_low_rank_work_into_the_gate():
    a, gate, up, down = 2, 16, 8, 32
    op = MlpCost(tokens=T, width=K, inner=N, ranks=(gate, up, down), adapters=a, dropout=True)
    x, h, bits, bits_h, both = 2 * T * K, 2 * T * N, T * K // 8, T * N // 8, gate + up
    weight, gate_dx = 2 * K * N, 2 * T * K * N
    low = 2 * T * (both + down) + 2 * a * N * (both + down) + bits_h
    assert op.passes == {
        "bits": Cost(flops=0, bytes=bits),
        "down": Cost(flops=2 * T * K * both, bytes=x + bits + 2 * a * K * both + 2 * T * both),
        "gate": Cost(flops=gate_dx, bytes=x + weight + h),
        "up": Cost(flops=gate_dx, bytes=x + weight + h),
        "gating": Cost(flops=2 * T * N * (both + down), bytes=3 * h + low),
        "forward": Cost(flops=gate_dx + 2 * T * K * down, bytes=h + weight + x + 2 * T * down + 2 * a * down * K),
        "dsdb": Cost(flops=4 * T * K * down, bytes=x + 2 * a * down * K + 4 * T * down + 4 * a * down * K),
        "dh": Cost(flops=gate_dx, bytes=x + weight + h),
        "gating back": Cost(
            flops=2 * T * N * (3 * both + 2 * down),
            bytes=5 * h + low + 2 * T * both + 4 * a * N * (both + down),
        ),
        "da": Cost(flops=2 * T * K * both, bytes=x + bits + 2 * T * both + 4 * a * K * both),
        "dx 0": Cost(flops=gate_dx + 2 * T * K * both, bytes=h + weight + x + bits + 2 * T * both + 2 * a * K * both),
        "dx 1": Cost(flops=gate_dx, bytes=h + weight + 2 * x),
    }


def test_the_mlp_as_one_op_costs_less_than_three_ops():
    op = MlpCost(tokens=T, width=K, inner=N, ranks=(R, R, R), dropout=True)
    gating = 8 * 2 * T * N / H200.bytes
    assert op.floor_s(H200) < op.siblings.floor_s(H200) + op.down.floor_s(H200) + gating
    assert 1 < op.floor_s(H200) / op.frozen_floor_s(H200) < 1.03
    none = MlpCost(tokens=T, width=K, inner=N, ranks=(0, 0, 0), dropout=True)
    assert none.total == add_up(none.frozen) == add_up(op.frozen)
