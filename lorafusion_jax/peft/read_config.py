"""adapter_config.json → AdapterSpec, from PEFT's words; write_config.py writes it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lorafusion_jax.adapters.kind import AdapterKind, Head
from lorafusion_jax.adapters.patterns import Patterns, matches, unusable_pattern
from lorafusion_jax.adapters.spec import ALL_LINEAR, AdapterSpec, spelled
from lorafusion_jax.adapters.table import KINDS, PLAIN, adapter_kind
from lorafusion_jax.adapters.tokens import TokenRows
from lorafusion_jax.errors import CheckpointError, LoraFusionError, first_few, raise_all
from lorafusion_jax.families.hf_config import shortened
from lorafusion_jax.families.multimodal import TEXT_ROOT
from lorafusion_jax.families.token_rows import check_tokens, token_rows
from lorafusion_jax.layout.layer import EMBEDDING, EMBEDDINGS, GPT_2, PATHS, RENAMED, ROOTS
from lorafusion_jax.peft.experts import targets_of
from lorafusion_jax.readable import SETTINGS, has_folder, read_text

CONFIG_FILE = "adapter_config.json"
LORA = "LORA"  # PEFT's type
WEIGHT = ".weight"  # of a projection that PEFT trains as a parameter
LAYERS = "layers"  # of `layers_pattern`: modules of other names are not numbered here
SAVED, TRAINED_TOKENS = "modules_to_save", "trainable_token_indices"
ADDED = ("classifier", "score")  # to `modules_to_save` by PEFT, for the task SEQ_CLS
REMEDIES = {  # an option of adapters is not supported → what to do
    "save_projection": "load it with PEFT, set config.save_projection = True, and save it again: A and B are not in it",
}
# Options that do not change what a trained adapter computes. Every other option that is set is refused by name: PEFT
# gains variants with every release, and an unknown one must not be dropped in silence.
_NEUTRAL = frozenset(
    {
        "peft_type",
        "task_type",
        "peft_version",
        "base_model_name_or_path",
        "revision",
        "auto_mapping",
        "inference_mode",
        "r",
        "lora_alpha",
        "lora_dropout",
        "use_rslora",
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "init_weights",  # the same of VeRA, true or false
        "bias",  # looked at below, as modules_to_save
        "eva_config",
        "lora_ga_config",
        "fan_in_fan_out",  # PEFT sets it by the class of each projection
        "megatron_core",
        "qalora_group_size",
        "runtime_config",
        "base_quantize",
        TRAINED_TOKENS,
        SAVED,
    }
)
_OFF: tuple[Any, ...] = (None, False, [], {})
MOST_RANK, MOST_LAYERS = 2**16, 4096
MOST_FOLDERS = 3  # that an error offers
EVERYWHERE = ("embed_tokens", "lm_head", "norm", "input_layernorm", "post_attention_layernorm")  # in every base
_PLAIN_INIT = (None, True, False, "gaussian", "eva", "orthogonal")  # others (pissa, olora, loftq …) change the base


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What adapter_config.json says of an adapter.

    Attributes:
        spec: the adapter.
        ranks: path of a projection, e.g. "layers.0.self_attn.q_proj" → its own rank.
        layers: that carry the adapter; None: all, or those that the tensors speak of.
        some_layers: the adapter may be on some layers or projections of a layer only.
        as_parameters: PEFT trains weights of MLPs as parameters, because other layers have experts.
        has_scale: whether alpha and rslora mean anything; they do not for some kinds.
        root: what the folder calls the text part's "model.": other words in adapters of a multimodal model.
        base: name or path of the base model, "" where the file does not say.
        revision: of the base model.
    """

    spec: AdapterSpec
    ranks: Mapping[str, int]
    layers: tuple[int, ...] | None
    some_layers: bool
    as_parameters: bool
    has_scale: bool
    root: str
    base: str
    revision: str | None

    def same_settings(self, spec: AdapterSpec) -> bool:
        """Whether kind, rank, scale and targets are those of a specification."""
        described = self.spec
        same = (described.kind, set(described.targets)) == (spec.kind, set(spec.targets))
        same = same and described.tokens == spec.tokens
        if described.patterns is None and spec.patterns is None:
            scale = (
                not self.has_scale
                or (described.alpha, described.rslora) == (spec.alpha, spec.rslora)
                or described.scale == spec.scale
            )
            return same and scale and described.rank == spec.rank
        return same and all(
            spec.has(path)
            and spec.rank_at(path) == rank
            and (not self.has_scale or math.isclose(spec.scale_at(path), described.scale_at(path)))
            for path, rank in self.ranks.items()
        )


