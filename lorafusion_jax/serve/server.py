"""Runs the service: database, controller and HTTP server in one process."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import uvicorn
from fastapi import FastAPI

from lorafusion_jax.errors import ConfigError, RunError, quoted
from lorafusion_jax.files import replace_text
from lorafusion_jax.serve.api.access import Service
from lorafusion_jax.serve.api.app import LOCAL_NAMES, make_app
from lorafusion_jax.serve.api.connections import allow_files, server_config
from lorafusion_jax.serve.control.controller import Controller
from lorafusion_jax.serve.settings import ONE_SESSION, Settings
from lorafusion_jax.serve.store.database import Database, OtherVersion
from lorafusion_jax.serve.store.keys import restore_revocations
from lorafusion_jax.serve.tinker.access import UPLOADS
from lorafusion_jax.serve.tinker.mount import mount
from lorafusion_jax.serve.tinker.streams import Streams

PRIVATE = ("service.db", "service.db-wal", "service.db-shm", "service.copy.db", "keys.log", "workers.secret")
log = logging.getLogger("lorafusion.control")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def open_database(settings: Settings, *, other_version: OtherVersion = "migrate") -> Database:
    """Opens the database of a home, which only its owner can read.

    Args:
        other_version: see `Database`; who migrates holds the home.
    """
    protect(settings)
    return Database(settings.database, other_version=other_version)


def protect(settings: Settings) -> None:
    """Makes a home that only its owner can use, or makes it so: keys and everybody's data are in it.

    Raises:
        ConfigError: `serve.home`, it belongs to somebody else.
    """
    home = settings.home
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    for path in (home, *(file for name in PRIVATE if (file := home / name).exists())):
        mode = path.stat().st_mode
        if not mode & 0o077:
            continue
        try:
            path.chmod(mode & 0o700)
        except PermissionError:
            raise ConfigError(
                "serve.home",
                f"others can use {path} (mode {mode & 0o777:o}), and it does not belong to this user.",
                why="keys, data and adapters of all users are in it",
                fix=f"sudo chown -R $USER {quoted(home)}, or another --home",
            ) from None
        log.warning("%s was open to others (mode %o): it is closed now", path, mode & 0o777)


def run_server(
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 7070,
    host_names: Sequence[str] = (),
    on_start: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves until a signal. Jobs are saved; they continue at the next start.

    Raises:
        ConfigError: `serve.host`, `serve.mlora`: others could use it without a key; `serve.training-api`.
        RunError: `serve.in-use`, `store.damaged`, `serve.address`.
    """
    with ExitStack() as resources:
        resources.enter_context(hold(settings))
        db = open_database(settings)
        resources.callback(db.close)
        with db.write() as connection:
            had_keys = restore_revocations(connection)
        if settings.mlora_compat and (host not in LOCAL_HOSTS or had_keys):
            raise ConfigError(
                "serve.mlora",
                "mLoRA's routes have no users: they are served to this machine only, without keys.",
                fix="leave --mlora-compat or --host out, or use a --home that never had a key",
            )
        if settings.training_api and settings.policy != ONE_SESSION:
            raise ConfigError(
                "serve.training-api",
                f"the training API is served by one session of one base, not with the policy {settings.policy}.",
                why="a policy predicts how long jobs train, and clients end when they like",
                fix="one --base and --gpus 1, without --policy",
            )
        if host not in LOCAL_HOSTS and not had_keys:
            raise ConfigError(
                "serve.host",
                f"without a key the service listens on this machine only, not on {host}.",
                fix=f"lorafusion keys add admin --admin --home {quoted(settings.home)}",
            )
        sockets = resources.enter_context(bound(host, port))  # before a worker is started in vain
        streams = Streams(settings, db) if settings.training_api else None
        controller = Controller(settings, db, streams=streams)
        controller.start()
        resources.callback(controller.close)
        app = build_app(Service(settings, db, controller), streams, names=(*LOCAL_NAMES, in_url(host), *host_names))
        allow_files()
        config = server_config(app, host=host, port=port, timeout_graceful_shutdown=3)

        def started(url: str) -> None:
            replace_text(settings.home / "address", url)
            on_start(url)

        _Server(config, started).run(sockets)


def build_app(service: Service, streams: Streams | None, *, names: Sequence[str] = LOCAL_NAMES) -> FastAPI:
    """Builds the application, with the training API if it is served."""
    if streams is None:
        return make_app(service, names=names)
    app = make_app(service, names=names, uploads=UPLOADS)
    mount(app, streams)
    return app


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_start: Callable[[str], None]):
        super().__init__(config)
        self._on_start = on_start

    async def startup(self, sockets: list | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            port = self.servers[0].sockets[0].getsockname()[1]
            self._on_start(f"http://{in_url(self.config.host)}:{port}")


@contextmanager
def bound(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Takes a port of all addresses of a host. Nobody is answered until the server listens.

    Args:
        port: 0: any free one.

    Raises:
        RunError: `serve.address`, another program listens there, or it is no address of this machine.
    """
    with ExitStack() as stack:
        sockets: list[socket.socket] = []
        try:
            resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((entry[0], entry[4]) for entry in resolved):
                sockets.append(stack.enter_context(socket.socket(family)))
                sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # of one that has just ended
                if family == socket.AF_INET6:
                    sockets[-1].setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sockets[-1].bind((address[0], port, *address[2:]))
                port = sockets[-1].getsockname()[1]
        except OSError as problem:
            raise RunError(
                "serve.address",
                f"the service cannot listen on {in_url(host)}:{port}: {problem.strerror}.",
                fix="another --port (0: any free one), or a --host that is an address of this machine",
            ) from None
        yield sockets


def in_url(host: str) -> str:
    """Returns a host as URLs write it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


@contextmanager
def hold(settings: Settings) -> Iterator[None]:
    """Prevents a second server on the same home. The lock ends with its process.

    Raises:
        RunError: `serve.in-use`.
    """
    protect(settings)
    with (settings.home / "server.lock").open("a+") as file:
        os.set_inheritable(file.fileno(), False)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                "serve.in-use", f"another server uses {settings.home}.", fix="stop it, or choose another --home"
            ) from None
        yield
