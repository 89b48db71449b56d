"""Tells streams of events when to read: one task looks at the database for all of them."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool

from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.database import Database, StoreError

LOOK_S = 0.1


class News:
    """Looks for new events while somebody waits for them: once for all streams.

    Attributes:
        at: number of the newest event that it has seen.
    """

    def __init__(self, db: Database):
        self._db, self.at = db, db.last_event
        self._floor, self._newest = self.at, dict[str | None, int]()  # by job and by owner; unknown: up to the floor
        self._waiting = 0
        self._changed = asyncio.Condition()
        self._looking: asyncio.Task[None] | None = None

    def newest(self, scope: str | None) -> int:
        """Number of the newest event of a job or an owner (None: of all), as far as it was looked for."""
        return self.at if scope is None else self._newest.get(scope, self._floor)

    async def changed(self, last_seen: int, seconds: float) -> bool:
        """Waits for an event after `last_seen`. Returns whether there is one."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())
        self._waiting += 1
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(lambda: self.at > last_seen)
            return True
        except TimeoutError:
            return False
        finally:
            self._waiting -= 1

    async def _look(self) -> None:
        while self._waiting:
            if self._db.last_event > self.at:
                with suppress(StoreError):  # busy: the next look may be lucky
                    await self._tell(*await run_in_threadpool(self._read))
            await asyncio.sleep(LOOK_S)
        self._floor, self._newest = self.at, {}  # who comes next reads for itself

    async def _tell(self, newest: int, rows: list[tuple[str, str | None, int]]) -> None:
        for owner, job, number in rows:
            self._newest |= {owner: number, job: number}
        async with self._changed:
            self.at = newest
            self._changed.notify_all()

    def _read(self) -> tuple[int, list[tuple[str, str | None, int]]]:
        """Returns the number of the newest event, and that of each owner and job since the last time."""
        number = func.max(t.events.c.seq)
        query = select(t.events.c.owner, t.events.c.job, number).where(t.events.c.seq > self.at)
        with self._db.read() as connection:
            rows = connection.execute(query.group_by(t.events.c.owner, t.events.c.job).order_by(number)).all()
        return max((row[2] for row in rows), default=self.at), [(row[0], row[1], row[2]) for row in rows]
