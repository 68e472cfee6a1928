"""Plain-torch reference of every block operation: the definition that the other back ends are held to.

A leaf of shape `shape` is seen as `[..., C]`: the axes `start..` are merged into `C` columns, cut into blocks of
`block` entries, the last one possibly shorter. Scales have shape `shape[:start] + (ceil(C / block),)`.
All functions are pure and work under `torch.vmap` and `torch.compile(fullgraph=True)`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

Ties = Literal["zero", "published"]
Part = tuple[Sequence[int], Sequence[int]] | None

_CHUNK = 1 << 20  # entries whose codes are widened to integers at one time
_HALF_BINS = 2048
_MASK = 0xFFFFFFFF
_TINY = torch.finfo(torch.float32).tiny


def block_count(columns: int, block: int) -> int:
    """Number of blocks in a row of `columns` entries: `ceil(columns / block)`.

    Raises:
        ValueError: if `block < 1`.
    """
    if block < 1:
        raise ValueError(f"`block` must be at least 1: got block={block}. Use 256, the default, or a smaller length.")
    return -(-columns // block)


def scale_shape(shape: Sequence[int], block: int, start: int = 1) -> tuple[int, ...]:
    """Shape of the scales of a leaf: `shape[:start] + (ceil(prod(shape[start:]) / block),)`.

    Raises:
        ValueError: if `start` is negative or beyond the last axis, or if `block < 1`.
    """
    if not 0 <= start <= len(shape):
        raise ValueError(
            f"`start` must lie between 0 and the number of axes: got start={start} for shape {tuple(shape)}. "
            "Use start=1, or start=0 for a flattened leaf."
        )
    return (*shape[:start], block_count(math.prod(shape[start:]), block))


def block_absmax(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """Largest magnitude of each block, fp32.

    Args:
        x: a leaf of any floating dtype.
        block: entries per block.
        start: first of the axes that are merged into columns.

    Returns:
        `scale_shape(x.shape, block, start)`; NaN or infinite where the block holds such an entry.
    """
    return _per_block(_columns(x, block, start).abs(), block, lambda rows: rows.amax(-1))


def block_mean_square(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """Mean of `x^2` over the entries of each block, fp32, added by `tree_sum`.

    Arguments and shapes as in `block_absmax`; a shorter last block is divided by its own length.
    """
    columns = _columns(x, block, start)
    sums = _per_block(columns * columns, block, lambda rows: tree_sum(rows, -1))
    first = torch.arange(sums.shape[-1], device=x.device) * block
    # A tensor as divisor: CUDA turns division by a Python number into a product with its rounded reciprocal.
    return sums / (columns.shape[-1] - first).clamp(max=block).to(torch.float32)


def sum_of_squares(x: Tensor, *, block: int = 256, start: int = 1) -> Tensor:
    """Sum of `x^2` over a whole leaf as a 0-dim float64 tensor: blocks by `tree_sum` in fp32, their sums in float64.

    Arguments as in `block_absmax`.
    """
    columns = _columns(x, block, start)
    return _per_block(columns * columns, block, lambda rows: tree_sum(rows, -1)).to(torch.float64).sum()


def strip_sums(x: Tensor, strips: Sequence[tuple[int, int]]) -> Tensor:
    """Sums of `x^2` over strips of rows in fp32, added by `tree_sum`.

    Args:
        x: `[.., R, C]` of any floating dtype.
        strips: the first row of each, and its number of rows.

    Returns:
        `[.., strips, C]`.
    """
    parts = [x.narrow(-2, *strip).to(torch.float32) for strip in strips]
    sums = [tree_sum(part * part, -2) for part in parts]
    return torch.stack(sums, -2) if sums else x.new_empty((*x.shape[:-2], 0, x.shape[-1]), dtype=torch.float32)


def root(x: Tensor) -> Tensor:
    """Correctly rounded fp32 square root.

    Through float64, because torch's own fp32 root on a CPU may be a vector library's, off by one ulp in a fifth of all
    entries, where every other back end has the IEEE root.
    """
    return x.to(torch.float64).sqrt().to(torch.float32)


def expand_blocks(scales: Tensor, shape: Sequence[int], *, block: int, start: int = 1) -> Tensor:
    """Give every entry of a leaf the scale of its block: `scales[..., arange(C) // block]`.

    Args:
        scales: `scale_shape(shape, block, start)`.
        shape: shape of the leaf.
        block: entries per block.
        start: first of the axes that are merged into columns.

    Returns:
        fp32 of `shape`.

    Raises:
        ValueError: if `scales` has another shape.
    """
    expected = scale_shape(shape, block, start)
    if tuple(scales.shape) != expected:
        raise ValueError(
            f"scales must have shape {expected} for a leaf of shape {tuple(shape)}, block={block}, start={start}: "
            f"got {tuple(scales.shape)}. Was the state made with another `block`?"
        )
    index = torch.arange(math.prod(shape[start:]), device=scales.device) // block
    return scales.index_select(-1, index).reshape(tuple(shape))


def nearest(x: Tensor, codebook: Tensor, *, ties: Ties = "zero") -> Tensor:
    """Code of the level nearest to each entry, by the fp32 midpoints `(c[k] + c[k + 1]) * 0.5`.

    Args:
        x: fp32 of any shape, usually in [-1, 1].
        codebook: `[K]` fp32 levels, non-decreasing, `K <= 256`.
        ties: an entry on a midpoint goes toward zero ("zero") or to the lower level ("published").

    Returns:
        uint8 of `x.shape`. An entry that is not finite gets `K // 2`, and so does one whose level is exactly
        0, if `codebook[K // 2]` is 0 (of a symmetric codebook's two zeros only the upper is written).

    Raises:
        ValueError: if `ties` is neither of the two.
    """
    bounds = midpoints(codebook, ties)
    return _in_chunks(lambda part: _zero_code(part, torch.bucketize(part, bounds, out_int32=True), codebook), x)


def encode(
    x: Tensor, codebook: Tensor, *, block: int, start: int = 1, ties: Ties = "zero", noise: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Codes and block scales of a leaf: `absmax = max |x|` over the block, code of `x / absmax`.

    A non-finite entry gets the zero code and leaves its `absmax` non-finite. An `absmax` below the smallest normal
    fp32 is stored as 0, its block as zeros.

    Args:
        x: a leaf of any floating dtype.
        codebook: `[K]` fp32 levels from -1 to 1, non-decreasing, `K <= 256`.
        block: entries per block.
        start: first of the axes that are merged into columns.
        ties: as in `nearest`.
        noise: fp32 of `x.shape`, uniform in [0, 1): round stochastically, to the level above or below by distance.

    Returns:
        `(codes, absmax)`: uint8 of `x.shape`, fp32 of `scale_shape(x.shape, block, start)`.
    """
    ratio, absmax = _scaled(x, block, start)
    if noise is None:
        return nearest(ratio, codebook, ties=ties), absmax
    return _stochastic(ratio, codebook, noise), absmax


def decode(codes: Tensor, absmax: Tensor, codebook: Tensor, *, block: int, start: int = 1) -> Tensor:
    """The values that codes stand for: `codebook[codes] * absmax`, fp32 of `codes.shape`.

    Args:
        codes: uint8, the leaf's own shape.
        absmax: fp32 of `scale_shape(codes.shape, block, start)`.
        codebook: `[K]` fp32 levels.
        block: as it was given to `encode`.
        start: as it was given to `encode`.
    """
    # uint8 tensors index as masks in torch, hence the integers.
    levels = _in_chunks(lambda part: codebook[part.to(torch.int32)], codes.contiguous(), codebook.dtype)
    return levels * expand_blocks(absmax, codes.shape, block=block, start=start)


def requantize(codes: Tensor, old: Tensor, new: Tensor, *, ties: Ties = "zero") -> Tensor:
    """Codes in the codebook `new` of the levels that `codes` stand for in `old`; scales stay as they are.

    Args:
        codes: uint8, any shape.
        old: `[K]` fp32 levels of `codes`.
        new: `[K']` fp32 levels, non-decreasing.
        ties: as in `nearest`.

    Returns:
        uint8 of `codes.shape`.
    """
    table = nearest(old, new, ties=ties)
    return _in_chunks(lambda part: table[part.to(torch.int32)], codes.contiguous())


def tree_sum(x: Tensor, dim: int) -> Tensor:
    """Sum along `dim` by the fixed pairwise tree: pad with zeros to a power of two, add neighbours until one is left.

    The bits depend on the entries and their order alone.
    """
    dim = dim % x.dim()
    if x.shape[dim] == 0:
        return x.sum(dim)
    while (length := x.shape[dim]) > 1:
        pairs = torch.unflatten(x.narrow(dim, 0, length - length % 2), dim, (length // 2, 2))
        sums = pairs.select(dim + 1, 0) + pairs.select(dim + 1, 1)
        # An entry without neighbour meets only padding on this level.
        x = torch.cat([sums, x.narrow(dim, length - 1, 1)], dim) if length % 2 else sums
    return x.select(dim, 0)


def histogram(x: Tensor, *, block: int, start: int = 1) -> Tensor:
    """Counts of `x / absmax` in 4096 equal bins on [-1, 1], for learning a codebook: `[4096]` int64.

    The magnitude is binned in 2048 half-open bins on [0, 1] and mirrored for negative entries, so that the counts of
    `-x` are the counts of `x` reversed. Exact zeros, non-finite entries and blocks stored as zero do not count.

    Arguments as in `block_absmax`.
    """
    ratio, _ = _scaled(x, block, start)
    counts = torch.zeros(2 * _HALF_BINS, dtype=torch.int64, device=x.device)
    for part in torch.split(ratio.reshape(-1), _CHUNK):
        counted = part.isfinite() & (part != 0)
        magnitude = (torch.where(counted, part.abs(), 0.0) * _HALF_BINS).to(torch.int64).clamp(max=_HALF_BINS - 1)
        bins = torch.where(part < 0, _HALF_BINS - 1 - magnitude, _HALF_BINS + magnitude)
        counts = counts.scatter_add(0, bins, counted.to(torch.int64))
    return counts


def uniform(seed: int, count: Tensor, shape: Sequence[int], device: torch.device | str, part: Part = None) -> Tensor:
    """Uniform noise in [0, 1): the upper 24 bits of `random_words`, whose arguments it takes, times 2^-24.

    Returns:
        fp32 of `shape`.
    """
    return as_uniform(random_words(seed, count, shape, device, part))


def as_uniform(words: Tensor) -> Tensor:
    """What `uniform` makes of `random_words`: fp32 in [0, 1)."""
    return (words >> 8).to(torch.float32) * 2.0**-24


def random_words(
    seed: int, count: Tensor, shape: Sequence[int], device: torch.device | str, part: Part = None
) -> Tensor:
    """Random 32-bit words that depend on `(seed, count, flat index)` alone.

    Entry `i` is word `i % 4` of Philox4x32-10 with key `seed` (64 bits) and counter `(i // 4, count)` (64 bits each).

    Args:
        seed: a non-negative integer below 2^64.
        count: 0-dim integer tensor, the leaf's count.
        shape: shape of the result.
        device: device of the result.
        part: if the result is for a part of a leaf, the leaf's shape and its index of the part's first entry.

    Returns:
        int64 of `shape`.
    """
    size, step = math.prod(shape), count.to(device=device, dtype=torch.int64)
    index = torch.arange(block_count(size, 4), device=device) * 4 if part is None else flat_index(shape, *part, device)
    counter = ((index >> 2) & _MASK, index >> 34, step & _MASK, (step >> 32) & _MASK)
    words = torch.stack(philox(counter, (seed & _MASK, (seed >> 32) & _MASK)), dim=-1)
    if part is None:
        return words.reshape(-1)[:size].reshape(tuple(shape))
    return words.gather(-1, (index & 3).unsqueeze(-1)).squeeze(-1)


def flat_index(shape: Sequence[int], whole: Sequence[int], offset: Sequence[int], device: torch.device | str) -> Tensor:
    """The flat index in a leaf of shape `whole` of every entry of a part of it, int64 of `shape`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for size, length, first in zip(shape, whole, offset, strict=True):
        index = index.unsqueeze(-1) * length + torch.arange(first, first + size, device=device)
    return index


def round_to_bf16(x: Tensor, words: Tensor) -> Tensor:
    """Round fp32 to one of the two bf16 numbers around it, up with a probability that is its distance from the lower.

    A bf16 number and what is not finite stay as they are; `-x` takes the mirrored number under the same words.

    Args:
        x: fp32 of any shape.
        words: `random_words` of `x.shape`, of which the upper 16 bits are used.

    Returns:
        fp32 of `x.shape`.
    """
    bits = (x.contiguous().view(torch.int32) + (words >> 16).to(torch.int32)) & -0x10000
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

    Args:
        counter: four int64 tensors of 32-bit words that broadcast together.
        key: two 32-bit words.

    Returns:
        Four int64 tensors of 32-bit words.
    """
    (a, b, c, d), (k0, k1) = counter, key
    for _ in range(10):
        high0, low0 = _multiply(0xD2511F53, a)
        high1, low1 = _multiply(0xCD9E8D57, c)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    return a, b, c, d


def _multiply(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """Upper and lower 32 bits of a 32 x 32 bit product, by 16-bit halves so that no int64 overflows."""
    lower = factor * (word & 0xFFFF)
    upper = factor * (word >> 16) + (lower >> 16)
    return upper >> 16, ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)


def _columns(x: Tensor, block: int, start: int) -> Tensor:
    """`x` as fp32 `[..., C]`."""
    lead = scale_shape(x.shape, block, start)[:-1]
    return x.to(torch.float32).reshape(*lead, math.prod(x.shape[start:]))


def _scaled(x: Tensor, block: int, start: int) -> tuple[Tensor, Tensor]:
    """`x / absmax` as fp32 of `x.shape`, contiguous, and `absmax`; NaN or infinite where `absmax` is 0."""
    absmax = block_absmax(x, block=block, start=start)
    absmax = torch.where(absmax < _TINY, 0.0, absmax)
    return x.to(torch.float32).contiguous() / expand_blocks(absmax, x.shape, block=block, start=start), absmax


def _per_block(columns: Tensor, block: int, reduce: Callable[[Tensor], Tensor]) -> Tensor:
    """Reduce the last axis of whole blocks `[..., n, block]` and of the ragged tail `[..., 1, rest]` separately."""
    whole, rest = columns.shape[-1] // block, columns.shape[-1] % block
    scales = reduce(torch.unflatten(columns[..., : whole * block], -1, (whole, block)))
    if not rest:
        return scales
    return torch.cat([scales, reduce(columns[..., whole * block :].unsqueeze(-2))], dim=-1)


def midpoints(codebook: Tensor, ties: Ties) -> Tensor:
    """`[K - 1]` bounds such that the code of x is the number of bounds below x.

    Args:
        codebook: `[K]` fp32 levels, non-decreasing.
        ties: as in `nearest`.
    """
    if ties not in ("zero", "published"):
        raise ValueError(f'`ties` must be "zero" or "published": got {ties!r}. Use "zero", the default.')
    middle = (codebook[:-1] + codebook[1:]) * 0.5
    if ties == "published":
        return middle
    # An entry on a negative midpoint belongs above it: count that midpoint as the next number below.
    return torch.where(middle < 0, torch.nextafter(middle, torch.full_like(middle, -math.inf)), middle)


def _zero_code(x: Tensor, codes: Tensor, codebook: Tensor) -> Tensor:
    """Write `K // 2` for entries that are not finite, and for a chosen 0 where the codebook has its 0 there."""
    zero = codebook.shape[0] // 2
    kept = (codebook[codes] != 0) | (codebook[zero] != 0)
    return torch.where(x.isfinite() & kept, codes, zero).to(torch.uint8)


def _stochastic(x: Tensor, codebook: Tensor, noise: Tensor) -> Tensor:
    """Round to one of the two levels around x, away from zero where `noise` is below the share of the gap."""
    last = codebook.shape[0] - 2
    below = (torch.bucketize(x, codebook, right=True, out_int32=True) - 1).clamp(0, last)
    low, high = codebook[below], codebook[below + 1]
    # Measured from the level nearer to zero, so that -x takes the mirrored level under the same noise.
    share = torch.where(x < 0, high - x, x - low) / (high - low)
    codes = below + ((x < 0) ^ (noise < share)).to(torch.int32)
    return _zero_code(x, codes, codebook)


def _in_chunks(op: Callable[[Tensor], Tensor], x: Tensor, dtype: torch.dtype = torch.uint8) -> Tensor:
    """`op(x)` for an elementwise op with results of `dtype`, whose intermediates would be larger than x."""
    if x.numel() <= _CHUNK or torch.compiler.is_compiling():
        return op(x)
    out = x.new_empty(x.shape, dtype=dtype)
    for source, target in zip(torch.split(x.reshape(-1), _CHUNK), torch.split(out.view(-1), _CHUNK), strict=True):
        target.copy_(op(source))
    return out
