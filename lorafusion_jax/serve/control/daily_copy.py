"""Copies the database once a day, in the background, to go on from where its file is damaged or lost."""

from __future__ import annotations

import logging
import threading
import time

from lorafusion_jax.serve.store.database import Database, StoreError

DAY_S, LOOK_S = 86_400.0, 600.0
log = logging.getLogger("lorafusion.control")


class DailyCopy:
    """Replaces the copy beside the file once it is a day old. A copy that fails leaves the older one.

    Args:
        db: what is copied.
    """

    def __init__(self, db: Database):
        self._db, self._looked = db, time.monotonic()
        self._copying: threading.Thread | None = None

    def look(self) -> None:
        """Begins a copy if there is none of today."""
        if time.monotonic() - self._looked < LOOK_S or (self._copying is not None and self._copying.is_alive()):
            return
        self._looked = time.monotonic()
        file = self._db.daily_copy
        if not file.exists() or abs(time.time() - file.stat().st_mtime) > DAY_S:
            self._copying = threading.Thread(target=self._copy, name="copy", daemon=True)
            self._copying.start()

    def close(self, seconds: float) -> None:
        """Waits for a copy that is under way; one that takes longer is made again another time."""
        if self._copying is not None:
            self._copying.join(seconds)

    def _copy(self) -> None:
        try:
            self._db.copy(self._db.daily_copy)
        except (StoreError, OSError) as problem:
            log.warning("the database was not copied: %s", problem)
