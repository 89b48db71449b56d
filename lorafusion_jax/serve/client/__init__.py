"""A client of the service, with nothing but the standard library."""

from __future__ import annotations

import hashlib
import http.client
import json
import re
import shutil
import socket
import ssl
import tarfile
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PLAIN = re.compile(r"[!-~]+")  # what a line of HTTP takes
ENDED = ("done", "failed", "cancelled", "rejected", "deleted")
TRIES = 5
FOR_GOOD = (socket.gaierror, ssl.SSLError, http.client.InvalidURL)  # another try does not change them
AGAIN_S = 0.5
AWAY_S = 600.0  # that a service which has answered may not answer, while somebody waits for a job


class ServiceError(Exception):
    """The service refused a request.

    Attributes:
        status: HTTP status.
        problems: every problem, each with code, what, where, why and fix.
    """

    def __init__(self, status: int, problems: list[dict[str, str]]):
        self.status, self.problems = status, problems
        super().__init__("\n".join(_line(problem) for problem in problems) or f"HTTP {status}")


class Client:
    """Talks to one service. Requests are repeated when the connection fails; writes still act once.

    Args:
        url: for example `http://127.0.0.1:7070`.
        key: `tml-lf_…` (None: a service on this machine without keys).
        timeout_s: of one request.
    """

    def __init__(self, url: str = "http://127.0.0.1:7070", key: str | None = None, *, timeout_s: float = 60.0):
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if not host or parts.scheme not in ("http", "https") or PLAIN.fullmatch(host + parts.path) is None:
            raise ValueError(f"{url!r} is not a URL: http://HOST:PORT")
        if key is not None and PLAIN.fullmatch(key) is None:  # which is not shown
            raise ValueError("this is no key: tml-lf_, 8 characters, _, and 43 characters")
        self._secure, self._host, self._port = parts.scheme == "https", host, port
        self._prefix, self._timeout_s = parts.path.rstrip("/"), timeout_s
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    def upload(self, path: str | Path) -> dict[str, Any]:
        """Uploads a data file; equal content has the same id."""
        path = Path(path)
        name = path.name.lower()
        with path.open("rb") as file:
            return self.request("POST", f"/v1/datasets?name={urllib.parse.quote(name)}", file)

    def submit(self, job: Mapping[str, Any]) -> Job:
        """Submits a job. `data.train` and `data.eval` may be local files; they are uploaded.

        Raises:
            ServiceError: with every problem.
        """
        spec = {**job, "data": dict(job["data"])}
        for key in ("train", "eval"):
            file = spec["data"].get(key)
            if isinstance(file, str | Path) and not str(file).startswith("sha256-"):
                spec["data"][key] = self.upload(file)["id"]
        return Job(self, self.request("POST", "/v1/jobs", spec)["id"])

    def job(self, name: str) -> Job:
        """Returns a job by its id."""
        return Job(self, name)

    def jobs(self, **filters: Any) -> Iterator[dict[str, Any]]:
        """Yields jobs, newest first, page by page."""
        after: dict[str, Any] = {}
        while True:
            query = urllib.parse.urlencode(filters | after, doseq=True)
            page = self.request("GET", f"/v1/jobs?{query}")
            yield from page["items"]
            if page["next"] is None:
                return
            after = {"after": page["next"]}

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Sends a request and returns the JSON of the answer.

        Args:
            body: an open file is sent as it is, everything else as JSON.

        Raises:
            ServiceError: the service refused it.
            OSError: the service cannot be reached.
        """
        headers = dict(self._headers)
        if method in ("POST", "DELETE"):
            headers["Idempotency-Key"] = str(uuid.uuid4())
        is_file = hasattr(body, "read")
        data = body if is_file or body is None else json.dumps(body).encode()
        if is_file:
            headers["Content-Type"] = "application/octet-stream"
        elif data is not None:
            headers["Content-Type"] = "application/json"
        for attempt in range(TRIES):
            try:
                status, content = self._once(method, path, data, headers)
            except (OSError, http.client.HTTPException) as problem:
                if attempt + 1 == TRIES or isinstance(problem, FOR_GOOD):
                    raise
                time.sleep(AGAIN_S * 2**attempt)
                if is_file:
                    body.seek(0)
                continue
            if status in (429, 503) and attempt + 1 < TRIES:
                time.sleep(AGAIN_S * 2**attempt)
                if is_file:
                    body.seek(0)
                continue
            if status >= 400:
                raise _error(status, content)
            return _read(status, content)
        raise AssertionError

    @contextmanager
    def stream(self, path: str, headers: Mapping[str, str] | None = None) -> Iterator[http.client.HTTPResponse]:
        """Opens an answer to read from.

        Raises:
            ServiceError: the service refused it.
        """
        with closing(self._connect()) as connection:
            connection.request("GET", self._prefix + path, headers=self._headers | dict(headers or {}))
            with connection.getresponse() as answer:
                if answer.status >= 400:
                    raise _error(answer.status, answer.read())
                yield answer

    def _once(self, method: str, path: str, data: Any, headers: Mapping[str, str]) -> tuple[int, bytes]:
        connection = self._connect()
        try:
            connection.request(method, self._prefix + path, data, dict(headers))
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def _connect(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=self._timeout_s)


@dataclass(frozen=True, slots=True)
class Job:
    """A job of a service."""

    client: Client
    id: str

    def show(self) -> dict[str, Any]:
        """Returns its state and numbers."""
        return self.client.request("GET", self._path)

    def wait(self, timeout_s: float = float("inf"), *, every_s: float = 0.5) -> Job:
        """Waits until it is done; also while the service is started again.

        Raises:
            ServiceError: it was rejected, or failed.
            TimeoutError: it takes longer.
            OSError: the service cannot be reached, for ten minutes if it has answered before.
        """
        until = time.monotonic() + timeout_s
        absence = _Absence()
        while True:
            try:
                fields = self.show()
                absence.end()
            except (OSError, http.client.HTTPException):
                if absence.is_too_long(until):
                    raise
                time.sleep(every_s)
                continue
            if fields["state"] == "done":
                return self
            if fields["state"] in ENDED:
                message = fields["reason"] or f"the job is {fields['state']}"
                problem = {"code": f"job.{fields['state']}", "what": message, "where": "", "why": "", "fix": ""}
                raise ServiceError(200, fields["problems"] or [problem])
            if time.monotonic() > until:
                raise TimeoutError(f"{self.id} is {fields['state']} after {timeout_s:g} s")
            time.sleep(every_s)

    def cancel(self) -> dict[str, Any]:
        """Cancels it."""
        return self._ask("cancel")

    def pause(self) -> dict[str, Any]:
        """Pauses it; its place is free for others."""
        return self._ask("pause")

    def resume(self) -> dict[str, Any]:
        """Continues a paused job where it stopped."""
        return self._ask("continue")

    def set_weight(self, weight: float) -> dict[str, Any]:
        """Changes its share of the session relative to other jobs."""
        return self.client.request("PATCH", self._path, {"weight": weight})

    def set_priority(self, priority: int) -> dict[str, Any]:
        """Changes its priority: jobs of higher ones are placed first, and take places of lower ones."""
        return self.client.request("PATCH", self._path, {"priority": priority})

    def set_deadline(self, deadline: float) -> dict[str, Any]:
        """Changes the time, in seconds since 1970, by which it should end."""
        return self.client.request("PATCH", self._path, {"deadline": deadline})

    def delete(self) -> dict[str, Any]:
        """Deletes it, once it has ended. Its adapter stays."""
        return self.client.request("DELETE", self._path)

    def log(self, tail: int = 200) -> str:
        """Returns the last lines on what happened to it."""
        with self.client.stream(f"{self._path}/log?tail={tail}") as answer:
            return answer.read().decode()

    def metrics(self, from_step: int = 0) -> list[dict[str, Any]]:
        """Returns the rows of its steps and evaluations."""
        return self.client.request("GET", f"{self._path}/metrics?from_step={from_step}")["items"]

    def events(self, after: int = 0) -> Iterator[dict[str, Any]]:
        """Yields its events as they happen, until it has ended. A broken connection is continued.

        Raises:
            ServiceError: the service refused it.
            OSError: the service cannot be reached, for ten minutes if it has answered before.
        """
        absence = _Absence()
        while True:
            try:
                headers = {"Last-Event-ID": str(after)}
                with self.client.stream(f"{self._path}/events", headers) as answer:
                    absence.end()
                    for event in _parse_events(answer):
                        after = event["seq"]
                        yield event
                if self.show()["state"] in ENDED:  # a stream also ends with its server
                    return
            except (OSError, http.client.HTTPException):
                if absence.is_too_long():
                    raise
            time.sleep(AGAIN_S)

    def adapter(self, folder: str | Path) -> Path:
        """Downloads the trained adapter into a new folder and compares it with its digests."""
        target = Path(folder)
        with self.client.stream(f"{self._path}/adapter") as answer:
            target.mkdir(parents=True, exist_ok=False)
            try:
                with tarfile.open(fileobj=answer, mode="r|") as tar:
                    tar.extractall(target, filter="data")
                _check_digests(target)
            except BaseException as problem:  # the next attempt makes it again
                shutil.rmtree(target, ignore_errors=True)
                if isinstance(problem, tarfile.TarError):
                    raise OSError(f"the download was broken off: {problem}") from None
                raise
        return target

    @property
    def _path(self) -> str:
        """Path of the API; an id is one part of it, whatever its signs are."""
        return f"/v1/jobs/{urllib.parse.quote(self.id, safe='')}"

    def _ask(self, action: str) -> dict[str, Any]:
        return self.client.request("POST", f"{self._path}/{action}")


class _Absence:
    """How long a service has not answered, mostly because it is started again."""

    def __init__(self) -> None:
        self._has_answered, self._since = False, None

    def end(self) -> None:
        self._has_answered, self._since = True, None

    def is_too_long(self, until: float = float("inf")) -> bool:
        """Whether it has never answered, or not for `AWAY_S`, or not before a time."""
        now = time.monotonic()
        self._since = now if self._since is None else self._since
        return not self._has_answered or now > min(until, self._since + AWAY_S)


def _parse_events(answer: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    fields: dict[str, str] = {}
    for raw in answer:
        line = raw.decode().rstrip("\n")
        if line and not line.startswith(":"):
            name, _, value = line.partition(": ")
            fields[name] = value
        elif not line and "data" in fields:
            yield {"seq": int(fields["id"]), "kind": fields["event"]} | json.loads(fields["data"])
            fields = {}


def _check_digests(folder: Path) -> None:
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        digest, _, name = line.partition("  ")
        if not line.startswith("#") and hashlib.sha256((folder / name).read_bytes()).hexdigest() != digest:
            raise OSError(f"{folder / name} was damaged on the way; download it again")


def _read(status: int, content: bytes) -> Any:
    """Returns the JSON of an answer.

    Raises:
        ServiceError: it is that of another server.
    """
    try:
        answer = json.loads(content) if content else None
        if status < 300 and (answer is None or isinstance(answer, dict)):
            return answer
    except ValueError:
        pass
    problem = {"code": "http.answer", "what": "what answers at this address is no service of lorafusion."}
    raise ServiceError(status, [problem | {"fix": "--url of lorafusion serve, which it says when it starts"}])


def _error(status: int, content: bytes) -> ServiceError:
    try:
        answer = json.loads(content)
        return ServiceError(status, answer.get("problems") or [answer["error"]])
    except (ValueError, KeyError, TypeError, AttributeError):
        return ServiceError(status, [{"code": f"http.{status}", "what": content[:200].decode(errors="replace")}])


def _line(problem: Mapping[str, str]) -> str:
    parts = [f"error[{problem.get('code', '')}] {problem.get('what', '')}"]
    parts += [f"  where: {problem['where']}"] if problem.get("where") else []
    parts += [f"  because {problem['why']}"] if problem.get("why") else []
    parts += [f"  fix: {problem['fix']}"] if problem.get("fix") else []
    return "\n".join(parts)
