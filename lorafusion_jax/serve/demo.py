"""The demo: three jobs of two users on the tiny base of the package."""

from __future__ import annotations

from sqlalchemy import select

from lorafusion_jax.errors import quoted
from lorafusion_jax.examples import examples_directory
from lorafusion_jax.report.console import out, say
from lorafusion_jax.serve.client import Client, ServiceError
from lorafusion_jax.serve.server import open_database
from lorafusion_jax.serve.settings import Settings
from lorafusion_jax.serve.store import tables
from lorafusion_jax.serve.store.keys import SCOPES, add_key

JOBS = (
    ("ana", "ask", "ask.jsonl", "ask_eval.jsonl", {"rank": 16}, 4),
    ("ben", "cards", "cards.jsonl", "cards_eval.jsonl", {"rank": 8, "alpha": 16.0}, 2),
    ("ana", "module", "module.csv", "module_eval.csv", {"rank": 32, "targets": ["q_proj", "v_proj"]}, 8),
)


def submit_demo(url: str, settings: Settings) -> None:
    """Adds keys for two users and one for the page, and submits the jobs; a home that has jobs goes on with those."""
    data = examples_directory() / "data"
    db = open_database(settings)
    with db.write() as connection:
        is_new = connection.execute(select(tables.jobs.c.id).limit(1)).first() is None
        keys = {owner: add_key(connection, owner)[1] for owner in ("ana", "ben")} if is_new else {}
        admin = add_key(connection, "admin", SCOPES)[1] if is_new else ""
    db.close()
    if not is_new:
        new_key = f"lorafusion keys add admin --admin --home {quoted(settings.home)}"
        say(out(), f"the jobs of this home go on; another key: {new_key}")
        return
    out().print(f"key of the page: [bold]{admin}[/bold]", highlight=False)
    for owner, name, train, held_out, lora, batch in JOBS:
        job = {
            "name": name,
            "base": next(iter(settings.bases)),
            "data": {"train": str(data / train), "eval": str(data / held_out), "max_length": 512},
            "lora": lora,
            "optim": {"lr": 2e-3},
            "batch": {"global_samples": batch},
            "epochs": 2,
        }
        try:
            job_handle = Client(url, keys[owner]).submit(job)
        except (ServiceError, OSError) as problem:  # the service was stopped meanwhile, mostly
            out().print(f"{name} of {owner} was not submitted: {problem}", markup=False)
            return
        out().print(f"{job_handle.id}: {name} of {owner}", highlight=False)
