"""Counted work of a layer against counts by hand."""

import pytest

from pallas_kernels.cost import H200, LayerCost, product

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
