"""Figures in sentences and hand-made tables of the documents: each is computed from raw rows and put where it stands.

`FIGURES` has a document, a text with a `{}` for each number, and the numbers. `make tables` writes them, a test fails
if a document has others, and a text that a document no longer has is an error.
"""

from __future__ import annotations

import json
from typing import Any

from benchmarks import predicted, published
from benchmarks.figure import RESULTS, Figure, of, pattern, pick, replaced, rows
from benchmarks.figures_computed import COMPUTED


def with_figures(document: str, text: str) -> str:
    """Returns the text of a document with the numbers of its figures.

    Raises:
        ValueError: a figure is not there exactly once.
    """
    for figure in FIGURES:
        if figure.document == document:
            shape, values = pattern(figure), tuple(figure.values())
            count = len(shape.findall(text))
            if count != 1 or shape.groups != len(values):
                raise ValueError(f"{document} has {count} times: {figure.text}")
            text = shape.sub(lambda match, values=values: replaced(match, values), text)
    return text


def k(tokens_per_s: float) -> str:
    return f"{tokens_per_s / 1000:.1f}"


def ms(us: float) -> str:
    return f"{us / 1000:.{2 if us < 5000 else 1}f}"


# --- whole runs ---

FP8 = "end_to_end_h200_2026-11-23d/end_to_end.jsonl"
FP8_RUN = {"run": "2026-11-23 17:46:28"}


def own_fp8() -> list[str]:
    ours, frozen = (pick(FP8, variant=name, **FP8_RUN)["useful_tokens_per_s"] for name in ("ours_fp8", "frozen"))
    return [k(ours), k(frozen), f"{ours / frozen:.2f}"]


def speed_and_peak(name: str, **fields: Any) -> list[str]:
    row = pick(name, **fields)
    return [k(row["useful_tokens_per_s"]), f"{row['peak_gb'][0]:.0f}"]


def small_nf4() -> list[str]:
    row = pick(FP8, variant="ours_nf4")
    return [f"{row['peak_gb'][0]:.1f}", k(row["useful_tokens_per_s"])]


def long_sample() -> list[str]:
    ours, peer = (rows(f"long_samples_h200_2026-11-23/{name}.jsonl")[0] for name in ("long_samples", "peers"))
    speeds = [f"{value / 1000:.2f}" for value in (ours["tokens_per_s"], peer["useful_tokens_per_s"])]
    return [speeds[0], f"{ours['peak_gib']:.1f}", speeds[1]]


def newest_jax() -> list[str]:
    """Tokens/s of jax 0.12 over those of 0.11, mean of two cards: bfloat16, 8-bit floats, frozen."""
    table = rows("end_to_end_h200_2026-11-28_jax_0_12/end_to_end.jsonl")

    def mean(variant: str, version: str) -> float:
        speeds = [row["useful_tokens_per_s"] for row in table if row["variant"] == variant and row["jax"] == version]
        return sum(speeds) / len(speeds)

    return [f"{mean(name, '0.12.0.1') / mean(name, '0.11.2'):.3f}" for name in ("ours", "ours_fp8", "frozen")]


GPT_OSS = ("end_to_end_h200_2026-11-24_gpt_oss", "end_to_end_h100_2026-11-24_gpt_oss")


def gpt_oss(folder: str) -> list[str]:
    (row,) = rows(f"{folder}/end_to_end.jsonl")
    return [f"{row['peak_gb'][0]:.1f}", f"{row['predicted_gb'][0]:.1f}"]


def attention_of_documents() -> list[str]:
    """As `lorafusion tune` timed them."""
    tuned = json.loads((RESULTS / "attention_h200_2026-11-23" / "tune.json").read_text(encoding="utf-8"))["ops"]
    (times,) = (op["median_us"] for op in tuned if op["call"]["op"] == "attention")
    return [f"{times[name] / 1000:.2f}" for name in ("pallas_triton", "cudnn", "pallas_mosaic_gpu")]


SAVING = ("saving_h200_2026-11-23b", "saving_h200_2026-11-24")


