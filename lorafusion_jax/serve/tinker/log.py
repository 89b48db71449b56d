"""The log of a model: its requests by number. A repeated request gets the first future; one that comes early waits.

What is accepted is on the disk. A request is removed once a state of the model has it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from sqlalchemy import Connection, func, select

from lorafusion_jax.files import make_folder, sync
from lorafusion_jax.serve.api.pages import get_row
from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.states import ENDED
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs
from lorafusion_jax.serve.tinker.bodies import Body
from lorafusion_jax.serve.tinker.futures import Row, add_future, find_future

MOST_WAITING = 4096  # requests of a model, or samples of a sampler
MOST_BYTES = 256 << 20  # of the requests of an owner that wait
MISSING = "missing"  # kind of a request that never came
# Values that may differ where a request is repeated: of the service, and a number that the SDK draws anew each time.
NOT_COMPARED = ("refused", "folder", "sampler")
GAP_S = 600.0  # that requests wait for one before them; the SDK sends it again for 5 minutes
ALIVE_S = 300.0  # after the last sign of its client a session counts as gone, and its models leave their places


def future_of(stream: str, seq: int) -> str:
    """The id of the future of a request.

    >>> future_of("ses-1:train:0", 3)
    'ses-1:train:0:3'
    """
    return f"{stream}:{seq}"


def payload_of(stream: str, seq: int) -> str:
    """Where the payload of a request is, relative to the home; its result is beside it.

    >>> payload_of("ses-1:train:0", 3)
    'requests/ses-1/train-0/3.pb'
    """
    session, kind, number = stream.split(":")
    return f"requests/{session}/{kind}-{number}/{seq}.pb"


def any_session(connection: Connection, session: str, owner: str | None) -> Row:
    """Returns a session of an owner, also one that is over.

    Raises:
        ApiError: 404.
    """
    return get_row(connection, t.api_sessions, session, owner, "session")


def find_session(connection: Connection, session: str, owner: str | None) -> Row:
    """Returns a session of an owner that goes on.

    Raises:
        ApiError: 404, there is none; 410, `api.session-over`.
    """
    row = any_session(connection, session, owner)
    if row["ended"] is not None:
        raise ApiError(410, "api.session-over", "this session is finished.", fix="a new ServiceClient")
    return row


def beat(connection: Connection, session: str) -> None:
    connection.execute(t.api_sessions.update().where(t.api_sessions.c.id == session).values(beat=time.time()))


def find_model(connection: Connection, model: str, owner: str | None) -> Row:
    """Returns a model of an owner.

    Raises:
        ApiError: 404.
    """
    return get_row(connection, t.api_models, model, owner, "model")


def accept(
    connection: Connection,
    jobs: Jobs,
    home: Path,
    model: Row,
    seq: int,
    kind: str,
    *,
    values: Row | None = None,
    body: Body | None = None,
    tokens: int = 0,
) -> Row:
    """Adds a request to the log of a model. Returns its future; of a repeated request the first one.

    Args:
        values: of a request that is no payload.
        body: its payload, which is moved to its place.

    Raises:
        ApiError: 409 to 429; nothing is added.
    """
    stream, future = model["id"], future_of(model["id"], seq)
    if (row := find_future(connection, future, None)) is not None:
        if difference := _difference(row["kind"], find_request(connection, stream, seq), kind, values or {}, body):
            message = f"request {seq} of this model was {difference}."
            fix = "a number of its own for each request: one client for a model, in one process"
            raise ApiError(422, "api.other-request", message, fix=fix)
        return row
    find_session(connection, model["session"], None)
    job = jobs.get(connection, model["job"])
    if job["state"] in (*ENDED, "deleted"):
        why = job["reason"] or f"it is {job['state']}"
        raise ApiError(410, "api.model-over", f"the model takes no requests any more: {why}.", fix="a new model")
    if seq < 1:
        raise ApiError(422, "api.seq", f"requests of a model count from 1, not from {seq}.", fix="the next number")
    if seq <= job["step"] or find_request(connection, stream, seq) is not None:
        message = f"request {seq} of this model was executed, and its result was removed."
        raise ApiError(410, "api.expired", message, fix="ask for results within a day, and read them within an hour")
    size = 0 if body is None else body.size
    check_waiting(connection, stream, model["owner"], size)
    path = None
    if body is not None:
        path = payload_of(stream, seq)
        make_folder((home / path).parent)
        body.path.replace(home / path)
        sync((home / path).parent)
    row = {"stream": stream, "seq": seq, "kind": kind, "body": values or {}, "path": path, "bytes": size}
    row |= {"sha256": "" if body is None else body.sha256, "tokens": tokens, "at": time.time()}
    connection.execute(t.api_requests.insert().values(row))
    connection.execute(t.api_models.update().where(t.api_models.c.id == stream).values(used=time.time()))
    beat(connection, model["session"])
    return add_future(connection, future, model["owner"], stream, seq, kind)


def _difference(first_kind: str, first: Row | None, kind: str, values: Row, body: Body | None) -> str:
    """In what a request differs from the first one of its number, as far as that is known; "" if in nothing.

    Rows are compared by their size: a map of protobuf has no order, so the same rows may be other bytes.
    """
    if first_kind == MISSING:
        return ""
    if first_kind != kind:
        return f"{first_kind}, not {kind}"
    if first is None or first["body"].get("refused"):
        return ""
    if body is not None and body.size != first["bytes"]:
        return f"{kind} with other rows, of {first['bytes']} bytes instead of {body.size}"
    changed = [key for key in values if key not in NOT_COMPARED and values[key] != first["body"].get(key)]
    return f"{kind} with other values of {', '.join(changed)}" if changed else ""


def check_waiting(connection: Connection, stream: str, owner: str, size: int) -> None:
    """Refuses a request where too many wait.

    Raises:
        ApiError: 429, `api.waiting`.
    """
    futures, requests = t.api_futures.c, t.api_requests.c
    both = t.api_requests.join(t.api_futures, (futures.stream == requests.stream) & (futures.seq == requests.seq))
    is_waiting = futures.state == "waiting"
    count = select(func.count()).select_from(t.api_futures).where(futures.stream == stream, is_waiting)
    total = select(func.sum(requests.bytes)).select_from(both).where(futures.owner == owner, is_waiting)
    if (connection.scalar(count) or 0) >= MOST_WAITING or (connection.scalar(total) or 0) + size > MOST_BYTES:
        message = f"at most {MOST_WAITING} requests of a model wait, and {MOST_BYTES >> 20} MiB of an owner."
        raise ApiError(429, "api.waiting", message, fix="wait for results", headers={"Retry-After": "1"})


def find_request(connection: Connection, stream: str, seq: int) -> Row | None:
    where = (t.api_requests.c.stream == stream, t.api_requests.c.seq == seq)
    row = connection.execute(select(t.api_requests).where(*where)).mappings().one_or_none()
    return None if row is None else dict(row)


def next_requests(connection: Connection, stream: str, after: int) -> list[Row]:
    """The requests of a model that follow a number without a gap."""
    where = (t.api_requests.c.stream == stream, t.api_requests.c.seq > after)
    rows = connection.execute(select(t.api_requests).where(*where).order_by(t.api_requests.c.seq)).mappings()
    following: list[Row] = []
    for row in rows:
        if row["seq"] != after + len(following) + 1:
            break
        following.append(dict(row))
    return following


def missing_request(connection: Connection, stream: str, after: int, seq: int) -> int | None:
    """Returns the first request that has not arrived of those between two numbers."""
    where = (t.api_requests.c.stream == stream, t.api_requests.c.seq > after, t.api_requests.c.seq < seq)
    numbers = set(connection.execute(select(t.api_requests.c.seq).where(*where)).scalars())
    return next((number for number in range(after + 1, seq) if number not in numbers), None)


def overdue_requests(connection: Connection) -> list[tuple[str, int]]:
    """Models whose requests have waited for too long for one that did not arrive, and the number of that one."""
    requests, models, jobs = t.api_requests.c, t.api_models, t.jobs.c
    both = t.api_requests.join(models, models.c.id == requests.stream).join(t.jobs, jobs.id == models.c.job)
    columns = select(requests.stream, jobs.step, func.max(requests.seq)).select_from(both).group_by(requests.stream)
    is_late = (requests.at < time.time() - GAP_S, requests.seq > jobs.step + 1, jobs.state.notin_((*ENDED, "deleted")))
    late = [tuple(row) for row in connection.execute(columns.where(*is_late))]
    numbers = [(stream, missing_request(connection, stream, step, seq)) for stream, step, seq in late]
    return [(stream, seq) for stream, seq in numbers if seq is not None]


def skip(connection: Connection, model: Row, seq: int) -> None:
    """Adds a request that did not arrive as one that fails in its turn, so that later ones run."""
    why = f"request {seq} of this model did not arrive for {GAP_S:.0f} s, and later ones waited for it"
    row = {"stream": model["id"], "seq": seq, "kind": MISSING, "body": {"refused": why}, "path": None, "bytes": 0}
    connection.execute(t.api_requests.insert().values(row | {"sha256": "", "tokens": 0, "at": time.time()}))
    add_future(connection, future_of(model["id"], seq), model["owner"], model["id"], seq, MISSING)


def waiting_samples(connection: Connection) -> list[tuple[str, int]]:
    """Sampler and number of the samples that are waited for, in the order in which they came."""
    columns = select(t.api_requests.c.stream, t.api_requests.c.seq).where(t.api_requests.c.kind == "sample")
    return [(stream, seq) for stream, seq in connection.execute(columns.order_by(t.api_requests.c.at))]


def forget_request(connection: Connection, stream: str, seq: int) -> None:
    """Removes a request that was answered and changes nothing."""
    requests = t.api_requests.c
    connection.execute(t.api_requests.delete().where(requests.stream == stream, requests.seq == seq))


def forget_requests(connection: Connection, stream: str, up_to: int | None = None) -> Sequence[str]:
    """Removes requests that a state has, or all. Returns the paths of their payloads."""
    where = [t.api_requests.c.stream == stream] + ([] if up_to is None else [t.api_requests.c.seq <= up_to])
    paths = connection.execute(select(t.api_requests.c.path).where(*where)).scalars().all()
    connection.execute(t.api_requests.delete().where(*where))
    return [path for path in paths if path is not None]
