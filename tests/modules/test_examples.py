"""The examples in docstrings run."""

import doctest
from importlib import import_module
from pathlib import Path

import pytest
from more_cases import mostly_nightly

ROOT = Path(__file__).parents[2]
PACKAGES = ("lorafusion_jax", "lorafusion_jax.serve", "pallas_kernels", "scheduling")
DEAR = {  # programs of a second and more
    "lorafusion_jax.api.training", "lorafusion_jax.models.attention.api", "lorafusion_jax.models.decoder",
    "lorafusion_jax.models.segments", "pallas_kernels.delta_rule.api", "pallas_kernels.experts.fp8",
    "pallas_kernels.experts.rows", "pallas_kernels.quantised.fp8", "pallas_kernels.quantised.rows",
    "pallas_kernels.state_space.xla", "pallas_kernels.tuning.tune",
}  # fmt: skip


def modules() -> list[str]:
    """All modules with examples."""
    files = (file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py")))
    paths = [file.relative_to(ROOT).with_suffix("") for file in files if ">>> " in file.read_text(encoding="utf-8")]
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


@pytest.mark.parametrize("name", mostly_nightly(modules(), [name for name in modules() if name not in DEAR]))
def test_examples_of(name):
    assert not doctest.testmod(import_module(name)).failed