def saves() -> list[str]:
    """Pauses, times of writing and lost seconds of two runs' first saves; how long a second save waited."""
    runs = [pick(f"{folder}/saving.jsonl", case="saving") for folder in SAVING]
    first = [run["saves"][0] for run in runs]
    lost = (runs[0]["lost_share"] * runs[0]["wall_s"], runs[1]["lost_s"])
    return [
        *(f"{1000 * save['paused_s']:.0f}" for save in first),
        *(f"{save['seconds']:.0f}" for save in first),
        *(f"{seconds:.1f}" for seconds in lost),
        f"{runs[1]['saves'][1]['paused_s']:.0f}",
    ]


DPO = "end_to_end_h200_2026-11-24"


def trl_with_more_rows(pairs: int) -> list[str]:
    speeds = {row["rows"]: row["useful_tokens_per_s"] for row in rows(f"{DPO}/peers.jsonl")}
    return [k(speeds[pairs]), f"{speeds[pairs] / max(speeds.values()):.2f}"]


def dpo_together() -> list[str]:
    """Over one after another, how full microbatches of both are, and what full ones would make."""
    ours, single = (pick(f"{DPO}/end_to_end.jsonl", variant=name) for name in ("ours", "single"))
    return [
        f"{ours['useful_tokens_per_s'] / single['useful_tokens_per_s']:.2f}",
        f"{100 * single['density']:.0f}",
        f"{100 * ours['density']:.0f}",
        f"{1 / single['density']:.2f}",
    ]


def dpo(which: str) -> list[str]:
    """The best of TRL's variants is the one to compare with."""
    trl = max(row["useful_tokens_per_s"] for row in rows("end_to_end_h200_2026-11-24/peers.jsonl"))
    speed = trl
    if which != "trl":
        speed = pick("end_to_end_h200_2026-11-24/end_to_end.jsonl", variant=which)["useful_tokens_per_s"]
    return [k(speed), f"{speed / trl:.2f}"]


# --- layers and kernels ---


def fp8_layer() -> list[str]:
    """Our products with the fused gate in the first run, the default in the second."""
    first = [row for row in rows(f"{QUANTISED}/first.jsonl") if row.get("case") == "fp8 own, gate"]
    second = [row for row in rows(f"{QUANTISED}/quantised_layer.jsonl") if row.get("case") == "fp8"]
    ratios = [next(row["over_frozen_bf16"] for row in run if "over_frozen_bf16" in row) for run in (first, second)]
    return [f"{ratio:.2f}" for ratio in ratios]


QUANTISED = "quantised_layer_h200_2026-11-23b"


def cells(table: str, *start: str) -> list[str]:
    """Cells of the only line of a table that starts like this."""
    (line,) = (line for line in table.splitlines() if line.startswith("| " + " | ".join(start) + " |"))
    return line[2:-2].split(" | ")


def option_against_triton() -> list[str]:
    over = float(cells(published.layers(), "8B", "frozen layer, XLA's default options")[-2])
    return [f"{100 * (over - 1):.1f}"]


def our_ops_on_xla() -> list[str]:
    return [f"{100 / float(cells(published.layers(), '8B', 'our ops on XLA', '4', '0.1')[-1]) - 100:.0f}"]


def played_again() -> list[str]:
    models = (("Qwen2.5-32B", "2"), ("Llama-3.1-70B", "4"))
    return [cells(published.pipelines(), *model, "ours")[-1] for model in models]


def profiles_apart() -> list[str]:
    """By how much times by a profile over measured ones differ between two orders at 70B, in %."""
    orders = ("mLoRA's order, our kernels", "ours")
    mlora, ours = (float(cells(published.pipelines(), "Llama-3.1-70B", "4", order)[-2]) for order in orders)
    return [f"{100 * (mlora / ours - 1):.0f}"]


def padding_of_mlora() -> list[str]:
    row = pick(published.END_TO_END, model="70b", variant="mlora")
    return [f"{100 * (1 - row['density']):.0f}"]


def fill_of_one_size() -> list[str]:
    density = float(cells(published.workloads(), "mix")[2].removesuffix("%"))
    return [f"{density:.0f}"]


def gain_of_groups() -> list[str]:
    factors = [float(cells(published.online_ideas(), gpus)[2].split()[0]) for gpus in ("1", "8")]
    return [f"{100 * (factor - 1):.0f}" for factor in factors]


