"""What a fused Gefen step is told of each leaf; every back end that has a `gefen_step` takes the same."""

from typing import Literal, NamedTuple

from torch import Tensor

SCALARS = (
    "b1",
    "one_minus_b1",
    "b2",
    "one_minus_b2",
    "correction1",
    "root_correction2",
    "eps",
    "step",
    "weight_decay",
    "grad_scale",
)
"""Columns of a step's scalars: fp32, each rounded once from float64. `step` is the learning rate with its sign."""

PARAM_STREAM = 1 << 32
"""What is added to a leaf's seed for its parameter, so that its noise is not that of its codes."""

NO_COUNTS = "`counts` must be given where a leaf is rounded at random: got None. Pass integers [leaves, 2]."

STRIP = 128
"""The most rows of a strip whose squares are added at one time."""


class Leaf(NamedTuple):
    """One parameter of a step. All tensors but `grad` are written in place.

    The leaf is seen as `[.., R, C]`: the axes `start..` are the columns, the axis before them the rows.

    Attributes:
        grad: of `param`'s shape, fp32, bf16 or fp16.
        param: fp32, bf16 or fp16.
        mu: uint8 codes of `param`'s shape; fp32 for a dense leaf.
        absmax: fp32, one per block; None for a dense leaf.
        nu: `(nu,)` for "dense" and "block", `(row, col)` for "factored", as `gefen_fn.second_moment` lays them;
            `(row, means)` for "given", the means fp32 `[C]`, which are only read.
        policy: "dense": one per entry; "block": one per block; "factored": row and column means of tiles; "given": rows
            `[R, C]` of one row tile whose new column means are known.
        start: first of the axes that are merged into columns.
        block: entries per block.
        tile: `(Tr, Tc)` of "factored" and "given"; None for a whole side.
        decays: whether `u + weight_decay * p` is a stage of this leaf.
        corrects: whether the root is divided by `root_correction2`.
        seed: of what is rounded at random, 32 bits.
        first: what is rounded at random is drawn as for the entries from this one on of a flattened leaf.
        random_codes: round the codes up or down by `reference.uniform(seed, count, ...)`.
        random_param: round a bf16 parameter up or down by `reference.random_words(seed + PARAM_STREAM, count, ...)`.
    """

    grad: Tensor
    param: Tensor
    mu: Tensor
    absmax: Tensor | None
    nu: tuple[Tensor, ...]
    policy: Literal["dense", "block", "factored", "given"]
    start: int = 1
    block: int = 256
    tile: tuple[int | None, int | None] = (None, None)
    decays: bool = True
    corrects: bool = False
    seed: int = 0
    first: int = 0
    random_codes: bool = False
    random_param: bool = False
