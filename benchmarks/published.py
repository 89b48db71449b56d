"""Generates the published tables as Markdown, each from the raw rows of the runs named here.

Ratios compare rows of one run. `useful` counts real tokens. `processed` counts all rows of microbatches, including
padding: useful tokens/s / density, where density is the share of rows with a token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import fmean

from benchmarks import kernel_report
from benchmarks.agreement import joint_alone, parity
from benchmarks.csv_rows import RESULTS, Row, markdown
from benchmarks.csv_rows import rows as rows_of
from benchmarks.end_to_end_rows import LABELS, WORKLOADS, age, devices_of, newest
from benchmarks.flax_report import flax_mesh, flax_model, flax_vit
from benchmarks.generate_report import decoding, generated
from benchmarks.joining_report import joining, joining_peft, joining_rl, joining_search, learning
from benchmarks.online_report import (
    online_claims,
    online_decision,
    online_held_out,
    online_ideas,
    online_large,
    online_queue,
    online_rates,
    online_targets,
    online_throughput,
)
from benchmarks.peers.report import SIZES, peers, peers_compiled, peers_in_short
from benchmarks.predicted import long_samples, longer_samples
from benchmarks.quantised_plan import quantised_bases

PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)  # of a table in a document
KERNEL_FILES = (  # a row of a later file replaces the same row of an earlier one
    "kernels_h200_2026-11-22f/ops.jsonl",
    "kernels_h200_2026-11-22f/rows.jsonl",
    "kernels_h200_2026-11-22g/ops.jsonl",
    "kernels_h200_2026-11-22g/ops_4096.jsonl",
    "kernels_h200_2026-11-22g/ops_16384.jsonl",
    "kernels_h200_2026-11-22h/ops.jsonl",
    "kernels_h200_2026-11-22h/ops_2048.jsonl",
    "kernels_h200_2026-11-22h/ops_4096.jsonl",
    "kernels_h200_2026-11-22h/ops_5120.jsonl",
    "kernels_h200_2026-11-22h/ops_16384.jsonl",
    "kernels_h200_2026-11-22h/layer.jsonl",
    "kernels_h200_2026-11-22h/siblings.jsonl",
    "kernels_h200_2026-11-22e/bytes.jsonl",
)
END_TO_END = "end_to_end_h200_2026-11-22h/end_to_end.jsonl"
SHARDED = "end_to_end_h200_2026-11-29_two", "end_to_end_h200_2026-11-28_sharded"
ADAPTER_COUNTS = "adapter_counts_h200_2026-11-23/adapter_counts.jsonl"
LOSS = (
    "quantised_loss_h200_2026-11-23/quantised_loss_means.csv",
    "quantised_loss_h200_2026-11-23b/quantised_loss_means.csv",
)
TENSOR, TENSOR_ALONE = "tensor_h200_2026-11-27/tensor.jsonl", "tensor_h200_2026-11-27/one_adapter.jsonl"
DEPTH = "quantised_depth_cpu_2026-11-23/quantised_depth.csv"
PIPELINES = "pipelines_2026-11-24"
PLANNED = "planner_2026-11-24"  # with counted budgets; those of PLANNER were of wall time, on a quiet machine
FLOORS = "plan_floors_2026-11-29"
PLANNER, ORDERS, SCALING = "planner_2026-11-22", "planner_2026-11-30", "scaling_2026-11-22"
SHARDED_NAMES = {
    "ours": "ours, four adapters together, a stage per card",
    "fsdp": "ours, one adapter after another, `mesh.fsdp`",
    "fsdp2_packed": "FSDP2 + PEFT + Liger, one adapter, no padding",
    "fsdp2_checkpointed": "FSDP2 + PEFT + Liger, layers recomputed",
}
NAMES = {"8b": "Llama-3.1-8B", "32b": "Qwen2.5-32B", "70b": "Llama-3.1-70B"}
LAYER_FORMS = {
    "frozen": "frozen layer, no LoRA, compiled as ours: the floor",
    "frozen_default": "frozen layer, XLA's default options",
    "xla_naive": "plain XLA",
    "xla_wide": "XLA, one wide masked adapter",
    "ours_on_xla": "our ops on XLA",
    "ragged_dot": "`jax.lax.ragged_dot`",
    "ours_separate": "our kernels, every projection its own op",
    "ours_mlp_apart": "our kernels, the MLP as three ops",
    "ours": "our kernels",
}


def kernel_runs() -> list[list[Row]]:
    return [kernel_report.read(RESULTS / name) for name in KERNEL_FILES]


def training_rows() -> list[Row]:
    return rows_of(END_TO_END)


def span(numbers: Iterable[float], form: str) -> str:
    """`least–most`, or one number if both have the same text."""
    texts = [format(number, form) for number in sorted(numbers)]
    return texts[0] if texts[0] == texts[-1] else f"{texts[0]}–{texts[-1]}"


def layers() -> str:
    rows = [row for run in kernel_runs() for row in kernel_report.layer_rows(run)]
    lines = []
    for part, title in (("layer 8B", "8B"), ("layer 32B", "32B"), ("layer 70B", "70B")):
        for variant, label in LAYER_FORMS.items():
            same = [row for row in rows if (row["part"], row["variant"]) == (part, variant)]
            for row in sorted(same, key=lambda row: (row["adapters"], -row["dropout"])):
                job = ("–", "–") if variant.startswith("frozen") else (row["adapters"], row["dropout"])
                best = row.get("best_xla_over_this")
                numbers = f"{row['p50_us'] / 1e3:.2f}", f"{row['over_frozen']:.3f}", f"{best:.3f}" if best else ""
                lines.append((title, label, *job, *numbers))
    return markdown(("layer", "form", "adapters", "dropout", "ms", "over frozen", "best XLA form over this"), lines)


def siblings() -> str:
    rows = [row for run in kernel_runs() for row in kernel_report.layer_rows(run)]
    rows = [row for row in rows if not row["part"].startswith("layer")]
    lines = [
        (row["part"], LAYER_FORMS[row["variant"]], f"{row['p50_us'] / 1e3:.2f}", f"{row['over_frozen']:.3f}")
        for row in rows
    ]
    return markdown(("projections", "form, four adapters, dropout 0.1", "ms", "over frozen"), lines)


def ops() -> str:
    """The default backend on single linear layers, five shapes per cell."""
    lines = kernel_report.summary_rows(published_ops())
    tokens = sorted({line["tokens"] for line in lines})
    cells = {(line["rank"], line["adapters"], line["dropout"], line["tokens"]): line for line in lines}
    table = []
    for job in dict.fromkeys(key[:3] for key in sorted(cells)):
        across = [cells[*job, count] for count in tokens]
        table.append((*job, *(f"{line['over_frozen_mean']:.2f} ({line['over_frozen_worst']:.2f})" for line in across)))
    return markdown(("largest rank", "adapters", "dropout", *(f"{count} tokens" for count in tokens)), table)


def published_ops() -> list[Row]:
    return kernel_report.newest(row for run in kernel_runs() for row in kernel_report.op_rows(run))


def slower() -> str:
    """Sizes where the default is slower than an XLA form of the same run."""
    rows = [row for row in published_ops() if row["variant"] == "default"]
    lines = [
        (f"{row['tokens']} × {row['in_features']} → {row['out_features']}", row["adapters"], row["rank"],
         row["dropout"], f"{row['best_xla_over_this']:.3f}")
        for row in rows if row["best_xla_over_this"] < 1
    ]  # fmt: skip
    head = ("size", "adapters", "largest rank", "dropout", "best XLA form over ours")
    return f"{len(lines)} of {len(rows)} sizes:\n\n{markdown(head, lines)}"


def moved() -> str:
    rows = [row for run in kernel_runs() for row in kernel_report.byte_rows(run)]
    lines = [(row["case"], row["kernels"], f"{row['mb']:.0f}", f"{row['of_naive']:.3f}") for row in rows]
    return markdown(("case (A adapters, p dropout)", "kernels", "MB", "of plain XLA"), lines)


def training() -> str:
    """The newest row of every model, number of GPUs, global batch and order, on `mix`."""
    groups: dict[tuple, list[Row]] = {}
    for row in sorted(training_rows(), key=model_order):
        groups.setdefault((row["model"], devices_of(row), row["global_batch"]), []).append(row)
    lines = []
    for (model, gpus, batch), rows in groups.items():
        chosen = newest(rows)
        newest_rows = [chosen["mix", name] for name in reversed(LABELS) if ("mix", name) in chosen]
        lines += [
            (NAMES[model], gpus, batch, LABELS[row["variant"]], *figures(row), started(row)) for row in newest_rows
        ]
    head = ("model", "GPUs", "global batch", "order", "microbatch", "timed slots", "density")
    return markdown((*head, "useful tok/s", "processed tok/s", "run"), lines)


def model_order(row: Row) -> tuple:
    return list(NAMES).index(row["model"]), devices_of(row), row["global_batch"]


def started(row: Row) -> str:
    """Name of the process; rows of one process were measured together."""
    return row["run"].replace(", ", " ", 1)


def figures(row: Row) -> tuple[str, ...]:
    rates = row["useful_tokens_per_s"], row["useful_tokens_per_s"] / row["density"]
    return (row["capacity_tokens"], row["slots"], f"{row['density']:.1%}", *(f"{rate / 1e3:.2f} k" for rate in rates))


def sharded() -> str:
    """Ours beside torch's FSDP2 with PEFT and Liger, on the same cards."""
    lines = []
    for folder in SHARDED:
        ours, peers = rows_of(f"{folder}/end_to_end.jsonl"), rows_of(f"{folder}/peers.jsonl")
        best = max(row["useful_tokens_per_s"] for row in peers)
        shape = f"{NAMES[ours[0]['model']]}, {devices_of(ours[0])} × H200, batch {ours[0]['global_batch']}"
        for row in (*ours, *peers):
            rate, peak = row["useful_tokens_per_s"], row["peak_gb"]
            largest = max(gb for gb in peak if gb is not None) if isinstance(peak, list) else peak
            lines.append((shape, SHARDED_NAMES[row["variant"]], f"{rate / 1e3:.2f} k", f"{rate / best:.2f}", largest))
    return markdown(("shape", "program", "useful tok/s", "over FSDP2 at its best", "largest peak, GB"), lines)