def joint_layer() -> list[str]:
    """Our kernels with four adapters and dropout, over the frozen layer of 8B."""
    (line,) = (line for line in published.layers().splitlines() if line.startswith("| 8B | our kernels | 4 | 0.1 |"))
    return [f"{float(line.split(' | ')[5]):.2f}"]


def over_rank_16(name: str, file: str = "ranks") -> list[str]:
    return [f"{pick(f'ranks_h200_2026-11-24/{file}.jsonl', part='microbatch', name=name)['over_r16']:.2f}"]


def experts(tokens: int, adapters_on: str) -> list[str]:
    name, fields = "experts_h200_2026-11-27/experts.jsonl", {"tokens": tokens, "adapters_on": adapters_on}
    ours, peft = (pick(name, section=section, **fields) for section in ("layer", "peft"))
    return [f"{ours['of_frozen']:.2f}", f"{ours['tokens_per_s'] / peft['tokens_per_s']:.1f}"]


def experts_ms(adapters_on: str) -> list[str]:
    row = pick("experts_h200_2026-11-24/experts.jsonl", section="layer", tokens=8192, adapters_on=adapters_on)
    return [*predicted.layer_of_experts(), f"{row['ms']:.1f}"]


def predicted_and_measured(mixer: str) -> list[str]:
    return [*predicted.layer_of_hybrid(mixer), *mixer_ms(mixer)]


def mixer_ms(mixer: str, rule: str = "pallas_triton") -> list[str]:
    return [f"{pick(DELTA_NET, section='layer', mixer=mixer, rule=rule)['adapted_ms']:.1f}"]


DELTA_NET = "delta_net_h200_2026-11-27/delta_net.jsonl"


def delta_net() -> list[str]:
    net = "gated delta net"
    layer = pick(DELTA_NET, section="layer", mixer=net, rule="pallas_triton")
    rules = [pick(DELTA_NET, section="mixer", mixer=name, samples=1) for name in ("rule, pallas_triton", "rule")]
    times = [*mixer_ms(net), *mixer_ms(net, "xla"), *mixer_ms("gated attention")]
    return [f"{layer['over_frozen']:.2f}", *times, *(f"{rule['both_us'] / 1000:.1f}" for rule in rules)]


def attention(rule: str, *implementations: str, width: int = 128) -> list[str]:
    picked = [
        pick("families_h200_2026-11-24/families.jsonl", rule=rule, width=width, samples=1, implementation=name)["us"]
        for name in implementations
    ]
    return [ms(us) for us in picked]


def peak_of_tensor() -> list[str]:
    """GB of a table, of the process on one GPU, and predicted for training."""
    row = pick(published.TENSOR, section="run", mesh="one", adapters=4)
    shape = pick(published.TENSOR, section="conditions")["shape"]
    table = 2 * shape["vocab_size"] * shape["hidden_size"]
    return [f"{table / 1e9:.2f}", *(f"{row[key] / 1e9:.1f}" for key in ("peak_bytes", "predicted_bytes"))]


def first_losses_of_tensor() -> list[str]:
    apart = max(row["first_losses_apart"] for row in rows(published.TENSOR) if row["section"] == "run")
    return [f"{apart:.0e}".replace("e-0", "e-")]


def wide_attention() -> list[str]:
    full, near = ("full", "window 1024")
    values = attention(full, "pallas_triton", "cudnn", width=256) + attention(near, "pallas_triton", width=256)
    values += [*attention(full, "xla", width=256), *attention(near, "xla", width=256)]
    return [f"{float(value):.1f}" for value in values]


def gemma_layer() -> list[str]:
    file = "families_h200_2026-11-27/families.jsonl"
    return [f"{pick(file, section='layer', layer=name)['over_frozen']:.2f}" for name in LAYERS]


LAYERS = ("window", "full")


def kinds() -> list[str]:
    over = (pick("kinds_h100_2026-11-24b/kinds.jsonl", variant=name)["over_lora"] for name in ("dora", "vera"))
    return [f"{ratio:.3f}" for ratio in over]


# --- generation, starts, services ---


