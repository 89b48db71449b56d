"""Rows as the API reads them: one of an owner, or pages, newest first, each with the cursor of the next one."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import Query
from sqlalchemy import Connection, Table, select, tuple_

from lorafusion_jax.serve.api.problems import ApiError, not_found
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.keys import Owner

After = Annotated[str | None, Query(max_length=200)]
Limit = Annotated[int, Query(ge=1, le=1000)]


def get_row(connection: Connection, table: Table, key: str, owner: str | None, kind: str) -> dict[str, Any]:
    """Returns the row of a primary key, if an owner sees it.

    Args:
        kind: of the row, for the error.

    Raises:
        ApiError: 404.
    """
    row = t.find_row(connection, table, key, owner)
    if row is None:
        raise not_found(f"such {kind}")
    return row


def read_page(connection: Connection, table: Table, owner: Owner, after: str | None, limit: int) -> dict[str, Any]:
    """Returns a page of the rows that an owner sees of a table."""
    where = t.seen_by(table, owner.sees)
    where += [] if after is None else [tuple_(table.c.created, table.c.id) < cursor_of(after)]
    query = select(table).where(*where).order_by(table.c.created.desc(), table.c.id.desc()).limit(limit + 1)
    return page_of([dict(row) for row in connection.execute(query).mappings()], limit)


def page_of(rows: Sequence[dict[str, Any]], limit: int) -> dict[str, Any]:
    """Returns an answer with the first rows, and the cursor of the next page if there are more."""
    more = json.dumps([rows[limit - 1]["created"], rows[limit - 1]["id"]]) if len(rows) > limit else None
    return {
        "items": list(rows[:limit]),
        "next": None if more is None else base64.urlsafe_b64encode(more.encode()).decode(),
    }


def cursor_of(after: str | None) -> tuple[float, str] | None:
    """Returns what `next` of a page says.

    Raises:
        ApiError: 422, `api.cursor`.
    """
    if after is None:
        return None
    try:
        created_at, name = json.loads(base64.urlsafe_b64decode(after))
        return float(created_at), str(name)
    except (ValueError, TypeError):
        raise ApiError(422, "api.cursor", "after is not a cursor.", fix="the `next` of the page before") from None
