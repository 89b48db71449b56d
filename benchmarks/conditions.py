"""Conditions of a measurement, stored with every result."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

import jax
import jaxlib

from benchmarks.measured_code import code, commit


def conditions() -> dict[str, Any]:
    """Device, versions, date, and the code that is measured; driver and power limit if `nvidia-smi` is available."""
    facts: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "code": code(),
    }
    program = shutil.which("nvidia-smi")
    if program is not None:
        gpu = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0].strip()  # the first that jax sees
        query = [program, "--query-gpu=driver_version,power.limit", "--format=csv,noheader,nounits", f"--id={gpu}"]
        answer = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().split(", ")
        if len(answer) == 2:
            facts["driver"] = answer[0]
            with suppress(ValueError):  # [N/A]
                facts["power_limit_w"] = float(answer[1])
    return facts
