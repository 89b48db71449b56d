"""Checks that need several values of a job: names, lengths, mesh and targets; and settings without effect."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from lorafusion_jax.adapters.patterns import matches
from lorafusion_jax.adapters.spec import resolve_targets
from lorafusion_jax.adapters.table import adapter_kind
from lorafusion_jax.adapters.tokens import GROUP as TOKENS
from lorafusion_jax.config import schema
from lorafusion_jax.config.chat_templates import NAMED, is_template
from lorafusion_jax.config.merge import Entry
from lorafusion_jax.config.read import Keys, Source
from lorafusion_jax.config.references import reference_of, unknown_reference
from lorafusion_jax.config.rollout_section import ANSWER, estimator_of
from lorafusion_jax.config.user_functions import missing_function, unknown_arguments, wrong_tool
from lorafusion_jax.errors import ConfigError, LoraFusionError, did_you_mean
from lorafusion_jax.layout.layer import PATHS
from lorafusion_jax.objective.choose import on_rollouts
from lorafusion_jax.objective.protocol import DIVERGENCE, Chosen
from lorafusion_jax.optim.schedules import schedule
from lorafusion_jax.optim.table import optimizer
from lorafusion_jax.peft.read_config import CONFIG_FILE, did_you_mean_adapter
from lorafusion_jax.peft.settings import describe_folder, has_score
from lorafusion_jax.readable import TEMPLATE, has_file, read_text

MOST_DEVICES = 4096  # of a mesh
FUNCTION_FIX = "FILE.py:function, with a path relative to the job file"
REWARD = "reward"  # the objective of adapters that judge answers


def names_differ(entries: Sequence[Entry], source: Source) -> list[LoraFusionError]:
    """Names are folders, and some file systems are case-insensitive."""
    places: dict[str, list[tuple[str, Keys]]] = {}
    for entry in entries:
        if isinstance(name := entry.values.get("name"), str):
            places.setdefault(name.casefold(), []).append((name, entry.keys))
    errors: list[LoraFusionError] = []
    for _, same_names in sorted(places.items()):
        if "=" in same_names[0][0]:
            errors.append(
                ConfigError(
                    "config.name",
                    f"the name '{same_names[0][0]}' contains '='.",
                    where=source.where((*same_names[0][1], "name")),
                    why="names are folders, and vllm --lora-modules name=path splits there",
                    fix=same_names[0][0].replace("=", "-"),
                )
            )
        if len(same_names) > 1:
            (first, _), (second, keys) = same_names[:2]
            message = f"two adapters are called '{first}'."
            errors.append(
                ConfigError(
                    "config.duplicate-name",
                    message if first == second else f"'{first}' and '{second}' differ only in case.",
                    where=source.where(keys),
                    fix="give each adapter its own name",
                )
            )
    return errors


def mesh_fits(mesh: schema.MeshSettings, source: Source) -> list[LoraFusionError]:
    """Checks the number of devices."""
    devices = mesh.stages * mesh.stage_devices
    if devices <= MOST_DEVICES:
        return []
    return [
        ConfigError(
            "config.mesh",
            f"stages={mesh.stages} · data={mesh.data} · fsdp={mesh.fsdp} · tensor={mesh.tensor} are {devices} devices.",
            where=source.where(("mesh",)),
            why=f"a run has at most {MOST_DEVICES}",
        )
    ]


def lengths_fit(
    batch: schema.BatchSettings, adapters: Sequence[schema.AdapterConfig], source: Source
) -> list[LoraFusionError]:
    """Checks that samples fit into a microbatch, and that microbatches are whole tiles."""
    capacity, tile = batch.largest, batch.tile_tokens
    typed = [text for keys, text in source.overrides if keys[-1] in ("max_length", "capacity_tokens")]
    errors: list[LoraFusionError] = []
    if odd := [size for size in batch.sizes if size % tile]:
        fitting = sorted({_round_up(size, tile) for size in batch.sizes})
        errors.append(
            ConfigError(
                "config.capacity",
                f"capacity_tokens={odd[0]} is not a multiple of tile_tokens={tile}.",
                where=source.where(("batch", "capacity_tokens")),
                fix=f"batch.capacity_tokens: {fitting[0] if len(fitting) == 1 else fitting}",
            )
        )
    return errors + [
        ConfigError(
            "config.max-length",
            f"{adapter.name}: {_texts_prefix(adapter)}data.max_length={adapter.data.max_length} "
            f"{'do' if adapter.objective.chosen.num_segments > 1 else 'does'} not fit into a "
            f"microbatch of {capacity} tokens.",
            where=f"{', '.join(typed)} on the command line" if typed else str(source.path),
            fix=f"batch.capacity_tokens: {_round_up(largest_sample(adapter), tile)}   or   data.max_length: "
            f"{capacity // adapter.objective.chosen.num_segments}",
        )
        for adapter in adapters
        if largest_sample(adapter) > capacity
    ]


def largest_sample(adapter: schema.AdapterConfig) -> int:
    """Maximum tokens of a sample, over all its texts."""
    return adapter.data.max_length * adapter.objective.chosen.num_segments


def _texts_prefix(adapter: schema.AdapterConfig) -> str:
    count, group = adapter.objective.chosen.num_segments, adapter.objective.chosen.group
    rows = "" if group is None else f"a group of {group} rows, "
    return f"{rows}{count} texts of " if count > 1 else ""


def _where(source: Source, entry: Entry, *keys: str | int) -> str:
    """Where an adapter's setting is: in its entry, or among the defaults of all or the settings of a command line."""
    is_shared = not entry.writes(keys) and (source.typed(keys) or source.value(keys) is not None)
    return source.where(keys if is_shared else (*entry.keys, *keys))


