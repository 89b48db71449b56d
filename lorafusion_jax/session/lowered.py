"""Keeps programs in lowered form between processes: a later start neither traces nor lowers them.

Most of a warm start was Python: a Mosaic kernel takes 0.3 to 0.5 s to lower, and a layer has 24. The files are those of
`jax.export`, in the folder "lowered" of jax's compilation cache. Their names are digests of all that a program depends
on, so another version, device, shape or source is another file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, wraps
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
from jax import export

from lorafusion_jax.files import replace_bytes
from pallas_kernels import config_store

# Targets whose meaning may change between versions of jax, which are part of a file's name.
CUSTOM_CALLS = (
    "mosaic_gpu_v2",
    "__gpu$xla.gpu.triton",
    "triton_kernel_call",
    "__cudnn$fmhaSoftmax",
    "__cudnn$fmhaSoftmaxBackward",
)
PACKAGES = (
    "jax", "jaxlib", "flax", "jax-cuda12-plugin", "jax-cuda13-plugin", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13",
    "nvidia-nvjitlink", "nvidia-nvjitlink-cu12",
)  # fmt: skip
# Modules that set up what the custom calls of kernels need when they run. Whoever traces a kernel has imported them.
KERNEL_RUNTIMES = ("jax.experimental.mosaic.gpu", "jax.experimental.pallas.triton")
SETTINGS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion", "jax_threefry_partitionable")
SOURCES = ("lorafusion_jax", "pallas_kernels")
MOST = 512  # files; the least recently written are removed


def kept(function: Callable, identity: str) -> Callable:
    """Returns a function for `jax.jit` of one device that is traced only if no file has its lowered form.

    Args:
        function: pytrees of arrays → pytrees of tuples, lists and dictionaries. Without side effects.
        identity: everything else that decides what it computes.
    """

    @wraps(function)
    def call(*operands: Any) -> Any:
        folder = lowered_folder()
        if folder is None:
            return function(*operands)
        leaves, tree = jax.tree.flatten(operands)
        shapes = [jax.typeof(leaf) for leaf in leaves]
        file = folder / _name(function.__name__, identity, tree, shapes)
        program = read_program(file)
        if program is None:
            program = _lower(lambda *leaves: function(*jax.tree.unflatten(tree, leaves)), shapes)
            if program is None:
                return function(*operands)
            _write(file, program)
        return program.call(*leaves)

    return call


def lowered_folder() -> Path | None:
    """Where lowered programs are; None if compiled ones are not kept in a folder either."""
    return folder_of(jax.config) if find_spec("flatbuffers") else None  # jax.export writes with it


def started_before(facts: str) -> bool:
    """Whether a start with these facts has ended, so that its programs were kept."""
    folder = lowered_folder()
    return folder is not None and _start_file(folder, facts).exists()


def mark_start(facts: str) -> None:
    """Records that the programs of a start with these facts are kept."""
    if (folder := lowered_folder()) is not None:
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            _start_file(folder, facts).touch()


def _start_file(folder: Path, facts: str) -> Path:
    text = repr((facts, _versions(), source_digest()))
    return folder / f"{hashlib.sha256(text.encode()).hexdigest()[:40]}.started"


def folder_of(config: Any) -> Path | None:
    """`lowered_folder` by a configuration of jax."""
    folder = config.jax_compilation_cache_dir
    if not folder or "://" in folder or not config.jax_enable_compilation_cache:
        return None
    return Path(folder) / "lowered"


def read_program(file: Path) -> export.Exported | None:
    """Reads a program; None if there is none, or if its file is damaged."""
    try:
        content = file.read_bytes()
    except OSError:
        return None
    digest, program = content[:32], content[32:]
    if hashlib.sha256(program).digest() != digest:
        return None
    exported = export.deserialize(bytearray(program))
    if "cuda" in exported.platforms:
        for module in KERNEL_RUNTIMES:
            import_module(module)
    return exported


def _lower(function: Callable, shapes: list[Any]) -> export.Exported | None:
    """Traces and lowers; None for what jax cannot export, such as calls of the host."""
    arguments = [jax.ShapeDtypeStruct(shape.shape, shape.dtype, weak_type=shape.weak_type) for shape in shapes]
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in CUSTOM_CALLS]
    try:
        return export.export(jax.jit(function), disabled_checks=checks)(*arguments)
    except (NotImplementedError, ValueError):  # an error of the function itself comes again when it runs
        return None


def _write(file: Path, program: export.Exported) -> None:
    content = bytes(program.serialize())
    with suppress(OSError):  # a full disk is reported where it matters
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_bytes(file, hashlib.sha256(content).digest() + content)
        files = sorted(file.parent.glob("[!.]*"), key=lambda entry: entry.stat().st_mtime)
        for stale in files[:-MOST]:
            stale.unlink(missing_ok=True)


def _name(function: str, identity: str, tree: Any, shapes: list[Any]) -> str:
    types = [(str(shape), shape.weak_type) for shape in shapes]
    settings = [(name, getattr(jax.config, name)) for name in SETTINGS]
    text = repr((function, identity, str(tree), types, settings, _surroundings(jax.devices()[0].device_kind)))
    return f"{function.strip('_')}-{hashlib.sha256(text.encode()).hexdigest()[:40]}.program"


def _surroundings(device_kind: str) -> tuple:
    device = jax.devices()[0]
    measured = config_store.used_digest(device_kind)
    return (
        _versions(),
        source_digest(),
        device_kind,
        device.client.platform_version,
        getattr(device, "core_count", 0),
        measured,
    )


@lru_cache
def _versions() -> tuple[str, ...]:
    lines = []
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            lines.append(f"{package} {version(package)}")
    return tuple(lines)


@lru_cache
def source_digest() -> str:
    """Digest of the source of the packages that define programs."""
    top, total = Path(__file__).parents[2], hashlib.sha256()
    for package in SOURCES:
        for file in sorted((top / package).rglob("*.py")):
            total.update(file.relative_to(top).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return total.hexdigest()
