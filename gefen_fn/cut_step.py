"""How a back end steps leaves that have tiles cut by shard edges: as runs of rows, whose column means others finish.

The rows of a cut tile are a leaf of the back end of their own, with given column means; whole tiles between them are
one more. Before the step the sums of squares of the cut tiles' rows go out, and the finished means come back.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn.blocks import LeafLayout
from gefen_fn.cut_tiles import Edge, finish_columns, strips_of
from gefen_fn.exchange import Later, Talk, at_once, begun
from gefen_fn.shards import Piece
from gefen_fn.tiles import Tiles
from gefen_kernels.step import SCALARS, Leaf

_B2, _NOT_B2 = (SCALARS.index(name) for name in ("b2", "one_minus_b2"))


class Rows(NamedTuple):
    """Rows of one matrix of a leaf, which a back end steps as a leaf of their own.

    Attributes:
        matrix: its number among those held here.
        first: of the rows, among those held here.
        last: one past the last.
        means: where the new column means of their tile are put, fp32 `[C]`; None for rows of whole tiles.
    """

    matrix: int
    first: int
    last: int
    means: Tensor | None

    def of(self, x: Tensor, start: int) -> Tensor:
        """`[.., R, ..]` -> `[rows, C]`, the axes from `start` on being the columns."""
        lead, columns = math.prod(x.shape[: start - 1]), math.prod(x.shape[start:])
        return x.reshape(lead, x.shape[start - 1], columns)[self.matrix, self.first : self.last]

    def leaf(self, whole: Leaf, piece: Piece) -> Leaf:
        """These rows of the part of a factored leaf that is held here."""
        assert whole.absmax is not None  # factored leaves are quantized
        tensors = (whole.grad, whole.param, whole.mu, whole.absmax, *whole.nu)
        grad, param, mu, absmax, row, col = (self.of(x, whole.start) for x in tensors)
        first = first_entry(piece, whole.start, self.matrix, self.first)
        own = whole._replace(grad=grad, param=param, mu=mu, absmax=absmax, nu=(row, col), start=1, first=first)
        if self.means is None:
            return own
        return own._replace(nu=(row, self.means), policy="given", tile=(None, whole.tile[1]))


class CutLeaves(NamedTuple):
    """Leaves of one layout that have cut tiles, here or on other members.

    Attributes:
        numbers: of their works in the bundle.
        layout: of the parts that are held here.
        tiles: of each of them.
        cols: the column means as they are stored.
        means: of each cut tile the buffer of its rows' `means`, fp32 `[leaves, matrices, C]`.
    """

    numbers: tuple[int, ...]
    layout: LeafLayout
    tiles: Tiles
    cols: list[Tensor]
    means: dict[int, Tensor]

    @classmethod
    def of(cls, numbers: Sequence[int], layout: LeafLayout, tiles: Tiles, cols: list[Tensor]) -> "CutLeaves":
        """The leaves with room for their means."""
        *lead, _, columns = layout.matrix
        shape, device = (len(numbers), math.prod(lead), columns), cols[0].device
        means = {n: torch.zeros(shape, dtype=torch.float32, device=device) for n in tiles.cut}
        return cls(tuple(numbers), layout, tiles, cols, means)

    @property
    def axis(self) -> int:
        """Of the rows."""
        return self.layout.start - 1

    @property
    def lead(self) -> tuple[int, ...]:
        """The axes before the rows, those of the leaves first."""
        return (len(self.numbers), *self.layout.matrix[:-2])

    def rows(self, leaf: int) -> list[Rows]:
        """In which a back end steps a leaf."""
        runs = _runs(self.tiles)
        matrices = range(math.prod(self.lead[1:]))
        return [Rows(m, a, b, None if n is None else self.means[n][leaf, m]) for m in matrices for a, b, n in runs]

    def strips(self) -> list[tuple[int, int]]:
        """What is summed of each gradient seen as `[all rows, C]`."""
        rows, own = self.layout.rows, strips_of(self.tiles, self.axis)
        return [(m * rows + first, count) for m in range(math.prod(self.lead[1:])) for first, count in own]

    def flat(self, grad: Tensor) -> Tensor:
        """`[all rows, C]`."""
        return grad.reshape(math.prod(self.layout.matrix[:-1]), self.layout.columns)

    def asked(self, sums: Sequence[Tensor], table: Tensor) -> Talk[dict[int, Edge]]:
        """The talk that finishes their means out of the sums of their strips, one tensor of each leaf."""
        matrices = math.prod(self.lead)
        strips = torch.stack(list(sums)).view(*self.lead, sum(map(len, sums)) // max(matrices, 1), self.layout.columns)
        own = table[list(self.numbers)].view(-1, table.shape[-1], *(1,) * (strips.ndim - 1)).to(strips.device)
        b2, rest = own[:, _B2], own[:, _NOT_B2]

        def average(old: Tensor, new: Tensor) -> Tensor:
            return old * b2 + new * rest

        return finish_columns(self.tiles, self.axis, strips, torch.stack(self.cols), average)

    def put(self, edges: dict[int, Edge]) -> None:
        """Take the new means of the cut tiles."""
        for n, edge in edges.items():
            rows = slice(self.tiles.tops[n], self.tiles.tops[n] + edge.col.shape[-2])
            torch._foreach_copy_([col[..., rows, :] for col in self.cols], list(edge.col.unbind()))
            self.means[n].copy_(edge.means.view(self.means[n].shape))


def _runs(tiles: Tiles) -> list[tuple[int, int, int | None]]:
    """The rows held here by first and last, those of a cut tile with its place, those of whole tiles together."""
    runs: list[tuple[int, int, int | None]] = []
    for n, (top, (first, last)) in enumerate(zip(tiles.tops, tiles.parts, strict=True)):
        bottom = top + last - first
        if n in tiles.cut:
            runs.append((top, bottom, n))
        elif runs and runs[-1][2] is None:
            runs[-1] = (runs[-1][0], bottom, None)
        else:
            runs.append((top, bottom, None))
    return runs


def first_entry(piece: Piece, start: int, matrix: int = 0, row: int = 0) -> int:
    """The place in the flattened leaf of the first entry of a row held here, where no axis after the rows is cut."""
    line = 0
    for n, (size, offset) in enumerate(zip(piece.whole[:start], piece.offset, strict=False)):
        below = math.prod(piece.shape[n + 1 : start - 1])
        here = row if n == start - 1 else matrix // below % piece.shape[n]
        line = line * size + offset + here
    return line * math.prod(piece.whole[start:])


def is_one_run(piece: Piece, start: int, *, cut: bool) -> bool:
    """Whether each leaf of a back end is one run of the flattened leaf, from `first_entry` on.

    Args:
        piece: where what is held here lies.
        start: first of the axes that are merged into columns.
        cut: whether it has cut tiles, so that a back end takes it matrix by matrix.
    """
    return piece.axes <= (set(range(start)) if cut else {0})


class Cuts(NamedTuple):
    """The leaves of a bundle that have cut tiles.

    Attributes:
        groups: these, by layout.
        owner: int64, for each leaf of the back end the number of its work in the bundle.
        rows: for each leaf of the back end its rows; None for all of its work.
        sums: the back end's plan of their sums.
    """

    groups: list[CutLeaves]
    owner: Tensor
    rows: list[Rows | None]
    sums: Any

    def put(self, edges: Sequence[dict[int, Edge]]) -> None:
        """Take the new means of all cut tiles."""
        for group, own in zip(self.groups, edges, strict=True):
            group.put(own)


def asked_means(
    module: Any, cuts: Cuts, places: Sequence[int], grads: Sequence[Tensor], table: Tensor, factor: Tensor | None
) -> list[dict[int, Edge]] | Later[list[dict[int, Edge]]]:
    """The new column means of all cut tiles of a bundle: their sums go to the members that store the columns.

    Args:
        module: the back end.
        cuts: the leaves.
        places: of all works of the bundle in the tree.
        grads: of all works of the bundle.
        table: fp32 `[works, 10]`, columns as `SCALARS`.
        factor: what gradients are multiplied by, 0-dim float64; None for 1.
    """
    flat = [group.flat(grads[n]) for group in cuts.groups for n in group.numbers]
    sums = iter(module.run_sums(cuts.sums, flat, None if factor is None else factor.to(torch.float32)))
    talks = [group.asked([next(sums) for _ in group.numbers], table) for group in cuts.groups]
    each = zip(cuts.groups, talks, strict=True)
    return at_once([begun(talk, tuple(places[n] for n in group.numbers)) for group, talk in each])


def lay_out(
    module: Any, whole: Sequence[Leaf], groups: list[CutLeaves], pieces: Sequence[Piece]
) -> tuple[list[Leaf], Cuts | None]:
    """The leaves of a bundle as a back end takes them, and what is told of those with cut tiles; None without.

    Args:
        module: the back end.
        whole: all leaves as they are held here.
        groups: those with cut tiles.
        pieces: where all of them lie.
    """
    if not groups:
        return list(whole), None
    each: list[list[Rows | None]] = [[None] for _ in whole]
    for group in groups:
        for leaf, n in enumerate(group.numbers):
            each[n] = [*group.rows(leaf)]
    owner = [n for n, own in enumerate(each) for _ in own]
    rows = [own for parts in each for own in parts]
    leaves = [whole[n] if own is None else own.leaf(whole[n], pieces[n]) for n, own in zip(owner, rows, strict=True)]
    summed = [(group.flat(whole[n].grad), group.strips()) for group in groups for n in group.numbers]
    sums = module.plan_sums([grad for grad, _ in summed], [strips for _, strips in summed])
    return leaves, Cuts(groups, torch.tensor(owner, dtype=torch.int64, device="cpu"), rows, sums)
