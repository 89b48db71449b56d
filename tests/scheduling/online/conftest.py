"""The benchmark as a module: tests measure the same figures on smaller input."""

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def benchmark():
    path = Path(__file__).resolve().parents[3] / "benchmarks" / "online.py"
    spec = importlib.util.spec_from_file_location("online_benchmark", path)
    module = importlib.util.module_from_spec(spec)
    first, sys.path[0] = sys.path[0], sys.path[0]
    spec.loader.exec_module(module)
    sys.path[0] = first
    return module
