"""Saves a decoder as a Hugging Face model directory, one tensor at a time."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lorafusion_jax.errors import CheckpointError, RunError
from lorafusion_jax.models.decoder import Decoder
from lorafusion_jax.models.expert_files import write_part
from lorafusion_jax.models.naming import Tensor, frozen_tensors
from lorafusion_jax.tensor_file import bytes_of, header_of
from lorafusion_jax.weights.checkpoint_formats import INDEX, SINGLE

SHARD_BYTES = 4 * 1024**3
COMPANIONS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "chat_template.json", "tokenizer.model", "vocab.json", "merges.txt",
)  # fmt: skip
Edit = Callable[[str, jax.Array], jax.Array]


def save_decoder(
    model: Decoder,
    out_dir: str | os.PathLike[str],
    *,
    source_dir: str | os.PathLike[str] | None = None,
    edit: Edit | None = None,
    dtype: Any = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Writes the frozen leaves as a model directory for Hugging Face libraries.

    The folder appears only when it is complete. The host holds one tensor at a time.

    Args:
        model: the decoder; its LoRA weights are not written.
        out_dir: must not exist, or be empty.
        source_dir: model directory to copy config.json, tokenizer and chat template from. Default: writes a new
            config.json.
        edit: (leaf name such as "layers.0.mlp.up_proj.kernel", leaf in the decoder's layout) → what to
            write, to merge an adapter.
        dtype: dtype of the files. Default: that of the leaves.
        shard_bytes: maximum size of a file, unless a single tensor is larger.
    Raises:
        CheckpointError: out_dir exists and is not empty.
        RunError: the folder cannot be written, for example if the disk is full.

    Example:
        >>> import tempfile
        >>> from lorafusion_jax.models import ModelConfig
        >>> config = ModelConfig(family="llama", vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=1,
        ...                      num_heads=1, num_kv_heads=1, head_dim=8)
        >>> out = save_decoder(Decoder(config), tempfile.mkdtemp() + "/base")
        >>> sorted(file.name for file in out.iterdir())
        ['config.json', 'model.safetensors']
    """
    out = Path(out_dir)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError("model.out-exists", "the folder is not empty.", where=str(out), fix="another folder")
    draft = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}"
    try:
        draft.mkdir(parents=True)
        _write_companions(model, draft, None if source_dir is None else Path(source_dir), dtype)
        _write_weights(model, draft, edit, dtype, shard_bytes)
        if out.exists():
            out.rmdir()
        draft.rename(out)
    except OSError as error:
        raise RunError(
            "model.not-written",
            "the model could not be written.",
            where=str(out),
            why=str(error),
            fix="free some space",
        ) from None
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _Writer:
    """Converts tensors to bytes in the checkpoint's layout."""

    leaves: dict
    edit: Edit | None
    dtype: Any

    def parts(self, tensor: Tensor) -> list[tuple[str, tuple[int, ...]]]:
        """Names and shapes of the checkpoint's tensors that a leaf is written as."""
        return [(part.name, part.shape) for part in tensor.parts] or [(tensor.name, tensor.shape)]

    def dtype_of(self, tensor: Tensor) -> np.dtype:
        return jnp.dtype(self.leaves[tensor.path].dtype if self.dtype is None else self.dtype)

    def num_bytes(self, tensor: Tensor) -> int:
        return int(np.prod(tensor.shape)) * self.dtype_of(tensor).itemsize

    def write(self, tensor: Tensor, file: BinaryIO) -> None:
        x = self.leaves[tensor.path][...]
        if self.edit is not None:
            x = self.edit(tensor.leaf_name, x)
        x = np.asarray((x.T if tensor.transposed else x).astype(self.dtype_of(tensor)))
        if x.shape != tensor.shape:
            raise ValueError(f"edit gave {tensor.name} the shape {x.shape}, not {tensor.shape}")
        for part in tensor.parts:
            file.write(bytes_of(write_part(part, x)))
        if not tensor.parts:
            file.write(bytes_of(x))


def _write_companions(model: Decoder, draft: Path, source: Path | None, dtype: Any) -> None:
    for name in COMPANIONS:
        if name == "config.json" and model.config.wrapper:
            continue  # it describes the whole model, and this is its text part
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    if not (draft / "config.json").exists():
        kind = jnp.dtype(model.embed_tokens.weight.dtype if dtype is None else dtype).name
        _write_json(draft / "config.json", model.config.to_hf() | {"torch_dtype": kind})


def _write_weights(model: Decoder, draft: Path, edit: Edit | None, dtype: Any, shard_bytes: int) -> None:
    state = nnx.state(model, nnx.Not(nnx.LoRAParam))
    writer = _Writer(leaves=dict(nnx.to_flat_state(state)), edit=edit, dtype=dtype)
    shards = _shards(frozen_tensors(model), writer, shard_bytes)
    names = (
        [SINGLE]
        if len(shards) == 1
        else [f"model-{i:05}-of-{len(shards):05}.safetensors" for i in range(1, len(shards) + 1)]
    )
    for name, tensors in zip(names, shards, strict=True):
        _write_file(draft / name, tensors, writer)
    if len(shards) > 1:
        total = sum(writer.num_bytes(tensor) for tensors in shards for tensor in tensors)
        weight_map = {
            part: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors
            for part, _ in writer.parts(tensor)
        }  # fmt: skip
        _write_json(draft / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _shards(tensors: Sequence[Tensor], writer: _Writer, shard_bytes: int) -> list[list[Tensor]]:
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + writer.num_bytes(tensor) > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += writer.num_bytes(tensor)
    return shards


def _write_file(path: Path, tensors: Sequence[Tensor], writer: _Writer) -> None:
    """Writes a safetensors file: length of the header, header as JSON, tensors."""
    with path.open("wb") as file:
        file.write(
            header_of(
                (part, writer.dtype_of(tensor), shape) for tensor in tensors for part, shape in writer.parts(tensor)
            )
        )
        for tensor in tensors:
            writer.write(tensor, file)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
