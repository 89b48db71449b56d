"""A service without a worker, in this process: jobs are checked and queued."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import local_service
import pytest
from local_service import Running


@pytest.fixture(scope="session")
def start_service() -> Iterator[Callable[..., Running]]:
    ends: list[Callable[[], None]] = []

    def start(*arguments, **options) -> Running:
        running, end = local_service.start_service(*arguments, **options)
        ends.append(end)
        return running

    yield start
    for end in ends:
        end()


@pytest.fixture(scope="module")
def running(start_service, tmp_path_factory, tiny_base) -> Running:
    return start_service(tmp_path_factory.mktemp("service") / "home", tiny_base)


@pytest.fixture(scope="module")
def dataset(running, tmp_path_factory) -> str:
    """Id of a data set of ana."""
    file = tmp_path_factory.mktemp("data") / "rows.jsonl"
    file.write_text("".join(f'{{"prompt": "word {n}", "completion": " other {n}"}}\n' for n in range(12)))
    return running.client("ana").upload(file)["id"]


@pytest.fixture
def job(dataset) -> dict:
    data = {"train": dataset, "max_length": 64}
    return {"name": "law", "base": "tiny", "data": data, "lora": {"rank": 4}, "batch": {"global_samples": 4}}