def kind_of(raw: Mapping[str, Any]) -> str:
    """Returns the built-in adapter kind that adapter_config.json describes, or comes nearest to; LoRA if none does."""
    of_type = {
        name: kind.peft
        for name, kind in KINDS.items()
        if kind.peft is not None and peft_type(kind) == raw.get("peft_type")
    }
    fits = {name: len(entries) for name, entries in of_type.items() if _says(raw, entries)}
    return max(fits, key=lambda name: fits[name], default=PLAIN if PLAIN in of_type else next(iter(of_type), PLAIN))


def _says(raw: Mapping[str, Any], entries: Mapping[str, Any]) -> bool:
    return all(raw.get(key) == value for key, value in entries.items() if not callable(value))


def without_absent(raw: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Takes out of `modules_to_save` what PEFT adds to it whether the model has it or not, and repetitions.

    Args:
        keys: of the tensors in the folder.

    >>> without_absent({"modules_to_save": ["classifier", "score"]}, ["base_model.model.score.weight"])
    {'modules_to_save': ['score']}
    """
    saved, keys = raw.get(SAVED), list(keys)
    if not isinstance(saved, list):
        return dict(raw)
    absent = [name for name in ADDED if not any(f".{name}." in key for key in keys)]
    return {**raw, SAVED: list(dict.fromkeys(name for name in map(str, saved) if name not in absent)) or None}


def peft_type(kind: AdapterKind) -> str:
    return (kind.peft or {}).get("peft_type", LORA)


def did_you_mean_adapter(folder: Path, typed: str | Path) -> str:
    """Names the PEFT folders of a run that were meant by a folder above them; "" if there are none."""
    for below in ("latest", "*/latest", "adapters/*/latest") if has_folder(folder) else ():
        files = sorted(folder.glob(f"{below}/{CONFIG_FILE}"))
        if folders := [str(Path(typed) / file.parent.relative_to(folder)) for file in files]:
            return f"did you mean {first_few(folders, MOST_FOLDERS)}?"
    return ""


def read_config(folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json.

    Raises:
        CheckpointError: `peft.missing-file` or `peft.bad-config`.
    """
    file = folder / CONFIG_FILE
    try:
        raw = json.loads(read_text(file, SETTINGS))
    except FileNotFoundError:
        message, near = f"{folder} is not a PEFT folder: it has no {CONFIG_FILE}.", did_you_mean_adapter(folder, folder)
        raise CheckpointError("peft.missing-file", message, fix=near) from None
    except (OSError, ValueError, RecursionError) as problem:  # also numbers of thousands of digits
        raise CheckpointError(
            "peft.bad-config", f"{CONFIG_FILE} cannot be read.", where=str(file), why=str(problem)
        ) from None
    if not isinstance(raw, dict):
        raise CheckpointError("peft.bad-config", f"{CONFIG_FILE} is not a JSON object.", where=str(file))
    return raw


def describe(
    raw: Mapping[str, Any],
    paths: Iterable[str],
    name: str,
    where: str,
    known: Sequence[str] = tuple(PATHS),
    kind: str = PLAIN,
    head: Head | None = None,
    root: str = TEXT_ROOT,
) -> Described:
    """Reads what an adapter is.

    Args:
        raw: adapter_config.json.
        paths: of the projections that the tensors speak of, e.g. "layers.0.self_attn.q_proj".
        name: of the adapter.
        where: file, for messages.
        known: projections that there can be.
        kind: name of its adapter kind.
        head: that it may have.
        root: see `Described`.

    Raises:
        CheckpointError, ErrorList: every option that is not supported (`peft.unsupported`) and every value that is
            missing or wrong (`peft.bad-config`).
    """
    paths = sorted(paths)
    errors: list[LoraFusionError] = [
        CheckpointError(
            "peft.unsupported",
            f"this adapter uses {option}, which is not supported.",
            where=where,
            fix=REMEDIES.get(option.partition("=")[0], ""),
        )
        for option in _unsupported_options(raw, adapter_kind(kind))
    ]
    saved = raw.get(SAVED) if raw.get(SAVED) not in _OFF else None
    if saved is not None and (head is None or not _names_all(saved, head.modules)):
        errors.append(_other_head(saved, head, where))
    targets = _targets(raw, sorted({path.rsplit(".", 1)[-1] for path in paths}), where, errors, known)
    layers = _layers(raw, where, errors)
    rank = int(_number(raw, "r", None, where, errors))
    has_scale, of_lora = adapter_kind(kind).alpha_matters, peft_type(adapter_kind(kind)) == LORA
    if has_scale and not of_lora:
        errors += [_no_scale(key, kind, where) for key in ("lora_alpha", "use_rslora") if key not in raw]
    alpha = float(_number(raw, "lora_alpha", None if of_lora else rank, where, errors))
    dropout = float(_number(raw, dropout_key(adapter_kind(kind)), 0.0, where, errors))
    patterns = _patterns(raw, rank, alpha, layers, where, errors, root, paths)
    tokens = _tokens(raw, adapter_kind(kind), name, where, errors)
    raise_all(errors)
    ranks = dict.fromkeys(paths, rank) if patterns is None else {path: patterns.rank_of(path) for path in paths}
    base, revision, parameters = (raw.get(key) for key in ("base_model_name_or_path", "revision", "target_parameters"))
    return Described(
        spec=AdapterSpec(
            name=name,
            rank=rank if patterns is None else patterns.largest_rank,
            alpha=alpha,
            rslora=bool(raw.get("use_rslora")),
            dropout=dropout,
            targets=targets,
            kind=kind,
            patterns=patterns,
            head=None if saved is None else head,
            tokens=tokens,
        ),
        ranks=ranks,
        layers=layers,
        some_layers=_some_layers(raw),
        as_parameters=isinstance(parameters, list) and any(str(name).endswith(WEIGHT) for name in parameters),
        has_scale=has_scale,
        root=root,
        base=base if isinstance(base, str) else "",
        revision=revision if isinstance(revision, str) else None,
    )


def _tokens(
    raw: Mapping[str, Any], kind: AdapterKind, name: str, where: str, errors: list[LoraFusionError]
) -> TokenRows | None:
    indices = raw.get(TRAINED_TOKENS)
    if indices in _OFF:
        return None
    if isinstance(indices, dict):
        indices = {EMBEDDING if name in EMBEDDINGS.values() else name: ids for name, ids in indices.items()}
    try:
        checked = check_tokens(indices)
        lists: Iterable[Any] = checked.values() if isinstance(checked, dict) else [checked]
        if peft_type(kind) != LORA or not all(isinstance(token, int) for tokens in lists for token in tokens):
            raise ValueError("a list of ids, or {embed_tokens: …, lm_head: …}")
        return token_rows(name, indices, None)
    except ValueError as problem:
        message = f"{TRAINED_TOKENS}={shortened(indices)} names no rows of the embedding or the head."
        errors.append(CheckpointError("peft.bad-config", message, where=where, why=f"it must be {problem}"))
        return None


def _names_all(saved: Any, modules: Sequence[str]) -> bool:
    return isinstance(saved, list) and sorted(map(str, saved)) == sorted(modules)


def _other_head(saved: Any, head: Head | None, where: str) -> CheckpointError:
    return CheckpointError(
        "peft.unsupported",
        f"this adapter has modules of its own, {SAVED}={shortened(saved)}, which is not supported here.",
        where=where,
        why="only an adapter whose objective trains the same modules can continue it, and this one trains "
        + (", ".join(head.modules) if head else "none"),
        fix="objective: {name: reward} continues a score; lora.trainable_tokens trains rows of the embedding and the "
        "head, instead of all; the model itself can be merged by PEFT",
    )


def dropout_key(kind: AdapterKind) -> str:
    """PEFT's name of dropout: lora_dropout, or what the kind writes from the specification."""
    keys = (key for key, value in (kind.peft or {}).items() if key.endswith("_dropout") and callable(value))
    return next(keys, "lora_dropout")


def _no_scale(key: str, kind: str, where: str) -> CheckpointError:
    return CheckpointError(
        "peft.bad-config",
        f"the file has no {key}, without which the scale of an adapter of kind {kind} is not known.",
        where=where,
        fix=f"add {key} as the adapter was trained, or export the adapter again",
    )


def _unsupported_options(raw: Mapping[str, Any], kind: AdapterKind) -> list[str]:
    peft_entries = kind.peft or {}
    unsupported = [] if raw.get("peft_type") == peft_type(kind) else [f"peft_type={shortened(raw.get('peft_type'))}"]
    unsupported += [
        f"{key}={shortened(value)}"
        for key, value in raw.items()
        if key not in _NEUTRAL and value not in _OFF and key not in peft_entries
        if key != "ensure_weight_tying" or raw.get(TRAINED_TOKENS) not in _OFF  # it is about embedding and head
    ]
    unsupported += [
        f"{key}={shortened(raw.get(key))}"
        for key, value in peft_entries.items()
        if key != "peft_type" and not callable(value) and raw.get(key) != value
    ]
    unsupported += [f"bias={shortened(raw['bias'])}"] if raw.get("bias") not in (None, "none") else []
    init = raw.get("init_lora_weights")
    unsupported += [f"init_lora_weights={shortened(init)}"] if init not in _PLAIN_INIT else []
    pattern = raw.get("layers_pattern")
    names = [pattern] if isinstance(pattern, str) else pattern
    in_layers = isinstance(names, list) and LAYERS in names and all(str(name).isidentifier() for name in names)
    return (
        unsupported if in_layers or pattern in (*_OFF, "") else [*unsupported, f"layers_pattern={shortened(pattern)}"]
    )


def _some_layers(raw: Mapping[str, Any]) -> bool:
    """Whether the file lets projections out that it does not list one by one."""
    targets = raw.get("target_modules")
    names = targets if isinstance(targets, list) else []
    return (
        (isinstance(targets, str) and targets != ALL_LINEAR and targets not in PATHS)
        or any("." in str(name) for name in names)
        or raw.get("layers_to_transform") not in _OFF
        or raw.get("exclude_modules") not in (*_OFF, "")
    )


def _layers(raw: Mapping[str, Any], where: str, errors: list[LoraFusionError]) -> tuple[int, ...] | None:
    layers = raw.get("layers_to_transform")
    if layers is None or layers == []:
        return None
    numbers = layers if isinstance(layers, list) else [layers]
    if all(type(number) is int and 0 <= number < MOST_LAYERS for number in numbers):
        return tuple(sorted(set(numbers)))
    message = f"layers_to_transform={shortened(layers)} is not a list of layers from 0."
    errors.append(CheckpointError("peft.bad-config", message, where=where))
    return ()


def _patterns(
    raw: Mapping[str, Any],
    rank: int,
    alpha: float,
    layers: tuple[int, ...] | None,
    where: str,
    errors: list[LoraFusionError],
    root: str,
    paths: Sequence[str],
) -> Patterns | None:
    """Returns what differs between projections; None if nothing does."""
    ranks, alphas = (
        _for_parameters(_pattern(raw, key, where, errors), number, raw, paths, root)
        for key, number in (("rank_pattern", rank), ("alpha_pattern", alpha))
    )
    exclude = raw.get("exclude_modules") or ()
    names = exclude if isinstance(exclude, list | tuple) else ()
    wrong = unusable_pattern(exclude) if isinstance(exclude, str) else None
    if wrong or not (isinstance(exclude, str) or (exclude == names and all(isinstance(name, str) for name in names))):
        errors.append(_other_pattern("exclude_modules", shortened(exclude), wrong or "it is no list of names", where))
        return None
    if not (layers or exclude) and all(n == rank for _, n in ranks) and all(n == alpha for _, n in alphas):
        return None
    return Patterns(
        rank=rank,
        alpha=alpha,
        ranks=tuple((name, int(number)) for name, number in ranks),
        alphas=alphas,
        layers=layers,
        exclude=exclude if isinstance(exclude, str) else tuple(names),
        roots=(root,),
    )


def _pattern(
    raw: Mapping[str, Any], key: str, where: str, errors: list[LoraFusionError]
) -> tuple[tuple[str, float], ...]:
    pattern = raw.get(key) or {}
    if not isinstance(pattern, dict):
        errors.append(CheckpointError("peft.bad-config", f"{key}={shortened(pattern)} is not an object.", where=where))
        return ()
    numbers = []
    for name, value in pattern.items():
        experts = "experts" in name.replace("shared_experts", "")
        wrong = "experts have the adapter's own rank and alpha" if experts else unusable_pattern(name)
        if wrong:
            errors.append(_other_pattern(key, shortened(name), wrong, where))
        else:
            numbers.append((name, _number({key: value}, key, None, where, errors)))
    return tuple(numbers)


def _for_parameters(
    patterns: tuple[tuple[str, float], ...], number: float, raw: Mapping[str, Any], paths: Sequence[str], root: str
) -> tuple[tuple[str, float], ...]:
    """Names projections that PEFT trains as parameters one by one: it compares patterns with "….up_proj.weight"."""
    parameters = raw.get("target_parameters") or []
    ends = tuple(f".{name}" for name in parameters if isinstance(name, str) and name.endswith(WEIGHT))
    trained = [path for path in paths if f".{root}{path}{WEIGHT}".endswith(ends)]
    if not trained or not patterns:
        return patterns

    def number_at(path: str, entries: Sequence[tuple[str, float]]) -> float:
        return next((value for name, value in entries if matches(name, path, (root,))), number)

    modules = [path for path in paths if path not in trained]
    of_modules = [entry for entry in patterns if any(matches(entry[0], path, (root,)) for path in modules)]
    of_trained = {path: number_at(f"{path}{WEIGHT}", patterns) for path in trained}
    return (*(entry for entry in of_trained.items() if number_at(entry[0], of_modules) != entry[1]), *of_modules)


def _other_pattern(key: str, pattern: str, why: str, where: str) -> CheckpointError:
    message = f"this adapter uses {key} with {pattern}, which is not supported."
    return CheckpointError("peft.unsupported", message, where=where, why=why)


def _targets(
    raw: Mapping[str, Any], present: list[str], where: str, errors: list[LoraFusionError], known: Sequence[str]
) -> tuple[str, ...]:
    """The named projections; a pattern ("all-linear", a regular expression) means those that the tensors speak of.

    Names of which no layer has a tensor match nothing in the base, as q_proj in one with latents: PEFT ignores them.
    But where the adapter lets projections out, it may be on none of that name.
    """
    targets, experts = raw.get("target_modules"), targets_of(raw)
    if experts and targets in (None, [], ""):
        targets = []
    names = present if isinstance(targets, str) and (targets == ALL_LINEAR or targets not in known) else targets
    names = [names] if isinstance(names, str) else names
    roots = {ROOTS.get(name) for name in present if name in RENAMED or ROOTS.get(name) == GPT_2}
    renamed = [name for name in RENAMED if ROOTS.get(name) in roots]
    if isinstance(names, list) and renamed:
        names = [projection for name in names for projection in spelled(".".join(str(name).split(".")[-2:]), renamed)]
    names = [*names, *experts] if isinstance(names, list) else names
    if not isinstance(names, list) or not names:
        message = f"target_modules={shortened(targets)} names no projection."
        errors.append(CheckpointError("peft.bad-config", message, where=where))
        return ()
    last = {str(name): str(name).rsplit(".", 1)[-1] for name in names}
    matched = any(part in known for part in last.values())
    others = [
        name
        for name, part in last.items()
        if part not in known and (part in present or part in EVERYWHERE or not matched)
    ]  # PEFT ignores names that match nothing, where others match
    errors += [
        CheckpointError(
            "peft.unsupported",
            f"this adapter targets {shortened(name)}, which is not supported.",
            where=where,
            why=f"only {', '.join(known)} can have LoRA here",
        )
        for name in others
    ]
    some = [name for name in known if name in last.values()]
    if _some_layers(raw) or not any(name in present for name in some):
        return tuple(some)
    return tuple(name for name in some if name in present)


def _number(
    raw: Mapping[str, Any], key: str, default: float | None, where: str, errors: list[LoraFusionError]
) -> float:
    """A rank, an alpha or a rate in its range; 1 where it is wrong, which is one of the errors."""
    value = raw.get(key, default)
    is_rank = key in ("r", "rank_pattern")
    good = not isinstance(value, bool) and isinstance(value, int | float)
    if good and key.endswith("_dropout"):
        good = 0 <= value < 1
    elif good:
        good = 0 < value <= (MOST_RANK if is_rank else 1e30) and (not is_rank or value == int(value))
    if not good:
        valid_range = "in [0, 1)" if key.endswith("_dropout") else "a whole number from 1" if is_rank else "above 0"
        message = f"{key}={shortened(value)} cannot be used: it must be {valid_range}."
        errors.append(CheckpointError("peft.bad-config", message, where=where))
        return 1
    return value