def generation(section: str) -> list[str]:
    speed = pick("generate_h200_2026-11-24/generate.jsonl", section=section)["tokens_per_s"]
    return [f"{speed:,.0f}".replace(",", " ")]


def generation_pass() -> list[str]:
    row = pick("generate_h200_2026-11-24/generate.jsonl", section="ours")
    return [f"{row[key]:.1f}" for key in ("step_ms", "bound_ms")]


def addition() -> list[str]:
    without, place = rows("additions_cpu_2026-11-24/additions.jsonl")
    return [f"{without['cpu_seconds']:.1f}", str(without["programs"]), f"{place['cpu_seconds']:.1f}"]


def first_step() -> list[str]:
    empty = (pick("starting_h200_2026-11-26/starting.jsonl", ahead=ahead) for ahead in ("with", "without"))
    filled = pick("starting_h200_2026-11-24/starting.jsonl", cache="filled")
    return [f"{row['first_step_s']:.1f}" for row in (*empty, filled)]


def window_density(batches: str, decimals: bool) -> list[str]:
    row = pick("window_density_2026-11-24/density.csv", batches=batches, stages="1")
    error = [f"{float(row['windows_se']):.3f}"] if decimals else []
    return [
        f"{float(row['windows']):.3f}",
        *error,
        *(f"{float(row[key]):.3f}" for key in ("offline", "least_quotient")),
    ]


REAL, REAL_H100 = "online_real_h200_2026-11-26", "online_real_h100_2026-11-24"


def simulated_jobs(folder: str) -> list[float]:
    return [float(row["simulated_error"]) for row in rows(f"{folder}/jobs.csv")]


def simulated_on_its_card() -> list[str]:
    errors = [abs(error) for error in simulated_jobs(REAL)]
    makespans = [abs(float(row["makespan_simulated_error"])) for row in rows(f"{REAL}/runs.csv")]
    of_jobs = [f"{100 * value:.0f}" for value in (sum(errors) / len(errors), max(errors))]
    return of_jobs + [f"{100 * value:.1f}" for value in makespans]


def simulated_on_another() -> list[str]:
    return [f"{100 * bound(simulated_jobs(REAL_H100)):.0f}" for bound in (min, max)]