def ratios() -> str:
    """Ours over every baseline of the same run, split into the factors of density and of speed per processed token."""
    lines = []
    for ours, other in pairs(training_rows()):
        ratio = ours["useful_tokens_per_s"] / other["useful_tokens_per_s"]
        density = ours["density"] / other["density"]
        what = f"{NAMES[ours['model']]}, {devices_of(ours)} × H200, batch {ours['global_batch']}"
        densities = f"{ours['density']:.1%}", f"{other['density']:.1%}"
        parts = [f"{factor:.2f}" for factor in (ratio, density, ratio / density)]
        lines.append((what, LABELS[other["variant"]], *densities, *parts))
    head = ("job", "against", "our density", "its density", "useful tok/s", "= density", "× per processed token")
    return markdown(head, lines)


def pairs(rows: Sequence[Row]) -> list[tuple[Row, Row]]:
    """The newest run of each baseline, with ours of the same run."""
    chosen: dict[tuple, tuple[Row, Row]] = {}
    for row in sorted(rows, key=age):
        if row["variant"] in ("ours", "frozen"):
            continue
        job = ("run", "model", "workload", "global_batch")
        ours = [o for o in rows if o["variant"] == "ours" and all(o[key] == row[key] for key in job)]
        ours = [o for o in ours if devices_of(o) == devices_of(row)]
        if ours:
            chosen[row["model"], row["variant"]] = ours[-1], row
    return sorted(chosen.values(), key=lambda pair: (model_order(pair[0]), list(LABELS).index(pair[1]["variant"])))


