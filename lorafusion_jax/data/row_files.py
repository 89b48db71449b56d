"""Parses the content of JSONL, JSON, CSV and Parquet files into rows."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lorafusion_jax.config.read import has_half_character
from lorafusion_jax.data.rows import SHOWN, Rows, RowsError, Unreadable, type_name
from lorafusion_jax.errors import DataError, first_few, shortened_text
from lorafusion_jax.families.hf_config import one_of_each
from lorafusion_jax.readable import to_utf8, utf_16

if TYPE_CHECKING:
    import pyarrow as pa

SHOWN_WHY = 500  # characters of a library's reason
ARROW_FILE = b"ARROW1"  # begins a file; a stream has no name
DELIMITERS = (",", "\t", ";", "|")  # of tables
HALF = "\\ud"  # how JSON begins half of a surrogate pair


def decode(name: str, content: bytes, first_line: int = 1) -> str:
    """Decodes UTF-8; the first line of a file may begin with a byte order mark."""
    try:
        return content.decode("utf-8-sig" if first_line == 1 else "utf-8")
    except UnicodeDecodeError as problem:
        line = content.count(b"\n", 0, problem.start) + first_line
        raise DataError(
            "data.not-utf8",
            f"{name} is not UTF-8 text.",
            where=f"{name}, line {line}",
            why=f"byte 0x{content[problem.start]:02x} at offset {problem.start} cannot be decoded",
            fix=f"{to_utf8(name, utf_16(content) or 'latin1')} (or whatever the encoding is)",
        ) from None


def parse_jsonl(name: str, text: str, *, first_row: int = 0, first_line: int = 1) -> Rows:
    """Parses one JSON object per line. Bad lines are problems of the rows.

    Args:
        first_row, first_line: of the text in its file.
    """
    values, lines, broken, odd = [], [], [], []
    for number, line in enumerate(text.split("\n"), first_line):  # str.splitlines would also cut inside JSON strings
        if not line.strip():
            continue
        try:
            value = json.loads(line, object_pairs_hook=one_of_each)
        except (ValueError, RecursionError) as problem:
            broken.append((number, _json_problem(problem)))
            continue
        if HALF in line.lower() and (key := half_key(value)) is not None:
            broken.append((number, f"the key {key} has half a character (a lone surrogate)"))
        elif isinstance(value, dict):
            values.append(value)
            lines.append(number)
        else:
            odd.append((number, f"a row must be an object, this is {type_name(value)}"))
    if (broken or odd) and text.lstrip().startswith("[") and text.rstrip().endswith("]"):
        message = "it begins with [, so it is one JSON list of rows, not one object per line"
        fix = f"rename it to {name.removesuffix('.jsonl')}.json"
        raise DataError("data.bad-json", f"{name} is not JSONL.", where=name, why=message, fix=fix)
    problems = [
        _bad_lines(code, message, name, rows)
        for code, message, rows in (
            ("data.bad-json", f"{name} is not JSON in {{}}.", broken),
            ("data.bad-row", f"{name} has no row in {{}}.", odd),
        )
        if rows
    ]
    return Rows(source=name, values=values, lines=tuple(lines), problems=tuple(problems), first=first_row)


def _bad_lines(code: str, message: str, name: str, problems: list[tuple[int, str]]) -> RowsError:
    word = "line" if len(problems) == 1 else "lines"
    numbers = first_few([number for number, _ in problems], SHOWN)
    error = RowsError(
        code,
        message.format("1 line" if len(problems) == 1 else f"{len(problems)} lines"),
        where=f"{name}, {word} {numbers}",
        why="; ".join(f"line {number}: {why}" for number, why in problems[:SHOWN]),
        fix="one JSON object per line, with each key once",
    )
    error.count = len(problems)
    return error


def half_key(value: object) -> str | None:
    """Returns a key with half a surrogate pair, as ASCII: nothing can encode it."""
    pending = [value]
    while pending:
        inner = pending.pop()
        if isinstance(inner, dict):
            for key in inner:
                if has_half_character(key):
                    return ascii(key)
            pending += inner.values()
        elif isinstance(inner, list):
            pending += inner
    return None


def _json_problem(problem: Exception) -> str:
    if isinstance(problem, json.JSONDecodeError):
        return f"{problem.msg} (column {problem.colno})"
    return "nested too deeply" if isinstance(problem, RecursionError) else str(problem)


def parse_json(name: str, text: str) -> Rows:
    """Parses a list of objects, or an object with such a list in `data`."""
    try:
        value = json.loads(text, object_pairs_hook=one_of_each)
    except (ValueError, RecursionError) as problem:
        raise bad_json(name, getattr(problem, "lineno", 1), problem) from None
    if HALF in text.lower() and (key := half_key(value)) is not None:
        raise half_problem(name, key)
    if isinstance(value, dict) and isinstance(value.get("data"), list):
        value = value["data"]
    if not isinstance(value, list):
        raise not_a_list(name, value)
    check_objects(name, value)
    return Rows(source=name, values=value)


def bad_json(name: str, line: int, problem: Exception, row: int | None = None) -> DataError:
    """The error of a file, or of a row of it, that cannot be parsed."""
    is_json = not isinstance(problem, json.JSONDecodeError | RecursionError)
    return DataError(
        "data.bad-json",
        f"{name} is not JSON.",
        where=f"{name}, line {line}" + ("" if row is None else f", row {row}"),
        why=_json_problem(problem),
        fix="keep one of them" if is_json else "one object per line belongs into a .jsonl file",
    )


def half_problem(name: str, key: str) -> DataError:
    why = f"the key {key} has half a character (a lone surrogate)"
    fix = "write the file again in UTF-8, with whole characters"
    return DataError("data.bad-json", f"{name} is not JSON that can be read.", where=name, why=why, fix=fix)


def not_a_list(name: str, value: object) -> DataError:
    return DataError(
        "data.bad-row",
        f"{name} is not a list of rows.",
        where=name,
        why=f"it holds {type_name(value)}",
        fix='[{...}, {...}] or {"data": [{...}, {...}]}',
    )


def check_objects(name: str, values: list, first: int = 0) -> None:
    """Checks that rows of a list, of which this is a part, are objects.

    Raises:
        DataError: `data.bad-row`.
    """
    if odd := [row for row, item in enumerate(values) if not isinstance(item, dict)]:
        raise DataError(
            "data.bad-row",
            f"{len(odd)} rows of {name} are not objects.",
            where=Rows(source=name, values=[], first=first).places(odd),
            why=f"row {first + odd[0]} is {type_name(values[odd[0]])}",
            fix='each row as {"prompt": "…", "completion": "…"}, or take these out',
        )


def plain_rows(name: str, rows: Iterable[object]) -> Iterator[dict]:
    """Yields rows of Python objects as JSON has them: tuples and arrays of numpy become lists.

    Raises:
        DataError: `data.bad-row`, something is no object, or holds what no JSON can.
    """
    for number, row in enumerate(rows):
        where = f"{name}, row {number}"
        if not isinstance(row, Mapping):
            why, fix = f"it is {type_name(row)}", 'dictionaries, such as {"prompt": …, "completion": …}'
            raise DataError("data.bad-row", f"a row of {name} is not an object.", where=where, why=why, fix=fix)
        try:
            if odd := [key for key in row if not isinstance(key, str)]:
                raise TypeError(f"the key {odd[0]!r} is not a text")
            value = json.loads(json.dumps(dict(row), default=_as_list))
        except (TypeError, ValueError, RecursionError) as problem:
            why, fix = _json_problem(problem), "texts, numbers, true or false, lists and dictionaries"
            raise DataError(
                "data.bad-row", f"a row of {name} holds what no JSON can.", where=where, why=why, fix=fix
            ) from None
        if (key := half_key(value)) is not None:
            raise half_problem(where, key)
        yield value


def _as_list(value: object) -> object:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")


def parse_csv(name: str, text: str) -> Rows:
    """Parses a table with a header."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    header, delimiter = read_header(name, text)
    data = text.encode()
    try:  # pyarrow rather than csv.DictReader: no process-wide limit on field size, and 20 times as fast
        table = arrow_csv.read_csv(io.BytesIO(data), **csv_options(header, delimiter, max(len(data), 1 << 20)))
    except pa.ArrowInvalid as problem:
        raise bad_csv(name, str(problem).splitlines()[0]) from None
    return Rows(source=name, values=table.to_pylist(), untyped=True)


