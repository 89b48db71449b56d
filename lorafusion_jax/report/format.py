"""Numbers as people read them."""

from __future__ import annotations


def count(number: float) -> str:
    """41234 → '41.2 k', 3100000 → '3.1 M'.

    >>> count(41234), count(980)
    ('41.2 k', '980')
    """
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return f"{number:.0f}"


def duration(seconds: float) -> str:
    """75 → '1m15', 4000 → '1h06', 12.3 → '12 s'.

    >>> duration(75), duration(4000), duration(12.3), duration(1.25)
    ('1m15', '1h06', '12 s', '1.2 s')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours}h{minutes:02d}"


def percent(share: float) -> str:
    """0.931 → '93.1 %'."""
    return f"{100 * share:.1f} %"


def rate(value: float) -> str:
    """Learning rates: 0.0002 → '2.0e-4'."""
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}e{int(exponent)}" if value else "0"
