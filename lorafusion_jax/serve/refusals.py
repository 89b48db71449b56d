"""What every refusal says: a stable code, what is wrong, where, why, and what to do.

The tables have the reasons of all codes of the service, and what to do where that does not depend on the values. Where
a request is refused, more may be known: then that is said.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_OR = re.compile(r" {3}or {3}|; or |, or ")
_OF_A_RUN = re.compile(r"(?<![.\w])(rollout|base|batch|mesh|train)[.:](?!global_samples)")
KEYS = ("code", "what", "where", "why", "fix")
Problem = dict[str, str]

WHYS: Mapping[str, str] = {
    "adapter.gone": "a part of the home was not restored, or somebody has removed it",
    "adapter.in-use": "a job that is moved reads the adapter again",
    "api.body": "it is not what the SDK sends, or was cut",
    "api.bodies": "bodies are kept in memory, and one owner must not take all of it",
    "api.checkpoint-exists": "checkpoints do not change",
    "api.csrf": "a page of another site can make a browser send its cookie",
    "api.cursor": "a page continues from the last row of the one before",
    "api.depth": "reading it would take too much of the server",
    "api.encoding": "bodies are unpacked by zstd only",
    "api.expired": "results stay for a day unread, and for an hour after they were read",
    "api.future": "its id is unknown, of another owner, or its time is over",
    "api.host": "a page of another site can point a name of its own to this machine",
    "api.idempotency": "a repeated request gets the first answer, so it must be the same request",
    "api.internal": "something happened that the program does not expect",
    "api.json": "the body is no JSON",
    "api.key": "jobs, data and adapters belong to the owner of a key",
    "api.last-admin": "nobody could administer the service from elsewhere any more",
    "api.local": "they tell of all owners",
    "api.media-type": "rows come as protobuf",
    "api.missing": "it has no default",
    "api.model-over": "its client has ended it, or it has failed",
    "api.models": "models of one owner are limited, so that others have a turn",
    "api.no-worker": "no session of this base is connected",
    "api.not-found": "no thing of yours has this name; what others own is not shown",
    "api.not-served": "it is no part of this service",
    "api.other-request": "a repeated request gets the first result, so it must be the same request",
    "api.rate": "one key must not take the server from the others",
    "api.scope": "a key may do what its scopes name",
    "api.seq": "requests of a model are executed in the order of their numbers",
    "api.session-over": "its client has finished it",
    "api.sessions": "sessions of one owner are limited, so that others have a turn",
    "api.signature": "it was signed for an hour, by the server that ran then",
    "api.slow": "a connection that waits takes memory of the server",
    "api.streams": "every stream takes memory of the server",
    "api.ends": "the process is told to end",
    "api.ttl": "checkpoints live for an hour at least, and ten years at most",
    "api.turns": "one owner must not take the service from the others",
    "api.too-large": "bodies are kept in memory",
    "api.unknown-key": "a key that is not known may be a typing mistake",
    "api.twice": "readers take either value, and nobody would know which",
    "api.values": "reading it would take too much of the server",
    "api.value": "it is none of the values that are taken there",
    "api.waiting": "what waits takes room on the disk, and one owner must not take all of it",
    "data.check": "a limit of the process that reads data ended it",
    "data.empty-file": "there are no rows in it",
    "data.in-use": "a job that is moved reads its data again",
    "data.incomplete": "the connection ended before the body did",
    "data.over-limit": "an administrator limits what a key may ask for",
    "data.row": "rows are counted from 0",
    "data.slow": "a connection that waits takes memory of the server",
    "data.too-large": "the administrator has set this limit",
    "data.unpacked": "whoever reads a file unpacks it",
    "data.unknown-kind": "the ending of the name says how the file is read",
    "job.adapter": "it does not exist, was deleted, or belongs to somebody else",
    "job.base": "the service has the bases only that it was started with",
    "job.check": "the check itself failed, and an unchecked job does not train",
    "job.dataset": "it does not exist, was deleted, or belongs to somebody else",
    "job.kind": "places are made for kinds of adapters when a session is opened",
    "job.limit": "live jobs of one owner are limited, so that others have a turn",
    "job.max-slowdown": "jobs of one session train together from the start",
    "job.no-adapter": "an adapter is exported after the last step of its job",
    "job.not-served": "it is part of the programs of a run, which a session compiles once for all jobs",
    "job.objective": "the head of an objective is made when a session is opened",
    "job.over-limit": "an administrator limits what a key may ask for",
    "job.rank": "places are made for a largest rank when a session is opened",
    "job.state": "the event has no meaning in this state",
    "job.too-long": "reading it would take too much of the server",
    "job.too-large": "no session of this machine would hold it",
    "mlora.rows": "prompts are rendered when the data set is used",
    "store.busy": "another process holds its lock",
    "store.damaged": "its pages are not what was written",
    "store.failed": "the system refused to write",
    "store.not-writable": "the folder, or its disk, lets this user only read",
    "store.no-space": "the disk is full",
    "store.replaced": "the home was moved or exchanged while the service runs",
    "store.version": "its tables are those of another version of the program",
}
FIXES: Mapping[str, str] = {
    "data.row": "a smaller row",
    "job.check": "submit it again; if it fails again, report it with the log of the server",
    "mlora.rows": "mend the data or the prompt, and upload it again",
    "store.busy": "try again in a few seconds",
    "store.failed": "make room on the disk of the home folder, and try again",
}
JOB_WHY = "a job must be able to train before it waits"
WHYS_OF_ROOMS: Mapping[str, str] = {  # of codes that the tables do not have, by their first word
    "data": "a job trains on rows that can be read only",
    "generate": "answers are drawn from the model with settings that have a meaning for it",
}
FIXES_OF_ROOMS: Mapping[str, str] = {"generate": "correct the value, or leave it out; see /openapi.json"}
JOB_FIX = "correct the value; the page on the job file has its meaning and limits"


def completed(problem: Mapping[str, str], where: str = "job", why: str = JOB_WHY, fix: str = JOB_FIX) -> Problem:
    """Returns a refusal in which nothing is empty.

    Args:
        where, why, fix: of a refusal that names none, and whose code has none in the tables.

    >>> completed({"code": "api.json", "what": "it cannot be read."}, "POST /v1/jobs")["why"]
    'the body is no JSON'
    """
    code = problem["code"]
    room = code.partition(".")[0]
    of_code = {
        "where": where,
        "why": WHYS.get(code, WHYS_OF_ROOMS.get(room, why)),
        "fix": FIXES.get(code, FIXES_OF_ROOMS.get(room, fix)),
    }
    return {key: problem.get(key) or of_code.get(key, "") for key in KEYS}


def describe(problem: Exception) -> Problem:
    """Returns an error as the API shows it."""
    described = {key: str(getattr(problem, key, "")) for key in ("code", "where", "what", "why", "fix")} | (
        {} if hasattr(problem, "what") else {"what": str(problem).splitlines()[0]}
    )
    return described | {"fix": served_fix(described["fix"])}


def with_names(problem: Mapping[str, str], shown: Mapping[str, str]) -> Problem:
    """Returns a refusal with what its reader calls the things, in place of the service's paths and ids.

    >>> with_names({"what": "no rows.", "where": "sha256-0/data.csv"}, {"sha256-0/data.csv": "a.csv"})
    {'what': 'no rows.', 'where': 'a.csv'}
    """
    for text, instead in shown.items():
        problem = {key: value.replace(text, instead) for key, value in problem.items()}
    return dict(problem)


def served_fix(fix: str) -> str:
    """Leaves out of the ways to mend a job file those by settings that a job of a service does not have.

    >>> served_fix("batch.capacity_tokens: 4096   or   data.max_length: 512")
    'data.max_length: 512'
    """
    ways = _OR.split(fix)
    served = [way for way in ways if not _OF_A_RUN.search(way)]
    return fix if len(served) == len(ways) else ", or ".join(served)
