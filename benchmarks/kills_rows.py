"""What a good row of kills.py is, for the script and for tables."""

from __future__ import annotations

from collections.abc import Mapping


def is_good(row: Mapping[str, object]) -> bool:
    """Whether nothing was lost: what was killed ended bitwise as it should, and a signal was heard."""
    said = {key: str(value) for key, value in row.items()}
    if said["kind"] in ("SIGTERM", "SIGINT") and (said["code"] not in ("0", "130") or not said["acknowledged_s"]):
        return False
    same = said["bitwise"] == "True" and said["resumed"] == "0"
    return same and not said["leftovers"] and said["traceback"] == "False"
