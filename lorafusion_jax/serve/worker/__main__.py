"""python -m lorafusion_jax.serve.worker SETTINGS: started by the server."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

from lorafusion_jax.serve.wire import Message
from lorafusion_jax.serve.worker.link import Link

if TYPE_CHECKING:
    from lorafusion_jax.serve.worker.loop import Held
    from lorafusion_jax.serve.worker.stream import Models

REFUSED = 3  # exit code


def main() -> int:
    os.umask(0o077)  # states and adapters belong to the owner of the home
    settings = json.loads(sys.argv[1])
    secret = sys.stdin.readline().strip() if settings["secret"] else ""
    held: dict[str, Held] = {}
    models: list[Models] = []

    def holds() -> list[Message]:
        jobs: list[Message] = [{"job": entry.job, "epoch": entry.epoch} for entry in list(held.values())]
        return jobs + [model for entry in models for model in entry.holds()]

    open_event = threading.Event()

    def refused() -> None:
        if not open_event.is_set():  # there is nothing to save, and its successor needs the devices
            os._exit(REFUSED)

    # First of all: the server sees that a worker starts, whatever takes its time.
    link = Link(
        settings["server"],
        settings["group"],
        settings["epoch"],
        settings["beat_s"],
        holds,
        secret,
        on_refused=refused,
    )
    from lorafusion_jax.machine import prepare_machine

    prepare_machine()
    if settings["gpus"]:
        import jax

        jax.config.update("jax_cuda_visible_devices", ",".join(map(str, settings["gpus"])))
    from lorafusion_jax.config.schema import BaseSettings, BatchSettings, MeshSettings, TrainSettings
    from lorafusion_jax.serve.worker.loop import WorkerLoop
    from lorafusion_jax.serve.worker.samples import expected_room
    from lorafusion_jax.session import Places, Session, WindowPlanner
    from lorafusion_jax.session.turns import JOBS_SHARE, Turns

    try:
        session = Session.open_places(
            BaseSettings.model_validate(settings["base"]),
            MeshSettings.model_validate(settings["mesh"]),
            Places.of(settings["places"]),
            batch=BatchSettings.model_validate(settings["batch"]),
            train=TrainSettings.model_validate(settings["train"]),
            reproducible=settings["reproducible"],
            row_targets=settings.get("row_targets", 0),
            on_progress=lambda text: print(text, flush=True),
        )
    except Exception as problem:
        link.emit("not-opened", reason=str(problem))
        link.close()
        raise
    open_event.set()
    if text := expected_room(session, settings["sampler_places"]):
        print(text, flush=True)
    windows = WindowPlanner(session, Turns(jobs_share=settings.get("jobs_share", JOBS_SHARE)))
    options = {name: settings[name] for name in ("save_s", "sampling_share", "sampler_places")}
    loop = WorkerLoop(session, windows, link, held, **options)
    models.append(loop.models)
    signal.signal(signal.SIGTERM, lambda *_: loop.stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server decides when a worker ends
    link.emit("ready", device=session.facts.device["device"])
    try:
        loop.run()
    finally:
        session.close()
        link.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
