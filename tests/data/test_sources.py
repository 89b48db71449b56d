import decimal
import gzip
import json
import subprocess
import sys
import types
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from lorafusion_jax.config.schema import DataSettings
from lorafusion_jax.data import load_samples
from lorafusion_jax.data.row_files import bad_parquet
from lorafusion_jax.data.sources import expand_source, open_source, parse_rows, read_rows, row_blocks
from lorafusion_jax.errors import DataError, install_line

ROWS = [{"prompt": 'a, "b"\nc', "completion": "é"}, {"prompt": "x\u2028y", "completion": "2"}]


def fails(code: str, source: str, folder):
    with pytest.raises(DataError) as caught:
        read_rows(source, folder)
    assert caught.value.code == code
    assert caught.value.exit_code == 2
    return caught.value


def write(folder, kind: str):
    path = folder / f"rows.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n\n", encoding="utf-8")
    elif kind == "json":
        path.write_text(json.dumps(ROWS), encoding="utf-8")
    elif kind == "csv":
        path.write_text('prompt,completion\n"a, ""b""\nc",é\nx\u2028y,2\n', encoding="utf-8")
    else:
        parquet.write_table(pa.Table.from_pylist(ROWS), path)
    return path.name


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_every_kind_of_file_gives_the_same_rows(tmp_path, kind):
    assert read_rows(write(tmp_path, kind), tmp_path).values == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "json", "csv", "parquet"])
def test_a_packed_file_gives_the_same_rows(tmp_path, kind):
    name = write(tmp_path, kind)
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    assert read_rows(f"{name}.gz", tmp_path).values == ROWS
    assert open_source(f"{name}.gz", tmp_path).digest == open_source(name, tmp_path).digest  # one entry in the cache


@pytest.mark.parametrize(
    ("content", "fix"),
    [
        pytest.param(b"no gzip", "mv a.jsonl.gz a.jsonl: it is not packed", id="no gzip"),
        pytest.param(gzip.compress(b"x" * 4096)[:-20], "copy or download it again", id="cut"),
        pytest.param(gzip.compress(b""), "at least one row", id="empty"),
    ],
)
def test_a_packed_file_that_does_not_unpack_is_named(tmp_path, content, fix):
    (tmp_path / "a.jsonl.gz").write_bytes(content)
    problem = fails("data.unreadable" if content[-4:] != bytes(4) else "data.empty-file", "a.jsonl.gz", tmp_path)
    assert "a.jsonl.gz" in str(problem)
    assert fix in problem.fix


def test_a_packed_file_may_not_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("lorafusion_jax.data.row_blocks.MOST_UNPACKED", 1 << 12)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * 4096))
    assert "unpacks to more than" in fails("data.unreadable", "a.jsonl.gz", tmp_path).why


