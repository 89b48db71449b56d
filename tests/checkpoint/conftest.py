"""A disk that takes no large file."""

from __future__ import annotations

import resource

import pytest

LARGEST = 64 * 1024


@pytest.fixture
def no_large_files():
    """Writing a file beyond 64 KiB fails, as it does on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
