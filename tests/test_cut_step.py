"""Runs of rows that a back end steps of a shard, and where they lie in the whole leaf."""

import pytest
import torch

from gefen_fn.cut_step import Rows, first_entry
from gefen_fn.shards import Piece

PIECES = {
    "rows": Piece((5, 7), (12, 7), (5, 0), frozenset({0})),
    "entries": Piece((5,), (12,), (4,), frozenset({0})),
    "rows of experts": Piece((4, 3, 5), (4, 9, 5), (0, 6, 0), frozenset({1})),
    "experts and rows": Piece((2, 3, 5), (4, 9, 5), (2, 6, 0), frozenset({0, 1})),
    "heads of experts": Piece((2, 2, 3, 5), (4, 6, 9, 5), (2, 4, 6, 0), frozenset({0, 1, 2})),
    "filters": Piece((3, 2, 2, 2), (8, 2, 2, 2), (5, 0, 0, 0), frozenset({0})),
}


@pytest.mark.parametrize(("piece", "start"), list(zip(PIECES.values(), (1, 1, 2, 2, 3, 1), strict=True)), ids=PIECES)
def test_rows_know_their_place_in_the_whole_leaf(piece, start):
    whole = torch.arange(torch.Size(piece.whole).numel()).reshape(piece.whole)
    part = whole[tuple(slice(first, first + size) for first, size in zip(piece.offset, piece.shape, strict=True))]
    matrices, last = torch.Size(piece.shape[: start - 1]).numel(), piece.shape[start - 1] - 1
    for matrix in range(matrices):
        rows = Rows(matrix, last, last + 1, None).of(part, start)
        assert rows.flatten()[0] == first_entry(piece, start, matrix, last)
    assert part.flatten()[0] == first_entry(piece, start)
