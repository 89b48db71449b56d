"""What several processes of one run must decide together."""

from __future__ import annotations

from itertools import count as counting

import jax

PATIENCE_MS = 30 * 60 * 1000  # another process may still be compiling
_PREFIX = "lorafusion/agreed"
_questions = counting()


def agreed(flag: bool) -> bool:
    """True on every process if it is true on any; all processes must call it equally often.

    Hosts ask each other through jax's coordination service. A collective on the devices would queue behind the
    microbatches under way and drain the pipeline with every question.
    """
    count = jax.process_count()
    if count == 1:
        return flag
    from jax._src import distributed  # no public way to it; the tests with several processes hold it in place

    client, number = distributed.global_state.client, next(_questions)
    client.key_value_set(f"{_PREFIX}/{number}/{jax.process_index()}", str(int(flag)))
    answers = [client.blocking_key_value_get(f"{_PREFIX}/{number}/{process}", PATIENCE_MS) for process in range(count)]
    return "1" in answers


def is_first() -> bool:
    """Whether this process writes the run folder."""
    return jax.process_index() == 0


def meet(name: str) -> None:
    """Waits until every process is here."""
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
