"""Mounts the training API in the application of a service."""

from __future__ import annotations

from fastapi import FastAPI

from lorafusion_jax.serve.tinker import rest, results, sampling, saves, sessions, training, unserved
from lorafusion_jax.serve.tinker.streams import Streams

ROUTERS = (
    sessions.router, training.router, saves.router, sampling.router, results.router, rest.router,
    rest.signed_router, unserved.router,
)  # fmt: skip


def mount(app: FastAPI, streams: Streams) -> None:
    """Adds the routes of the training API."""
    app.state.streams = streams
    for router in ROUTERS:
        app.include_router(router)
