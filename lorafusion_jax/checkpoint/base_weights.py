"""Checks the weight files of a base model without a device: broken headers and indexes, NaN and infinity."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from lorafusion_jax.checkpoint.base_files import WHOLE_BYTES
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few
from lorafusion_jax.families.joined import as_published
from lorafusion_jax.families.model import ModelConfig
from lorafusion_jax.families.multimodal import names_in_file
from lorafusion_jax.families.table import family_named
from lorafusion_jax.families.unread import SAVE_PLAIN, is_ignored, other_root
from lorafusion_jax.layout.layer import EXPERTS
from lorafusion_jax.readable import RECORD, check_regular, open_regular, read_text
from lorafusion_jax.weights.checkpoint_formats import FLOATS, INDEX, SINGLE, two_sets

_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack")
# NaN and infinity have all bits of the exponent set: (type of the bits, these bits). This 8-bit float has no infinity,
# and one NaN, of all bits but the sign.
_EXPONENTS = {
    "F32": (np.uint32, 0x7F800000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
}
_BLOCK = 1 << 22  # weights looked at together
_SHOWN = 4  # tensors that a message names
_UNREADABLE = (SafetensorError, OSError, ValueError, KeyError, TypeError, RecursionError)


def weight_problems(directory: Path) -> list[LoraFusionError]:
    """Finds problems of the weight files. Values are only checked if the files hold less than 4 GB in total."""
    files = sorted(directory.glob("*.safetensors"))
    small = sum(file.stat().st_size for file in files) < WHOLE_BYTES
    problems: list[LoraFusionError] = list(_index_problems(directory / INDEX))
    for file in files:
        bad: list[str] = []
        broken = _broken_file(file)
        try:
            bad = list(_not_finite(file)) if small and broken is None else []
        except _UNREADABLE as problem:
            broken = _broken(file, problem)
        if broken is not None:
            problems.append(broken)
        if bad:
            problems.append(
                CheckpointError(
                    "model.not-finite",
                    f"the base model holds NaN or infinity: {first_few(bad, _SHOWN)}.",
                    where=str(file),
                    why="every token's loss would be NaN",
                    fix="download the file again, or convert the weights without overflow",
                )
            )
    return problems or list(tie_problems(directory))


def _broken_file(file: Path) -> CheckpointError | None:
    """What is wrong with a file of weights as a whole; None if its tensors fill it and do not overlap."""
    try:
        check_regular(file)
        with safe_open(file, "np"):
            return None
    except _UNREADABLE as problem:
        return _broken(file, problem)


def _broken(file: Path, problem: Exception) -> CheckpointError:
    message, fix = "a weight file is truncated or corrupt.", "download the file again"
    return CheckpointError("model.broken-file", message, where=str(file), why=str(problem), fix=fix)


def has_weights(directory: Path) -> bool:
    """Whether a folder holds weights, in a form that is read or not. A config.json alone is enough to plan with."""
    return any(file.suffix in _WEIGHTS or file.name == INDEX for file in directory.iterdir())


def header_problems(directory: Path, config: ModelConfig) -> list[LoraFusionError]:
    """Finds names and shapes in the headers of the weights that are not those of config.json; none without weights.

    Kernels of experts and shapes of quantised ones are checked where they are loaded.
    """
    if not has_weights(directory):
        return []
    if not any((directory / name).is_file() for name in (SINGLE, INDEX)):
        others = sorted(file.name for file in directory.iterdir() if file.suffix in _WEIGHTS)
        return [
            CheckpointError(
                "model.no-weights",
                f"there is neither {SINGLE} nor {INDEX}, and {first_few(others, _SHOWN)} is not read.",
                where=str(directory),
                fix="save the model with safetensors; shards need their index",
            )
        ]
    try:
        files = _listed_files(directory)
        if error := two_sets(directory, [file.name for file in files]):
            return [error]
        if absent := [file for file in files if not file.is_file()]:
            message, fix = "a weight file is missing.", "download the model again"
            return [CheckpointError("model.missing-file", message, where=str(file), fix=fix) for file in absent]
        if broken := [problem for file in files if (problem := _broken_file(file))]:
            return [*broken]
        stored = {name: entry for file in files for name, entry in _header(file)[0].items()}
        tensors = as_published({name: tuple(entry["shape"]) for name, entry in stored.items()}, config)
        types = {name: stored[rows.name]["dtype"] for name, rows in tensors.items()}
        shapes = {name: rows.shape for name, rows in tensors.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return []  # `weight_problems` says so
    expected = _expected_shapes(config)
    names, others = names_in_file(family_named(config.family), config.wrapper, expected, shapes)
    problems = [
        f"missing: {names[name]}" if names[name] not in shapes
        else f"wrong shape: {names[name]} is {list(shapes[names[name]])}, config.json says {list(shape or ())}"
        if shape != shapes[names[name]]
        else f"unreadable type: {names[name]} is {types[names[name]]}"
        for name, shape in expected.items()
        if names[name] not in shapes
        or (shape is not None and (shape != shapes[names[name]] or types[names[name]] not in FLOATS))
    ]  # fmt: skip
    extra = sorted(
        name
        for name in shapes.keys() - {*names.values(), *others}
        if not (is_ignored(name, config) or _later(name, config))
    )
    problems += [f"not of this model: {name} {list(shapes[name])}" for name in extra]
    if not problems:
        return []
    root = other_root((name for name in names.values() if name not in shapes), shapes)
    return [
        CheckpointError(
            "model.tensors-differ",
            f"{len(problems)} tensors do not fit the model that config.json describes: {first_few(problems, _SHOWN)}.",
            where=str(directory),
            why=root,
            fix=SAVE_PLAIN if root else "use the config.json and the weights of the same model",
        )
    ]


def _later(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is one that is checked where it is loaded."""
    module = family_named(config.family).expert_names[0].partition(".")[0]
    return bool(config.checkpoint_format or config.packed) or (config.experts is not None and f".{module}." in name)


