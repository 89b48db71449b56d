"""Reads files of rows that need not fit into memory, block by block."""

from __future__ import annotations

import gzip
import hashlib
import io
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from lorafusion_jax.data.json_blocks import json_blocks
from lorafusion_jax.data.row_files import (
    arrow_batches,
    bad_csv,
    bad_parquet,
    csv_options,
    decode,
    parse_jsonl,
    read_header,
    table_rows,
)
from lorafusion_jax.data.rows import Rows
from lorafusion_jax.readable import DATA, open_regular, open_text

if TYPE_CHECKING:
    import pyarrow as pa

BLOCK_BYTES = 8 << 20  # a tokenizer needs some hundred bytes for each token of a block
BATCH_ROWS, ROW_BYTES = 64, 64  # of a Parquet file: rows that are unpacked at once, and the least that a row takes
MOST_UNPACKED = 1 << 40
PART = 1 << 20
GZIP, ZSTD = ".gz", ".zst"
BEGINNINGS = {GZIP: b"\x1f\x8b", ZSTD: b"\x28\xb5\x2f\xfd"}


def packing_of(path: Path) -> str:
    """Returns the suffix of a packed file; empty for another one."""
    suffix = path.suffix.lower()
    return suffix if suffix in BEGINNINGS else ""


def begins_packed(path: Path) -> bool:
    """Whether a file begins as its suffix of packed files says; true without one, and where it cannot be read."""
    try:
        with open_regular(path, DATA) as file:
            return file.read(4).startswith(BEGINNINGS.get(packing_of(path), b""))
    except OSError:
        return True


@contextmanager
def open_unpacked(path: Path, *, text: bool) -> Iterator[IO[bytes]]:
    """Opens a file for reading its unpacked bytes.

    Raises:
        OSError, EOFError, zlib.error: while reading, too; it is no such file.
    """
    packing = packing_of(path)
    with open_text(path, DATA) if text and not packing else open_regular(path, DATA) as file:
        if packing == GZIP:
            with gzip.GzipFile(fileobj=file) as unpacked:
                yield io.BufferedReader(unpacked, PART)
        elif packing == ZSTD:
            import pyarrow as pa

            with pa.input_stream(file, compression="zstd") as unpacked:
                yield io.BufferedReader(unpacked, PART)  # pyright: ignore[reportArgumentType]
        else:
            yield file


def read_and_hash(file: IO[bytes], most: int | None) -> tuple[bytes | None, str]:
    """Returns the content, None if it is larger than `most`, and its SHA-256.

    Raises:
        OSError: it unpacks to far more than any data set has.
    """
    content, digest, size = bytearray(), hashlib.sha256(), 0
    fits = True
    while part := file.read(PART):
        digest.update(part)
        size += len(part)
        if size > MOST_UNPACKED:
            raise OSError(f"it unpacks to more than {MOST_UNPACKED >> 30} GiB")
        if fits:
            content += part
            if most is not None and size > most:
                fits = False
                content.clear()
    return bytes(content) if fits else None, digest.hexdigest()


def _jsonl_blocks(name: str, path: Path) -> Iterator[Rows]:
    first_row, first_line = 0, 1
    with open_unpacked(path, text=True) as file:
        while block := file.read(BLOCK_BYTES):
            block += file.readline()
            text = decode(name, block, first_line)
            rows = parse_jsonl(name, text, first_row=first_row, first_line=first_line)
            first_row += len(rows.values)
            first_line += block.count(b"\n")
            yield rows


def _csv_blocks(name: str, path: Path) -> Iterator[Rows]:
    import pyarrow as pa
    from pyarrow import csv as arrow_csv

    with open_unpacked(path, text=True) as file:
        line = decode(name, file.readline())
    header, delimiter = read_header(name, line)
    first_row = 0
    with open_unpacked(path, text=True) as file:
        try:
            with arrow_csv.open_csv(
                pa.PythonFile(file, mode="r"), **csv_options(header, delimiter, BLOCK_BYTES)
            ) as batches:
                for batch in batches:
                    yield Rows(source=name, values=batch.to_pylist(), first=first_row, untyped=True)
                    first_row += batch.num_rows
        except pa.ArrowInvalid as problem:
            raise bad_csv(name, str(problem).splitlines()[0]) from None


