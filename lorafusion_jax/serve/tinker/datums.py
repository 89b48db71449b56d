"""Datums of a request to arrays, and arrays of a result to a message. Numpy only: the worker reads and writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lorafusion_jax.serve.tinker.messages import message_class

TYPES = {1: np.float32, 2: np.int64, 3: np.int32}  # of DType; bfloat16 is the upper half of a float32
BFLOAT16, FLOAT32, INT64 = 4, 1, 2
MOST_TARGETS = 64  # of one position


class DatumError(ValueError):
    """A mistake of the client in its datums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """A tensor of rank 2 as CSR."""

    values: np.ndarray
    crow: np.ndarray
    col: np.ndarray
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Datum:
    """One sequence."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray | Sparse]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one request brings."""

    datums: Sequence[Datum]
    loss: str
    config: Mapping[str, float | str]


def read_batch(body: bytes) -> Batch:
    """Reads a ForwardBackwardRequest.

    Raises:
        DatumError: says which datum is wrong, and how.
    """
    request = message_class("ForwardBackwardRequest")()
    try:
        request.ParseFromString(body)
    except Exception as problem:  # DecodeError
        raise DatumError(f"the request cannot be read: {problem}") from None
    if not request.data:
        raise DatumError("the request has no datums")
    config: dict[str, float | str] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    datums = [_read_datum(at, datum) for at, datum in enumerate(request.data)]
    return Batch(datums=datums, loss=request.loss_fn, config=config)


def _read_datum(at: int, datum: Any) -> Datum:
    try:
        parts = [_tokens_of(chunk) for chunk in datum.model_input]
        tokens = np.concatenate(parts) if parts else np.zeros(0, np.int32)
        inputs = {name: _read_tensor(name, tensor) for name, tensor in sorted(datum.loss_fn_inputs.items())}
    except DatumError as problem:
        raise DatumError(f"datum {at}: {problem}") from None
    return Datum(tokens=tokens, inputs=inputs)


def _tokens_of(chunk: Any) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise DatumError(f"model_input has a chunk of {kind or 'no kind'}; there are chunks of text only")
    return _array(chunk.encoded_text.tokens, np.int32, "model_input")


def _read_tensor(name: str, tensor: Any) -> np.ndarray | Sparse:
    shape = tuple(tensor.shape)
    if tensor.WhichOneof("encoding") == "sparse_csr":
        csr = tensor.sparse_csr
        values = _values(csr.values, tensor.dtype, name)
        crow, col = _array(csr.crow_indices, np.int64, name), _array(csr.col_indices, np.int64, name)
        return Sparse(values=values, crow=crow, col=col, shape=shape)
    values = _values(tensor.dense, tensor.dtype, name)
    if not shape:
        return values
    size = 1
    for length in shape:
        size *= length
    if size != len(values) or min(shape) < 0 or len(shape) > 2:
        raise DatumError(f"{name} has {len(values)} values, and its shape is {list(shape)[:8]}")
    return values.reshape(shape)


def _values(data: bytes, kind: int, name: str) -> np.ndarray:
    if kind == BFLOAT16:
        return (_array(data, np.uint16, name).astype(np.uint32) << 16).view(np.float32)
    if kind not in TYPES:
        raise DatumError(f"{name} has the unknown type {kind}")
    return _array(data, TYPES[kind], name)


def _array(data: bytes, kind: Any, name: str) -> np.ndarray:
    size = np.dtype(kind).itemsize
    if len(data) % size:
        raise DatumError(f"{name} has {len(data)} bytes, which is no multiple of {size}")
    return np.frombuffer(data, dtype=np.dtype(kind).newbyteorder("<"))


def write_outputs(outputs: Sequence[Mapping[str, np.ndarray]], metrics: Mapping[str, float]) -> bytes:
    """Writes a ForwardBackwardOutput: neighbours whose arrays have equal widths are one record."""
    message = message_class("ForwardBackwardOutput")(loss_fn_output_type="ArrayRecord")
    for record in _records(outputs):
        output_message = message.loss_fn_outputs.add(type_tag="ArrayRecord", num_datums=len(record))
        for name in record[0]:
            arrays = [np.ascontiguousarray(output[name], dtype=_kind_of(output[name])) for output in record]
            field = output_message.fields[name]
            field.dtype = INT64 if arrays[0].dtype == np.int64 else FLOAT32
            field.data = b"".join(array.tobytes() for array in arrays)
            field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
            field.trailing_shape.extend(arrays[0].shape[1:])
    for name, value in metrics.items():
        message.metrics[name] = value
    return message.SerializeToString(deterministic=True)


def _records(outputs: Sequence[Mapping[str, np.ndarray]]) -> list[list[Mapping[str, np.ndarray]]]:
    records: list[list[Mapping[str, np.ndarray]]] = []
    widths = None
    for output in outputs:
        widths_of_output = {name: array.shape[1:] for name, array in output.items()}
        if not records or widths_of_output != widths:
            records.append([])
            widths = widths_of_output
        records[-1].append(output)
    return records


def _kind_of(array: np.ndarray) -> Any:
    return np.int64 if np.issubdtype(array.dtype, np.integer) else np.float32
