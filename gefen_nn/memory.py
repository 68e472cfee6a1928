"""Bytes of optimizer state of a model, leaf by leaf, for several optimizers."""

import math
from typing import Any, NamedTuple

from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT
from gefen_fn.text import table
from gefen_nn.console import size
from gefen_nn.model_shapes import LeafShape, Model
from gefen_nn.scale_model import state_bytes_of

COLUMNS = ("adamw", "8-bit", "gefen", "gefen_muon")
_BLOCK, _FEWEST = 256, 4096
_LEGEND = (
    f"8-bit: two codes an entry, two fp32 scales for {_BLOCK} of them; fp32 under {_FEWEST:,} entries. "
    "hybrid's rule: what gefen_muon applies."
)


class LeafMemory(NamedTuple):
    """A kind of leaf.

    Attributes:
        name: of the leaf, `*` for numbers.
        shape: of one of them.
        copies: how many there are.
        bytes: of the state of all of them, by optimizer.
        rule: "muon" or "gefen" in a hybrid.
    """

    name: str
    shape: tuple[int, ...]
    copies: int
    bytes: dict[str, int]
    rule: str


class Memory(NamedTuple):
    """State of a model; printed, it is a table.

    AdamW's moments are two of fp32. The 8-bit ones are two codes and two fp32 scales for each 256 entries
    (Dettmers et al., arXiv 2110.02861), and fp32 for leaves of fewer than 4,096 entries.

    Attributes:
        leaves: kinds of leaves, in order.
        entries: of all parameters.
    """

    leaves: tuple[LeafMemory, ...]
    entries: int

    @property
    def bytes(self) -> dict[str, int]:
        """Of all leaves, by optimizer."""
        return {column: sum(leaf.bytes[column] for leaf in self.leaves) for column in COLUMNS}

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"entries": self.entries, "bytes": self.bytes, "leaves": [leaf._asdict() for leaf in self.leaves]}

    def __str__(self) -> str:
        """The leaves, the sums, and bytes a parameter."""
        rows: list[tuple[str, ...]] = [("leaf", "shape", "copies", *COLUMNS, "hybrid's rule")]
        for leaf in self.leaves:
            sizes = (size(leaf.bytes[column]) for column in COLUMNS)
            rows.append((leaf.name, "x".join(map(str, leaf.shape)), f"{leaf.copies:,}", *sizes, leaf.rule))
        rows.append(("all", f"{self.entries:,}", "", *(size(x) for x in self.bytes.values()), ""))
        shares = (f"{x / max(self.entries, 1):.4f}" for x in self.bytes.values())
        rows.append(("bytes a parameter", "", "", *shares, ""))
        return f"{table(rows, left=2)}\n{_LEGEND}"


def memory_of(model: Model) -> Memory:
    """State of a model's leaves."""
    rows = tuple(_leaf(name, leaf) for name, leaf in model.items())
    return Memory(rows, sum(math.prod(row.shape) * row.copies for row in rows))


def _leaf(name: str, leaf: LeafShape) -> LeafMemory:
    entries = math.prod(leaf.shape)
    small = entries < _FEWEST
    eight = 8 * entries if small else 2 * entries + 8 * -(-entries // _BLOCK)
    gefen, muon = (state_bytes_of(leaf.shape, DEFAULT_SECOND_MOMENT, muon=muon) for muon in (False, leaf.muon))
    sizes = zip(COLUMNS, (8 * entries, eight, gefen, muon), strict=True)
    rule = "muon" if leaf.muon else "gefen"
    return LeafMemory(name, leaf.shape, leaf.copies, {k: x * leaf.copies for k, x in sizes}, rule)
