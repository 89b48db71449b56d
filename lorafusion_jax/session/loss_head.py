"""The end of the decoder: the final norm, the head, and the losses and metrics of each adapter.

T packed tokens · D model width · V vocabulary · A adapters · N samples · C columns of all adapters
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array

from lorafusion_jax.adapters.bank import rows_of
from lorafusion_jax.config.schema import TrainSettings
from lorafusion_jax.models.balance import balance_losses
from lorafusion_jax.models.forward import final_norm
from lorafusion_jax.modules.tensor_sums import TENSOR
from lorafusion_jax.objective.batch import divergence_rows, score_key, totals_of
from lorafusion_jax.objective.loss import sum_by, token_divergences, token_losses
from lorafusion_jax.objective.protocol import DIVERGENCE, HIDDEN, SCORE, TOKEN_SCORE, Chosen
from lorafusion_jax.objective.replaced_rows import ReplacedRows
from lorafusion_jax.objective.row_head import client_logprobs, client_losses
from lorafusion_jax.objective.rows import NO_ROW
from lorafusion_jax.session.leaf_layout import LeafLayout
from lorafusion_jax.session.leaves import HEAD, HEAD_ROWS


@dataclass(frozen=True, kw_only=True)
class LossHead:
    """Losses and metrics from the activations of the last layer.

    Args:
        layout: the leaves of the adapters.
        settings: the loss chunk.
        dtype: of the states.
        tensor: devices that split the vocabulary, if it divides.
    """

    layout: LeafLayout
    settings: TrainSettings
    dtype: Any
    tensor: int = 1

    def totals(
        self, norm: Array, head: Array, x_TD: Array, batch: Any, heads: Mapping[str, Array], chosen: Sequence[Chosen]
    ) -> tuple[dict[str, Array], Array | None]:  # Microbatch of tracers
        """Computes sums of loss and metrics of each adapter [A], and log-probabilities of clients' rows [T, K].

        Args:
            heads: leaves of the objectives' heads by name, [1, C, ...], and of trained rows of the head.
            chosen: as in `totals_of`.
        """
        weights = jnp.where(batch.row_adapter >= 0, batch.weights, 0.0)
        hidden = final_norm(x_TD, norm, self.layout.model)
        rows = heads.get(HEAD_ROWS)
        losses_T = self._token_losses(hidden, head, batch, weights, rows)
        needs = frozenset().union(*(objective.needs for objective in chosen))
        divergence_T = self._divergences(hidden, head, batch, chosen) if DIVERGENCE in needs else None
        scored = {score_key(objective) for objective in chosen if TOKEN_SCORE in objective.needs}
        of_samples = {} if batch.samples is None else heads  # a session has heads before an objective needs them
        totals = totals_of(
            losses_T,
            batch,
            chosen,
            None if needs.isdisjoint({HIDDEN, SCORE}) else hidden,
            divergence_T,
            {
                name.removeprefix(HEAD): self._of_samples(name, leaf, batch)
                for name, leaf in of_samples.items()
                if name != HEAD_ROWS
            },
            {key: self._scores(hidden, f"{HEAD}{key}", of_samples, batch) for key in sorted(scored) if of_samples},
        )
        if batch.rows is None:
            return totals, None
        losses_T, logprobs_TK = client_losses(
            hidden, head.T, _rows_of_adapters(batch), batch.segment_ids, batch.segment_lengths.shape[0], **self._options
        )
        num_adapters = totals["loss"].shape[0]
        return totals | {"loss": totals["loss"] + sum_by(losses_T, batch.row_adapter, num_adapters)}, logprobs_TK

    def row_logprobs(self, norm: Array, head: Array, x_TD: Array, batch: Any) -> Array:
        """Computes the log-probabilities of the targets of clients' rows, float32 [T, K]; 0 where there is no row."""
        hidden = final_norm(x_TD, norm, self.layout.model)
        return client_logprobs(hidden, head.T, _rows_of_adapters(batch), **self._options)

    def balance(self, choices_2ME: Array, batch: Any) -> Array:
        """Computes the weighted sum of the routers' losses over the sequences of each adapter, float32 [A].

        Sequences are selected, so that NaN stays with its adapter.
        """
        length_M, weight_M = batch.balance
        loss_M = balance_losses(choices_2ME, length_M, self.layout.model.num_routers) * weight_M
        adapter_M = jnp.where(length_M > 0, batch.row_adapter[batch.segment_offsets[:-1]], -1)
        of_adapter_AM = jnp.arange(len(self.layout.specs))[:, None] == adapter_M
        return jnp.where(of_adapter_AM, loss_M, 0.0).sum(-1)

    def states(self, norm: Array, x_TD: Array) -> Array:
        """Computes the states after the final norm, [T, D]."""
        return final_norm(x_TD, norm, self.layout.model).astype(self.dtype)

    def token_logprobs(self, norm: Array, head: Array, x_TD: Array, batch: Any, heads: Mapping[str, Array]) -> Array:
        """Computes log p of the learned target of each row, float32 [T]; 0 where nothing is learned."""
        hidden, learned = final_norm(x_TD, norm, self.layout.model), (batch.weights != 0).astype(jnp.float32)
        return -self._token_losses(hidden, head, batch, learned, heads.get(HEAD_ROWS))

    def _of_samples(self, name: str, leaf: Array, batch: Any) -> Array:
        """Returns the tensor of each sample's adapter, [N, ...]; any for samples of others."""
        return rows_of(leaf[0], self._columns(name, batch.samples.adapter))

    def _columns(self, name: str, adapter: Array) -> Array:
        """Returns the column of each adapter in a leaf; -1 for others."""
        at = self.layout.columns[name]
        column_A = jnp.array([first if width else -1 for first, width in zip(at.first, at.width, strict=True)])
        return jnp.where(adapter >= 0, column_A[jnp.maximum(adapter, 0)], -1)

    def _scores(self, hidden: Array, name: str, heads: Mapping[str, Array], batch: Any) -> Array:
        """Returns the product of each row with its adapter's [D, 1], float32 [T]; 0 for rows of others."""
        column_T = self._columns(name, batch.row_adapter)
        mine_T1 = (column_T >= 0)[:, None]  # what others hold, also NaN, is selected away
        weight_TD = jnp.where(mine_T1, rows_of(heads[name][0], column_T)[..., 0], 0.0)
        return (jnp.where(mine_T1, hidden, 0.0).astype(jnp.float32) * weight_TD).sum(-1)

    def _divergences(self, hidden: Array, head: Array, batch: Any, chosen: Sequence[Chosen]) -> Array:
        weights, betas, temperatures = divergence_rows(batch, chosen)
        return token_divergences(
            hidden,
            batch.samples.teacher,
            head.T,
            weights,
            betas,
            temperatures,
            **self._logits,
        )

    @property
    def _logits(self) -> dict[str, Any]:
        model = self.layout.model
        return {
            "chunk": self.settings.loss_chunk,
            "soft_cap": model.final_soft_cap,
            "logit_scale": model.logit_scale,
        }

    @property
    def _options(self) -> dict[str, Any]:
        return self._logits | {"axis": self._axis}

    @property
    def _axis(self) -> str | None:
        """The mesh axis that splits the vocabulary."""
        return TENSOR if self.tensor > 1 and self.layout.model.num_outputs % self.tensor == 0 else None

    def _token_losses(self, hidden: Array, head: Array, batch: Any, weights: Array, rows: Array | None) -> Array:
        """Computes the token losses.

        Args:
            rows: trained rows of the head, [1, D, C].
        """
        columns = self.layout.token_columns("head")
        replaced = None if rows is None else ReplacedRows(rows[0], columns, batch.row_adapter)
        return token_losses(
            hidden,
            head.T,
            batch.targets,
            weights,
            replaced=replaced,
            **self._options,
        )


def _rows_of_adapters(batch: Any) -> Any:
    """Returns the table of clients' rows without those of adapters that were removed."""
    has_adapter = batch.row_adapter >= 0
    return batch.rows._replace(
        kind=jnp.where(has_adapter, batch.rows.kind, NO_ROW), learned=has_adapter & batch.rows.learned
    )