def workloads() -> str:
    """8B on one H200: every workload, with the simulator's prediction."""
    rows = [row for row in training_rows() if (row["model"], devices_of(row), row["global_batch"]) == ("8b", 1, 8)]
    chosen = newest(rows)
    own_rows = [chosen[name, "ours"] for name in WORKLOADS]
    lines = [
        (row["workload"], row["slots"], f"{row['density']:.1%}", f"{row['useful_tokens_per_s'] / 1e3:.2f} k",
         f"{row['simulated_over_measured']:.3f}")
        for row in own_rows
    ]  # fmt: skip
    return markdown(("workload", "timed slots", "density", "useful tok/s", "predicted time / measured"), lines)


def idle() -> str:
    """Predicted idle time of a pipeline, with and without fill and drain; ranges over five workloads."""
    rows = rows_of(f"{ORDERS}/bubbles.csv")
    ours = {row["workload"]: float(row["seconds"]) for row in rows if row["order"] == "ours"}
    lines = []
    for order in dict.fromkeys(row["order"] for row in rows):
        mine = [row for row in rows if row["order"] == order]
        shares = [span((float(row[key]) for row in mine), ".1%") for key in ("bubble_share", "idle_share")]
        times = span((float(row["seconds"]) / ours[row["workload"]] for row in mine), ".2f")
        lines.append((order, span((int(row["capacity_tokens"]) for row in mine), "d"), *shares, times))
    return markdown(
        ("order", "microbatch", "bubbles in steady time", "idle with fill and drain", "time over ours"), lines
    )


