"""A service without a worker, in this process: jobs are checked and queued."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn

from lorafusion_jax.serve.api.access import Service
from lorafusion_jax.serve.api.app import make_app
from lorafusion_jax.serve.api.connections import server_config
from lorafusion_jax.serve.client import Client
from lorafusion_jax.serve.control.controller import Controller
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store.database import Database
from lorafusion_jax.serve.store.keys import SCOPES, USER, add_key


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running service."""

    settings: Settings
    db: Database
    url: str
    service: Service
    keys: dict[str, str]

    def client(self, owner: str) -> Client:
        return Client(self.url, self.keys[owner])


def start_service(
    home: Path, base: Path, *, owners: tuple[str, ...] = ("ana", "ben"),
    wrap: Callable[[Any], Any] = lambda app: app, **more: Any,
) -> tuple[Running, Callable[[], None]]:  # fmt: skip
    """Starts a service. Returns it, and what ends it.

    Args:
        wrap: (application) → what is served.
    """
    batch = {"capacity_tokens": 128, "tile_tokens": 16}
    settings = Settings(home=home, bases={"tiny": base}, places={4: 2, 8: 1}, batch=batch, **more)
    db = open_database(settings)
    with db.write() as connection:
        keys = {owner: add_key(connection, owner, USER)[1] for owner in owners}
        if owners:
            keys["admin"] = add_key(connection, "root", SCOPES)[1]
            keys["reader"] = add_key(connection, "ana", ("jobs:read",))[1]
    controller = Controller(settings, db, with_worker=False)
    controller.start()
    service = Service(settings, db, controller)
    config = server_config(wrap(make_app(service)), timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)

    def end() -> None:
        server.should_exit = True
        thread.join()
        controller.close()
        db.close()

    port = server.servers[0].sockets[0].getsockname()[1]
    return Running(settings=settings, db=db, url=f"http://127.0.0.1:{port}", service=service, keys=keys), end
