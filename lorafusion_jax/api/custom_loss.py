"""Losses that a caller writes: functions of the log-probabilities of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lorafusion_jax.errors import CallError

type CustomLoss = Callable[[Sequence[Any], list[Any]], Any]


def differentiate(
    loss_fn: CustomLoss, data: Sequence[Any], logprobs: list[np.ndarray], returns_gradients: bool
) -> tuple[float, dict[str, float], list[Any]]:
    """Returns loss, metrics and the gradient with respect to each array.

    Args:
        returns_gradients: the loss returns them; it may use numpy.

    Raises:
        CallError: `call.loss`, it returned something else, or a number that does not depend on the arrays for jax.
    """
    if returns_gradients:
        loss, metrics, gradients = _parts(loss_fn(data, logprobs), ("loss", "metrics", "gradients"))
    else:
        import jax
        import jax.numpy as jnp
        from jax.core import Tracer

        def loss_of(arrays: list[Any]) -> Any:
            loss, metrics = _parts(loss_fn(data, arrays), ("loss", "metrics"))
            is_traced = isinstance(loss, Tracer)
            if not (jnp.issubdtype(loss.dtype, jnp.floating) if is_traced else loss == 0):  # 0: nothing to lose
                raise CallError(
                    "call.loss",
                    f"the loss is {f'of type {loss.dtype}' if is_traced else loss}, which jax cannot differentiate.",
                    why="it has no gradient, as after .item() or a comparison: nothing would be trained",
                    fix="return a floating array that operations of jax.numpy make of the log-probabilities",
                )
            return jnp.asarray(loss, float), metrics

        loss_and_gradients = jax.value_and_grad(loss_of, has_aux=True)
        try:
            (loss, metrics), gradients = loss_and_gradients([jnp.asarray(array) for array in logprobs])
        except jax.errors.JAXTypeError as problem:  # numpy's functions, float(…)
            raise CallError(
                "call.loss",
                "the loss asks a log-probability for its value, which jax differentiates.",
                why=str(problem).partition("\n")[0],
                fix="operations of jax.numpy; or forward_backward_custom(…, returns_gradients=True) with gradients of "
                "its own",
            ) from problem
    if len(gradients) != len(logprobs):
        raise CallError("call.inputs", f"{len(gradients)} gradients for {len(logprobs)} data.")
    for number, (gradient, array) in enumerate(zip(gradients, logprobs, strict=True)):
        if np.shape(gradient) != array.shape:
            message = (
                f"a gradient of the loss has the shape {np.shape(gradient)}, and its log-probabilities {array.shape}."
            )
            raise CallError("call.loss", message, where=f"datum {number}")
        if not np.isfinite(gradient).all():
            message = "the gradient of the loss is not finite."
            raise CallError(
                "call.loss", message, where=f"datum {number}", fix="look for log 0, 0 / 0 and infinite ratios"
            )
    return float(loss), {name: float(value) for name, value in metrics.items()}, list(gradients)


def _parts(returned: Any, names: Sequence[str]) -> Any:
    """Checks what a custom loss has returned.

    Raises:
        CallError: `call.loss`.
    """
    expected = f"({', '.join(names)})"
    if not isinstance(returned, tuple) or len(returned) != len(names):
        raise CallError(
            "call.loss", f"the loss returned a {type(returned).__name__}, not {expected}.", fix=f"return {expected}"
        )
    loss, metrics = returned[:2]
    if np.shape(loss) != ():
        message = f"the loss has the shape {np.shape(loss)}, and must be one number."
        raise CallError("call.loss", message, fix="loss.sum()")
    if not isinstance(metrics, Mapping) or not all(np.shape(value) == () for value in metrics.values()):
        raise CallError("call.loss", "the metrics of the loss are no table of numbers.", fix="return loss, {}")
    return returned
