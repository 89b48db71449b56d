"""The tables, and how a row is found in one."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    select,
)

VERSION = 10
NAME_OF_PATH = "replace({0}, rtrim({0}, replace({0}, '/', '')), '')"  # what comes after the last slash
MIGRATIONS: dict[int, tuple[str, ...]] = {  # version → what makes the next one of it
    2: (
        "ALTER TABLE groups ADD COLUMN opens VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE groups ADD COLUMN host VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE artifacts ADD COLUMN url VARCHAR NOT NULL DEFAULT ''",
        "ALTER TABLE artifacts ADD COLUMN problem TEXT NOT NULL DEFAULT ''",
    ),
    3: (
        "CREATE TABLE IF NOT EXISTS page_sessions"
        " (sha256 VARCHAR NOT NULL PRIMARY KEY, key VARCHAR NOT NULL, expires FLOAT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS idempotency_by_time ON idempotency (at)",
        "CREATE INDEX IF NOT EXISTS idempotency_by_owner ON idempotency (owner, at)",
    ),
    4: (  # paths become relative to the home, by the names below it: it may have been moved since they were written
        f"UPDATE jobs SET state_path = 'jobs/' || id || '/state/' || {NAME_OF_PATH.format('state_path')}",
        f"UPDATE artifacts SET path = 'jobs/' || job || '/adapter/' || {NAME_OF_PATH.format('path')}",
        "CREATE TABLE IF NOT EXISTS removals (path VARCHAR NOT NULL PRIMARY KEY)",
    ),
    5: ("ALTER TABLE keys ADD COLUMN limits JSON NOT NULL DEFAULT '{}'",),
    6: ("CREATE INDEX IF NOT EXISTS jobs_of_owner ON jobs (owner, created, id)",),
    7: ("ALTER TABLE jobs ADD COLUMN eval_tokens INTEGER NOT NULL DEFAULT 0",),
    8: (
        "CREATE TABLE IF NOT EXISTS api_sessions (id VARCHAR NOT NULL PRIMARY KEY, owner VARCHAR NOT NULL,"
        " created FLOAT NOT NULL, beat FLOAT NOT NULL, ended FLOAT, reason JSON NOT NULL, data JSON NOT NULL)",
        "CREATE TABLE IF NOT EXISTS api_models (id VARCHAR NOT NULL PRIMARY KEY, session VARCHAR NOT NULL,"
        " owner VARCHAR NOT NULL, seq INTEGER NOT NULL, job VARCHAR NOT NULL, base VARCHAR NOT NULL,"
        " config JSON NOT NULL, data JSON NOT NULL, created FLOAT NOT NULL, used FLOAT NOT NULL)",
        "CREATE TABLE IF NOT EXISTS api_requests (stream VARCHAR NOT NULL, seq INTEGER NOT NULL,"
        " kind VARCHAR NOT NULL, body JSON NOT NULL, path VARCHAR, sha256 VARCHAR NOT NULL, bytes INTEGER NOT NULL,"
        " tokens INTEGER NOT NULL, at FLOAT NOT NULL, PRIMARY KEY (stream, seq))",
        "CREATE TABLE IF NOT EXISTS api_futures (id VARCHAR NOT NULL PRIMARY KEY, owner VARCHAR NOT NULL,"
        " stream VARCHAR NOT NULL, seq INTEGER NOT NULL, kind VARCHAR NOT NULL, state VARCHAR NOT NULL,"
        " result JSON, path VARCHAR, sha256 VARCHAR NOT NULL, bytes INTEGER NOT NULL, read FLOAT, until FLOAT)",
        "CREATE TABLE IF NOT EXISTS api_checkpoints (path VARCHAR NOT NULL PRIMARY KEY, owner VARCHAR NOT NULL,"
        " model VARCHAR NOT NULL, kind VARCHAR NOT NULL, name VARCHAR NOT NULL, folder VARCHAR NOT NULL,"
        " base VARCHAR NOT NULL, bytes INTEGER NOT NULL, config JSON NOT NULL, data JSON NOT NULL,"
        " created FLOAT NOT NULL, expires FLOAT)",
        "CREATE TABLE IF NOT EXISTS api_samplers (id VARCHAR NOT NULL PRIMARY KEY, owner VARCHAR NOT NULL,"
        " session VARCHAR NOT NULL, base VARCHAR NOT NULL, path VARCHAR, folder VARCHAR, created FLOAT NOT NULL)",
        "CREATE INDEX IF NOT EXISTS api_models_of_session ON api_models (session)",
        "CREATE INDEX IF NOT EXISTS api_models_of_job ON api_models (job)",
        "CREATE INDEX IF NOT EXISTS api_futures_of_stream ON api_futures (stream, state)",
        "CREATE INDEX IF NOT EXISTS api_futures_by_end ON api_futures (until)",
        "CREATE INDEX IF NOT EXISTS api_futures_of_owner ON api_futures (owner, state)",
        "CREATE INDEX IF NOT EXISTS api_checkpoints_of_owner ON api_checkpoints (owner, created)",
    ),
    9: ("ALTER TABLE api_samplers ADD COLUMN used FLOAT NOT NULL DEFAULT 0",),
}
meta = MetaData()

keys = Table(
    "keys",
    meta,
    Column("id", String, primary_key=True),
    Column("sha256", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("scopes", JSON, nullable=False),
    Column("created", Float, nullable=False),
    Column("used", Float),
    Column("expires", Float),
    Column("revoked", Boolean, nullable=False, default=False),
    Column("limits", JSON, nullable=False, default=dict),  # see `keys.Limits`
)
page_sessions = Table(
    "page_sessions",
    meta,
    Column("sha256", String, primary_key=True),
    Column("key", String, nullable=False),
    Column("expires", Float, nullable=False),
)
datasets = Table(
    "datasets",
    meta,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("name", String, nullable=False),
    Column("sha256", String, nullable=False),
    Column("format", String, nullable=False),
    Column("rows", Integer, nullable=False),
    Column("columns", JSON, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("created", Float, nullable=False),
)
jobs = Table(
    "jobs",
    meta,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False, index=True),
    Column("name", String, nullable=False),
    Column("base", String, nullable=False),
    Column("spec", JSON, nullable=False),
    Column("state", String, nullable=False, index=True),
    Column("after_drain", String),  # pause, cancel or preempt
    Column("reason", Text, nullable=False, default=""),
    Column("problems", JSON, nullable=False, default=list),
    Column("epoch", Integer, nullable=False, default=0),  # number of its placement; older writers are refused
    Column("step", Integer, nullable=False, default=0),
    Column("steps", Integer),
    Column("tokens", Integer),
    Column("rank", Integer),
    Column("lengths", JSON, nullable=False, default=list),  # tokens of some samples, for predictions
    Column("eval_tokens", Integer, nullable=False, default=0),  # of its held-out data, for predictions
    Column("loss", Float),
    Column("state_path", String),  # relative to the home, as all paths
    Column("state_step", Integer, nullable=False, default=0),
    Column("tries", Integer, nullable=False, default=0),  # lost workers without 20 steps of progress between
    Column("tries_step", Integer, nullable=False, default=0),
    Column("group", String),
    Column("place", Integer),
    Column("weight", Float, nullable=False, default=1.0),
    Column("priority", Integer, nullable=False, default=0),
    Column("deadline", Float),
    Column("created", Float, nullable=False),
    Column("queued", Float),
    Column("started", Float),
    Column("ended", Float),
)
Index("jobs_by_time", jobs.c.created, jobs.c.id)
Index("jobs_of_owner", jobs.c.owner, jobs.c.created, jobs.c.id)
transitions = Table(
    "transitions",
    meta,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("job", String, ForeignKey("jobs.id"), nullable=False, index=True),
    Column("before", String, nullable=False),
    Column("after", String, nullable=False),
    Column("event", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("why", Text, nullable=False, default=""),
)
placements = Table(
    "placements",
    meta,
    Column("job", String, ForeignKey("jobs.id"), primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("group", String, nullable=False),
    Column("place", Integer, nullable=False),
    Column("at", Float, nullable=False),
)
metrics = Table(  # a step that runs again after a lost worker replaces its row
    "metrics",
    meta,
    Column("job", String, ForeignKey("jobs.id"), primary_key=True),
    Column("kind", String, primary_key=True),
    Column("step", Integer, primary_key=True),
    Column("row", JSON, nullable=False),
)
artifacts = Table(
    "artifacts",
    meta,
    Column("id", String, primary_key=True),
    Column("job", String, ForeignKey("jobs.id"), nullable=False, index=True),
    Column("owner", String, nullable=False),
    Column("step", Integer, nullable=False),
    Column("path", String, nullable=False),
    Column("sha256", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("url", String, nullable=False, default=""),  # where it was published, too
    Column("problem", Text, nullable=False, default=""),  # why it was not
)
removals = Table(  # what was deleted and may still be on the disk
    "removals",
    meta,
    Column("path", String, primary_key=True),  # relative to the home
)
groups = Table(
    "groups",
    meta,
    Column("id", String, primary_key=True),
    Column("base", String, nullable=False),
    Column("pid", Integer),
    Column("epoch", Integer, nullable=False, default=0),
    Column("state", String, nullable=False),
    Column("places", JSON, nullable=False),
    Column("gpus", JSON, nullable=False, default=list),  # numbers of its GPUs; empty: whatever the machine has
    Column("mesh", JSON, nullable=False, default=dict),
    Column("capacity", Integer),  # tokens of its microbatches, if they are not those of the settings
    Column("device", String, nullable=False, default=""),
    Column("opens", String, nullable=False, default=""),  # digest of what its worker opened
    Column("host", String, nullable=False, default=""),  # whose GPUs these are
    Column("drained", Boolean, nullable=False, default=False),
    Column("received", Integer, nullable=False, default=0),  # number of the last event taken from this epoch
)
epochs = Table(  # outlives the sessions, because their names are used again
    "epochs",
    meta,
    Column("group", String, primary_key=True),
    Column("last", Integer, nullable=False),
)
decisions = Table(
    "decisions",
    meta,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("at", Float, nullable=False),
    Column("text", Text, nullable=False),
    Column("refused", Text, nullable=False, default=""),
)
events = Table(
    "events",
    meta,
    Column("seq", Integer, primary_key=True, autoincrement=True),
    Column("job", String, index=True),
    Column("owner", String, nullable=False),
    Column("kind", String, nullable=False),
    Column("at", Float, nullable=False),
    Column("data", JSON, nullable=False),
)
mlora = Table(  # what clients of mLoRA named, if its routes are mounted
    "mlora",
    meta,
    Column("kind", String, primary_key=True),  # data, prompt, dataset, adapter or task
    Column("name", String, primary_key=True),
    Column("value", JSON, nullable=False),
)
idempotency = Table(
    "idempotency",
    meta,
    Column("owner", String, primary_key=True),
    Column("key", String, primary_key=True),
    Column("route", String, nullable=False),
    Column("body_sha", String, nullable=False),
    Column("status", Integer, nullable=False),
    Column("response", JSON, nullable=False),
    Column("at", Float, nullable=False),
)
Index("idempotency_by_time", idempotency.c.at)
Index("idempotency_by_owner", idempotency.c.owner, idempotency.c.at)
api_sessions = Table(  # of clients of the training API
    "api_sessions",
    meta,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("created", Float, nullable=False),
    Column("beat", Float, nullable=False),  # when its client was last heard of
    Column("ended", Float),
    Column("reason", JSON, nullable=False, default=dict),
    Column("data", JSON, nullable=False, default=dict),  # what the client says of it
)
api_models = Table(  # adapters that clients train by calls; each is a job that has no data of its own
    "api_models",
    meta,
    Column("id", String, primary_key=True),  # SESSION:train:SEQ
    Column("session", String, nullable=False),
    Column("owner", String, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("job", String, nullable=False),
    Column("base", String, nullable=False),
    Column("config", JSON, nullable=False),
    Column("data", JSON, nullable=False, default=dict),
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False),
)
api_requests = Table(  # the log of each model: what its newest state does not have yet; and samples that are waited for
    "api_requests",
    meta,
    Column("stream", String, primary_key=True),  # a model or a sampler
    Column("seq", Integer, primary_key=True),
    Column("kind", String, nullable=False),
    Column("body", JSON, nullable=False, default=dict),
    Column("path", String),  # of its payload
    Column("sha256", String, nullable=False, default=""),
    Column("bytes", Integer, nullable=False, default=0),
    Column("tokens", Integer, nullable=False, default=0),
    Column("at", Float, nullable=False),
)
api_futures = Table(
    "api_futures",
    meta,
    Column("id", String, primary_key=True),
    Column("owner", String, nullable=False),
    Column("stream", String, nullable=False),
    Column("seq", Integer, nullable=False),
    Column("kind", String, nullable=False),
    Column("state", String, nullable=False),  # waiting, done or failed
    Column("result", JSON),
    Column("path", String),  # of a result that is not JSON
    Column("sha256", String, nullable=False, default=""),
    Column("bytes", Integer, nullable=False, default=0),
    Column("read", Float),
    Column("until", Float),  # when it is removed
)
api_checkpoints = Table(
    "api_checkpoints",
    meta,
    Column("path", String, primary_key=True),  # tinker://MODEL/KIND/NAME
    Column("owner", String, nullable=False),
    Column("model", String, nullable=False),
    Column("kind", String, nullable=False),  # weights, sampler_weights or external_weights
    Column("name", String, nullable=False),
    Column("folder", String, nullable=False),
    Column("base", String, nullable=False),
    Column("bytes", Integer, nullable=False),
    Column("config", JSON, nullable=False),
    Column("data", JSON, nullable=False, default=dict),
    Column("created", Float, nullable=False),
    Column("expires", Float),
)
api_samplers = Table(
    "api_samplers",
    meta,
    Column("id", String, primary_key=True),  # SESSION:sample:SEQ
    Column("owner", String, nullable=False),
    Column("session", String, nullable=False),
    Column("base", String, nullable=False),
    Column("path", String),  # of its checkpoint, if it has one
    Column("folder", String),  # of its adapter; None: the base alone
    Column("created", Float, nullable=False),
    Column("used", Float, nullable=False, server_default="0"),
)
Index("api_models_of_session", api_models.c.session)
Index("api_models_of_job", api_models.c.job)
Index("api_futures_of_stream", api_futures.c.stream, api_futures.c.state)
Index("api_futures_by_end", api_futures.c.until)
Index("api_futures_of_owner", api_futures.c.owner, api_futures.c.state)
Index("api_checkpoints_of_owner", api_checkpoints.c.owner, api_checkpoints.c.created)


def seen_by(table: Table, owner: str | None) -> list[ColumnElement[bool]]:
    """The condition of the rows that an owner sees; none for who sees all (None)."""
    return [] if owner is None else [table.c.owner == owner]


def find_row(connection: Connection, table: Table, key: str, owner: str | None = None) -> dict[str, Any] | None:
    """Returns the row of a primary key, if an owner sees it."""
    (column,) = table.primary_key.columns
    row = connection.execute(select(table).where(column == key, *seen_by(table, owner))).mappings().one_or_none()
    return None if row is None else dict(row)
