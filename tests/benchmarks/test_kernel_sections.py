"""The kernel benchmark times every row, including unfavourable ones."""

import dataclasses
from itertools import product

import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from benchmarks.kernel_sections import BACKENDS, benchmark_specs, default_backend, op_variants
from pallas_kernels.arg_specs import BENCHMARK_SHAPES, BENCHMARK_TOKENS, make_arrays

H200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
CARD = AbstractMesh((), (), abstract_device=H200)


def test_every_form_of_every_size_is_timed():
    variants = [
        v for t, (k, n) in product(BENCHMARK_TOKENS, BENCHMARK_SHAPES) for v in op_variants(t, k, n, tiny=False)
    ]
    forms = {}
    for variant in variants:
        assert variant.kind not in forms.setdefault(variant.spec, []), "the same row twice"
        forms[variant.spec].append(variant.kind)
    assert set(forms) == set(benchmark_specs())
    for spec, kinds in forms.items():
        xla = ["xla_naive"] if spec.adapters == 1 else ["xla_wide", "ragged_dot"]
        assert sorted(set(kinds) - {"frozen"}) == sorted([*xla, *BACKENDS]), spec
    plain = {spec for spec, kinds in forms.items() if "frozen" in kinds}
    assert {(spec.tokens, spec.in_features, spec.out_features) for spec in plain} == {
        (t, *shape) for t, shape in product(BENCHMARK_TOKENS, BENCHMARK_SHAPES)
    }


@pytest.mark.parametrize(
    ("tokens", "shape", "plain", "with_dropout"),
    [(8192, (4096, 4096), BACKENDS[0], BACKENDS[0]), (2048, (5120, 5120), "xla", BACKENDS[0])],
)
def test_the_default_row_is_that_of_the_default_backend(tokens, shape, plain, with_dropout):
    with use_abstract_mesh(CARD):
        variants = [v for v in op_variants(tokens, *shape, tiny=False) if v.spec.rank == 16 or v.spec.adapters == 1]
        taken = {(v.spec.rate, default_backend(v)) for v in variants}
    assert taken == {(0.0, plain), (0.1, with_dropout)}


def test_ranks_of_several_adapters_are_mixed():
    spec = next(spec for spec in benchmark_specs() if (spec.adapters, spec.rank) == (16, 64))
    small = dataclasses.replace(spec, tokens=2048, in_features=128, out_features=64)
    columns = (make_arrays(small)["a"] != 0).any(1).sum(1)
    assert sorted(set(columns.tolist())) == [8, 16, 32, 64]
