"""lorafusion report: one page of one or several runs."""

from __future__ import annotations

import json
import re
import shutil

import pytest
from browser import PROGRAM, Browser

import lorafusion_jax as lf
from lorafusion_jax.cli.main import run
from lorafusion_jax.log_file import encode_row


def page_data(path):
    """What the page draws."""
    return json.loads(re.search(r"^const data = (.*);$", path.read_text(), re.MULTILINE)[1])


def test_page_of_a_finished_run(lorafusion, finished, tmp_path):
    job, run = finished
    page = tmp_path / "page.html"
    outcome = lorafusion("report", run, "-o", page)
    assert outcome.code == 0
    assert str(page) in outcome.out
    data, status = page_data(page), json.loads(lorafusion("status", run, "--json").out)
    assert [row["name"] for row in data["adapters"]] == list(status["adapters"])
    law = next(row for row in data["adapters"] if row["name"] == "law")
    assert (law["status"], law["step"], law["before"]) == ("done", 6, status["adapters"]["law"]["held_out_before"])
    assert [step for step, _ in law["series"]["loss"]] == [1, 2, 3, 4, 5, 6]
    assert sum(row["tokens"] for row in data["adapters"]) > 0
    assert all(len({json.dumps(row["settings"].get(key)) for row in data["adapters"]}) > 1 for key in law["settings"])
    text = page.read_text()
    assert len(text) < 300_000
    assert "<svg" in text  # the timeline
    assert not re.search(r"""(src|href)=["']?https?://""", text)  # it needs no network
    assert str(job.folder) not in text.replace(str(run), "")


def test_runs_are_compared_on_one_page(lorafusion, finished, tmp_path):
    for name in ("red", "blue"):
        shutil.copytree(finished[1], tmp_path / name, symlinks=True)
    outcome = lorafusion("report", tmp_path / "red", tmp_path / "blue")
    assert outcome.code == 0
    data = page_data(tmp_path / "red" / "report.html")
    assert [run["name"] for run in data["runs"]] == ["red", "blue"]
    labels = [row["label"] for row in data["adapters"]]
    assert len(labels) == len(set(labels)) == 2 * len(lf.open_run(tmp_path / "red").adapters)
    assert len({row["color"] for row in data["adapters"]}) == len(labels)
    best = [row["label"] for row in data["adapters"] if row.get("is_best")]
    assert best, "adapters of both runs have the same held-out data"


def test_names_and_texts_cannot_break_the_page(finished, tmp_path):
    hostile = tmp_path / "<script>alert(1)</script>".replace("/", "∕")
    shutil.copytree(finished[1], hostile, symlinks=True)
    page = lf.open_run(hostile).report().save(tmp_path / "page.html")
    assert "<script>alert" not in page.read_text()
    assert page_data(page)["runs"][0]["name"] == hostile.name


def test_what_is_no_run_and_no_page_is_refused(lorafusion, finished, tmp_path):
    assert "run.missing" in lorafusion("report", tmp_path).err
    outcome = lorafusion("report", finished[1], "-o", tmp_path / "page.pdf")
    assert outcome.code == 2
    assert not (tmp_path / "page.pdf").exists()


def test_watch_ends_with_the_run(lorafusion, finished, tmp_path):
    outcome = lorafusion("report", finished[1], "--watch", "-o", tmp_path / "page.html", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["running"] is False
    assert "http-equiv" not in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def sweep(finished, tmp_path_factory):
    """The page of sixteen adapters or more with 3 000 steps each, in a few runs."""
    tmp_path = tmp_path_factory.mktemp("sweep")
    names, folders = list(lf.open_run(finished[1]).adapters), []
    for number in range(-(-16 // len(names))):
        folders.append(tmp_path / f"sweep-{number}")
        shutil.copytree(finished[1], folders[-1], symlinks=True)
        numbers = {"kind": "step", "grad_norm": 0.512345, "lr": 1.2345e-4, "loss_tokens": 64, "time": 1.0}
        with (folders[-1] / "metrics.jsonl").open("ab") as file:
            for step in range(1, 3001):
                for name in names:
                    loss = 3 / (step**0.5 + number)
                    file.write(encode_row(numbers | {"slot": step, "adapter": name, "step": step, "loss": loss}))
    return lf.make_report(folders).save(tmp_path / "page.html")


def test_a_sweep_of_sixteen_stays_small_and_tells_its_adapters_apart(sweep):
    data = page_data(sweep)
    assert len(data["adapters"]) >= 16
    assert len({row["color"] for row in data["adapters"]}) == len(data["adapters"])
    assert sweep.stat().st_size < 300_000


@pytest.fixture(scope="module")
def pages(finished, sweep, tmp_path_factory):
    """Pages with charts, and what each chart tells where it is touched."""
    folder = tmp_path_factory.mktemp("pages")
    assert run(["timeline", str(finished[1]), "-o", str(folder / "timeline.html")]) == 0
    options = ["--gpus", "16", "--policy", "ours", "fifo", "--out", str(folder / "replay.html")]
    assert run(["simulate", "--example", str(folder / "trace.csv"), *options]) == 0
    return {
        "sweep": (sweep, "#chart svg", r"step \d+\n(sweep-.* \d.*\n?)+"),
        "timeline": (folder / "timeline.html", "canvas", r"(forward|backward|pause|update)"),
        "replay": (folder / "replay.html", "canvas", r"\d:\d\d"),
    }


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("name", ["sweep", "timeline", "replay"])
def test_pages_with_charts_fit_their_window_and_answer_a_touch(pages, browser, tmp_path, name, width, scheme):
    page, chart, note = pages[name]
    browser.set_scheme(scheme)
    browser.resize(width, 900)
    browser.open(page.as_uri())
    browser.wait(f"document.querySelector({chart!r})?.clientHeight > 100")
    browser.picture(tmp_path / f"{name}-{width}-{scheme}.png")
    assert browser.value("document.documentElement.scrollWidth") <= width
    assert browser.is_dark() == (scheme == "dark")
    assert re.match(note, browser.touch(chart))
