"""Formatting of numbers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any


def count(number: float) -> str:
    """41234 → '41.2 k', 3100000 → '3.1 M'.

    >>> count(41234), count(980), count(999_990)
    ('41.2 k', '980', '1.0 M')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 0.99995 * size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"


def sizes(capacities: Iterable[int]) -> str:
    """Formats the capacities of a plan.

    >>> sizes((3072, 8192)), sizes((8192,))
    ('3 072 / 8 192', '8 192')
    """
    return " / ".join(map(exact, capacities))


def exact(number: int) -> str:
    """Formats an exact count, with spaces between thousands.

    >>> exact(8000), exact(412)
    ('8 000', '412')
    """
    return f"{number:,}".replace(",", " ")


def duration(seconds: float) -> str:
    """75 → '1m15', 4000 → '1h07', 12.3 → '12 s'.

    >>> duration(75), duration(4000), duration(12.3), duration(1.25), duration(59.7), duration(200_000)
    ('1m15', '1h07', '12 s', '1.2 s', '1m00', '2d08h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if round(seconds) < 60:
        return f"{seconds:.0f} s"
    minutes, seconds_over = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{seconds_over:02d}"
    hours, minutes = divmod(round(seconds / 60), 60)
    if hours < 48:
        return f"{hours}h{minutes:02d}"
    days, hours = divmod(round(seconds / 3600), 24)
    return f"{days}d{hours:02d}h"


def percent(share: float) -> str:
    """Formats a share as a percentage.

    >>> percent(0.931)
    '93.1 %'
    """
    return f"{100 * share:.1f} %"


def rate(value: float) -> str:
    """Formats a learning rate.

    >>> rate(0.0002), rate(0)
    ('2.0e-4', '0')
    """
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"


def loss_text(value: float | None, digits: int = 4) -> str:
    """Formats a loss, a reward or another result. What rounds to zero has no sign.

    >>> loss_text(3.17672), loss_text(-0.00004), loss_text(-0.25, 3), loss_text(None)
    ('3.1767', '0.0000', '-0.250', '–')
    """
    return "–" if value is None else f"{value:z.{digits}f}"


def last_result(numbers: Mapping[str, Any]) -> str:
    """Formats an adapter's last loss, or its last reward where it has one: the loss is then near 0 at every step.

    >>> last_result({"loss": 2.5}), last_result({"loss": 0.0, "reward": 0.71875})
    ('2.5000', 'reward 0.719')
    """
    reward = numbers.get("reward")
    return loss_text(numbers.get("loss")) if reward is None else f"reward {loss_text(reward, 3)}"


def layout(mesh: Mapping[str, int], layers: Sequence[int | float], remat: str) -> str:
    """Describes the mesh and the remat policy; empty for one device that saves everything.

    >>> layout({"stages": 2, "data": 4, "fsdp": 1, "tensor": 1}, [17, 15], "everything")
    '2 stages (17 + 15 layers) × 4 replicas'
    >>> layout({"stages": 1, "data": 2, "fsdp": 2, "tensor": 1}, [32], "gemm_inputs")
    '4 replicas, 2 share a copy of the base  ·  saved for backward: gemm_inputs'
    >>> layout({"stages": 2, "data": 1, "fsdp": 1, "tensor": 4}, [17, 15], "everything")
    '2 stages (17 + 15 layers) × 4 devices per layer'
    """
    mesh = {"stages": 1, "data": 1, "fsdp": 1, "tensor": 1} | dict(mesh)  # runs of before name fewer axes
    stages, replicas = mesh["stages"], mesh["data"] * mesh["fsdp"]
    parts = [f"{stages} stages ({' + '.join(map(str, layers))} layers)"] if stages > 1 else []
    parts += [f"{replicas} replicas"] if replicas > 1 else []
    parts += [f"{mesh['tensor']} devices per layer"] if mesh["tensor"] > 1 else []
    sharing = f", {mesh['fsdp']} share a copy of the base" if mesh["fsdp"] > 1 else ""
    remat_text = f"saved for backward: {remat}" if remat != "everything" else ""
    return "  ·  ".join(text for text in (" × ".join(parts) + sharing, remat_text) if text)


def better_layers(layers: Sequence[int | float], saving: float) -> str:
    """Suggests the setting for stages that took unequal times.

    >>> better_layers([20.5, 20.5, 20, 19], 0.033)
    "stages took unequal times: with 'mesh.layers=[20.5,20.5,20,19]' the slowest would take 3.3 % less"
    """
    setting = f"'mesh.layers=[{','.join(map(str, layers))}]'"
    return f"stages took unequal times: with {setting} the slowest would take {percent(saving)} less"


def waits(share: float | None, seconds: Mapping[str, float] | None) -> str:
    """What training waited for; empty where that is not worth a word.

    >>> waits(0.031, {"saving": 2.0, "evaluating": 20.0})
    '  ·  3.1 % evaluating, saving'
    >>> waits(0.0004, {"saving": 0.1})
    ''
    """
    if share is None or share < 0.001 or not seconds:
        return ""
    return f"  ·  {percent(share)} {', '.join(sorted(seconds))}"


def omissions(leaves_out: Sequence[str] | None) -> str:
    """What a time left does not count.

    >>> omissions(["evaluations"])
    ' without evaluations'
    """
    return f" without {', '.join(leaves_out)}" if leaves_out else ""