def _listed_files(directory: Path) -> list[Path]:
    if not (directory / INDEX).is_file():
        return [directory / SINGLE]
    return [
        directory / name for name in sorted({*json.loads(read_text(directory / INDEX, RECORD))["weight_map"].values()})
    ]


def _expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...] | None]:
    """Name of each tensor in a checkpoint of text → its shape there; None: that depends on how it is quantised."""
    family, width = family_named(config.family), config.hidden_size
    name_of, turned = family.tensor_name, family.turned
    shapes: dict[str, tuple[int, ...] | None] = {
        "model.embed_tokens.weight": (config.vocab_size, width),
        **{f"model.norm.{leaf}": (width,) for leaf in ("weight", "bias")[: 1 + config.norm_bias]},
        **({} if config.tie_embeddings else {"lm_head.weight": (config.num_outputs, width)}),
        **{f"model.{name}": shape for name, shape in config.input_shapes.items()},
    }
    for number, layer in enumerate(config.layers):
        for path, shape in layer.frozen_shapes().items():
            *modules, leaf = path.split(".")
            if modules and modules[-1] in EXPERTS:
                continue
            if (norm := layer.norm(".".join(modules))) is not None and norm.bias:
                stem = ".".join(["model", "layers", str(number), *modules])
                shapes |= {f"{stem}.weight": (norm.width,), f"{stem}.bias": (norm.width,)}
                continue
            stem = ".".join(["model", "layers", str(number), *modules])
            if leaf == "kernel" and config.packed:
                continue  # whether it is packed is seen where it is loaded
            if leaf == "kernel":
                shapes[f"{stem}.weight"] = None if config.checkpoint_format else shape[:: 1 if turned else -1]
            else:
                shapes[f"{stem}.{leaf}"] = shape
    return {name_of(name): shape for name, shape in shapes.items()}


def tie_problems(directory: Path) -> Iterator[LoraFusionError]:
    """Finds an output head that differs from the embedding although config.json says that they are one.

    transformers does not tie them then. We would train with the embedding, and merge into a folder with the other head.
    """
    try:
        config = ModelConfig.from_hf(directory)
    except LoraFusionError:  # whoever needs it reports it
        return
    family = family_named(config.family)
    tables = [family.tensor_name(f"{module}.weight") for module in ("lm_head", "model.embed_tokens")]
    files = [file for file in _listed_files(directory) if file.is_file()] if config.tie_embeddings else []
    places = {name: file for file in files for name in _entries(file)}
    head, table = names_in_file(family, config.wrapper, tables, places)[0].values()
    if {head, table} <= places.keys() and not _same_bytes(places[head], head, places[table], table):
        yield CheckpointError(
            "model.tensors-differ",
            f"{head} differs from {table}, and config.json says that they are one.",
            where=str(directory),
            why="transformers uses the head as it is in the file; with the embedding as head it is another model",
            fix="set tie_word_embeddings to false in config.json, or remove the tensor if it is not meant",
        )


def _header(file: Path) -> tuple[dict[str, dict], int]:
    """Reads the header: what it says of each tensor, and the first byte behind it."""
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return header, 8 + length


def _entries(file: Path) -> dict[str, tuple[str, int, int]]:
    """Tensor → type, first and last byte in the file."""
    header, first = _header(file)
    return {
        name: (entry["dtype"], first + entry["data_offsets"][0], first + entry["data_offsets"][1])
        for name, entry in header.items()
    }


def _same_bytes(file: Path, name: str, other: Path, other_name: str) -> bool:
    kind, start, stop = _entries(file)[name]
    other_kind, begin, end = _entries(other)[other_name]
    if (kind, stop - start) != (other_kind, end - begin):
        return False
    with open_regular(file) as stream, open_regular(other) as two:
        stream.seek(start)
        two.seek(begin)
        sizes = [min(_BLOCK, stop - start_of_block) for start_of_block in range(start, stop, _BLOCK)]
        return all(stream.read(size) == two.read(size) for size in sizes)


def _index_problems(index: Path) -> Iterator[LoraFusionError]:
    if not index.is_file():
        return
    try:
        if isinstance(json.loads(read_text(index, RECORD))["weight_map"], dict):
            return
        why = "weight_map is not an object"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as problem:
        why = f"{type(problem).__name__}: {problem}"
    yield CheckpointError("model.bad-index", "the index of the weights cannot be read.", where=str(index), why=why)


def _not_finite(file: Path) -> Iterator[str]:
    """Yields the names of tensors with NaN or infinity."""
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        for name, entry in header.items():
            if name == "__metadata__" or entry["dtype"] not in _EXPONENTS:
                continue
            kind, exponent = _EXPONENTS[entry["dtype"]]
            start, stop = entry["data_offsets"]
            if _any_all_ones(content[8 + length + start : 8 + length + stop], kind, exponent):
                yield name


def _any_all_ones(content: bytes, kind: type, exponent: int) -> bool:
    bits = np.frombuffer(content, kind)
    blocks = (bits[first : first + _BLOCK] for first in range(0, len(bits), _BLOCK))
    return any(((block & exponent) == exponent).any() for block in blocks)