def read_header(name: str, text: str) -> tuple[list[str], str]:
    """Reads the names of the columns of a CSV table, and what is between its cells: the first sign that splits them.

    Raises:
        DataError: data.bad-table.

    >>> read_header("x.csv", "prompt;completion\\nyes, or no?;no"), read_header("x.csv", "text\\na;b")
    ((['prompt', 'completion'], ';'), (['text'], ','))
    """
    header, delimiter = [], DELIMITERS[0]
    try:
        for sign in DELIMITERS:
            names = next(csv.reader(io.StringIO(text, newline=""), delimiter=sign), [])
            if len(header) < 2 and len(names) > len(header):
                header, delimiter = names, sign
    except csv.Error as problem:
        raise bad_csv(name, str(problem)) from None
    if len(set(header)) != len(header):
        twice = next(column for column in header if header.count(column) > 1)
        why, fix = f"'{twice}' stands there {header.count(twice)} times", "give each column of line 1 a name of its own"
        raise DataError("data.bad-table", f"{name} names a column twice.", where=f"{name}, line 1", why=why, fix=fix)
    return header, delimiter


def csv_options(header: Sequence[str], delimiter: str, block_bytes: int) -> dict[str, Any]:
    """Options of pyarrow's readers: every cell is a text."""
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    return {
        "read_options": arrow_csv.ReadOptions(use_threads=False, block_size=block_bytes),
        "parse_options": arrow_csv.ParseOptions(newlines_in_values=True, delimiter=delimiter),
        "convert_options": arrow_csv.ConvertOptions(
            column_types=dict.fromkeys(header, pa.string()), strings_can_be_null=False
        ),
    }


