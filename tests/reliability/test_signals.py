"""SIGINT and SIGTERM: none is lost, the first is acknowledged within a second, the second ends the process."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref

import pytest
from jax._src import lib as jax_library

from lorafusion_jax.signals import CUT, FIRST, cutting, deferred_stop, saving, shown_by, stop_if_asked, stop_signals

# The command line, held up in C without a bytecode, as a long compilation does.
COMPILING = """
import hashlib, sys
from lorafusion_jax import __main__ as command
from lorafusion_jax.cli.main import app

def compiling():
    print("compiling", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2**31 - 1)  # without the interpreter's lock, for minutes

app.command("compile")(compiling)
sys.argv = ["lorafusion", "compile"]
command.main()
"""


def test_the_first_signal_is_acknowledged_and_the_second_ends_a_process_that_compiles():
    with subprocess.Popen(
        [sys.executable, "-c", COMPILING], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline() == "compiling\n"
            time.sleep(0.2)
            process.send_signal(signal.SIGTERM)
            assert "a second signal stops at once" in process.stderr.readline()
            assert process.poll() is None  # at once, and not when it gives up
            process.send_signal(signal.SIGINT)
            assert process.stderr.readline() == "stopping at once\n"
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


def test_a_signal_among_the_imports_ends_the_process_with_its_message():
    """Right after the interpreter has started, long before jax or typer are there."""
    code = "import os, signal, lorafusion_jax.__main__ as c, lorafusion_jax.signals as s\n"
    code += "watch = s.StopSignals.watch\n"
    code += "s.StopSignals.watch = lambda self: (watch(self), os.kill(os.getpid(), signal.SIGTERM))\n"
    code += "c.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


def interrupt(number: int, ended: list[str]) -> None:
    os.kill(os.getpid(), number)
    for _ in range(1000):  # Python calls the handler in here
        pass
    ended.append("whole")


def finalize(number: int, ended: list[str]) -> None:
    class Finalized:
        def __del__(self):
            interrupt(number, ended)

    Finalized()


def collect(number: int, ended: list[str]) -> None:
    def callback(phase: str, info: dict) -> None:
        if phase == "start":
            interrupt(number, ended)

    gc.callbacks.append(callback)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(callback)


def finalize_weakly(number: int, ended: list[str]) -> None:
    class Referred:
        pass

    weakref.finalize(Referred(), interrupt, number, ended)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("callback", [finalize, collect, finalize_weakly])
def test_a_signal_inside_a_callback_lets_it_end_and_is_not_lost(number, callback, monkeypatch):
    dropped, ended = [], []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    with stop_signals():
        callback(number, ended)
        assert ended == ["whole"]
        assert not dropped
        with pytest.raises(KeyboardInterrupt):
            stop_if_asked()


def test_a_second_signal_inside_the_callback_of_jax_prints_nothing(monkeypatch):
    """Training has heard the first one; the thread of signals ends the process after the second."""
    dropped = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: dropped.append(what.exc_type))
    monkeypatch.setattr(jax_library._jax, "collect_garbage", lambda: signal.raise_signal(signal.SIGTERM))
    with deferred_stop() as asked:
        gc.collect()  # the callback runs before and after
        assert asked.is_set()
    assert jax_library._xla_gc_callback in gc.callbacks
    assert not dropped


def test_while_the_state_is_saved_the_second_signal_waits_and_the_third_ends():
    """What the command line shows is the same on a terminal, where a live view shows it."""
    shown = []
    with deferred_stop() as asked, stop_signals() as handler, shown_by(shown.append):
        handler.watched = True  # without its thread, which would end this process
        try:
            with saving():
                signal.raise_signal(signal.SIGINT)
                signal.raise_signal(signal.SIGINT)
                assert asked.is_set()
                with pytest.raises(KeyboardInterrupt):
                    signal.raise_signal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        finally:
            handler.watched = False
    assert [text.partition(";")[0] for text in shown] == [
        "stopping: what is under way is finished and the state saved",
        "the state is being saved, then it stops",
        "stopping at once",
    ]


CUTTING = """
import os, signal, time
from lorafusion_jax import signals

signals.GRACE_S, signals.CUT_S = 0.05, 0.2
with signals.stop_signals() as handler:
    handler.watch()
    for seconds in (0.1, 0.1, 0.4):  # of the answers of a chat after Ctrl-C
        with signals.cutting() as cut:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(seconds)
            print(cut.is_set())
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        print("stopped")
    time.sleep(0.3)
    print("alive")
"""


def test_interrupts_that_cut_something_short_do_not_count():
    done = subprocess.run([sys.executable, "-c", CUTTING], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "True", "True", "stopped", "alive"]
    assert done.stderr.splitlines() == [CUT, FIRST]  # only the answer that goes on is spoken of


@pytest.mark.parametrize("numbers", [(signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)])
def test_what_can_be_cut_short_can_be_stopped(numbers):
    def interrupts() -> None:
        with cutting():
            for number in numbers:
                interrupt(number, [])

    with pytest.raises(KeyboardInterrupt):
        interrupts()


def test_training_is_asked_once_and_stopped_by_the_second_signal():
    before = signal.getsignal(signal.SIGTERM)
    with deferred_stop() as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked.is_set()
        stop_if_asked()  # the loop stops by itself
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
