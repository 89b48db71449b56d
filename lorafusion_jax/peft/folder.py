"""Writes and reads PEFT folders (adapter_config.json and adapter_model.safetensors) and checks every tensor.

K in · N out · r an adapter's rank
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, TypedDict, Unpack

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from lorafusion_jax import digests
from lorafusion_jax.adapters.init import SHARED
from lorafusion_jax.adapters.kind import AdapterKind, Head, Leaf
from lorafusion_jax.adapters.patterns import Patterns
from lorafusion_jax.adapters.spec import AdapterSpec
from lorafusion_jax.adapters.table import GROUP, PLAIN, adapter_kind
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.digests import find_damage, refuse_damage
from lorafusion_jax.errors import CheckpointError, ConfigError, LoraFusionError, RunError
from lorafusion_jax.families.multimodal import IN_PEFT, TEXT_ROOT
from lorafusion_jax.new_folder import new_folder
from lorafusion_jax.peft.experts import from_file, to_file
from lorafusion_jax.peft.leaves import (
    HEAD,
    NOT_PROJECTIONS,
    TOKENS,
    Arrays,
    Leaves,
    SomeLayers,
    as_exported,
    tensors_at,
)
from lorafusion_jax.peft.leaves import put_adapter as put_adapter
from lorafusion_jax.peft.leaves import take_adapter as take_adapter
from lorafusion_jax.peft.read_config import CONFIG_FILE, Described, describe, kind_of, read_config, without_absent
from lorafusion_jax.peft.required_tensors import key_of, tensor_problems
from lorafusion_jax.peft.settings import (
    KEY,
    TENSOR_FILE,
    embedding_in_peft,
    plain_name,
    root_for,
    root_of,
    text_name,
    whole_name,
)
from lorafusion_jax.peft.write_config import BY_PATH, config_of, names_each
from lorafusion_jax.plugins import origin
from lorafusion_jax.readable import check_regular
from lorafusion_jax.tensor_file import write_tensors
from lorafusion_jax.weights.table import NONE

TRANSPOSED_ROWS = 64
TOWER = re.compile(r"(?<=\.)\w*(?:vision|visual|audio|multi_modal)\w*(?=\.)")  # of a multimodal model
ONE_EXPERT = re.compile(r"\.experts\.\d+\.\w+\.lora_")


class FileOptions(TypedDict, total=False):
    """How the files of an adapter are written.

    Attributes:
        dtype: dtype of the tensors [default: float32].
        base_quantize: storage of the base in training, see `weights.table`; written to adapter_config.json.
        base_revision: commit of a base model on the hub.
        multimodal: the base is a multimodal model: the folder has the names of the whole model, not of its text part.
        root: what the multimodal model calls the text part's "model." [default: "model.language_model."].
        replace: replace an existing folder.
        finish: called with the temporary folder before it is renamed, e.g. to add a model card and tokenizer files.
    """

    dtype: Literal["float32", "bfloat16"]
    base_quantize: str
    base_revision: str | None
    multimodal: bool
    root: str
    replace: bool
    finish: Callable[[Path], None] | None


def export_adapter(
    lora_leaves: Leaves,
    spec: AdapterSpec,
    index: int,
    base_name: str,
    to_dir: str | Path,
    *,
    shapes: Mapping[str, tuple[int, int]] | None = None,
    layers: SomeLayers | None = None,
    **options: Unpack[FileOptions],
) -> Path:
    """Writes one adapter as a PEFT folder atomically, and compares what it reads back.

    An adapter of a kind that PEFT lacks is written as LoRA, if it is a low-rank product.

    Args:
        lora_leaves: the stacked LoRA weights, see `take_adapter`.
        spec: the adapter.
        index: its place among the stacked adapters.
        base_name: name or path of the base model for users of the adapter.
        to_dir: new or empty folder.
        shapes: in and out features by target; needed if projections share tensors.
        layers: see `take_adapter`.
        **options: see `FileOptions`.

    Returns:
        The folder.

    Raises:
        CheckpointError: `export.exists`; `export.not-finite`, a weight is NaN or infinite; `peft.kind`.
        RunError: `save.no-space`, `save.failed`, or `export.differs` when the folder reads back differently.
    """
    spec, arrays = as_exported(spec, take_adapter(lora_leaves, spec, index, layers), shapes)
    return write_adapter(arrays, spec, base_name, to_dir, **options)


def write_adapter(
    arrays: Arrays, spec: AdapterSpec, base_name: str, to_dir: str | Path, **options: Unpack[FileOptions]
) -> Path:
    """Writes the tensors of an adapter of a kind that PEFT has; see `export_adapter`."""
    check_finite(arrays, spec)
    dtype = ml_dtypes.bfloat16 if options.get("dtype") == "bfloat16" else np.float32
    tensors = {
        key: array.astype(dtype, copy=False)
        for key, array in peft_tensors(arrays, spec.kind, spec.head, spec.tokens).items()
    }
    quantize, revision = options.get("base_quantize", NONE), options.get("base_revision")
    paths, multimodal = [path for path in arrays if path not in NOT_PROJECTIONS], options.get("multimodal", False)
    if names_each(spec, paths, multimodal):  # so a target of which patterns leave none is not in the file
        present = {path.rpartition(".")[2] for path in paths}
        spec = replace(spec, targets=tuple(name for name in spec.targets if name in present))
    with new_folder(to_dir, replace=options.get("replace", False)) as folder:
        root = options.get("root", IN_PEFT)
        settings = json.dumps(config_of(spec, base_name, quantize, revision, paths, multimodal, root), indent=2)
        (folder / CONFIG_FILE).write_text(settings + "\n", encoding="utf-8")
        in_file = to_file(tensors)
        root = root if multimodal else root_for(paths)
        embedding = embedding_in_peft(paths)
        file_tensors = {whole_name(key, root, embedding): array for key, array in in_file.items()}
        write_tensors(folder / TENSOR_FILE, file_tensors)
        _check_copy(folder, spec, tensors)
        if finish := options.get("finish"):
            finish(folder)
    return Path(to_dir)


def check_folder_of(kind: str, *, rslora: bool = True) -> None:
    """Checks on small tensors that a folder of a kind says all of an adapter: what is read back merges the same.

    Raises:
        ConfigError: `kind.broken`.
    """
    if wrong := _lost_in_folder(kind, adapter_kind(kind), rslora):
        settings = "rsLoRA, patterns and dropout" if rslora else "patterns and dropout"
        raise ConfigError(
            "kind.broken",
            f"folders of the adapter kind '{kind}' do not say all of an adapter.",
            where=origin(GROUP, kind),
            why=f"a small adapter with {settings} reads back {wrong}",
            fix="update or repair its package: AdapterKind(peft=…) must not say another rank, alpha or pattern",
        )


def _lost_in_folder(kind: str, table: AdapterKind, rslora: bool) -> str:
    patterns = Patterns(rank=3, alpha=5, ranks=(("up_proj", 2),), alphas=(("up_proj", 7),)) if table.scaled else None
    dropout, targets = (0.25 if table.dropout else 0.0), ("q_proj", "up_proj")
    spec = AdapterSpec(
        name="small", rank=3, alpha=5, rslora=rslora, dropout=dropout, targets=targets, kind=kind, patterns=patterns
    )
    sizes, draw, paths = (
        {"K": 5, "N": 4},
        np.random.default_rng(0),
        ("layers.0.self_attn.q_proj", "layers.0.mlp.up_proj"),
    )

    def drawn(leaves: Sequence[Leaf], rank: int) -> tuple[np.ndarray, ...]:
        return tuple(draw.random(leaf.shape_in(sizes | {"R": rank}), np.float32) for leaf in leaves)

    arrays = {path: drawn(table.leaves_at(path), spec.rank_at(path)) for path in paths}
    arrays |= {SHARED: drawn(table.shared, spec.rank)} if table.shared else {}
    try:
        with TemporaryDirectory() as folder:
            exported, exported_arrays = as_exported(spec, arrays, dict.fromkeys(targets, (sizes["K"], sizes["N"])))
            written = write_adapter(exported_arrays, exported, "base", Path(folder) / "small")
            described, copy = read_described(written, exported.kind)
    except LoraFusionError as problem:
        return f"with an error: {problem}"
    w_KN = draw.random((sizes["K"], sizes["N"]), np.float32)

    def merged(spec: AdapterSpec, arrays: Arrays, path: str) -> np.ndarray:
        return np.asarray(adapter_kind(spec.kind).merge(w_KN, *tensors_at(spec, arrays, path, w_KN.shape)))

    rounding = 0 if exported.kind == kind else 1e-4  # A and B of LoRA are computed from its tensors
    if not all(
        np.allclose(merged(spec, arrays, path), merged(described.spec, copy, path), rounding, rounding)
        for path in paths
    ):
        return "with other weights"
    return "" if described.spec.dropout == dropout else f"with dropout {described.spec.dropout:g}, not {dropout:g}"


def read_adapter(folder: str | Path, kind: str | None = None, head: Head | None = None) -> tuple[AdapterSpec, Arrays]:
    """Reads a PEFT folder and compares its files with SHA256SUMS, if there is one.

    Args:
        folder: with adapter_config.json and adapter_model.safetensors.
        kind: name of its adapter kind (None: the built-in kind that adapter_config.json describes).
        head: of the objective that continues it (None: the folder may have none). A folder may lack it.

    Returns:
        The specification (named after the folder, without the seed, which a folder does not hold) and
        "layers.0.self_attn.q_proj" → the tensors of its kind, float32; for LoRA (a [K, r], b [r, N]). If rank_pattern
        gives a projection a lower rank, its r is lower than that of the specification. An adapter of some layers has
        no arrays of the others.

    Raises:
        CheckpointError: `peft.missing-file`, `peft.pickle` (only adapter_model.bin), `peft.bad-config`,
            `peft.damaged`, `peft.unsupported`, `peft.tensors` (missing, extra and misshapen tensors, all in one).
        ErrorList: several options that are not supported.
    """
    described, arrays = read_described(Path(folder), kind, head)
    return described.spec, arrays


def read_described(folder: Path, kind: str | None = None, head: Head | None = None) -> tuple[Described, Arrays]:
    """Like `read_adapter`, with the full description of the adapter."""
    described, tensors = _read(folder, kind, head)
    table = adapter_kind(described.spec.kind)

    def read(path: str, leaves: Sequence[Leaf]) -> tuple[np.ndarray, ...]:
        return tuple(_transposed(tensors[key_of(path, leaf)].astype(np.float32, copy=False)) for leaf in leaves)

    arrays = {path: read(path, table.leaves_at(path)) for path in _paths(tensors, table)}
    arrays |= {SHARED: read(SHARED, table.shared)} if table.shared else {}
    arrays |= {HEAD: read(HEAD, described.spec.head.leaves)} if described.spec.head else {}
    return described, arrays | ({TOKENS: read(TOKENS, described.spec.tokens.leaves)} if described.spec.tokens else {})


def _read(folder: Path, kind: str | None = None, head: Head | None = None) -> tuple[Described, dict[str, np.ndarray]]:
    """Returns the description of a folder and its tensors, which fit it."""
    check_digests(folder)
    raw, stored, where = read_config(folder), read_tensors(folder), str(folder / TENSOR_FILE)
    raw = without_absent(raw, stored)
    text_tensors = {text_name(key)[0]: array for key, array in stored.items()}
    if len(text_tensors) < len(stored):
        why = "the text part of a multimodal model has two names in it"
        raise CheckpointError("peft.tensors", f"{TENSOR_FILE} does not hold one adapter.", where=where, why=why)
    tensors, raw = from_file(text_tensors, raw, where)
    kind = kind_of(raw) if kind is None else kind
    paths, name, settings = _paths(tensors, adapter_kind(kind)), folder.resolve().name, str(folder / CONFIG_FILE)
    described = describe(raw, paths, name, settings, kind=kind, head=head, root=root_of(stored))
    problems = tensor_problems(tensors, paths, described)
    if problems:
        towers, why, fix = sorted({match[0] for key in stored if (match := TOWER.search(key))}), "", ""
        if towers:
            why = f"it is on {', '.join(towers)}, too, and only text parts are trained here"
            fix = f"train it with exclude_modules=r'.*({'|'.join(towers)}).*'"
        elif any(ONE_EXPERT.search(key) for key in stored):
            why = "it has tensors of each expert alone, as PEFT wrote them before transformers 5"
            fix = "PeftModel.from_pretrained(base, FOLDER).save_pretrained(NEW), with PEFT 0.21 and transformers 5"
        raise CheckpointError(
            "peft.tensors",
            f"{TENSOR_FILE} does not hold this adapter.",
            where=f"{where}\n    " + "\n    ".join(problems),
            why=why,
            fix=fix,
        )
    return described, tensors


def cast_tensors(folder: Path, dtype: str) -> None:
    """Rewrites the tensors of a PEFT folder in another dtype, rounded to the nearest."""
    to = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with safe_open(folder / TENSOR_FILE, "np") as reader:
        tensors = {key: reader.get_tensor(key).astype(to) for key in reader.keys()}  # noqa: SIM118 (no mapping)
    write_tensors(folder / TENSOR_FILE, tensors)


def name_for_multimodal(folder: Path, kind: str, head: Head | None = None, root: str = IN_PEFT) -> None:
    """Rewrites a folder that has the names of a text part alone, as earlier versions wrote it, for the whole model."""
    described, arrays = read_described(folder, kind, head)
    if described.root != TEXT_ROOT:
        return
    settings = read_config(folder)
    paths = [path for path in arrays if path not in NOT_PROJECTIONS]
    whole_settings = config_of(described.spec, described.base, NONE, described.revision, paths, True, root)
    text = json.dumps(settings | {key: whole_settings[key] for key in BY_PATH if key in whole_settings}, indent=2)
    (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
    write_tensors(folder / TENSOR_FILE, {whole_name(key, root): array for key, array in read_tensors(folder).items()})


def check_digests(folder: Path) -> None:
    """Checks that the files of an adapter are unchanged. Folders of other programs have no digests.

    Raises:
        CheckpointError: `peft.damaged`.
    """
    if digests.has_digests(folder):
        refuse_damage(
            "peft.damaged",
            find_damage(folder, (CONFIG_FILE, TENSOR_FILE)),
            fix=f"take another copy or another step; if you changed the file yourself, remove {folder / digests.FILE}",
        )


def peft_tensors(
    arrays: Arrays, kind: str = PLAIN, head: Head | None = None, tokens: TokenRows | None = None
) -> dict[str, np.ndarray]:
    """Converts to PEFT's names and shapes; for LoRA lora_A.weight [r, K] and lora_B.weight [N, r].

    Those of experts, [E, r, K] and [E, N, r], have other names and shapes in files, see `experts`.
    """
    table = adapter_kind(kind)
    leaves_of = {SHARED: table.shared, HEAD: () if head is None else head.leaves}
    leaves_of |= {} if tokens is None else {TOKENS: tokens.leaves}
    return {
        key_of(path, leaf): _transposed(array)
        for path, tensors in arrays.items()
        for leaf, array in zip(leaves_of.get(path, table.leaves_at(path)), tensors, strict=True)
    }


def _transposed(array: np.ndarray) -> np.ndarray:
    """Swaps in and out; vectors stay as they are."""
    if array.ndim == 3:
        return np.ascontiguousarray(array.swapaxes(1, 2))
    return _transpose(array) if array.ndim == 2 else array


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """Reads every tensor of a PEFT folder."""
    file = folder / TENSOR_FILE
    if not file.is_file():
        if (folder / "adapter_model.bin").is_file():
            raise CheckpointError(
                "peft.pickle",
                "adapter_model.bin is a pickle, which can run any program; it is not read.",
                where=str(folder),
                fix="load it with peft where you trust it, then model.save_pretrained(folder, safe_serialization=True)",
            )
        raise CheckpointError("peft.missing-file", f"{folder} has no {TENSOR_FILE}.")
    try:
        check_regular(file)
        with safe_open(file, "np") as reader:
            names = {key: plain_name(key) for key in reader.keys()}  # noqa: SIM118 (no mapping)
            if len(set(names.values())) < len(names):  # both forms of a name: one of them is extra
                names = {key: key for key in names}
            return {name: reader.get_tensor(key) for key, name in names.items()}
    except (SafetensorError, OSError, TypeError) as problem:
        raise CheckpointError(
            "peft.damaged", f"{TENSOR_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None


def check_finite(arrays: Arrays, spec: AdapterSpec) -> None:
    """Checks that all weights of an adapter are finite.

    Raises:
        CheckpointError: `export.not-finite`.
    """
    bad = [path for path, pair in arrays.items() if not all(np.isfinite(array).all() for array in pair)]
    if bad:
        raise CheckpointError(
            "export.not-finite",
            f"{spec.name}: {len(bad)} weights are NaN or infinite.",
            where=", ".join(bad[:4]),
            fix="export an earlier checkpoint",
        )


def _check_copy(folder: Path, spec: AdapterSpec, tensors: dict[str, np.ndarray]) -> None:
    """Reads the folder back, with the checks of the public reader, and compares its tensors with what was written."""
    copy_spec, copy_tensors = _read(folder, spec.kind, spec.head)
    same = copy_spec.same_settings(spec)
    if (
        not same
        or copy_tensors.keys() != tensors.keys()
        or any((copy_tensors[key] != tensors[key]).any() for key in copy_tensors)
    ):
        raise RunError("export.differs", f"{spec.name}: the written folder reads back differently.", where=str(folder))


def _paths(tensors: dict[str, np.ndarray], kind: AdapterKind) -> list[str]:
    """Returns the projections that have tensors."""
    names = {leaf.peft_name for leaf in kind.of_projections}
    matches = (KEY.fullmatch(key) for key in tensors)
    return list(dict.fromkeys(match[1] for match in matches if match and match[4] in names))


def _transpose(matrix: np.ndarray) -> np.ndarray:
    """Returns the transposed matrix in C order, made in blocks that fit into caches: up to eight times as fast."""
    transposed = np.empty(matrix.shape[::-1], matrix.dtype)
    for start in range(0, len(matrix), TRANSPOSED_ROWS):
        rows = slice(start, start + TRANSPOSED_ROWS)
        transposed[:, rows] = matrix[rows].T
    return transposed