def bad_csv(name: str, why: str) -> DataError:
    """The error of a file that is not a table."""
    return DataError(
        "data.bad-table",
        f"{name} is not a CSV table.",
        where=name,
        why=why,
        fix='the same number of cells in every row; "quotes" around cells with commas or line ends',
    )


def parse_parquet(name: str, content: bytes) -> Rows:
    """Parses a table."""
    import pyarrow as pa
    from pyarrow import parquet

    try:
        values = table_rows(parquet.ParquetFile(pa.BufferReader(content)).read())
    except (pa.ArrowException, OSError, ValueError, OverflowError) as problem:
        raise bad_parquet(name, problem) from None
    return Rows(source=name, values=values)


def parse_arrow(name: str, content: bytes) -> Rows:
    """Parses a file of Arrow, as `save_to_disk` of datasets writes it."""
    import pyarrow as pa

    try:
        values = [row for batch in arrow_batches(io.BufferedReader(io.BytesIO(content))) for row in table_rows(batch)]
    except (pa.ArrowException, OSError, ValueError, OverflowError) as problem:
        raise bad_parquet(name, problem) from None
    return Rows(source=name, values=values)


def arrow_batches(file: io.BufferedReader) -> Iterator[pa.RecordBatch]:
    """Yields the batches of an Arrow stream or file, each checked: what it says of its buffers may be wrong.

    Raises:
        ArrowInvalid: it is neither, or damaged.
    """
    import pyarrow as pa

    try:
        if file.peek(len(ARROW_FILE)).startswith(ARROW_FILE):
            table = pa.ipc.open_file(file)
            batches = (table.get_batch(index) for index in range(table.num_record_batches))
        else:
            batches = iter(pa.ipc.open_stream(file))
        while (batch := next(batches, None)) is not None:
            batch.validate(full=True)
            yield batch
    except MemoryError:
        raise pa.ArrowInvalid("it says that a part of it is larger than the memory") from None


def table_rows(table: pa.Table | pa.RecordBatch) -> list[dict]:
    """Returns the rows of a table. Values that Python cannot hold are `Unreadable`: the column may not be used.

    Raises:
        ValueError: it names a column twice.
    """
    names = table.schema.names
    if len(set(names)) != len(names):
        raise ValueError(f"it names the column '{next(name for name in names if names.count(name) > 1)}' twice")
    columns = [_values(column) for column in table.columns]
    return [without_nulls(dict(zip(names, row, strict=True))) for row in zip(*columns, strict=True)]


def _values(column: pa.ChunkedArray | pa.Array) -> list:
    try:
        return column.to_pylist()
    except Exception:  # a text that is not UTF-8, a time beyond Python's or in a zone that is not there: many types
        return [_value(scalar) for scalar in column]


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except Exception as problem:
        return Unreadable(f"{scalar.type}: {shortened_text(str(problem).partition('\n')[0], SHOWN_WHY)}")


def bad_parquet(name: str, problem: Exception) -> DataError:
    """The error of a file whose values cannot be read."""
    import pyarrow as pa

    # a name may not be UTF-8
    kind = "an Arrow" if ".arrow" in name.lower() else "a Parquet"
    is_none = isinstance(problem, pa.ArrowInvalid)
    message = f"is not {kind} file" if is_none else "holds values that cannot be read"
    table_fix = "copy or download it again, or give it the suffix of what it holds"
    too_large = "it says that a part of it is larger than the memory" if isinstance(problem, MemoryError) else ""
    return DataError(
        "data.bad-table",
        f"{name} {message}.",
        where=name,
        why=too_large or shortened_text(str(problem).partition("\n")[0], SHOWN_WHY),
        fix=table_fix if is_none else "columns of texts, numbers, lists and structs, each once",
    )


def without_nulls(row: dict) -> dict:
    """Removes null keys from nested objects: tables give every object the keys of all objects."""
    return {key: _drop_nulls(value) if isinstance(value, list | dict) else value for key, value in row.items()}


def _drop_nulls(value):
    if isinstance(value, dict):
        return {key: _drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_drop_nulls(inner) for inner in value] if isinstance(value, list) else value
