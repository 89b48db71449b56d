"""Mounts the training API in the application of a service.

Routes that are not served say why, with 403: clients send what is answered by 501 again for minutes.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, FastAPI

from lorafusion_jax.serve.api.problems import ApiError
from lorafusion_jax.serve.tinker import rest, results, sampling, saves, sessions, training
from lorafusion_jax.serve.tinker.access import PREFIX, InTurn, Reader
from lorafusion_jax.serve.tinker.streams import Streams

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=InTurn)
NO_USERS = "a service has owners of keys, and neither projects nor accounts"
NO_PUBLIC = "checkpoints are their owner's only"
UNSERVED = {  # method and path → why
    ("POST", "/auth/token"): "keys are sent as they are",
    ("GET", "/auth/apikey/me"): NO_USERS,
    ("DELETE", "/auth/apikey/me"): "an administrator revokes keys: lorafusion keys revoke",
    ("GET", "/whoami"): NO_USERS,
    ("GET", "/audit"): "the service keeps transitions of jobs: GET /v1/jobs/ID",
    ("GET", "/billing/usage/events"): "nothing is billed",
    ("GET", "/billing/usage/checkpoints/current"): "nothing is billed",
    ("POST", "/copy_weights"): NO_PUBLIC,
    ("POST", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): NO_PUBLIC,
    ("DELETE", "/training_runs/{run}/checkpoints/{kind}/{name}/publish"): NO_PUBLIC,
    ("PUT", "/sessions/{session}/project"): NO_USERS,
    ("GET", "/sessions/{session}/trace_export"): "nothing is traced",
    ("POST", "/sessions/search"): "ask for the list of sessions: GET /api/v1/sessions",
    ("POST", "/create_custom_loss"): "custom losses run in the client: forward_backward_custom",
    ("POST", "/join_sampling_session"): "clients choose their own numbers",
    ("POST", "/retrieve_futures"): "each result is asked for by itself: /api/v1/retrieve_future",
}


def _refuse(path: str, why: str) -> Any:
    def refuse(owner: Reader) -> None:
        del owner
        raise ApiError(403, "api.not-served", f"{path} is not served: {why}.", fix="do without it", why=why)

    return refuse


for (_method, _path), _why in UNSERVED.items():
    router.add_api_route(_path, _refuse(PREFIX + _path, _why), methods=[_method])


ROUTERS = (
    sessions.router, training.router, saves.router, sampling.router, results.router, rest.router,
    rest.signed_router, router,
)  # fmt: skip


def mount(app: FastAPI, streams: Streams) -> None:
    """Adds the routes of the training API."""
    app.state.streams = streams
    for router in ROUTERS:
        app.include_router(router)