def pipelines() -> str:
    """Whole runs on several stages: idle shares and time, measured and predicted; and passes played again."""
    default = {(row["model"], row["stages"], row["variant"]): row for row in rows_of(f"{PIPELINES}/pipelines.csv")}
    again = {(row["model"], row["variant"]): row for row in rows_of(f"{PIPELINES}/replayed.csv")}
    lines = []
    for (model, stages), rows in sorted(pipeline_rows().items(), key=lambda item: item[0][1]):
        for (_, variant), row in newest(rows).items():
            rates, shares, slot, replayed = default.get((model, str(stages), variant)), "–", "–", "–"
            if rates is not None:
                shares = " / ".join(f"{float(share):.1%}" for share in rates["predicted_bubbles"].split())
                slot = f"{float(rates['predicted_slot_s']) / row['slot_s']:.3f}"
            if (model, variant) in again:
                replayed = f"{float(again[model, variant]['replayed_over_measured']):.3f}"
            measured = " / ".join(f"{share:.1%}" for share in row["bubbles"])
            profiled = row.get("simulated_over_measured")
            lines.append(
                (NAMES[model], stages, LABELS[variant], measured, shares, slot,
                 f"{profiled:.3f}" if profiled else "–", replayed)
            )  # fmt: skip
    head = (
        "job", "stages", "order", "idle share of each stage", "predicted", "microbatch by default rates / measured",
        "time by a profile / measured", "passes played again / measured",
    )  # fmt: skip
    return markdown(head, lines)


def pipeline_rows() -> dict[tuple[str, int], list[Row]]:
    by_pipeline: dict[tuple[str, int], list[Row]] = {}
    for row in training_rows():
        if row["mesh"]["stages"] > 1:
            by_pipeline.setdefault((row["model"], row["mesh"]["stages"]), []).append(row)
    return by_pipeline


def batch_sizes() -> str:
    """Gain in density by joint training, by global batch: mean and range of five workloads."""
    rows = rows_of(f"{ORDERS}/batch_sizes.csv")
    lines = []
    for size in dict.fromkeys(row["global_batch"] for row in rows):
        mine = [row for row in rows if row["global_batch"] == size]
        ours, alone = ([float(row[f"{kind}_density"]) for row in mine] for kind in ("together", "one_after_another"))
        wins = [a / b for a, b in zip(ours, alone, strict=True)]
        lines.append((size, span(ours, ".1%"), span(alone, ".1%"), f"{fmean(wins):.2f} ({span(wins, '.2f')})"))
    head = ("global batch", "density together", "one after another, own capacity", "ratio: mean (range)")
    return markdown(head, lines)


def scaling() -> str:
    rows = rows_of(f"{SCALING}/scaling.csv")
    gpus = list(dict.fromkeys(row["gpus"] for row in rows))
    cells = {(row["model"], row["adapters"], row["global_batch"], row["gpus"]): row for row in rows}
    lines = []
    for job in dict.fromkeys(key[:3] for key in cells):
        row_cells = [cells.get((*job, count)) for count in gpus]
        rates = [f"{int(row['tokens_per_s']) / 1e3:.1f} k" if row else "does not fit" for row in row_cells]
        if job[1:] in (("4", "8"), ("4", "16"), ("16", "64")):
            lines.append((job[0], f"{job[1]} × {job[2]}", *rates))
    return markdown(("model", "adapters × global batch", "1 GPU", *(f"{count} GPUs" for count in gpus[1:])), lines)


