"""The page in a real browser: every view at 360 px and wide, and by keyboard. Needs Chromium."""

from __future__ import annotations

import math
import re
import time

import pytest
from browser import PROGRAM, Browser

from lorafusion_jax.serve.client import Client
from lorafusion_jax.serve.store import tables as t
from lorafusion_jax.serve.store.jobs import Jobs

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")]

LONG = "a-rather-long-name-of-an-adapter-that-somebody-typed-lr3e-4-seed7"
NAMES = ("contract-review-r16", "chat-lr1e-4", LONG, "reward", "law", "tax")


@pytest.fixture(scope="module")
def filled(start_service, tmp_path_factory, tiny_base):
    """A service without keys, with jobs in several states."""
    folder = tmp_path_factory.mktemp("page")
    running = start_service(folder / "home", tiny_base, owners=())
    jobs, ids = Jobs(running.db), []
    with running.db.write() as connection:
        places = {"4": 4, "8": 2}
        row = {"id": "g0", "base": "tiny", "epoch": 3, "state": "ready", "places": places, "device": "NVIDIA H200"}
        connection.execute(t.groups.insert().values(row))
        for number, name in enumerate(NAMES):
            spec = {
                "name": name, "base": "tiny", "data": {"train": "sha256-0"}, "lora": {"rank": 4}, "steps": 200,
                "optim": {"lr": 1e-4}, "objective": {}, "batch": {"global_samples": 4}, "weight": 1.0, "seed": 0,
            }  # fmt: skip
            ids.append(jobs.submit(connection, "local", spec)["id"])
            jobs.change(connection, ids[-1], "accept", actor="checker", rank=4, steps=200, tokens=120_000)
            if number > 3:
                continue
            jobs.place(connection, ids[-1], group="g0", place=number)
            jobs.change(connection, ids[-1], "started", actor="worker g0")
            steps = [{"kind": "step", "step": s, "loss": 2.5 * math.exp(-s / 60) + 0.8} for s in range(1, 120)]
            evals = [{"kind": "eval", "step": s, "eval_loss": 2.4 * math.exp(-s / 70) + 0.9} for s in range(0, 120, 20)]
            jobs.add_metrics(connection, ids[-1], steps + evals)
            jobs.set(connection, ids[-1], step=119, loss=1.145)
        jobs.change(connection, ids[3], "failed", actor="worker g0", why="loss not finite at step 120", step=119)
        for text, refused in (
            (f"open g0 (tiny on 1 GPU, 8192 tokens a microbatch): {', '.join(ids)}; the queue is empty", ""),
            ("a decision of ours", "job-0123 would be slower than promised: 1.42 instead of 1.30"),
        ):
            connection.execute(t.decisions.insert().values(at=time.time(), text=text, refused=refused))
    return running, ids


@pytest.fixture(scope="module")
def browser():
    made = Browser()
    yield made
    made.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_every_view_fits_its_window(filled, browser, tmp_path, width, scheme):
    running, ids = filled
    browser.set_scheme(scheme)
    browser.resize(width, 800)
    for view in ("jobs", f"jobs/{ids[2]}", "cluster", "decisions", "keys"):
        browser.open(f"{running.url}/#/{view}")
        browser.wait("document.querySelector('main h2') !== null")
        browser.picture(tmp_path / f"{view.partition('/')[0]}{len(view)}-{width}-{scheme}.png")
        assert browser.value("document.documentElement.scrollWidth") <= width, view
        assert browser.is_dark() == (scheme == "dark")
        assert browser.value("document.getElementById('notice').textContent") in ("", "there is no data set sha256-0.")


def test_charts_of_a_job_answer_a_touch(filled, browser):
    running, ids = filled
    browser.resize(390, 800)
    browser.open(f"{running.url}/#/jobs/{ids[0]}")
    browser.wait("document.querySelectorAll('main svg').length", lambda count: count == 2)
    loss, states = (f"main svg[aria-label^='{label}']" for label in ("training loss, dots: held-out", "states of"))
    assert re.match(rf"step \d+\n{NAMES[0]}  [\d.]+  held-out [\d.]+ \(step \d+\)$", browser.touch(loss))
    assert browser.touch(f"{states} rect:last-of-type").startswith("running: ")


def test_the_page_is_used_by_keyboard_while_jobs_train(filled, browser):
    running, ids = filled
    browser.resize(900, 700)
    browser.open(f"{running.url}/#/jobs")
    browser.wait("document.querySelectorAll('main table a').length", lambda count: count == len(NAMES))
    for _ in range(30):
        browser.press("Tab")
        if browser.value("document.activeElement.closest('main table') !== null"):
            break
    focused = browser.value("document.activeElement.textContent")
    assert focused in NAMES
    browser.value("window.before = document.querySelector('main table'), 1")
    with running.db.write() as connection:  # a step: the view is read again
        row = {"kind": "step", "step": 120, "loss": 1.1}
        Jobs(running.db).add_metrics(connection, ids[0], [row])
        running.db.add_event(connection, "step", "local", ids[0], row)
    browser.wait("document.querySelector('main table') !== window.before")
    assert browser.value("document.activeElement.textContent") == focused
    browser.press("Enter")
    browser.wait("document.querySelector('main h2')?.textContent ?? ''", lambda text: text.startswith(focused))


FILE = """(() => {
  const rows = Array.from({length: 24}, (_, n) => JSON.stringify({QUESTION: `a ${n}`, completion: "b"})).join("\\n");
  const files = new DataTransfer();
  files.items.add(new File([rows], "My Rows.jsonl"));
  document.querySelector("input[type=file]").files = files.files;
  return 1;
})()"""


def set_field(browser, label, value):
    field = (
        f"[...document.querySelectorAll('form.new label')].find(one => one.textContent.startsWith({label!r})).lastChild"
    )
    assert browser.value(f"{field}.value = {value!r}") == value


def click(browser, title):
    browser.value(f"[...document.querySelectorAll('button')].find(one => one.textContent === {title!r}).click()")


@pytest.mark.parametrize("width", [390, 1280])
def test_a_job_is_checked_shown_and_submitted_from_the_page(filled, browser, tmp_path, width):
    running, _ = filled
    browser.resize(width, 900)
    browser.open(f"{running.url}/#/new")
    browser.wait("document.querySelector('form.new') !== null")
    browser.value(FILE.replace("QUESTION", "question"))  # no format has these columns
    set_field(browser, "name", f"by-hand-{width}")
    set_field(browser, "rank", "4")
    set_field(browser, "longest row", "64")
    click(browser, "Submit")
    browser.wait("document.querySelector('main').textContent.includes('data.unknown-format')")
    browser.picture(tmp_path / f"refused-{width}.png")
    assert all(row["name"] != f"by-hand-{width}" for row in Client(running.url).jobs())
    browser.value(FILE.replace("QUESTION", "prompt"))
    click(browser, "Check and preview")
    browser.wait("document.querySelector('main pre')?.textContent.includes('⟦b')")
    browser.picture(tmp_path / f"checked-{width}.png")
    assert browser.value("document.documentElement.scrollWidth") <= width
    click(browser, "Submit")
    browser.wait("document.querySelector('main h2')?.textContent ?? ''", lambda text: text.startswith("by-hand"))
    (job,) = [row for row in Client(running.url).jobs() if row["name"] == f"by-hand-{width}"]
    assert job["state"] in ("checking", "queued")
