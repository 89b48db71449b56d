"""Figures that code computes, and those that were measured on a CPU."""

from __future__ import annotations

import json

from benchmarks import agreement, predicted
from benchmarks.figure import RESULTS, Figure, of, pick, rows

PAGES = "docs/pages"


def page(name: str) -> str:
    return f"{PAGES}/{name}.md"


def exports_beside_peft() -> list[str]:
    """The largest difference of any logits, relative."""
    proof = json.loads((RESULTS / "peft_proof_2026-11-21" / "peft_proof.json").read_text(encoding="utf-8"))
    errors = [row[key] for row in proof["rows"] for key in row if key.endswith("_error")]
    return [f"{max(errors):.0e}".replace("e-0", "e-")]


def windows_of_stages() -> list[str]:
    quotients = [row["least_quotient"] for row in rows("window_density_2026-11-24/density.csv") if row["stages"] == "4"]
    return [f"{min(map(float, quotients)):.3f}"]


def sizes_over_one(*batches: int) -> list[str]:
    gains = [pick("planner_2026-11-27/sizes.csv", global_batch=str(batch)) for batch in batches]
    return [f"{float(row['four_sizes']) / float(row['one_size']):.2f}" for row in gains]


def loss_by_fp8() -> list[str]:
    """The least and the largest loss of a data set, in % of that on the bfloat16 base, without training."""
    starts = [row for row in rows("quantised_loss_h200_2026-11-23/quantised_loss.csv") if row["base"] == "examples"]
    shares = []
    for adapter in {row["adapter"] for row in starts}:
        plain, rounded = (
            sum(float(row["before"]) for row in starts if (row["kind"], row["adapter"]) == (kind, adapter))
            for kind in ("none", "fp8")
        )
        shares.append(100 * (rounded / plain - 1))
    return [f"{min(shares):.1f}", f"{max(shares):.1f}"]


def counted(key: str, *files: str) -> list[str]:
    return [predicted.spaced(sum(int(row[key]) for file in files for row in rows(file)))]


def service_kills() -> list[str]:
    return [number for kind in ("server", "worker", "stop") for number in counted(kind, SERVICE_KILLS)]


def live(name: str, *shares: str, digits: int = 1) -> list[str]:
    """Of 32 jobs on one H200: a value, or those of shares of the jobs."""
    value = pick("live_h200_2026-11-27b/live.jsonl", what="live")[name]
    return [f"{number:.{digits}f}" for number in ([value[share] for share in shares] or [value])]


def live_speed() -> list[str]:
    (speed,), share = live("tokens_per_s"), live("share_of_offline", digits=2)
    return [f"{float(speed) / 1000:.1f}", *share]


def gemma4_e2b() -> list[str]:
    """Tokens/s of four adapters, over the frozen model; GB at most, and predicted."""
    file = "end_to_end_h200_2026-11-27_gemma4_e2b/end_to_end.jsonl"
    ours, frozen = (pick(file, variant=name) for name in ("ours", "frozen"))
    speed, floor = (row["useful_tokens_per_s"] for row in (ours, frozen))
    gigabytes = [f"{ours[name][0]:.1f}" for name in ("peak_gb", "predicted_gb")]
    return [f"{speed / 1000:.1f}", f"{speed / floor:.2f}", *gigabytes]


def live_slots() -> list[str]:
    return [*live("slots", digits=0), *live("offline_slots", digits=0)]


SERVICE_KILLS = "service_kills_cpu_2026-11-27/service_kills.csv"
HOSTILE = (
    "hostile_cpu_2026-11-24/shard-00.csv",
    "hostile_cpu_2026-11-24b/shard-00.csv",
    "hostile_cpu_2026-11-24b/shard-01.csv",
)
SCHEMA = "schema_requests_cpu_2026-11-24/schemathesis.csv"
COMPUTED = (
    Figure(
        page("models"),
        "{} k tokens/s, {} of the frozen model, and {} GB at most where {} were predicted",
        gemma4_e2b,
    ),
    Figure(
        page("service"),
        "start of an adapter in a free place | {} s in the median, {} s at most",
        of(live, "start_s", "p50", "most"),
    ),
    Figure(
        page("service"),
        "a place being free | {} s in the median, {} s at most",
        of(live, "first_step_free_s", "p50", "most"),
    ),
    Figure(page("service"), "to the last step | {} k, {} of an offline plan", live_speed),
    Figure(page("service"), "| microbatches | {}, {} in the offline plan", live_slots),
    Figure(
        page("reliability"),
        "`campaigns/service_kills.py`: {} kills of servers, {} of workers and {} stops",
        service_kills,
    ),
    Figure(page("reliability"), "`campaigns/hostile_requests.py`: {} requests;", of(counted, "requests", *HOSTILE)),
    Figure(
        page("reliability"),
        "`campaigns/schema_requests.py`: {} requests of three users",
        of(counted, "requests", SCHEMA),
    ),
    Figure(page("quantised"), "loses {} to {} % of its held-out loss on the four data sets below", loss_by_fp8),
    Figure(page("quantised"), "| `nf4` | {} | is dequantised", of(predicted.bytes_a_weight, "nf4")),
    Figure(page("quantised"), "`nf4_single` | 1, {} | is dequantised", of(predicted.bytes_a_weight, "nf4_single")),
    Figure(page("quantised"), "about {} % of a row's norm each", predicted.rounding_to_fp8),
    Figure(
        page("lossless"),
        "is {} of its bound in bfloat16, and {} and {} in two runs of float32",
        agreement.most_of_bound,
    ),
    Figure(page("planning"), "by default {} GiB for 131 072 tokens", predicted.loss_of_long_sample),
    Figure(
        page("planning"),
        "memory/stage s0 {} s1 {} s2 {} s3 {} GiB of 140 fits",
        of(predicted.stages_of_70b, "gemm_inputs"),
    ),
    Figure(
        page("planning"),
        "memory/stage s0 {} s1 {} s2 {} s3 {} GiB of 140 does not fit to make it fit: batch.capacity_tokens: {} or",
        of(predicted.stages_of_70b, "everything", suggestion=True),
    ),
    Figure(page("several-gpus"), "inputs of all layers, {} GiB of the last row", predicted.inputs_of_layers),
    Figure(page("models"), "rank 8 on all experts of Qwen3-30B-A3B is {} billion", predicted.parameters_of_experts),
    Figure(
        page("models"),
        "2 bytes a weight: {} GB for gpt-oss-20b. With four adapters of rank 16 on attention and microbatches of 8 192 "
        "tokens, `plan` predicts {} GB in all, without products that are computed twice, and {} GB with everything "
        "saved",
        predicted.gpt_oss_20b,
    ),
    Figure(
        page("models"),
        "the table of inputs ({} GB of E2B's {} in bfloat16) is split by columns",
        predicted.inputs_of_gemma_4_e2b,
    ),
    Figure(page("models"), "inputs of a microbatch ({} kB a token of E2B)", predicted.row_of_gemma_4_e2b),
    Figure(page("lossless"), "beside `transformers` and `peft` themselves it was {} |", exports_beside_peft),
    Figure(page("service"), "the quotients are {} and more", windows_of_stages),
    Figure(
        page("planning"),
        "with default rates of an H200: {} at a global batch of 8, {} at 16, {} at 32 and {} at 64",
        of(sizes_over_one, 8, 16, 32, 64),
    ),
)
