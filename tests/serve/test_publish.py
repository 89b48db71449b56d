"""Finished adapters are published to other file systems; the service keeps its own copy whatever happens there."""

from __future__ import annotations

import re
from pathlib import Path

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from simulated_service import Service, wait_for
from sqlalchemy import select

from lorafusion_jax.errors import ConfigError, install_line
from lorafusion_jax.serve.control import publish
from lorafusion_jax.serve.store import tables as t
from scheduling.online.policies.baselines import Packing


class Moody(MemoryFileSystem):
    """A store that refuses everything, or loses the ends of files, while it is told to."""

    protocol = "moody"
    mood = "good"
    store = {}  # noqa: RUF012

    def put_file(self, lpath, rpath, **options):
        if self.mood == "closed":
            raise PermissionError("403 Forbidden")
        super().put_file(lpath, rpath, **options)
        if self.mood == "short":
            self.pipe_file(rpath, self.cat_file(rpath)[:-1])


@pytest.fixture
def serve(tmp_path, tiny_base, monkeypatch):
    monkeypatch.setattr(publish, "AGAIN_S", 0.05)
    fsspec.register_implementation("moody", Moody, clobber=True)
    made: list[Service] = []

    def start(url: str) -> Service:
        made.append(Service(tmp_path / f"home-{len(made)}", tiny_base, Packing, artifacts=url))
        return made[-1]

    yield start
    for service in made:
        service.close()


def artifact(service: Service) -> dict:
    with service.db.read() as connection:
        return dict(connection.execute(select(t.artifacts)).mappings().one())


def kinds(service: Service) -> list[str]:
    with service.db.read() as connection:
        kinds = connection.execute(select(t.events.c.kind)).scalars().all()
    return [kind for kind in kinds if "published" in kind]


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_an_adapter_is_published_whole(serve, tmp_path, kind):
    root = f"file://{tmp_path}/bucket" if kind == "file" else "memory://bucket"
    service = serve(root + "/")
    job = service.submit("one", "red", steps=3)
    service.wait(job)
    wait_for(lambda: artifact(service)["url"])
    row = artifact(service)
    assert (row["url"], row["problem"]) == (f"{root}/ana/{job}/step-3", "")
    system, folder = fsspec.core.url_to_fs(row["url"])
    names = {Path(path).name for path in system.find(folder)}
    assert (
        names
        == {path.name for path in Path(service.settings.home, row["path"]).iterdir()}
        == {"SHA256SUMS", "adapter_model.safetensors"}
    )
    for path in Path(service.settings.home, row["path"]).iterdir():
        assert system.cat_file(f"{folder}/{path.name}") == path.read_bytes()
    assert kinds(service) == ["published"]


@pytest.mark.parametrize(("mood", "said"), [("closed", "403 Forbidden"), ("short", "has another size")])
def test_a_store_that_fails_keeps_the_adapter_and_says_so(serve, monkeypatch, mood, said):
    monkeypatch.setattr(Moody, "mood", mood)
    monkeypatch.setattr(Moody, "store", {})
    service = serve("moody://bucket")
    job = service.submit("one", "red", steps=3)
    service.wait(job)
    wait_for(lambda: artifact(service)["problem"])
    row = artifact(service)
    assert said in row["problem"]
    assert row["url"] == ""
    assert Path(service.settings.home, row["path"], "adapter_model.safetensors").exists()
    monkeypatch.setattr(Moody, "mood", "good")
    wait_for(lambda: artifact(service)["url"])
    assert kinds(service) == ["not-published", "published"]  # each once, however often it was tried
    assert not artifact(service)["problem"]


def test_digests_come_last(tmp_path, monkeypatch):
    """Who finds them finds every other file."""
    for name in ("zebra.bin", "SHA256SUMS", "adapter.bin"):
        (tmp_path / name).write_text(name)
    put: list[str] = []
    monkeypatch.setattr(MemoryFileSystem, "put_file", lambda self, local, remote: put.append(remote))
    monkeypatch.setattr(MemoryFileSystem, "info", lambda self, path: {"size": len(path.rpartition("/")[2])})
    publish.copy_folder(tmp_path, "memory://last")
    assert [path.rpartition("/")[2] for path in put] == ["adapter.bin", "zebra.bin", "SHA256SUMS"]


def test_a_place_of_no_known_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(install_line("artifacts"))) as problem:
        publish.Publisher("cloud9://bucket", None)  # type: ignore[arg-type]
    assert problem.value.code == "serve.artifacts"
