"""Trees of blockwise 8-bit tensors."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gefen_fn import agree
from gefen_fn.blocks import DEFAULT_BLOCK, Blocks, LeafLayout, check_block, layout_list, layouts, lengths_in
from gefen_fn.shards import like_piece, local, zeros_placed
from gefen_fn.tree import StructureError, Tree, broadcast, check_leaves, check_tensors, tree_leaves, tree_map
from gefen_kernels import reference

LEVELS = 256
ZERO_CODE = 128


class Quantized(NamedTuple):
    """A tensor as `codes` (uint8, its own shape) and `absmax` (fp32, one per block: `shape[:j] + (blocks,)`)."""

    codes: Tensor
    absmax: Tensor


def quantized_zeros(like: Tensor, layout: LeafLayout) -> Quantized:
    """Zeros in the layout of `like`: code 128 everywhere, absmax 0; fresh, contiguous, on its device."""
    whole = layout.piece.whole
    codes = zeros_placed(like, whole, torch.uint8, ZERO_CODE)
    return Quantized(codes, zeros_placed(like, reference.scale_shape(whole, layout.block, layout.start)))


def is_codebook(x: Any) -> bool:
    """Whether `x` is fp32 `[256]`, finite and non-decreasing, from -1 to 1."""
    if not isinstance(x, Tensor) or x.shape != (LEVELS,) or x.dtype != torch.float32:
        return False
    return bool((x[:1] == -1) & (x[-1:] == 1) & (x.diff() >= 0).all())


def tie_rule(codebook: Tensor) -> reference.Ties:
    """How a tie at a midpoint falls: `"zero"` (toward it) for a symmetric codebook, else `"published"` (downwards).

    Raises:
        ValueError: if it is no codebook.
    """
    if not is_codebook(codebook):
        came = f"{codebook.dtype} {tuple(codebook.shape)}" if isinstance(codebook, Tensor) else repr(codebook)
        raise ValueError(
            f"`codebook` must be fp32 [256], non-decreasing from -1 to 1: got {came}. "
            "Use `learn_codebook(gradient_histogram(grads))`, and pad fewer levels by repeating zero."
        )
    return "zero" if torch.equal(codebook, -codebook.flip(0)) else "published"


def quantize(tree_or_tensor: Tree, codebook: Tensor, *, block: Blocks = DEFAULT_BLOCK) -> Tree:
    """Quantize every tensor of a tree, whatever its size.

    Args:
        tree_or_tensor: real floating-point tensors; `None` stays `None`.
        codebook: fp32 `[256]`, non-decreasing from -1 to 1.
        block: entries per block: an int, a tree of ints, or `FlatBlocks`.

    Returns:
        The tree with a `Quantized` for each tensor. A vector is one row.

    Raises:
        StructureError: if a leaf is not a dense floating-point tensor.
        ValueError: if a block length is not a positive int, or `codebook` no codebook.

    Example:
        >>> grads = {"w": torch.randn(64, 512), "b": None}
        >>> q = quantize(grads, default_codebook(), block=256)
        >>> q["w"].codes.dtype, q["w"].absmax.shape, q["b"]
        (torch.uint8, torch.Size([64, 2]), None)
    """
    check_leaves(tree_or_tensor)
    ties = tie_rule(codebook)

    def encode(x: Tensor, layout: LeafLayout) -> Quantized:
        start = min(layout.start, max(x.ndim - 1, 0))
        book = codebook.to(x.device)
        return Quantized(*reference.encode(x.float(), book, block=layout.block, start=start, ties=ties))

    return tree_map(encode, tree_or_tensor, layouts(block, tree_or_tensor))


def dequantize(q: Tree, codebook: Tensor, *, block: Blocks = DEFAULT_BLOCK, like: Tree | None = None) -> Tree:
    """Decode a tree of `Quantized`.

    Args:
        q: a `Quantized` or a tree of them; other leaves pass unchanged.
        codebook: the codebook it was encoded with.
        block: the block length it was encoded with; ragged rows do not tell it.
        like: a tensor or tree of tensors whose dtypes the result takes; fp32 if None.

    Raises:
        StructureError: if the trees do not fit.

    Example:
        >>> x, book = torch.randn(64, 256), default_codebook()
        >>> y = dequantize(quantize(x, book), book)
        >>> bool((x - y).norm() < 0.02 * x.norm())
        True
    """

    def decode(x: Quantized, length: int) -> Tensor:
        codes, absmax = local(x)
        values = reference.decode(codes, absmax, codebook.to(codes.device), block=length, start=absmax.ndim - 1)
        return like_piece(values, x.codes)

    values = _map_quantized(decode, q, block)
    return values if like is None else tree_map(lambda x, v: v.to(x.dtype), like, values)


def requantize(q: Tree, old: Tensor, new: Tensor, *, block: Blocks = DEFAULT_BLOCK) -> Tree:
    """Move a tree of `Quantized` from the codebook `old` to `new`; `absmax` is unchanged, other leaves pass.

    Args:
        q: a `Quantized` or a tree of them.
        old: the codebook it was encoded with.
        new: the codebook to move to.
        block: as in `quantize`; only checked, because scales stay where they are.

    Raises:
        StructureError: if the trees do not fit.
        ValueError: if `new` is no codebook.

    Example:
        >>> x, old = torch.randn(64, 256) ** 3, default_codebook()
        >>> new = learn_codebook(gradient_histogram(x))
        >>> moved = requantize(quantize(x, old), old, new)
        >>> bool((dequantize(moved, new) - x).norm() < 0.05 * x.norm())
        True
    """
    ties = tie_rule(new)

    def move(x: Quantized, length: int) -> Quantized:
        codes, device = local(x.codes), x.codes.device
        moved = reference.requantize(codes, old.to(device), new.to(device), ties=ties)
        return Quantized(like_piece(moved, x.codes), x.absmax)

    return _map_quantized(move, q, block)


def _map_quantized(f: Callable[[Quantized, int], Any], q: Tree, block: Blocks) -> Tree:
    """Map `f(quantized, block length)` over the `Quantized` of a tree; other leaves pass."""
    lengths = broadcast(lengths_in(block), q, _is_quantized)

    def leaf(x: Any, length: Any) -> Any:
        if not isinstance(x, Quantized):
            check_tensors(x, int, float)
            return x
        check_block(length)
        return f(x, length)

    return tree_map(leaf, q, lengths, is_leaf=_is_quantized)


def _is_quantized(x: Any) -> bool:
    return isinstance(x, Quantized)


def has_codebook(node: Any) -> bool:
    """Whether a part of a state is the stage of a transform that keeps a codebook."""
    return {"codebook", "learned"} <= set(getattr(node, "_fields", ()))


def check_codebooks(old: Any, new: Any) -> None:
    """Refuse a state in which codes stand beside a codebook that they were not made with.

    Args:
        old: the state before a partial load.
        new: the same state with some tensors replaced; a tensor that is not the same object was loaded.

    Raises:
        StructureError: if codes were loaded without their codebook, or a codebook without codes that are not zero.
    """

    def check(x: Any, y: Any) -> None:
        if not has_codebook(x):
            return
        pairs = zip(tree_leaves(x.mu), tree_leaves(y.mu), strict=True)
        codes = [(a, b) for a, b in pairs if a is not None and a.dtype == torch.uint8 and not b.is_meta]
        if y.codebook is x.codebook and any(a is not b for a, b in codes):
            raise StructureError("Codes need the codebook they were made with: got codes alone. Load it with them.")
        kept = [a for a, b in codes if a is b and bool((local(a) != ZERO_CODE).any())]
        if kept and not torch.equal(x.codebook, y.codebook.to(x.codebook.device)):
            raise StructureError(
                f"A codebook needs the codes made with it: got one that replaces the codebook of {len(kept)} leaves "
                "that have no saved codes. Load into a fresh state, or load all leaves."
            )

    tree_map(check, old, new, is_leaf=has_codebook)


def gradient_histogram(grads: Tree, *, block: Blocks = DEFAULT_BLOCK) -> Tensor:
    """Count the entries of all quantized leaves, each divided by its block's largest magnitude; of all shards together.

    Args:
        grads: gradients; `None` and dense leaves count nothing.
        block: entries per block.

    Returns:
        int64 `[4096]`: counts in equal bins on [-1, 1], exact zeros and non-finite entries not counted; on the device
        of the first quantized leaf.

    Raises:
        StructureError: if a leaf is not a dense floating-point tensor.

    Example:
        >>> counts = gradient_histogram({"w": torch.randn(64, 256), "b": torch.randn(64)})
        >>> counts.shape, int(counts.sum()) == 64 * 256
        (torch.Size([4096]), True)
    """
    leaves = tree_leaves(grads)
    return histogram_of(leaves, layout_list(block, grads), agree.group_of(leaves))


def histogram_of(leaves: Sequence[Tensor | None], layout: Sequence[LeafLayout | None], group: Any) -> Tensor:
    """`gradient_histogram` of leaves whose blocks lie as given, over the members of a group or scope."""
    rows = zip(leaves, layout, agree.counted(leaves, group), strict=True)
    kept = [(local(g), at) for g, at, counts in rows if at is not None and counts and not at.dense]
    total = torch.zeros(4096, dtype=torch.int64, device=kept[0][0].device if kept else None)
    for g, at in kept:
        total = total + reference.histogram(g.float(), block=at.block, start=at.start).to(total.device)
    return agree.total(total, group)
