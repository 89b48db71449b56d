"""Small faults of the code, each with the nearest tests, which must notice it. Run by `benchmarks.mutants`."""

from __future__ import annotations

from typing import NamedTuple


class Mutant(NamedTuple):
    """A change of one place.

    Args:
        file: path in the repository.
        old, new: text, which the file holds once, and what takes its place.
        tests: file that must fail.
        equivalent: why no test can or should fail; empty if one must.
    """

    file: str
    old: str
    new: str
    tests: str
    equivalent: str = ""


MUTANTS = (
    Mutant(
        "scheduling/bounds.py",
        "(2 * tokens > room)",
        "(2 * tokens >= room)",
        "tests/scheduling/test_bounds.py",
    ),
    Mutant(
        "scheduling/replan.py",
        "before + plan.num_stages - at_slot",
        "before + plan.num_stages - at_slot + 1",
        "tests/scheduling/test_extend.py",
    ),
    Mutant(
        "lorafusion_jax/checkpoint/store.py",
        "[slot for slot in slots if slot <= self._slot][-self._keep :]",
        "slots[-self._keep :]",
        "tests/checkpoint/test_store.py",
    ),
    Mutant(
        "lorafusion_jax/checkpoint/digests.py",
        'return Damage(file=file, why=f"{FILE} does not list it")',
        "return None",
        "tests/checkpoint/test_store.py",
    ),
    Mutant(
        "lorafusion_jax/checkpoint/saved_states.py",
        'position.get("slot") != int(folder.name)',
        "False",
        "tests/checkpoint/test_store.py",
    ),
    Mutant(
        "lorafusion_jax/data/assemble.py",
        "key=sample_key(epoch, row)",
        "key=sample_key(0, row)",
        "tests/data/test_assemble.py",
    ),
    Mutant(
        "pallas_kernels/tiles.py",
        "jnp.where(has_adapter, values, jnp.zeros((), values.dtype))",
        "values * has_adapter",
        "tests/pallas_kernels/test_tiles.py",
    ),
    Mutant(
        "pallas_kernels/dropout.py",
        "stride | np.uint32(1)",
        "stride",
        "tests/pallas_kernels/test_dropout.py",
    ),
    Mutant(
        "scheduling/online/policies/ours/claims.py",
        "SLACK, SLACK_S = 1.5, 120.0",
        "SLACK, SLACK_S = 0.2, 120.0",
        "tests/scheduling/online/test_online_rules.py",
    ),
    Mutant(
        "scheduling/online/policies/ours/claims.py",
        "QUEUE * later / gpus",
        "0 * later / gpus",
        "tests/scheduling/online/test_online_rules.py",
    ),
    Mutant(
        "scheduling/online/check.py",
        "one.waited(now) > PATIENCE * fair_s[one.job.name]",
        "one.waited(now) > 3 * PATIENCE * fair_s[one.job.name]",
        "tests/scheduling/online/test_online_rules.py",
    ),
    Mutant(
        "scheduling/online/sharing.py",
        "max(slots) + mesh.stages - 1",
        "max(slots)",
        "tests/scheduling/online/test_online_rules.py",
    ),
    Mutant(
        "scheduling/online/sharing.py",
        "        room -= shares[i]\n",
        "",
        "tests/scheduling/online/test_online_rates.py",
    ),
    Mutant(
        "scheduling/packing/bins.py",
        "return after <= slot <= before\n",
        "return after <= slot <= before + 1\n",
        "tests/scheduling/test_balance_work.py",
    ),
    Mutant(
        "scheduling/packing/bins.py",
        "max(self.last[key], target[0])",
        "self.last[key]",
        "tests/scheduling/test_balance_work.py",
    ),
    Mutant(
        "scheduling/packing/greedy.py",
        "served / problem.jobs[job].weight if state.weighted else served",
        "served",
        "tests/scheduling/test_planner.py",
    ),
    Mutant(
        "scheduling/packing/subsets.py",
        "_exact(pending, room - taken)",
        "_exact(pending, room)",
        "tests/scheduling/test_planner.py",
    ),
    Mutant(
        "scheduling/packing/search.py",
        "ready[job] = slot + self.problem.num_stages",
        "ready[job] = slot + self.problem.num_stages - 1",
        "tests/scheduling/test_planner.py",
    ),
    Mutant(
        "scheduling/packing/search.py",
        "        if len(free) > 1:\n",
        "        if len(free) > 99:\n",
        "tests/scheduling/test_bounds.py",
        "an order of trying: plans get a little longer at most; the tables of plan quality judge it",
    ),
    Mutant(
        "scheduling/packing/sizes.py",
        "prices.seconds[index] + prices.cover(rest) if alone",
        "prices.seconds[index] if alone",
        "tests/scheduling/test_several_sizes.py",
    ),
    Mutant(
        "scheduling/packing/balance_work.py",
        "change <= -WORTH * gap * gap",
        "change <= WORTH * gap * gap",
        "tests/scheduling/test_balance_work.py",
        "the exchange of nothing comes first among those that gain nothing",
    ),
    Mutant(
        "scheduling/planner.py",
        "Budget(EVEN_SHARE * evaluations)",
        "Budget(0 * evaluations)",
        "tests/scheduling/test_balance_work.py",
    ),
    Mutant(
        "scheduling/planner.py",
        "evaluations = EVALUATIONS_PER_S * check_time_limit(time_limit_s)",
        "evaluations = 0 * check_time_limit(time_limit_s)",
        "tests/scheduling/test_planner.py",
    ),
    Mutant(
        "scheduling/packing/fill.py",
        "        budget.evaluations -= CHOICE_PRICE\n",
        "",
        "tests/scheduling/test_planner.py",
    ),
    Mutant(
        "scheduling/verify.py",
        "if distance < needed:",
        "if distance < needed - 1:",
        "tests/scheduling/test_mutations.py",
    ),
    Mutant(
        "scheduling/verify.py",
        "count > 1 if job.name in dict(plan.stopped) else count != 1",
        "count > 1",
        "tests/scheduling/test_mutations.py",
    ),
    Mutant(
        "scheduling/verify.py",
        "slot.max() >= stop",
        "slot.max() > stop",
        "tests/scheduling/test_mutations.py",
    ),
    Mutant(
        "scheduling/verify.py",
        "np.flatnonzero(rows > room)",
        "np.flatnonzero(rows > room + 1)",
        "tests/scheduling/test_mutations.py",
    ),
    Mutant(
        "scheduling/pipeline.py",
        "if index >= ahead:",
        "if index > ahead:",
        "tests/scheduling/test_pipeline.py",
    ),
    Mutant(
        "scheduling/pipeline.py",
        "start = max(clock[stage], arrival)",
        "start = arrival",
        "tests/scheduling/test_simulate.py",
    ),
    Mutant(
        "scheduling/pipeline.py",
        "if not open_batches and not slot.is_noop:",
        "if not open_batches:",
        "tests/scheduling/test_pipeline.py",
        "an empty group of no-ops between two groups has no events",
    ),
    Mutant(
        "scheduling/simulate.py",
        "+ padding * padding",
        "",
        "tests/scheduling/test_simulate.py",
    ),
    Mutant(
        "scheduling/baselines.py",
        "last[job] + problem.num_stages - len(filling)",
        "last[job] + problem.num_stages - 1 - len(filling)",
        "tests/scheduling/test_baselines.py",
    ),
    Mutant(
        "scheduling/bounds.py",
        "slots[:-1] + num_stages - 1]",
        "slots[:-1] + num_stages]",
        "tests/scheduling/test_bounds.py",
        "heads and tails move against each other: the bound stays valid, and is sometimes weaker",
    ),
    Mutant(
        "scheduling/bounds.py",
        'np.searchsorted(ordered, room - threshold, side="right")',
        'np.searchsorted(ordered, room - threshold, side="left")',
        "tests/scheduling/test_bounds.py",
    ),
    Mutant(
        "scheduling/bounds.py",
        "max(0, -(-excess // room))",
        "max(0, -(-excess // room) + 1)",
        "tests/scheduling/test_bounds.py",
    ),
    Mutant(
        "scheduling/checks.py",
        "_refuse_long_samples(jobs, checked.tiles * tile, tile)",
        "_refuse_long_samples(jobs, checked.tiles * tile + tile, tile)",
        "tests/scheduling/test_refusals.py",
    ),
    Mutant(
        "scheduling/plan.py",
        "slot.capacity_tokens or self.capacity_tokens",
        "self.capacity_tokens",
        "tests/scheduling/test_several_sizes.py",
    ),
    Mutant(
        "scheduling/plan.py",
        "if not left.get((name, batch))",
        "if True",
        "tests/scheduling/test_contract.py",
    ),
    Mutant(
        "scheduling/serialize.py",
        'if digest != data.get("digest"):',
        "if False:",
        "tests/scheduling/test_contract.py",
    ),
    Mutant(
        "scheduling/replan.py",
        "if job.name in finish else job",
        "if False else job",
        "tests/scheduling/test_extend.py",
    ),
    Mutant(
        "scheduling/replan.py",
        "if job.name in progress and not moves else 0",
        "if job.name in progress else 0",
        "tests/scheduling/test_moves.py",
    ),
    Mutant(
        "scheduling/statistics.py",
        "if limit.share >= 0.005",
        "if limit.share >= 0.5",
        "tests/scheduling/test_simulate.py",
    ),
    Mutant(
        "lorafusion_jax/data/assemble.py",
        "positions[span] = np.arange(last - first)",
        "positions[span] = np.arange(1, last - first + 1)",
        "tests/data/test_assemble.py",
    ),
    Mutant(
        "lorafusion_jax/data/assemble.py",
        "row_adapter[end : -(-stop // tile_tokens) * tile_tokens]",
        "row_adapter[end:stop]",
        "tests/data/test_assemble.py",
    ),
    Mutant(
        "lorafusion_jax/data/assemble.py",
        "    return mix64(key ^ segment) if segment else key\n",
        "    return key\n",
        "tests/data/test_assemble.py",
    ),
    Mutant(
        "lorafusion_jax/data/assemble.py",
        "piece.loss_mask[first + 1 : last] * np.float32",
        "piece.loss_mask[first : last - 1] * np.float32",
        "tests/data/test_assemble.py",
    ),
    Mutant(
        "lorafusion_jax/data/cache.py",
        "            tokenizer.template_hash,\n",
        "",
        "tests/data/test_cache.py",
    ),
    Mutant(
        "lorafusion_jax/data/cache.py",
        'folder.glob("*.npz")), reverse=True)',
        'folder.glob("*.npz")))',
        "tests/data/test_cache.py",
    ),
    Mutant(
        "lorafusion_jax/data/cache.py",
        "        os.utime(entry)\n",
        "",
        "tests/data/test_cache.py",
    ),
    Mutant(
        "lorafusion_jax/data/fit_length.py",
        "encoded[row].mask[:limit].any()",
        "encoded[row].mask.any()",
        "tests/data/test_tokenized.py",
    ),
    Mutant(
        "lorafusion_jax/config/sweep.py",
        "if many > MOST_ADAPTERS:",
        "if many > 2 * MOST_ADAPTERS:",
        "tests/config/test_load.py",
    ),
    Mutant(
        "lorafusion_jax/optim/schedules.py",
        "np.arange(1, warm + 1) / max(warm, 1)",
        "np.arange(warm) / max(warm, 1)",
        "tests/training/test_optim.py",
    ),
    Mutant(
        "lorafusion_jax/optim/schedules.py",
        "min(int(settings.warmup), num_steps)",
        "int(settings.warmup)",
        "tests/training/test_optim.py",
    ),
    Mutant(
        "lorafusion_jax/optim/step.py",
        "jnp.where(norm < largest, leaf, leaf / norm * largest)",
        "jnp.where(norm > largest, leaf, leaf / norm * largest)",
        "tests/training/test_optim.py",
    ),
    Mutant(
        "lorafusion_jax/optim/per_adapter.py",
        "after = _where(mask[number], after, state.states[name])",
        "after = after",
        "tests/optim/test_per_adapter.py",
    ),
    Mutant(
        "lorafusion_jax/optim/per_adapter.py",
        "jnp.full_like(leaf, -0.0)",
        "jnp.full_like(leaf, 0.0)",
        "tests/optim/test_per_adapter.py",
    ),
    Mutant(
        "lorafusion_jax/adapters/spec.py",
        "(math.sqrt(self.rank) if self.rslora else self.rank)",
        "self.rank",
        "tests/adapters/test_spec.py",
    ),
    Mutant(
        "lorafusion_jax/checkpoint/merge.py",
        "if not np.isfinite(rounded_NK).all():",
        "if False:",
        "tests/checkpoint/test_merge.py",
    ),
    Mutant(
        "pallas_kernels/dropout.py",
        "t = jnp.round(",
        "t = jnp.floor(",
        "tests/pallas_kernels/test_dropout.py",
    ),
    Mutant(
        "pallas_kernels/dropout.py",
        "return (1 << BITS) / (",
        "return ((1 << BITS) - 1) / (",
        "tests/pallas_kernels/test_dropout.py",
    ),
    Mutant(
        "pallas_kernels/dropout.py",
        "mix32(site * _GOLDEN + _SILVER)",
        "site",
        "tests/pallas_kernels/test_dropout.py",
    ),
    Mutant(
        "pallas_kernels/tiles.py",
        "jnp.where(is_adapters, partials, jnp.zeros((), partials.dtype))",
        "is_adapters * partials",
        "tests/pallas_kernels/test_tiles.py",
    ),
    Mutant(
        "lorafusion_jax/planning/rebalance.py",
        "if took >= WORTH_A_MOVE * max(seconds):",
        "if took >= max(seconds):",
        "tests/planning/test_rebalance.py",
    ),
    Mutant(
        "lorafusion_jax/planning/rebalance.py",
        "if not 2 <= stop - start <= room:",
        "if not 2 <= stop - start:",
        "tests/planning/test_rebalance.py",
    ),
    Mutant(
        "lorafusion_jax/planning/stages.py",
        "    loads[-1] += costs.head\n",
        "",
        "tests/planning/test_stages.py",
    ),
    Mutant(
        "lorafusion_jax/planning/stages.py",
        "return cut if slowest(cut, costs) < WORTH_A_CUT * slowest(whole, costs) else whole",
        "return cut",
        "tests/planning/test_stages.py",
    ),
    Mutant(
        "lorafusion_jax/training/meter.py",
        "if self._seen > WARM_UP:",
        "if self._seen >= WARM_UP:",
        "tests/report/test_meter.py",
    ),
    Mutant(
        "lorafusion_jax/training/meter.py",
        "self._before_pause += began - self._at",
        "self._before_pause += 0.0",
        "tests/report/test_meter.py",
    ),
    Mutant(
        "lorafusion_jax/training/meter.py",
        "busy = [rows if tokens else 0 for",
        "busy = [rows for",
        "tests/report/test_meter.py",
    ),
    Mutant(
        "lorafusion_jax/report/format.py",
        "if round(seconds) < 60:",
        "if seconds < 60:",
        "tests/report/test_format.py",
    ),
    Mutant(
        "lorafusion_jax/report/format.py",
        "if number >= 0.99995 * size:",
        "if number >= size:",
        "tests/report/test_format.py",
    ),
    Mutant(
        "lorafusion_jax/weights/nf4.py",
        'side="left", method="compare_all"',
        'side="right", method="compare_all"',
        "tests/weights/test_nf4.py",
    ),
    Mutant(
        "lorafusion_jax/weights/nf4.py",
        "(codes[::2] << 4) | codes[1::2]",
        "(codes[1::2] << 4) | codes[::2]",
        "tests/weights/test_nf4.py",
    ),
    Mutant(
        "lorafusion_jax/weights/nf4.py",
        "jnp.where(largest > 0, 1 / largest, 0)",
        "1 / largest",
        "tests/weights/test_nf4.py",
    ),
    Mutant(
        "lorafusion_jax/config/overrides.py",
        "return written is not None and written != given",
        "return written is not None",
        "tests/config/test_load.py",
    ),
    Mutant(
        "lorafusion_jax/plugins.py",
        "tuple((path, _changed_at(path)) for path in sys.path)",
        "tuple((path, 0) for path in sys.path)",
        "tests/extending/test_finding.py",
    ),
    Mutant(
        "lorafusion_jax/planning/memory/problem.py",
        "Counter(kinds).items()",
        "dict.fromkeys(kinds, 1).items()",
        "tests/planning/test_memory.py",
    ),
    Mutant(
        "lorafusion_serve/store/jobs.py",
        "if tries >= MOST_TRIES",
        "if tries > MOST_TRIES",
        "tests/serve/test_states.py",
    ),
    Mutant(
        "lorafusion_serve/store/jobs.py",
        "tries = 1 if progressed else row",
        "tries = 0 if progressed else row",
        "tests/serve/test_states.py",
    ),
    Mutant(
        "lorafusion_serve/control/controller.py",
        'event["number"] <= group["received"]',
        'event["number"] < group["received"]',
        "tests/serve/test_fences.py",
    ),
    Mutant(
        "lorafusion_serve/control/controller.py",
        'if event["epoch"] != job["epoch"] or',
        "if",
        "tests/serve/test_fences.py",
    ),
    Mutant(
        "lorafusion_serve/states.py",
        '("draining", "lost"): "queued",',
        '("draining", "lost"): "failed",',
        "tests/serve/test_states.py",
    ),
    Mutant(
        "lorafusion_jax/families/pattern.py",
        "FULL if (number + 1) % every == 0 else SLIDING",
        "FULL if number % every == 0 else SLIDING",
        "tests/models/test_model_config.py",
    ),
    Mutant(
        "lorafusion_jax/families/pattern.py",
        "SLIDING if number >= first else FULL",
        "SLIDING if number > first else FULL",
        "tests/models/test_model_config.py",
    ),
    Mutant(
        "lorafusion_jax/objective/dpo.py",
        "return -(1 - options.label_smoothing) * keep - options.label_smoothing * swap",
        "return -(1 - options.label_smoothing) * keep + options.label_smoothing * swap",
        "tests/objective/test_formulas.py",
    ),
    Mutant(
        "lorafusion_jax/objective/kto.py",
        "jnp.maximum(gains[:, 1].mean(), 0.0)",
        "gains[:, 1].mean()",
        "tests/objective/test_formulas.py",
    ),
    Mutant(
        "lorafusion_jax/objective/kto.py",
        "texts[number - 1][1]",
        "texts[number][1]",
        "tests/objective/test_formulas.py",
    ),
)