README, PAGES = "README.md", "docs/pages"
QUANTISED_PAGE, MODELS, PLANNING = f"{PAGES}/quantised.md", f"{PAGES}/models.md", f"{PAGES}/planning.md"
KERNELS, OBJECTIVES, SERVICE = f"{PAGES}/kernels.md", f"{PAGES}/objectives.md", f"{PAGES}/service.md"
GENERATE, ONLINE, RUN_FOLDER = f"{PAGES}/generate.md", f"{PAGES}/online.md", f"{PAGES}/run-folder.md"
ALL = ("pallas_mosaic_gpu", "pallas_triton", "cudnn", "xla")
NO_CUDNN = ("pallas_mosaic_gpu", "pallas_triton", "xla")
BENCHMARKS = "benchmarks/README.md"
FIGURES = (
    *COMPUTED,
    Figure(BENCHMARKS, "which is {} % slower than the best plain XLA form there", our_ops_on_xla),
    Figure(BENCHMARKS, "which is worth {} % of the frozen layer", option_against_triton),
    Figure(BENCHMARKS, "it plays measured passes again in {} and {} of their time", played_again),
    Figure(BENCHMARKS, "Predictions from a profile of the run were {} % apart at 70B", profiles_apart),
    Figure(BENCHMARKS, "and {} % of the rows of mLoRA's order are padding", padding_of_mlora),
    Figure(PLANNING, "two tables of {} GB took {} GB on one H200 where {} are predicted", peak_of_tensor),
    Figure(f"{PAGES}/several-gpus.md", "First losses are equal to {}.", first_losses_of_tensor),
    Figure(PLANNING, "fill microbatches of one size to {} %", fill_of_one_size),
    Figure(ONLINE, "Groups bring {} to {} % on one and eight GPUs", gain_of_groups),
    Figure(
        KERNELS,
        "of eight documents in 8192 rows take {} ms, cuDNN {} and Hopper's kernels {}.",
        attention_of_documents,
    ),
    Figure(
        RUN_FOLDER,
        "training waited {} and {} ms for the first save of two runs, which was written in {} and {} s to a disk in "
        "memory and cost {} and {} s in all. In the second of them the next save came before that one was written and "
        "stopped training for {} s",
        saves,
    ),
    Figure(OBJECTIVES, "| the same, two pairs a microbatch | {} k | {} |", of(trl_with_more_rows, 2)),
    Figure(OBJECTIVES, "| the same, eight pairs, gradient checkpointing | {} k | {} |", of(trl_with_more_rows, 8)),
    Figure(
        OBJECTIVES,
        "Together the adapters are {} times as fast as one after another with our kernels, whose microbatches are {} % "
        "full instead of {} %: full ones would make {}.",
        dpo_together,
    ),
    Figure(README, "With our own fp8 products {} k, against {} k of the frozen model in one process: {} ×.", own_fp8),
    Figure(QUANTISED_PAGE, "takes {} to {} of the time of the frozen bfloat16 layer", fp8_layer),
    Figure(QUANTISED_PAGE, "where it takes {} on a bfloat16 base", joint_layer),
    Figure(
        f"{PAGES}/index.md",
        "a decoder layer with four adapters takes {} times as long as the same layer without LoRA",
        joint_layer,
    ),
    Figure(
        QUANTISED_PAGE,
        "A whole run does {} k useful tokens/s next to {} k of the frozen bfloat16 model in the same process: {} ×",
        own_fp8,
    ),
    Figure(
        QUANTISED_PAGE,
        "Qwen2.5-32B's shape at {} k useful tokens/s, peak {} GB",
        of(speed_and_peak, "end_to_end_h200_2026-11-23e/end_to_end.jsonl"),
    ),
    Figure(
        QUANTISED_PAGE,
        "Llama-3.1-70B's at {} k in microbatches of 4096 tokens, peak {} GB",
        of(speed_and_peak, "end_to_end_h200_2026-11-23c/end_to_end.jsonl"),
    ),
    Figure(QUANTISED_PAGE, "8B in nf4 trains within 24 GB: peak {} GB and {} k useful tokens/s", small_nf4),
    Figure(
        PLANNING,
        "run at {} k tokens/s with a peak of {} GiB. A step of PEFT + Liger + flash attention with gradient "
        "checkpointing does {} k",
        long_sample,
    ),
    Figure(PLANNING, "| Qwen3-30B-A3B's shape | attention | {} | {} |", of(experts_ms, "attention")),
    Figure(
        PLANNING, "| Qwen3-30B-A3B's shape | attention and experts | {} | {} |", of(experts_ms, "attention, experts")
    ),
    Figure(
        PLANNING,
        "| Qwen3.5-9B's shape, gated delta net | all projections | {} | {} |",
        of(predicted_and_measured, "gated delta net"),
    ),
    Figure(
        PLANNING,
        "| Qwen3.5-9B's shape, attention | all projections | {} | {} |",
        of(predicted_and_measured, "gated attention"),
    ),
    Figure(KERNELS, "| three adapters of rank 16, one of 128 | {} |", of(over_rank_16, "3 x r16, r128")),
    Figure(
        KERNELS,
        "An earlier measurement with these gave {}; gradients",
        of(over_rank_16, "3 x r16, r128", "first_microbatches"),
    ),
    Figure(KERNELS, "| four of rank 128 | {} |", of(over_rank_16, "4 x r128")),
    Figure(KERNELS, "| four of rank 256 | {} |", of(over_rank_16, "4 x r256")),
    Figure(MODELS, "six of its layers took {} GB at most where {} were predicted", of(gpt_oss, GPT_OSS[0])),
    Figure(MODELS, "on an H100 the six layers took {} GB where {} were predicted", of(gpt_oss, GPT_OSS[1])),
    Figure(MODELS, "| 8 192 | attention | {} | {} |", of(experts, 8192, "attention")),
    Figure(MODELS, "| 8 192 | attention and experts | {} | {} |", of(experts, 8192, "attention, experts")),
    Figure(MODELS, "| 16 384 | attention | {} | {} |", of(experts, 16384, "attention")),
    Figure(MODELS, "| 16 384 | attention and experts | {} | {} |", of(experts, 16384, "attention, experts")),
    Figure(
        MODELS,
        "takes {} of the frozen layer's time at 8 192 tokens on one H200: {} ms forward and backward, {} with XLA's "
        "form, beside {} for a layer with gated attention. The rule itself takes {} ms by the kernels and {} by XLA",
        delta_net,
    ),
    Figure(MODELS, "| full | {} | {} | {} | {} |", of(attention, "full", *ALL)),
    Figure(MODELS, "| window of 4096 | {} | {} | – | {} |", of(attention, "window 4096", *NO_CUDNN)),
    Figure(MODELS, "| window of 1024 | {} | {} | – | {} |", of(attention, "window 1024", *NO_CUDNN)),
    Figure(MODELS, "| window of 512 | {} | {} | – | {} |", of(attention, "window 512", *NO_CUDNN)),
    Figure(MODELS, "| soft cap | – | {} | – | {} |", of(attention, "cap", "pallas_triton", "xla")),
    Figure(
        MODELS,
        "| soft cap, window of 1024 | – | {} | – | {} |",
        of(attention, "cap, window 1024", "pallas_triton", "xla"),
    ),
    Figure(
        MODELS,
        "Triton {} and cuDNN {} for full attention, Triton {} with a window of 1024, XLA {} and {}.",
        wide_attention,
    ),
    Figure(MODELS, "takes {} (window) and {} (full) times its frozen layer on an H200", gemma_layer),
    Figure(OBJECTIVES, "| four `dpo` adapters together | {} k | {} |", of(dpo, "ours")),
    Figure(OBJECTIVES, "| four `dpo` adapters one after another, our kernels | {} k | {} |", of(dpo, "single")),
    Figure(OBJECTIVES, "| TRL 1.16's DPOTrainer, PEFT and Liger, one pair a microbatch | {} k | {} |", of(dpo, "trl")),
    Figure(f"{PAGES}/kinds.md", "`dora` takes {} of LoRA's time, `vera` {}", kinds),
    Figure(GENERATE, "| all 64 sequences in one batch, prompts included | {} |", of(generation, "ours")),
    Figure(
        GENERATE,
        "| transformers with PEFT, one adapter after another, four sequences each | {} |",
        of(generation, "peft"),
    ),
    Figure(
        "docs/pages/kernels.md",
        "keeps {} of its tokens/s in bfloat16 and {} on an fp8 base, the frozen model {}",
        newest_jax,
    ),
    Figure(GENERATE, "A pass takes {} ms; reading weights, adapters and cache once takes {} ms", generation_pass),
    Figure(
        ONLINE,
        "simulated completion times are off by {} % in the mean and {} % at worst, the makespans of the two "
        "scenarios by {} and {} %",
        simulated_on_its_card,
    ),
    Figure(ONLINE, "at rates from data sheets were {} to {} % too long", simulated_on_another),
    Figure(
        RUN_FOLDER,
        "the processor worked {} s from the request to the first step of the new adapter without a place, for {} "
        "programs, and {} s with a place",
        addition,
    ),
    Figure(
        RUN_FOLDER,
        "makes its first step {} s after the command with empty caches, {} s without these processes, and {} s "
        "with filled caches",
        first_step,
    ),
    Figure(SERVICE, "| 4, 8, 16 | {} ± {} | {} | {} |", of(window_density, "4 8 16", True)),
    Figure(SERVICE, "| 8, 8, 8 | {} | {} | {} |", of(window_density, "8 8 8", False)),
    Figure(SERVICE, "| 4, 8 | {} ± {} | {} | {} |", of(window_density, "4 8", True)),
    Figure(SERVICE, "| 4, 8, 16, 4 | {} | {} | {} |", of(window_density, "4 8 16 4", False)),
    Figure(SERVICE, "| 4, 8, 16, 32, 4, 8 | {} | {} | {} |", of(window_density, "4 8 16 32 4 8", False)),
    Figure(SERVICE, "| 4, 8, 16, 4, 8, 16, 4, 8 | {} | {} | {} |", of(window_density, "4 8 16 4 8 16 4 8", False)),
)
