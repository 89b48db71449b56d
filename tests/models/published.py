"""config.json of published models, written from their documented values, and what becomes of them: published.jsonl.

A line has a name, and what the model's config.json has, beyond that of another model (`of`) where one is named;
`refused` is the key that is not served. Who changes a line runs `tests/peers/saved_configs.py` again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SERVED: dict[str, dict[str, Any]] = {}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {}

for row in map(json.loads, (Path(__file__).parent / "published.jsonl").read_text(encoding="utf-8").splitlines()):
    config = SERVED.get(row.get("of"), {}) | row["config"]
    if "refused" in row:
        REFUSED[row["name"]] = config, row["refused"]
    else:
        SERVED[row["name"]] = config
