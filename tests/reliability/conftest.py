import pytest


@pytest.fixture(autouse=True)
def _quick(kept_programs):
    """Every test here runs programs of a tiny model."""
