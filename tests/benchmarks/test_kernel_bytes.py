"""Sums over the profiler's table of counters."""

import pytest

from benchmarks.kernel_bytes import added


def row(number, name, metric, value, unit):
    return {"ID": number, "Kernel Name": name, "Metric Name": metric, "Metric Value": value, "Metric Unit": unit}


def test_bytes_and_times_of_all_units_are_summed_by_kernel():
    read, written, time = "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum"
    totals = added(
        [
            row("0", "lora_down", read, "67.5", "Mbyte"), row("0", "lora_down", written, "1,024", "Kbyte"),
            row("0", "lora_down", time, "19.8", "us"), row("1", "gemm", read, "1.5", "Gbyte"),
            row("1", "gemm", written, "512", "byte"), row("1", "gemm", time, "3,100,000", "ns"),
            row("1", "gemm", "sm__cycles", "5", "cycle"),
        ]
    )  # fmt: skip
    assert totals["kernels"] == 2
    assert (totals[read], totals[written]) == pytest.approx((1.5675e9, 1_024_512))
    assert totals["bytes"] == totals[read] + totals[written]
    assert totals["each"] == [["lora_down", 68_524_000, 19.8], ["gemm", 1_500_000_512, 3100.0]]
