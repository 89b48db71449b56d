"""What a file of tests leaves changed in its process: the files after it run in the same one, so it is put back."""

from __future__ import annotations

import logging
import os
import signal
import sys
from typing import Any, NamedTuple

import jax
import pytest

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGALRM, signal.SIGCHLD, signal.SIGPIPE)
# Variables of pytest and its plugins, and one that jax sets when its part for Hopper is imported, for good.
OF_LIBRARIES = ("PYTEST_", "MOSAIC_GPU_CUDA_ROOT")
OF_BACKENDS = "jax_pjrt_client_create_options"  # a setting that jax changes when it starts a backend


class Process(NamedTuple):
    """What is one for a whole process, by a name that says where to look."""

    folder: str
    umask: int
    users: tuple[int, int]
    import_path: tuple[str, ...]
    variables: dict[str, str]
    handlers: dict[int, Any]
    log_level: int
    jax_settings: dict[str, Any]


def read_process() -> Process:
    mask = os.umask(0o022)
    os.umask(mask)
    return Process(
        folder=os.getcwd(),
        umask=mask,
        users=(os.geteuid(), os.getegid()),
        import_path=tuple(sys.path),
        variables={name: value for name, value in os.environ.items() if not name.startswith(OF_LIBRARIES)},
        handlers={number: signal.getsignal(number) for number in SIGNALS},
        log_level=logging.getLogger().level,
        jax_settings={name: value for name, value in jax.config.values.items() if name != OF_BACKENDS},
    )


def name_changes(before: Process, after: Process) -> list[str]:
    """What differs, and of variables, handlers and settings which."""
    changes = []
    for name, value, other in zip(Process._fields, before, after, strict=True):
        if isinstance(value, dict):
            keys = sorted(key for key in value.keys() | other.keys() if value.get(key) != other.get(key))
            changes += [f"{name}: {key}" for key in keys]
        elif value != other:
            changes.append(name)
    return changes


def put_back(before: Process) -> None:
    """Settings of jax stay: some cannot be changed once a backend runs."""
    os.chdir(before.folder)
    os.umask(before.umask)
    os.seteuid(before.users[0])
    os.setegid(before.users[1])
    sys.path[:] = before.import_path
    for name in read_process().variables.keys() - before.variables.keys():
        del os.environ[name]
    os.environ.update(before.variables)
    for number, handler in before.handlers.items():
        if handler is not None and handler != signal.getsignal(number):  # None: one that Python cannot set again
            signal.signal(number, handler)
    logging.getLogger().setLevel(before.log_level)


class LeftBehind:
    """A pytest plugin: puts back what a file changed, and the end of a run names the files."""

    def __init__(self) -> None:
        self.before: Process | None = None
        self.changes: list[str] = []
        self.files: dict[str, list[str]] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item):
        import_path, folder = tuple(sys.path), os.getcwd()
        yield
        if self.before is None:  # after the set-ups of a session, which last; path and folder are only of tests
            self.before = read_process()._replace(import_path=import_path, folder=folder)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None):
        yield
        if self.before is not None and nextitem is not None and nextitem.path != item.path:
            self.changes = name_changes(self.before, read_process())
            if self.changes:
                put_back(self.before)
                self.before = read_process()  # what stays is not named again

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self):
        report = yield
        report.left_behind, self.changes = self.changes, []
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if changes := getattr(report, "left_behind", ()):
            self.files[report.nodeid.split("::")[0]] = list(changes)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        if self.files:
            terminalreporter.section("files that left their process changed")
        for path, changes in self.files.items():
            terminalreporter.line(f"{path}: {', '.join(changes)}")