def test_json_with_a_data_key(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": 1, "data": ROWS}))
    assert read_rows("a.json", tmp_path).values == ROWS


def test_bom_and_windows_line_ends(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n{"text": "b"}\r\n')
    assert read_rows("a.jsonl", tmp_path).values == [{"text": "a"}, {"text": "b"}]


def test_digest_follows_content_and_nothing_else(tmp_path):
    for name, text in [("a.jsonl", '{"text": "a"}'), ("b.jsonl", '{"text": "a"}'), ("c.jsonl", '{"text": "b"}')]:
        (tmp_path / name).write_text(text)
    a, b, c = (open_source(name, tmp_path).digest for name in ("a.jsonl", "b.jsonl", "c.jsonl"))
    assert a == b != c


def test_missing_file_names_its_neighbour(tmp_path):
    (tmp_path / "law.jsonl").write_text("{}")
    assert "did you mean 'law.jsonl'?" in fails("data.missing-file", "lwa.jsonl", tmp_path).fix
    assert "did you mean" not in fails("data.missing-file", "med.jsonl", tmp_path).fix
    assert "law.jsonl" in fails("data.missing-file", "something.csv", tmp_path).fix
    assert "folder" in fails("data.missing-file", "nowhere/law.jsonl", tmp_path).fix


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_empty_file(tmp_path, text):
    (tmp_path / "a.jsonl").write_text(text)
    assert "a.jsonl" in fails("data.empty-file", "a.jsonl", tmp_path).what


@pytest.mark.parametrize(("name", "text"), [("a.json", "[]"), ("a.csv", "prompt,completion\n")])
def test_file_without_rows(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    fails("data.empty-file", name, tmp_path)


def test_unknown_kind(tmp_path):
    (tmp_path / "a.rows").write_text("x")
    assert ".jsonl" in fails("data.unknown-kind", "a.rows", tmp_path).fix


def test_broken_json_names_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n\n{"text": "b"\n')
    error = fails("data.bad-json", "a.jsonl", tmp_path)
    assert error.where == "a.jsonl, line 3"
    assert "column" in error.why


def test_many_broken_lines_are_counted_and_the_first_five_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "{oops}\n" * 8)
    error = fails("data.bad-json", "a.jsonl", tmp_path)
    assert "8 lines" in error.what
    assert error.where == "a.jsonl, lines 2, 3, 4, 5, 6 and 3 more"


def test_hostile_json_is_an_error_like_any_other(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n' + "[" * 200_000 + '\n{"n": ' + "9" * 5000 + "}\n")
    assert "lines 2, 3" in fails("data.bad-json", "a.jsonl", tmp_path).where


def test_line_that_is_no_object(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n["b"]\n')
    error = fails("data.bad-row", "a.jsonl", tmp_path)
    assert error.where == "a.jsonl, line 2"
    assert "a list" in error.why


@pytest.mark.parametrize(("text", "where"), [('{"rows": []}', "a.json"), ('[{"text": "a"}, 3]', "a.json, row 1")])
def test_json_that_is_no_list_of_objects(tmp_path, text, where):
    (tmp_path / "a.json").write_text(text)
    assert fails("data.bad-row", "a.json", tmp_path).where == where


def test_broken_json_document_names_its_line(tmp_path):
    (tmp_path / "a.json").write_text('[{"text": "a"},\n{"text": }]')
    assert fails("data.bad-json", "a.json", tmp_path).where == "a.json, line 2"


def test_text_that_is_not_utf8_names_its_line(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}\n{"text": "caf\xe9"}\n')
    error = fails("data.not-utf8", "a.jsonl", tmp_path)
    assert error.where == "a.jsonl, line 2"
    assert "0xe9" in error.why


def test_a_file_that_may_not_be_looked_at_is_an_error_of_its_source(tmp_path, monkeypatch):
    def refuse(path, **options):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", refuse)
    assert "Permission denied" in fails("data.unreadable", "a.jsonl", tmp_path).why
    with pytest.raises(DataError, match=r"data\.unreadable"):
        expand_source("a.jsonl", tmp_path)


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_the_command_that_converts_a_packed_file_unpacks_it(tmp_path, monkeypatch, encoding):
    rows = '{"text": "café"}\n'
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(rows.encode(encoding)))
    command = fails("data.not-utf8", "a.jsonl.gz", tmp_path).fix.partition(" (")[0]
    monkeypatch.chdir(tmp_path)
    subprocess.run(command, shell=True, check=True)
    assert (tmp_path / "a-utf8.jsonl").read_text(encoding="utf-8") == rows


def test_csv_with_a_ragged_row(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\nc\n")
    assert "Expected 2 columns, got 1" in fails("data.bad-table", "a.csv", tmp_path).why


def test_csv_with_a_column_twice(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,prompt\na,b\n")
    problem = fails("data.bad-table", "a.csv", tmp_path)
    assert (problem.why, problem.fix) == (
        "'prompt' stands there 2 times",
        "give each column of line 1 a name of its own",
    )


def test_csv_cells_stay_text(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,completion\n007,\n1.50,NA\n")
    assert read_rows("a.csv", tmp_path).values == [
        {"prompt": "007", "completion": ""},
        {"prompt": "1.50", "completion": "NA"},
    ]


def test_parquet_that_is_none(tmp_path):
    (tmp_path / "a.parquet").write_text("no parquet at all")
    assert "download it again" in fails("data.bad-table", "a.parquet", tmp_path).fix


def test_a_part_that_no_memory_holds_is_said_to_be_too_large():
    problem = pa.ArrowMemoryError("realloc of size 4611686018427387904 failed")
    assert bad_parquet("law.parquet", problem).why == "it says that a part of it is larger than the memory"


def test_parquet_with_a_name_that_is_not_utf8(tmp_path):
    parquet.write_table(pa.table({"text": ["one two"]}), tmp_path / "a.parquet", compression="none")
    content = (tmp_path / "a.parquet").read_bytes()
    (tmp_path / "a.parquet").write_bytes(content.replace(b"text", b"\xe3ext"))
    fails("data.bad-table", "a.parquet", tmp_path)


def test_parquet_with_a_column_twice(tmp_path):
    table = pa.Table.from_arrays([pa.array(["one"]), pa.array(["two"])], ["text", "text"])
    parquet.write_table(table, tmp_path / "a.parquet")
    assert "'text' twice" in fails("data.bad-table", "a.parquet", tmp_path).why


ODD = {  # values that Python can hold, and some that it cannot
    "struct": pa.array([{"a": 1, "b": None}] * 2),
    "list": pa.array([[1, None], []]),
    "map": pa.array([[("k", 1)]] * 2, pa.map_(pa.string(), pa.int64())),
    "image": pa.array([{"bytes": b"\x89PNG", "path": None}] * 2),
    "binary": pa.array([b"\xff\x00"] * 2),
    "decimal": pa.array([decimal.Decimal("1.5")] * 2),
    "nanoseconds": pa.array([[1234567890123456789]] * 2, pa.list_(pa.timestamp("ns"))),
    "far date": pa.array([2**30] * 2, pa.date32()),
    "no zone": pa.array([5] * 2, pa.timestamp("us", tz="Nowhere/Land")),
    "no text": pa.array([b"\xff"] * 2).view(pa.string()),
    "label": pa.array(["a", "b"]).dictionary_encode(),
}


@pytest.mark.parametrize("name", ODD)
def test_a_column_that_is_not_used_may_hold_anything(name, tmp_path, tokenizer):
    columns = {"prompt": ["2+2?", "3+3?"], "completion": ["four", "six"]}
    parquet.write_table(pa.table({**columns, name: ODD[name]}), tmp_path / "odd.parquet")
    parquet.write_table(pa.table(columns), tmp_path / "even.parquet")

    def tokens(file: str):
        settings = DataSettings.model_validate({"train": file})
        read = load_samples(
            file, settings=settings, tokenizer=tokenizer, adapter="a", base_dir=tmp_path, cache_dir=tmp_path / "c"
        )
        return read.tokens.tolist(), read.report.notes

    expected, _ = tokens("even.parquet")
    got, notes = tokens("odd.parquet")
    assert got == expected
    assert f"'{name}'" in notes[0]


def test_a_column_that_is_used_and_cannot_be_read_is_named_with_its_row(tmp_path, tokenizer):
    texts = pa.array([b"one", b"\xff"]).view(pa.string())
    parquet.write_table(pa.table({"text": texts}), tmp_path / "a.parquet")
    with pytest.raises(DataError) as caught:
        load_samples(
            "a.parquet",
            settings=DataSettings.model_validate({"train": "a.parquet"}),
            tokenizer=tokenizer,
            adapter="a",
            base_dir=tmp_path,
        )
    assert (caught.value.code, caught.value.where) == ("data.bad-type", "a.parquet, row 1")
    assert "cannot be read" in caught.value.why


@pytest.mark.parametrize("text", ["pro\rmpt,completion\ntwo,four\n", "p" * 200_000 + ",completion\na,b\n"])
def test_csv_with_a_header_that_cannot_be_read(tmp_path, text):
    (tmp_path / "a.csv").write_text(text, newline="")
    fails("data.bad-table", "a.csv", tmp_path)


def test_hub_set_without_the_extra_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)  # import fails, installed or not
    assert fails("data.hub-extra", "hf:org/set", tmp_path).fix == install_line("hf")


@pytest.mark.parametrize(
    ("source", "asked"), [("hf:org/set", ("org/set", "train")), ("hf:org/set:test[:9]", ("org/set", "test[:9]"))]
)
def test_hub_set_and_split(tmp_path, monkeypatch, source, asked):
    calls = []
    hub = types.SimpleNamespace(load_dataset=lambda name, split: calls.append((name, split)) or ROWS)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert parse_rows(open_source(source, tmp_path)).values == ROWS
    assert calls == [asked]


def test_hub_failure_is_a_data_error(tmp_path, monkeypatch):
    def refuse(name, split):
        raise ConnectionError("no route")

    hub = types.SimpleNamespace(load_dataset=refuse)
    monkeypatch.setitem(sys.modules, "datasets", hub)
    assert "no route" in fails("data.hub", "hf:org/set", tmp_path).why


def hub_folder(tmp_path, *names: str) -> None:
    for name in names:
        path = tmp_path / "set" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('{"text": "a"}\n' if path.suffix == ".jsonl" else "{}")


def test_files_that_describe_a_set_are_no_rows(tmp_path):
    hub_folder(tmp_path, "data/train-00000-of-00002.jsonl", "data/train-00001-of-00002.jsonl", "dataset_infos.json")
    hub_folder(tmp_path, "state.json", "dataset_info.json", "dataset_dict.json")
    names = [f"set/data/train-0000{number}-of-00002.jsonl" for number in range(2)]
    assert expand_source("set", tmp_path) == names


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["data/train-0-of-1.jsonl", "data/test-0-of-1.jsonl"], "set/data/train-*.jsonl"),
        (["train.jsonl", "validation.jsonl"], "set/train.jsonl"),
        (["train/a.jsonl", "eval/a.jsonl"], "set/train/*.jsonl"),
        (["test_1.jsonl", "validation_1.jsonl"], "set/test_*.jsonl"),
        (["data/train_gen-00000-of-00001.jsonl", "data/train_sft-00000-of-00001.jsonl"], "set/data/train_gen-*.jsonl"),
        (["law-train.jsonl", "law-dev.jsonl"], "set/law-train.jsonl"),
        (["de.TRAINING.1.jsonl", "de.Eval.1.jsonl"], "set/de.TRAINING.1.jsonl"),
        (["Train/deep/a.jsonl", "Valid/deep/a.jsonl"], "set/Train/deep/*.jsonl"),
        (["train1.jsonl", "evaluation2.jsonl"], "set/train*.jsonl"),
        (["snapshots/0a/data/x.jsonl", "snapshots/1b/data/x.jsonl"], "set/snapshots/0a/data/*.jsonl"),
    ],
)
def test_a_folder_with_several_splits_is_refused_and_the_fix_works(files, named, tmp_path):
    hub_folder(tmp_path, *files, "testimony.jsonl", "retrained_devices.jsonl")
    with pytest.raises(DataError, match=r"data\.splits") as caught:
        expand_source("set", tmp_path)
    assert caught.value.fix.split()[0] == named
    assert expand_source(named, tmp_path) == [f"set/{files[0]}"]


CARD = """---
license: mit
configs:
- config_name: plain
  data_files: [{split: train, path: plain/train-*}, {split: test, path: [plain/test-*]}]
- {config_name: hard, data_files: "**/hard.jsonl"}
---
configs:
"""


@pytest.mark.parametrize(
    "card", [CARD, CARD.replace("config_name", "name"), "---\nconfigs: [1, {}]\n---\n", "---\n: [\n---\n"]
)
def test_a_folder_with_several_configurations_of_a_hub_is_refused(card, tmp_path):
    hub_folder(tmp_path, "plain/train-0.jsonl", "plain/train-1.jsonl")
    (tmp_path / "set/README.md").write_text(card)
    names = ["set/plain/train-0.jsonl", "set/plain/train-1.jsonl"]
    assert expand_source("set", tmp_path) == names
    hub_folder(tmp_path, "deep/hard.jsonl")
    if card != CARD:
        assert len(expand_source("set", tmp_path)) == 3
        return
    with pytest.raises(DataError, match="several configurations: hard, plain") as caught:
        expand_source("set", tmp_path)
    assert caught.value.fix.startswith("set/deep/*.jsonl ")
    assert expand_source("set/plain", tmp_path) == names


def write_arrow(path, rows: list[dict], new=pa.ipc.new_stream, batch: int = 1) -> None:
    table = pa.Table.from_pylist(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file, new(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)


@pytest.mark.parametrize("new", [pa.ipc.new_stream, pa.ipc.new_file])
@pytest.mark.parametrize("name", ["a.arrow", "a.arrow.gz"])
def test_files_of_arrow_give_the_same_rows(new, name, tmp_path, monkeypatch):
    rows = [{**row, "note": "new" if number % 2 else None} for number, row in enumerate(ROWS * 3)]
    write_arrow(tmp_path / "a.arrow", rows, new, 4)
    if name.endswith("gz"):
        (tmp_path / name).write_bytes(gzip.compress((tmp_path / "a.arrow").read_bytes()))
    assert read_rows(name, tmp_path).values == rows
    monkeypatch.setattr("lorafusion_jax.data.row_blocks.BLOCK_BYTES", 1)
    monkeypatch.setattr("lorafusion_jax.data.row_blocks.BATCH_ROWS", 3)
    blocks = list(row_blocks(open_source(name, tmp_path)))
    assert [row for block in blocks for row in block.values] == rows
    assert [block.first for block in blocks] == ([0] if name.endswith("gz") else [0, 3, 4])


@pytest.mark.parametrize(
    "content", [b"no arrow at all, but long enough", b"ARROW1\0\0 and then nothing", b"\xff\xff\xff\xff"]
)
def test_files_of_arrow_that_are_none(content, tmp_path):
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(DataError) as caught:
        read_rows("a.arrow", tmp_path)
    assert caught.value.code in ("data.bad-table", "data.unreadable", "data.empty-file")


def test_a_folder_of_save_to_disk_is_one_set(tmp_path):
    set_folder = tmp_path / "set"
    for number, row in enumerate(ROWS):
        write_arrow(set_folder / f"data-0000{number}-of-00002.arrow", [row])
    write_arrow(set_folder / "cache-12ab.arrow", [{"indices": 5}])
    for name in ("state.json", "dataset_info.json"):
        (set_folder / name).write_text("{}")
    files = expand_source("set", tmp_path)
    assert [row for file in files for row in read_rows(file, tmp_path).values] == ROWS
    write_arrow(tmp_path / "sets" / "train" / "data-00000-of-00001.arrow", ROWS)
    write_arrow(tmp_path / "sets" / "test" / "data-00000-of-00001.arrow", ROWS)
    with pytest.raises(DataError) as caught:
        expand_source("sets", tmp_path)
    assert caught.value.code == "data.splits"
    (train,) = expand_source(caught.value.fix.split()[0], tmp_path)
    assert read_rows(train, tmp_path).values == ROWS


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.csv"])
def test_pointers_of_git_lfs_are_named(name, tmp_path):
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n")
    with pytest.raises(DataError, match="git lfs pull"):
        read_rows(name, tmp_path)


@pytest.mark.parametrize("text", ['[{"text": "a"}, {"text": "b"}]', '[\n{"text": "a"},\n{"text": "b"}\n]\n'])
def test_a_list_in_jsonl_is_named(text, tmp_path):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=r"rename it to rows\.json"):
        read_rows("rows.jsonl", tmp_path)
