"""What a file of tests leaves changed is named and put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
from types import SimpleNamespace

import pytest
from left_behind import LeftBehind, name_changes, put_back, read_process


@pytest.fixture
def before():
    process = read_process()
    yield process
    put_back(process)


def test_nothing_changed_has_no_name(before):
    assert name_changes(before, read_process()) == []


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda: os.chdir("/"), "folder"),
        (lambda: os.umask(0o077), "umask"),
        (lambda: sys.path.pop(), "import_path"),
        (lambda: os.environ.__setitem__("LEFT_HERE", "1"), "variables: LEFT_HERE"),
        (lambda: os.environ.pop("HOME"), "variables: HOME"),
        (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), f"handlers: {signal.SIGUSR1}"),
        (lambda: logging.getLogger().setLevel(logging.DEBUG), "log_level"),
    ],
    ids=[
        "folder",
        "umask",
        "the path of imports",
        "a new variable",
        "a variable that is gone",
        "a handler",
        "the level of logs",
    ],
)
def test_a_change_is_named_and_put_back(before, change, named):
    change()
    assert name_changes(before, read_process()) == [named]
    put_back(before)
    assert name_changes(before, read_process()) == []


def finish(hook, value=None):
    """Runs a wrapper of a hook around one that returns `value`."""
    next(hook)
    with pytest.raises(StopIteration) as ended:
        hook.send(value)
    return ended.value.value


def test_the_end_of_a_file_puts_back_and_the_end_of_a_run_names_it(before):
    plugin, lines = LeftBehind(), []
    one, other = SimpleNamespace(path="test_a.py"), SimpleNamespace(path="test_b.py")
    finish(plugin.pytest_runtest_setup(one))
    os.environ["LEFT_HERE"] = "1"
    finish(plugin.pytest_runtest_teardown(one, one))  # another test of the file may use it
    assert "LEFT_HERE" in os.environ
    finish(plugin.pytest_runtest_teardown(one, other))
    assert "LEFT_HERE" not in os.environ
    plugin.pytest_runtest_logreport(finish(plugin.pytest_runtest_makereport(), SimpleNamespace(nodeid="test_a.py::t")))
    os.environ["LEFT_HERE"] = "2"
    finish(plugin.pytest_runtest_teardown(other, None))  # no file comes after it, and what a session set up ends, too
    plugin.pytest_runtest_logreport(finish(plugin.pytest_runtest_makereport(), SimpleNamespace(nodeid="test_b.py::t")))
    plugin.pytest_terminal_summary(SimpleNamespace(section=lines.append, line=lines.append))
    assert lines == ["files that left their process changed", "test_a.py: variables: LEFT_HERE"]
