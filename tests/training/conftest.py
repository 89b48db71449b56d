import pytest


@pytest.fixture(autouse=True)
def _quick(quick_compiles):
    """Every test here compiles programs of a tiny model."""
