"""Errors as the API answers them: `{"error": {code, what, where, why, fix}}`, for a job `{"problems": [...]}`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match

from lorafusion_jax.errors import LoraFusionError, did_you_mean
from lorafusion_jax.serve.control.spec import NOT_SERVED, RUN, JobSpec
from lorafusion_jax.serve.refusals import KEYS, completed
from lorafusion_jax.serve.states import StateError
from lorafusion_jax.serve.store.database import StoreError

CODES = {"missing": "api.missing", "extra_forbidden": "api.unknown-key", "json_invalid": "api.json"}
FIXES = {"missing": "add it", "extra_forbidden": "leave it out"}
NOT_THERE = ("missing", "json_invalid")  # the end of their place is no key of the body
PLACES = ("body", "query", "path", "header")
Detail = dict[str, Any]
Keys = tuple[str | int, ...]


class Problem(BaseModel):
    """One mistake: a stable code, what is wrong and where, why, and what to do."""

    code: str
    what: str
    where: str = ""
    why: str = ""
    fix: str = ""


class Problems(BaseModel):
    """An answer that is no success; `problems` has every mistake of a job or of values."""

    error: Problem
    problems: list[Problem] | None = None


MOST_PROBLEMS = 100  # of values, in one answer
MEANINGS = {
    400: "the request cannot be read",
    401: "no valid key",
    403: "the key lacks a scope, or another page writes with a cookie",
    404: "there is no such thing, or it belongs to somebody else",
    409: "its state does not allow it",
    410: "its files are not there any more",
    413: "the body is too large",
    422: "wrong values: every problem is named",
    429: "too many requests, streams or live jobs; see Retry-After",
    503: "the database is busy; see Retry-After",
    507: "the disk is full",
}
ANSWERS: dict[int | str, dict[str, Any]] = {
    status: {"model": Problems, "description": meaning} for status, meaning in MEANINGS.items()
}

_SCHEMA = {"$ref": f"#/components/schemas/{Problems.__name__}"}
BESIDE_FILES: dict[int | str, dict[str, Any]] = {  # of routes whose good answer is not JSON
    status: {"description": meaning, "content": {"application/json": {"schema": _SCHEMA}}}
    for status, meaning in MEANINGS.items()
}


class ApiError(Exception):
    """An answer that is no success."""

    def __init__(
        self, status: int, code: str, what: str, *, fix: str, headers: dict[str, str] | None = None, **more: str
    ):
        super().__init__(what)
        self.status, self.headers = status, headers
        self.error = dict.fromkeys(KEYS, "") | {"code": code, "what": what, "fix": fix} | more


def not_found(what: str) -> ApiError:
    """Also for things of other owners: nobody learns that they exist."""
    return ApiError(404, "api.not-found", f"there is no {what}.", fix="an id of the list of yours, see /openapi.json")


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Answers every error in one form. Nothing of the inside reaches a client.

    Args:
        routes: of the application, for the methods of a path.
    """

    @app.exception_handler(ApiError)
    async def _api(request: Request, problem: ApiError) -> JSONResponse:
        return answer_problem(request, problem)

    @app.exception_handler(StateError)
    async def _state(request: Request, problem: StateError) -> JSONResponse:
        return _answer(request, 409, _describe(problem))

    @app.exception_handler(StoreError)
    async def _store(request: Request, problem: StoreError) -> JSONResponse:
        return answer_problem(request, problem)

    @app.exception_handler(LoraFusionError)
    async def _known(request: Request, problem: LoraFusionError) -> JSONResponse:
        return answer_problem(request, problem)

    @app.exception_handler(RequestValidationError)
    async def _validation(request: Request, problem: RequestValidationError) -> JSONResponse:
        return answer_problem(request, problem)

    @app.exception_handler(HTTPException)
    async def _http(request: Request, problem: HTTPException) -> JSONResponse:
        headers = dict(problem.headers or {}) | (
            {"Allow": _methods(routes, request)} if problem.status_code == 405 else {}
        )
        sentences = {404: "there is no such path.", 405: "the path does not take this method."}
        error = {"what": sentences.get(problem.status_code, str(problem.detail)), "fix": "see /openapi.json"}
        error |= {"code": f"api.http-{problem.status_code}"}
        return _answer(request, problem.status_code, error, headers)

    @app.exception_handler(Exception)
    async def _unknown(request: Request, problem: Exception) -> JSONResponse:
        del problem  # the log has it
        fix, error = "report it with the log", "the server has a defect; its log says more."
        return _answer(request, 500, {"code": "api.internal", "what": error, "fix": fix})


