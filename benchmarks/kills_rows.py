"""What a good row of kills.py is, for the script and for tables."""

from __future__ import annotations

from collections.abc import Mapping


def is_good(row: Mapping[str, object]) -> bool:
    """Whether nothing was lost; a signal ends a run orderly, or comes after its end."""
    said = {key: str(value) for key, value in row.items()}
    orderly = said["kind"] not in ("SIGTERM", "SIGINT") or said["code"] in ("0", "130")
    same = said["bitwise"] == "True" and said["resumed"] == "0"
    return orderly and same and not said["leftovers"] and said["traceback"] == "False"
