"""The command `lorafusion`, and `python -m lorafusion_jax` where the package is not installed.

Signals are handled before anything else is imported.
"""

from __future__ import annotations

import sys

from lorafusion_jax.signals import INTERRUPTED, stop_signals


def main() -> None:
    """Runs the command line and exits with its code."""
    try:
        with stop_signals() as signals:
            signals.watch()
            from lorafusion_jax.cli.main import main as command_line

            command_line()
    except KeyboardInterrupt:  # among imports
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
