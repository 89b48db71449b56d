"""Published tables agree with the raw rows, and every run has a folder named after its script."""

import re
from pathlib import Path

import pytest
from more_cases import nightly

from benchmarks import figures, published, tables
from benchmarks.published import RESULTS, pairs
from benchmarks.shown_numbers import stated

LOG = (RESULTS.parent / "LOG.md").read_text(encoding="utf-8")
USERS = ("benchmarks", "docs", "lorafusion_jax", "pallas_kernels", "scheduling", "tests")
FOLDERS = (RESULTS.parent, Path(__file__).parents[1] / "campaigns")
SCRIPTS = {file.stem for folder in FOLDERS for file in folder.glob("*.py")} | {"peers"}


def test_committed_tables_are_up_to_date():
    assert tables.outdated() == [], "run: make tables"


@pytest.mark.parametrize("change", ["cell", nightly("missing")])
def test_outdated_tables_are_named(monkeypatch, tmp_path, change):
    (tmp_path / "benchmarks" / "tables").mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables, "FOLDER", tmp_path / "benchmarks" / "tables")
    monkeypatch.setattr(tables.end_to_end_report, "write", lambda *_: [])
    monkeypatch.setattr(tables.peer_report, "report", lambda *_: [])
    made = tables.write_tables(tables.FOLDER)
    monkeypatch.setattr(tables, "with_figures", lambda document, text: text)
    text = "before\n<!-- table: slower -->\n<!-- end of table -->\nafter\n"
    (tmp_path / "README.md").write_text(tables.PLACE.sub(lambda p: f"{p[1]}{published.slower()}\n{p[3]}", text))
    (tmp_path / "benchmarks" / "README.md").write_text("no tables")
    assert tables.outdated() == []
    table = next(file for file in made if file.name == "kernels_h200_bytes.csv")
    if change == "cell":
        table.write_bytes(table.read_bytes().replace(b"744.4", b"743.4"))
    else:
        table.unlink()
    readme = tmp_path / "README.md"
    readme.write_text(readme.read_text().replace("2 of 240", "none of 240"))
    assert tables.outdated() == ["benchmarks/tables/kernels_h200_bytes.csv", "README.md"]


def test_numbers_of_sentences_are_computed(monkeypatch):
    monkeypatch.setattr(
        figures, "FIGURES", [figures.Figure("a.md", "takes {} ms, or {} with it", lambda: ("1 234", "5e-7"))]
    )
    assert (
        figures.with_figures("a.md", "It takes 7\nms, or 1.2e-6 with\nit.") == "It takes 1 234\nms, or 5e-7 with\nit."
    )
    assert figures.with_figures("b.md", "It takes 7 ms") == "It takes 7 ms"
    with pytest.raises(ValueError, match="0 times"):
        figures.with_figures("a.md", "It took 7 ms, or 12 with it.")


def test_stated_numbers_name_rows_that_exist():
    sources = {name for entry in stated() for name in re.findall(r"results/([\w./-]+)", entry.source)}
    assert len(sources) > 20
    assert [name for name in sorted(sources) if not (RESULTS / name).exists()] == []


def row(variant, tokens, density, run):
    mesh = {"stages": 1, "data": 1, "fsdp": 1}
    job = {"model": "8b", "workload": "mix", "global_batch": 8, "mesh": mesh, "run": run}
    return job | {"variant": variant, "useful_tokens_per_s": tokens, "density": density}


def test_ratios_are_of_one_run_and_products_of_their_factors(monkeypatch):
    rows = [
        row("ours", 150.0, 0.9, "2026-11-22 10:00:00"),
        row("ours", 180.0, 0.9, "2026-11-22 11:00:00"),
        row("single", 100.0, 0.6, "2026-11-22 10:00:00"),  # newest with ours beside it
        row("single", 90.0, 0.6, "2026-11-22 12:00:00"),
    ]
    for order in (rows, rows[::-1]):
        assert [(a["useful_tokens_per_s"], b["useful_tokens_per_s"]) for a, b in pairs(order)] == [(150.0, 100.0)]
    monkeypatch.setattr(published, "training_rows", lambda: rows)
    cells = published.ratios().splitlines()[-1].strip("| ").split(" | ")
    assert cells[2:] == ["90.0%", "60.0%", "1.50", "1.50", "1.00"]  # all of it is density


def test_every_run_has_a_folder_that_names_its_script():
    assert [path.name for path in RESULTS.iterdir() if not path.is_dir()] == []
    for folder in RESULTS.iterdir():
        name = re.fullmatch(r"(\w+?)_(?:h200_|h100_|cpu_)?\d{4}-\d\d-\d\d[a-z]?(?:_\w+)?", folder.name)
        assert name, folder.name
        if name[1] not in SCRIPTS:  # one in the history, whose rows a page still shows
            assert (folder / "conditions.txt").read_text(encoding="utf-8").startswith("Script: git show "), folder.name


def test_every_folder_of_rows_is_named_where_it_is_used():
    """By a table, a page, a stated number, a test or code, or as the newest of a campaign."""
    folders = sorted(folder.name for folder in RESULTS.iterdir())
    newest = {re.sub(r"_cpu_\d{4}-.*", "", name): name for name in folders if "_cpu_" in name}
    users = [
        file for top in USERS for file in sorted((RESULTS.parents[1] / top).rglob("*")) if file.suffix in (".py", ".md")
    ]
    texts = [
        file.read_text(encoding="utf-8") for file in users if file.name != "LOG.md" and RESULTS not in file.parents
    ]
    texts += [entry.source for entry in stated()]
    named = set(re.findall(r"\w+_\d{4}-\d\d-\d\d\w*", "\n".join(texts)))
    assert [name for name in folders if name not in named and name not in newest.values()] == []


def test_published_runs_exist():
    names = [*published.KERNEL_FILES, published.END_TO_END, published.PLANNER, published.ORDERS, published.SCALING]
    names += [tables.peer_report.PEERS, published.SIZES, published.ADAPTER_COUNTS]
    names += re.findall(r"`results/([\w./-]+)`", LOG)
    assert [name for name in names if not (RESULTS / name).exists()] == []


def test_an_entry_of_the_log_is_a_question_and_a_conclusion():
    entries = re.findall(r"^\* .*(?:\n  .*)*", LOG, re.MULTILINE)
    assert len(entries) > 50
    assert [entry for entry in entries if entry.count("\n") > 4 or not re.match(r"\* \*\*[^*]+\?\*\* \(", entry)] == []
    assert len(LOG.splitlines()) < 300