def answer_problem(request: Request, problem: ApiError | LoraFusionError | RequestValidationError) -> JSONResponse:
    """Answers a request that is refused, or for which the database cannot be used."""
    if isinstance(problem, ApiError):
        return _answer(request, problem.status, problem.error, problem.headers)
    if isinstance(problem, RequestValidationError):
        return problems_answer(value_problems(problem.errors()[:MOST_PROBLEMS], problem.body))
    if not isinstance(problem, StoreError):
        return problems_answer([_describe(error) for error in getattr(problem, "errors", [problem])])
    full = problem.code == "store.no-space"
    return _answer(request, 507 if full else 503, _describe(problem), {} if full else {"Retry-After": "5"})


def problems_answer(problems: list[dict[str, str]]) -> JSONResponse:
    """422 with every problem."""
    problems = [completed(problem) for problem in problems]
    return JSONResponse({"error": problems[0], "problems": problems}, 422)


def _answer(
    request: Request, status: int, error: dict[str, str], headers: dict[str, str] | None = None
) -> JSONResponse:
    where = f"{request.method} {request.url.path[:200]}"
    why = MEANINGS.get(status, "the server does not take such requests")
    return JSONResponse({"error": completed(error, where, why, "see /openapi.json")}, status, headers)


def _methods(routes: Sequence[BaseRoute], request: Request) -> str:
    """The methods of a path. Each of its routes knows its own only."""
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return ", ".join(sorted({method for route in matching for method in getattr(route, "methods", ())}))


def _describe(problem: LoraFusionError) -> dict[str, str]:
    return {key: str(getattr(problem, key, "")) for key in KEYS}


def value_problems(details: Sequence[Detail], body: Any) -> list[dict[str, str]]:
    """Describes mistakes that pydantic has found.

    A value that may be of several kinds has a mistake for each of them, whose place names the kind by pydantic's own
    words. They become one problem, whose place has keys of the body only.

    Args:
        body: of the request.
    """
    by_union: dict[Keys, list[tuple[Keys, Detail]]] = {}
    for number, detail in enumerate(details):
        keys, union = _keys_in(body, detail)
        by_union.setdefault((number,) if union is None else ("union", *union), []).append((keys, detail))
    return [_problem(likely) for mistakes in by_union.values() for likely in _likely(mistakes)]


def _keys_in(body: Any, detail: Detail) -> tuple[Keys, Keys | None]:
    """Returns the keys of a mistake, and those of the value that may be of several kinds (None: there is none)."""
    if detail["loc"][:1] != ("body",):
        return tuple(part for part in detail["loc"] if part not in PLACES), None
    keys: list[str | int] = []
    union, value, parts = None, body, detail["loc"][1:]
    for number, part in enumerate(parts, 1):
        holds_it = part in value if isinstance(value, dict) else isinstance(value, list) and isinstance(part, int)
        if holds_it:
            value = value[part]
            keys.append(part)
        elif number == len(parts) and detail["type"] in NOT_THERE:
            keys.append(part)
        elif union is None:
            union = tuple(keys)
    return tuple(keys), union


def _likely(mistakes: list[tuple[Keys, Detail]]) -> list[list[tuple[Keys, Detail]]]:
    """Groups mistakes by their place, without those of kinds that the value is clearly not of."""
    if len(mistakes) > 1:
        deepest = max(len(keys) for keys, _ in mistakes)
        mistakes = [(keys, detail) for keys, detail in mistakes if len(keys) == deepest]
        of_kind = [(keys, detail) for keys, detail in mistakes if not detail["type"].endswith("_type")]
        mistakes = of_kind or mistakes
    by_place: dict[Keys, list[tuple[Keys, Detail]]] = {}
    for keys, detail in mistakes:
        by_place.setdefault(keys, []).append((keys, detail))
    return list(by_place.values())


def _problem(mistakes: list[tuple[Keys, Detail]]) -> dict[str, str]:
    where, kind = ".".join(map(str, mistakes[0][0])), mistakes[0][1]["type"]
    if kind == "extra_forbidden" and where in NOT_SERVED:
        sentence = f"a service does not take {where}."
        return {"code": "job.not-served", "what": sentence, "where": where, "why": NOT_SERVED[where], "fix": RUN}
    messages = dict.fromkeys(detail["msg"].removeprefix("Value error, ") for _, detail in mistakes)
    message = ", or: ".join(messages)
    sentence = {"missing": f"{where} is missing.", "extra_forbidden": f"there is no key {where}."}.get(
        kind, f"{where}: {message}." if where else f"{message}."
    )
    code, fix = CODES.get(kind, "api.value"), FIXES.get(kind, "see /openapi.json")
    if kind == "extra_forbidden":
        fix = _near_key(mistakes[0][0]) or fix
    return {"code": code, "what": sentence[:500], "where": where[:200], "fix": fix}


def _near_key(keys: Keys) -> str:
    """Asks for the key of a job that is most similar to an unknown one; "" if none is."""
    section: Any = JobSpec
    for key in keys[:-1]:
        field = section.model_fields.get(str(key))
        section = None if field is None else field.annotation
        if not (isinstance(section, type) and issubclass(section, BaseModel)):
            return ""
    return did_you_mean(str(keys[-1]), section.model_fields)