def targets_exist(valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    """Checks the names of projections, of any family; `config.specs` checks them with the base model."""
    errors: list[LoraFusionError] = []
    for entry, adapter in valid:
        try:
            resolve_targets(adapter.lora.targets, tuple(PATHS))
        except LoraFusionError as problem:
            of_entry = entry.writes(("lora", "targets"))
            where = _where(source, entry, "lora", "targets")
            prefix = f"{entry.written['name']}: " if of_entry else ""
            errors += [
                ConfigError(error.code, f"{prefix}{error.what}", where=where, fix=error.fix)
                for error in getattr(problem, "errors", [problem])
            ]
    return errors


def references_exist(valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    """Checks that what adapters compare with exists."""
    names = [adapter.name for _, adapter in valid]
    return [
        ConfigError(
            "objective.reference",
            f"{adapter.name}: {wrong}.",
            where=_where(source, entry, "objective", "reference"),
            fix="base, start, the name of an adapter of this job, or a PEFT folder, such as RUN/adapters/NAME/latest",
        )
        for entry, adapter in valid
        if (wrong := unknown_reference(adapter, names, source.path.parent)) is not None
    ]


def tokens_fit_objectives(valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    """Checks that objectives that compare whole distributions do so with the head of the base."""
    adapters = {adapter.name: adapter for _, adapter in valid}

    def trains_tokens(adapter: schema.AdapterConfig) -> bool:
        reference = reference_of(adapter, adapters)
        teacher = adapters.get(reference.name) if reference is not None and reference.kind == "adapter" else None
        return any(trained.lora.trainable_tokens is not None for trained in (adapter, teacher or adapter))

    return [
        ConfigError(
            "lora.trainable-tokens",
            f"{adapter.name}: objective {adapter.objective.name} compares distributions over the base's vocabulary.",
            where=_where(source, entry, "lora", "trainable_tokens"),
            why="with trainable_tokens, teacher and student would have other rows of the head",
            fix="leave lora.trainable_tokens out, or train with another objective",
        )
        for entry, adapter in valid
        if DIVERGENCE in adapter.objective.chosen.needs and trains_tokens(adapter)
    ]


def rollouts_fit(valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    """Checks settings of adapters that sample their own rows."""
    adapters, folder = {adapter.name: adapter for _, adapter in valid}, source.path.parent
    return [
        ConfigError(f"config.{keys[0]}", f"{adapter.name}: {wrong}", where=_where(source, entry, *keys), fix=fix)
        for entry, adapter in valid
        for keys, wrong, fix in (
            *_rollout_problems(adapter, folder, adapters),
            *_judge_problems(adapter, folder, adapters),
            *_score_problems(adapter, folder),
        )
    ]


def _score_problems(adapter: schema.AdapterConfig, folder: Path) -> Iterator[tuple[Keys, str, str]]:
    """Yields key, problem and fix."""
    if adapter.eval.score is None:
        return
    if adapter.data.eval is None:
        yield ("eval", "score"), "eval.score needs held-out prompts.", "data.eval: FILE"
    if wrong := missing_function(folder, adapter.eval.score):
        yield ("eval", "score"), wrong, FUNCTION_FIX
    elif not adapter.rollout.is_on and (wrong := unknown_arguments(folder, adapter.eval.score, [ANSWER])):
        yield ("eval", "score"), wrong, "def score(prompts, completions, answer)"


def _rollout_problems(
    adapter: schema.AdapterConfig, folder: Path, adapters: Collection[str]
) -> Iterator[tuple[Keys, str, str]]:
    """Yields key, problem and fix."""
    rollout, objective, fields = adapter.rollout, adapter.objective.chosen, type(adapter.rollout).model_fields
    if not rollout.is_on:
        keys = [key for key in rollout.model_fields_set if getattr(rollout, key) != fields[key].default]
        if keys:
            yield ("rollout",), f"rollout has {', '.join(sorted(keys))}, but no reward.", "rollout.reward: exact"
        return
    if not objective.objective.advantages:
        message = f"objective {objective.name} does not train on rewarded answers."
        yield ("objective",), message, f"objective: one of {', '.join(on_rollouts())}"
    group, samples, reserved = rollout.group, adapter.global_samples, rollout.reserved_tokens
    if samples % group:
        message = f"batch.global_samples={samples} counts answers, and rollout.group={group} does not divide it."
        yield ("rollout", "group"), message, f"batch.global_samples: {_round_up(samples, group)}"
    if group == 1 and (estimator := estimator_of(adapter)) not in ("global", "none"):
        message = f"with rollout.group: 1 an answer has no others to be compared with, as advantages: {estimator} do."
        yield ("rollout", "group"), message, "rollout.group: 8, or objective: reinforce"
    if reserved >= adapter.data.max_length:
        message = (
            f"an answer may have {reserved} tokens, all turns together, and data.max_length={adapter.data.max_length} "
            "leaves no room for a prompt."
        )
        yield ("rollout", "max_tokens"), message, f"{rollout.fix_of_room}, or a larger data.max_length"
    if (rollout.tool is None) != (rollout.turns == 1):
        message = "turns above 1 need a tool, which speaks between them, and a tool needs turns above 1."
        yield ("rollout", "turns"), message, "rollout: {tool: FILE.py:function, turns: 4}"
    if objective.compares and objective.reference in adapters and objective.reference != adapter.name:
        yield (
            ("objective", "reference"),
            "another adapter of the job is no reference of answers.",
            ("objective.reference: base, start, or a PEFT folder"),
        )
    if isinstance(adapter.data.eval, float):
        yield ("data", "eval"), "held-out prompts are a file of their own.", "data.eval: FILE"
    for text in rollout.functions:
        if wrong := missing_function(folder, text):
            yield ("rollout", "reward"), wrong, FUNCTION_FIX
    if rollout.tool is not None:
        if wrong := missing_function(folder, rollout.tool):
            yield ("rollout", "tool"), wrong, FUNCTION_FIX
        elif wrong := wrong_tool(folder, rollout.tool):
            yield ("rollout", "tool"), wrong, "def tool(row, answers)"


def _judge_problems(
    adapter: schema.AdapterConfig, folder: Path, adapters: Mapping[str, schema.AdapterConfig]
) -> Iterator[tuple[Keys, str, str]]:
    """Yields key, problem and fix of reward adapters."""
    for judge in (reward.value for reward in adapter.rollout.reward if reward.kind == "adapter"):
        if judge in adapters:
            objective = adapters[judge].objective.name
            wrong = "" if objective == REWARD else f"{judge} judges answers, and its objective is {objective}."
        elif not has_file(folder / judge / CONFIG_FILE):
            near = did_you_mean(judge, [name for name, other in adapters.items() if other.objective.name == REWARD])
            near = near or did_you_mean_adapter(folder / judge, judge)
            wrong = f"there is no adapter '{judge}' in the job, and no PEFT folder of that name.{near and ' ' + near}"
        else:
            wrong = "" if has_score(folder / judge) else f"{judge} judges answers, and the folder has no score."
        if wrong:
            fix = f"an adapter of the job with objective: {REWARD}, or the PEFT folder of one that was trained"
            yield ("rollout", "reward"), wrong, fix


def rate_groups_exist(valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source) -> list[LoraFusionError]:
    """Checks that `optim.lr_ratio` names groups of the adapter's tensors."""
    errors: list[LoraFusionError] = []
    for entry, adapter in valid:
        head = adapter.objective.chosen.head
        leaves = (*adapter_kind(adapter.lora.kind).leaves, *(head.leaves if head else ()))
        with_tokens = {TOKENS} if adapter.lora.trainable_tokens is not None else set()
        groups = sorted({leaf.lr_group for leaf in leaves if leaf.lr_group} | with_tokens)
        for group in sorted(set(adapter.optim.lr_ratios) - set(groups)):
            keys = ("optim", "lr_ratio")
            has = f"the groups {', '.join(groups)}" if groups else "one learning rate for all its tensors"
            errors.append(
                ConfigError(
                    "config.lr-ratio",
                    f"{adapter.name}: optim.lr_ratio is for the group '{group}', which adapters of kind "
                    f"{adapter.lora.kind} do not have.",
                    where=_where(source, entry, *keys),
                    why=f"they have {has}",
                    fix=f"optim.lr_ratio: {{{groups[0]}: 16}}" if groups else "leave optim.lr_ratio out",
                )
            )
    return errors


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def ineffective(config: schema.JobConfig) -> list[str]:
    """Lists settings that are given but have no effect, or one that few want."""
    notes = []
    if (resident := config.train.resident) is not None and resident >= len(config.adapters):
        notes.append(f"train.resident={resident} has no effect: the job has {len(config.adapters)} adapters")
    elif resident is not None and config.train.places:
        notes.append("train.places has no effect with train.resident: adapters that join take turns, too")
    for adapter in config.adapters:
        optim = adapter.optim
        fields = type(optim).model_fields
        set_keys = {key for key in optim.model_fields_set if getattr(optim, key) != fields[key].default}
        unread = {"b1", "b2", "eps", "momentum"} - set(optimizer(optim.name).options)
        notes += [f"{adapter.name}: optim.{key} has no effect with {optim.name}" for key in sorted(set_keys & unread)]
        if "min_lr_ratio" in set_keys and not schedule(optim.schedule).falls:
            notes.append(f"{adapter.name}: optim.min_lr_ratio has no effect with a {optim.schedule} schedule")
        notes += [
            f"{adapter.name}: lora.{key} has no effect with kind {adapter.lora.kind}" for key in _unscaled(adapter)
        ]
        objective = adapter.objective.chosen
        if objective.objective.defaults.get("lora.dropout") == 0 and adapter.lora.dropout > 0:
            notes.append(f"{adapter.name}: lora.dropout={adapter.lora.dropout:g}, {_dropout_effect(objective)}")
        if objective.name == "distill" and _is_its_teacher(adapter):
            fix = "objective.reference: a PEFT folder, such as RUN/adapters/NAME/latest"
            notes.append(f"{adapter.name}: its teacher is what it starts as, so it learns nothing; {fix}")
        notes += _overlapping(adapter, Path(config.directory))
        if (priority := adapter.priority) != 0:
            notes.append(f"{adapter.name}: priority={priority} has no effect in a run: a service orders jobs by it")
    return list(dict.fromkeys(notes))


def _is_its_teacher(adapter: schema.AdapterConfig) -> bool:
    reference = reference_of(adapter, [adapter.name])
    starts_as_base = adapter.lora.init_from is None and reference is not None and reference.kind == "base"
    return starts_as_base or (reference is not None and reference.name == adapter.name)


def _overlapping(adapter: schema.AdapterConfig, directory: Path) -> Iterator[str]:
    """Notes patterns of a folder of which PEFT may not have kept the order: `save_pretrained` sorts them."""
    if adapter.lora.init_from is None:
        return
    try:
        start = describe_folder(directory / adapter.lora.init_from, adapter.lora.adapter_kind)
    except (LoraFusionError, OSError, ValueError):  # who reads the folder says why
        return
    patterns = start.spec.patterns
    for key, values in (
        () if patterns is None else (("rank_pattern", patterns.ranks), ("alpha_pattern", patterns.alphas))
    ):
        for path in start.ranks:
            value_by_pattern = {name: value for name, value in values if matches(name, path)}
            if len(set(value_by_pattern.values())) > 1:
                both = " and ".join(map(repr, value_by_pattern))
                yield (
                    f"{adapter.name}: {both} of {key} in {adapter.lora.init_from} match one projection ({path}). "
                    "The first counts, but PEFT sorts patterns when it saves: the adapter may have been trained with "
                    "another value"
                )
                break


def _unscaled(adapter: schema.AdapterConfig) -> list[str]:
    """Returns the given settings of the scale that an adapter's kind does not use: PEFT's VERA has none."""
    lora, scale = adapter.lora, adapter_kind(adapter.lora.adapter_kind).scale
    if scale is None:
        return []

    def factor(alpha: float, rslora: bool) -> float:
        return scale(alpha, lora.rank, rslora) if callable(scale) else scale

    factor_by_key = {"alpha": factor(2 * lora.alpha, lora.rslora), "rslora": factor(lora.alpha, not lora.rslora)}
    defaults = type(lora).model_fields
    set_keys = {key for key in lora.model_fields_set if getattr(lora, key) != defaults[key].default}
    return [key for key, other in factor_by_key.items() if key in set_keys and other == factor(lora.alpha, lora.rslora)]


def _dropout_effect(chosen: Chosen) -> str:
    if chosen.compares:
        return f"but objective {chosen.name} compares with a reference without dropout: they differ from the first step"
    return f"adds noise to the log-likelihoods that objective {chosen.name} compares; its default is 0"


def with_templates(
    valid: Sequence[tuple[Entry, schema.AdapterConfig]], source: Source, errors: list[LoraFusionError]
) -> list[schema.AdapterConfig]:
    """Reads the templates that are files, relative to the job file; a moved or changed file then changes no run.

    Returns the adapters without those whose template is nowhere.
    """
    result = []
    for entry, adapter in valid:
        value = adapter.data.chat_template
        if value is not None and not is_template(value) and value not in NAMED:
            try:
                text = read_text(source.path.parent / value, TEMPLATE)
                if not is_template(text):
                    raise ValueError("it has no {{ or {%")
                data = adapter.data.model_copy(update={"chat_template": text})
                adapter = adapter.model_copy(update={"data": data})
            except (OSError, ValueError) as problem:
                near = did_you_mean(value, list(NAMED))
                errors.append(
                    ConfigError(
                        "config.chat-template",
                        f"{adapter.name}: data.chat_template: {value} is neither a known name nor a file of a template"
                        + (f"; {near}" if near else "."),
                        where=_where(source, entry, "data", "chat_template"),
                        why=str(problem),
                        fix=f"one of: {', '.join(NAMED)}; or a file relative to the job file",
                    )
                )
                continue  # its rows would be wrong, too
        result.append(adapter)
    return result
