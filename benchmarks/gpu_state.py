"""Clock and power of the GPUs during a measurement, from `nvidia-smi`.

Times at different clocks are not comparable.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import threading
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

PERIOD_MS = 200


class Sample(NamedTuple):
    at: float  # seconds since the epoch
    device: str
    sm_mhz: float
    watts: float


class GpuState:
    """Context manager that samples the visible GPUs; without `nvidia-smi` there are no samples."""

    def __init__(self):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        self._visible = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None

    def __enter__(self) -> GpuState:
        program = shutil.which("nvidia-smi")
        if program is None or self._visible == []:
            return self
        name = "uuid" if self._visible and not self._visible[0].isdigit() else "index"
        command = [program, f"--query-gpu=timestamp,{name},clocks.sm,power.draw", "--format=csv,noheader,nounits"]
        command += [f"--id={','.join(self._visible)}"] if self._visible else []
        # A pipe: if this program is killed, nvidia-smi ends at its next line, because the pipe has no reader.
        self._process = subprocess.Popen(
            [*command, "-lms", str(PERIOD_MS)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, args=[self._process.stdout], name="gpu-state", daemon=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None or self._reader is None:
            return
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)

    def means(self, windows: Sequence[tuple[float, float]], devices: int) -> dict[str, list[float | None]]:
        """Mean clock and power per device in time windows; empty without samples.

        Args:
            windows: (start, end) of each, in seconds since the epoch.
            devices: number of devices, from the first visible one.
        """
        inside = [s for s in self._samples if any(start <= s.at <= end for start, end in windows)]
        names = self._visible or sorted({sample.device for sample in inside}, key=int)
        by_device = [[sample for sample in inside if sample.device == name] for name in names[:devices]]
        if not any(by_device):
            return {}
        return {
            "sm_mhz": [
                round(statistics.fmean(s.sm_mhz for s in device_samples), 1) if device_samples else None
                for device_samples in by_device
            ],
            "watts": [
                round(statistics.fmean(s.watts for s in device_samples), 1) if device_samples else None
                for device_samples in by_device
            ],
        }

    def _read(self, stream: Iterable[str]) -> None:
        for line in stream:
            try:
                at, device, clock, power = (field.strip() for field in line.split(","))
                # Uses the time in the line, because a pipe may buffer lines.
                stamp = datetime.strptime(at, "%Y/%m/%d %H:%M:%S.%f").timestamp()
                self._samples.append(Sample(stamp, device, float(clock), float(power)))
            except ValueError:  # a message, a truncated last line, or "[N/A]"
                continue