def sizes() -> str:
    """One adapter after another, with one size of microbatch and with four."""
    rows = {row["variant"]: row for row in rows_of(SIZES)}
    floor = rows["frozen"]["useful_tokens_per_s"]
    lines = []
    for variant in ("single", "single_sizes"):
        row = rows[variant]
        used = ", ".join(f"{count} × {size}" for size, count in row["sizes"].items())
        rate = row["useful_tokens_per_s"]
        lines.append((used, f"{row['density']:.1%}", f"{rate / 1e3:.2f} k", f"{rate / floor:.3f}"))
    return markdown(("microbatches", "density", "useful tok/s", "of the frozen model"), lines)


def tensor() -> str:
    """Two GPUs that compute each layer together, beside one GPU and two stages."""
    rows = [row for file in (TENSOR, TENSOR_ALONE) for row in rows_of(file) if row["section"] == "run"]
    one = {row["adapters"]: row["tokens_per_s"] for row in rows if row["mesh"] == "one"}
    lines = [
        (
            row["adapters"],
            "one GPU" if row["mesh"] == "one" else f"`{row['mesh']}: 2`",
            f"{row['tokens_per_s'] / 1e3:.1f} k",
            f"{row['tokens_per_s'] / one[row['adapters']]:.2f}",
            f"{row['predicted_tokens_per_s'] / 1e3:.1f} k",
            f"{row['predicted_tokens_per_s'] / row['tokens_per_s'] - 1:+.1%}",
        )
        for row in rows
    ]
    return markdown(("adapters", "mesh", "tokens/s", "over one GPU", "predicted", "prediction off by"), lines)


def adapter_counts() -> str:
    """Microbatches of jobs with 4 to 256 adapters; the adapters in the microbatch are the same."""
    rows = [row for row in rows_of(ADAPTER_COUNTS) if row.get("what", "").startswith("microbatch")]
    lines = [(row["adapters"], row["what"].split()[2], f"{row['ms']:.2f}", f"{row['ratio']:.3f}") for row in rows]
    head = ("adapters in the job", "in the microbatch", "ms, two layers", "over the smallest job")
    return markdown(head, lines)


def quantised_loss() -> str:
    """Held-out loss of adapters that learnt on a quantised base, over that on the bfloat16 base."""
    rows = [row for name in LOSS for row in rows_of(name) if row["kind"] != "none"]
    lines = [
        (
            f"{float(row['millions']):.1f} M", row["kind"], row["adapter"], f"{float(row['after']):.3f}",
            f"{float(row['over_bf16']):+.2%}", f"{float(row['standard_error']):.2%}", f"{float(row['cosine']):.3f}",
        )
        for row in rows
    ]  # fmt: skip
    head = ("parameters", "base", "adapter", "held-out loss", "over bfloat16", "standard error", "cosine of gradients")
    return markdown(head, lines)


def quantised_depth() -> str:
    """Gradients of adapters on a quantised base against those on its unrounded weights, by depth."""
    cases: dict[tuple[str, str], list[str]] = {}
    for row in rows_of(DEPTH):
        cases.setdefault((row["kind"], row["layers"]), []).append(row["cosine"])
    lines = [
        (kind, layers, f"{float(all_[0]):.3f}", f"{float(all_[-1]):.3f}") for (kind, layers), all_ in cases.items()
    ]
    return markdown(("base", "layers", "cosine in the first layer", "in the last"), sorted(lines))


