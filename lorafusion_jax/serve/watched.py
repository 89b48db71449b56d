"""Threads whose end would leave a service half alive: they go on after an error, which is logged."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

AGAIN_S = 0.1
log = logging.getLogger("lorafusion.control")


def start_watched(name: str, work: Callable[[], None], ended: threading.Event) -> threading.Thread:
    """Starts a thread. Work that raises begins again after a moment, until it is ended; work that returns is done."""

    def repeat() -> None:
        while not ended.is_set():
            try:
                work()
                return
            except Exception:
                log.exception("the thread %s failed; it goes on", name)
                ended.wait(AGAIN_S)

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    return thread
