"""Slots to arrays: where rows go, what they learn, and keys that know nothing of packing."""

import numpy as np
import pytest
import shape_checks
from hypothesis import given
from hypothesis import strategies as st

from lorafusion_jax.data.assemble import (
    Piece,
    Weights,
    assemble,
    num_segments,
    pieces_of,
    row_keys,
    sample_key,
    segment_key,
)
from lorafusion_jax.data.prepare import AdapterData
from scheduling import SampleRef

TILE, CAPACITY = 16, 160


def piece(adapter: int, length: int, key: int = 0, weight: float = 0.5) -> Piece:
    tokens = np.arange(1, length + 1, dtype=np.int32) + 100 * adapter
    mask = np.zeros(length, bool)
    mask[length // 2 :] = True
    mask[0] = False
    return Piece(adapter, tokens, mask, weight, key)


def packed(pieces):
    return assemble(
        pieces, capacity_tokens=CAPACITY, tile_tokens=TILE, max_segments=num_segments(len(pieces)), max_adapters=4
    )


def test_every_row_predicts_the_next_token_of_its_sample():
    batch = packed([piece(0, 5), piece(0, 4), piece(1, 6)])
    np.testing.assert_array_equal(batch.tokens[:9], [1, 2, 3, 4, 5, 1, 2, 3, 4])
    np.testing.assert_array_equal(batch.targets[:4], [2, 3, 4, 5])
    np.testing.assert_array_equal(batch.positions[:9], [0, 1, 2, 3, 4, 0, 1, 2, 3])
    np.testing.assert_array_equal(
        batch.weights[:9], [0, 0.5, 0.5, 0.5, 0, 0, 0.5, 0.5, 0]
    )  # the last row predicts nothing
    np.testing.assert_array_equal(batch.tokens[16:22], [101, 102, 103, 104, 105, 106])  # the next adapter starts a tile


def test_tiles_belong_to_one_adapter_and_padding_to_none():
    batch = packed([piece(2, 17), piece(0, 3)])
    np.testing.assert_array_equal(batch.tile_adapter, [2, 2, 0] + [-1] * 7)
    np.testing.assert_array_equal(batch.row_adapter, np.repeat(batch.tile_adapter, TILE))


@pytest.mark.parametrize(("samples", "padding"), [(1, [21] * 6 + [18]), (5, [27, 27, 26]), (7, [48])])
def test_padding_is_cut_into_the_places_that_are_free(samples, padding):
    """Attention costs the square of a segment's length."""
    lengths = packed([piece(0, 16) for _ in range(samples)]).segment_lengths
    assert lengths[lengths > 0].tolist() == [16] * samples + padding


def test_too_many_rows_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        packed([piece(0, 100), piece(1, 100)])


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(2, 12)), min_size=1, max_size=6))
def test_segments_cover_every_row_once_and_rise(sizes):
    pieces = [piece(adapter, length, key=index) for index, (adapter, length) in enumerate(sorted(sizes))]
    batch = packed(pieces)
    used = batch.segment_lengths > 0
    starts, lengths = batch.segment_offsets[:-1][used], batch.segment_lengths[used]
    np.testing.assert_array_equal(starts, np.concatenate([[0], np.cumsum(lengths)[:-1]]))
    assert lengths.sum() == CAPACITY
    np.testing.assert_array_equal(batch.segment_ids, np.repeat(np.arange(used.sum()), lengths))
    for start, row_piece in zip(starts, pieces, strict=False):
        np.testing.assert_array_equal(batch.tokens[start : start + len(row_piece.tokens)], row_piece.tokens)
    learned = sum(int(piece.loss_mask[1:].sum()) for piece in pieces)
    assert np.count_nonzero(batch.weights) == learned


@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 40))
def test_row_keys_depend_on_sample_and_position_only(key, short, long):
    short, long = sorted((short, long))
    np.testing.assert_array_equal(row_keys(key, long)[:short], row_keys(key, short))


def test_row_keys_of_samples_and_epochs_differ():
    keys = {(epoch, sample): row_keys(sample_key(epoch, sample), 64) for epoch in range(8) for sample in range(64)}
    everything = np.concatenate(list(keys.values()))
    # 32768 draws of 32 bits: 0.125 equal pairs are expected, so five would be a fault
    assert len(everything) - len(np.unique(everything)) < 5


def test_packing_does_not_change_the_rows_of_a_sample():
    alone = packed([piece(0, 9, key=7)])
    others = packed([piece(0, 4, key=3), piece(0, 9, key=7), piece(1, 5, key=1)])
    for name in ("tokens", "targets", "positions", "row_key", "weights"):
        np.testing.assert_array_equal(getattr(alone, name)[:9], getattr(others, name)[4:13])


def test_every_epoch_of_a_sample_draws_its_own_masks():
    """And no place in the plan does: the key is of epoch and row."""

    class Train:
        lengths = np.array([3, 2])

        def sample(self, row):
            return np.arange(self.lengths[row], dtype=np.int32), np.ones(self.lengths[row], bool)

        def segment_lengths_of(self, row):
            return None

    with shape_checks.off():
        data = AdapterData(train=Train(), eval=None, order=np.array([1, 0, 0, 1]))
    weights = [Weights(1.0)] * 4

    def keys_of(refs):
        return [piece.key for piece in pieces_of(refs, data, 0, weights)]

    with shape_checks.off():
        refs = [SampleRef("law", 0, batch, sample) for batch, sample in enumerate((0, 1, 2, 3))]
        keys = keys_of(refs)
        again = keys_of(refs[::-1])
    assert keys == [sample_key(0, 1), sample_key(0, 0), sample_key(1, 0), sample_key(1, 1)]
    assert len(set(keys)) == 4
    assert again == keys[::-1]


def test_segments_of_a_sample_draw_their_own_masks():
    """The first has the key of the sample, so a sample of one segment is that of before."""
    keys = [segment_key(99, segment) for segment in range(4)]
    assert keys[0] == 99
    assert len(set(keys)) == 4