def _parquet_blocks(name: str, path: Path) -> Iterator[Rows]:
    from pyarrow import parquet

    with open_regular(path, DATA) as file, _reading_table(name), parquet.ParquetFile(file) as table:
        yield from _blocks_of(name, table.iter_batches(batch_size=BATCH_ROWS))


def _arrow_blocks(name: str, path: Path) -> Iterator[Rows]:
    with open_unpacked(path, text=False) as file, _reading_table(name):
        parts = (
            batch.slice(at, BATCH_ROWS)
            for batch in arrow_batches(cast(io.BufferedReader, file))
            for at in range(0, len(batch), BATCH_ROWS)
        )
        yield from _blocks_of(name, parts)


@contextmanager
def _reading_table(name: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as problem:
        raise bad_parquet(name, problem) from None


def _blocks_of(name: str, batches: Iterable[pa.RecordBatch]) -> Iterator[Rows]:
    first_row, size, values = 0, 0, []
    for batch in batches:
        values += table_rows(batch)
        size += _batch_bytes(batch)
        if size >= BLOCK_BYTES:
            yield Rows(source=name, values=values, first=first_row)
            first_row, size, values = first_row + len(values), 0, []
    if values:
        yield Rows(source=name, values=values, first=first_row)


def unpacked_parquet_bytes(name: str, path: Path, most: int) -> int:
    """Returns about how many bytes the rows of a Parquet file take; more than `most` if they take more.

    The counts of the file itself are looked at first. They do not tell how often a value of a dictionary is repeated.

    Raises:
        DataError: `data.bad-table`.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        with open_regular(path, DATA) as file, parquet.ParquetFile(file) as table:
            groups = [table.metadata.row_group(index) for index in range(table.num_row_groups)]
            size = max(sum(group.total_byte_size for group in groups), ROW_BYTES * table.metadata.num_rows)
            if size > most:
                return size
            num_bytes = 0
            for batch in table.iter_batches(batch_size=BATCH_ROWS):
                num_bytes += _batch_bytes(batch)
                if num_bytes > most:
                    break
            return max(size, num_bytes)
    except (pa.ArrowException, OSError, ValueError, OverflowError) as problem:
        raise bad_parquet(name, problem) from None


def _batch_bytes(batch: pa.RecordBatch) -> int:
    return sum(map(_unpacked_bytes, batch.columns)) + ROW_BYTES * batch.num_rows


def _unpacked_bytes(array: pa.Array) -> int:
    """Returns the bytes of an array with every value of a dictionary written out."""
    import pyarrow as pa
    from pyarrow import compute

    kind = array.type
    if isinstance(array, pa.DictionaryArray):
        texts = isinstance(array.dictionary, pa.StringArray | pa.BinaryArray | pa.LargeStringArray)
        if not texts:
            return len(array) * (_unpacked_bytes(array.dictionary) // max(len(array.dictionary), 1))
        lengths = compute.binary_length(array.dictionary)  # pyright: ignore[reportAttributeAccessIssue]
        return compute.sum(lengths.take(array.indices)).as_py() or 0  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(array, pa.ExtensionArray):
        return _unpacked_bytes(array.storage)
    if pa.types.is_nested(kind):
        return sum(map(_unpacked_bytes, _parts(array))) + 8 * len(array)
    return array.nbytes


def _parts(array: Any) -> list[pa.Array]:
    """Returns the arrays that a nested one consists of."""
    import pyarrow as pa

    if pa.types.is_map(array.type):  # it has no kernel to flatten
        return [array.keys, array.items]
    if pa.types.is_union(array.type):
        return [array.field(index) for index in range(array.type.num_fields)]
    parts = array.flatten()
    return parts if isinstance(parts, list) else [parts]


def _json_blocks(name: str, path: Path) -> Iterator[Rows]:
    with open_unpacked(path, text=True) as file:
        yield from json_blocks(name, file, BLOCK_BYTES)


LARGE: dict[str, Callable[[str, Path], Iterator[Rows]]] = {
    "jsonl": _jsonl_blocks,
    "json": _json_blocks,
    "csv": _csv_blocks,
    "parquet": _parquet_blocks,
    "arrow": _arrow_blocks,
}
