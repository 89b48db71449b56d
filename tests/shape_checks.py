"""Checks shapes and types of signatures during tests; the annotations cost nothing in production."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from beartype import BeartypeConf, beartype
from jaxtyping import config, install_import_hook

CHECKED = (  # packages and modules whose annotated functions are checked
    "pallas_kernels.attention.api",
    "pallas_kernels.linear.api",
    "pallas_kernels.mlp.api",
    "pallas_kernels.mlp.xla",
    "pallas_kernels.norm.api",
    "lorafusion_jax.modules.apply",  # not context: jax rebuilds its dataclass with leaves of other shapes
    "lorafusion_jax.adapters.bank",
    "lorafusion_jax.adapters.init",
    "lorafusion_jax.modules.lora",
)

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int serves where a float is asked for


def install() -> None:
    """Before anything imports the modules."""
    install_import_hook(CHECKED, "shape_checks.checked")


@contextmanager
def off() -> Iterator[None]:
    """Nothing is checked within."""
    before = config.jaxtyping_disable
    config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        config.update("jaxtyping_disable", before)