def planner() -> str:
    shared, held = rows_of(f"{PLANNED}/workloads.csv"), rows_of(f"{PLANNED}/heldout.csv")
    earlier = {"shared workloads": f"{PLANNER}/workloads.csv", "held-out workloads": f"{PLANNER}/heldout.csv"}
    grown, exact = rows_of(f"{PLANNER}/growth.csv")[-1], rows_of(f"{PLANNER}/exact.csv")
    cells = []
    for size in ("16", "8"):
        for name, rows, keys in (
            ("shared workloads", shared, ("slots", "first_plan_slots", "reference_slots")),
            ("held-out workloads", held, ("slots", "first_plan_slots")),
        ):
            mine = [row for row in rows if row["global_batch"] == size]
            bound = sum(int(row["bound"]) for row in mine)
            totals = [f"{sum(int(row[key]) for row in mine) / bound:.4f}" for key in keys]
            before = sum(int(row["slots"]) for row in rows_of(earlier[name]) if row["global_batch"] == size)
            totals.insert(1, f"{before / bound:.4f}")
            cells.append((f"{name}, global batch {size}", len(mine), *totals, *[""] * (4 - len(totals))))
    known = [row for row in exact if row["proven"] == "True" or row["slots"] == row["bound"]]
    best = sum(int(row["slots"]) <= int(row["exact_slots"]) for row in known)
    head = (
        "slots over the lower bound",
        "plans",
        "planner",
        "with limits of wall time",
        "its first plan",
        "reference solver",
    )
    lines = markdown(head, cells)
    again = rows_of(f"{PLANNED}/growth.csv")[-1]
    return (
        f"{lines}\n\nOptimal in {best} of the {len(known)} small instances that the exact solver decided. "
        f"{int(grown['samples']):,} samples: {float(grown['first_plan_s']):.1f} s, {float(grown['memory_gb']):.2f} GB, "
        f"{float(grown['gap']):.2%} over the bound. Processor time a sample: "
        f"{float(again['cpu_us_per_sample']):.1f} µs beside other work, "
        f"before on a quiet machine {float(grown['cpu_us_per_sample']):.1f} µs."
    )


def plan_floors() -> str:
    """Plans of drawn instances beside what simple rules and other systems' orders make of them."""
    rows = rows_of(f"{FLOORS}/slots.csv")
    orders = {
        "slots": "planner",
        "list_rule": "list rule: the longest chain first, first-fit decreasing",
        "lorafusion": "LoRAFusion's order: pairs of adapters, batch by batch",
        "mlora": "mLoRA's order: a batch of each adapter in turn",
    }
    lines = []
    for key, order in orders.items():
        over = [int(row[key]) / int(row["bound"]) for row in rows]
        counts = (sum(sign * (int(row[key]) - int(row["slots"])) > 0 for row in rows) for sign in (1, -1))
        against = ("–", "–") if key == "slots" else tuple(counts)
        lines.append((order, f"{fmean(over):.4f}", f"{max(over):.2f}", sum(ratio == 1 for ratio in over), *against))
    head = (
        "order",
        "slots over the lower bound, mean",
        "most",
        "at the bound",
        "planner is shorter",
        "planner is longer",
    )
    return f"{len(rows)} instances:\n\n{markdown(head, lines)}"


def pipeline_claims() -> str:
    """Claims of mLoRA and LoRAFusion, and what simulated pipelines give."""
    rows = rows_of("pipelines_2026-11-28_claims/claims.csv")
    columns = "idle: one after another", "mLoRA's order", "plan", "time: one after another / plan"
    columns = "stages", *columns, "mLoRA's order / one after another", "mLoRA's order / plan"
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    for stages in dict.fromkeys(row["stages"] for row in rows):
        some = [{key: float(value) for key, value in row.items()} for row in rows if row["stages"] == stages]
        idle = (f"{100 * fmean(row[f'{name}_idle'] for row in some):.0f} %" for name in ("flushed", "mlora", "ours"))
        ratios = (
            f"{min(values):.2f}–{max(values):.2f}"
            for over, under in (("flushed", "ours"), ("mlora", "flushed"), ("mlora", "ours"))
            if (values := [row[f"{over}_s"] / row[f"{under}_s"] for row in some])
        )
        lines.append(f"| {stages} | {' | '.join(idle)} | {' | '.join(ratios)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    function.__name__: function
    for function in (
        layers, siblings, ops, slower, moved, training, sharded, ratios, workloads, idle, batch_sizes, scaling, planner,
        pipelines, quantised_bases, peers_in_short, peers, peers_compiled, sizes, flax_model, adapter_counts,
        quantised_loss, quantised_depth, online_targets, online_claims, online_held_out, online_large, online_queue,
        online_ideas, online_throughput, online_rates, online_decision, long_samples,
        longer_samples, parity, joint_alone, tensor, plan_floors, pipeline_claims, joining,
        joining_peft, joining_rl, joining_search, learning, decoding, generated, flax_vit, flax_mesh,
    )
}  # fmt: skip
