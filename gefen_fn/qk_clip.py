"""Clipping attention logits at their source: the query and key weights of a head shrink where its logits grew large."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gefen_fn.base import EmptyState, GradientTransformation, Params, Recipe, Updates, made
from gefen_fn.combine import choices_of
from gefen_fn.scalar import Scalar, check_int, check_positive, check_state, exact, wide_dtype
from gefen_fn.scale import need_params
from gefen_fn.shards import Piece, piece_of
from gefen_fn.tree import StructureError, Tree, check_tensors, map_update, readable, tree_leaves, tree_paths

_QUERY = re.compile(r"q|query|wq|to_q|q_proj|query_proj", re.IGNORECASE)
_KEY = re.compile(r"k|key|wk|to_k|k_proj|key_proj", re.IGNORECASE)
_LEAST_FACTOR = 2.0**-24  # in one step: other query heads of that key grow by one over its root, which fp16 must hold
_FUSED = re.compile(r"qkv|wqkv|to_qkv|qkv_proj|in_proj_(weight|bias)", re.IGNORECASE)


@dataclass(frozen=True)
class HeadRows:
    """The rows of all query heads, or of all key heads, in a weight or bias.

    Attributes:
        size: rows of a head.
        first: the first row of the first head.
        stride: rows from one head to the next; `size` if None.

    Example:
        >>> HeadRows(size=2, first=4, stride=6).index(heads=2, device="cpu")
        tensor([ 4,  5, 10, 11])
    """

    size: int
    first: int = 0
    stride: int | None = None

    def index(self, heads: int, device: torch.device) -> Tensor:
        """Every row in turn, head by head: int64 `[heads * size]`."""
        stride = self.size if self.stride is None else self.stride
        begins = self.first + stride * torch.arange(heads, device=device)
        return (begins[:, None] + torch.arange(self.size, device=device)).reshape(-1)

    def end(self, heads: int) -> int:
        """One past the last row."""
        return self.first + (heads - 1) * (self.size if self.stride is None else self.stride) + self.size


@dataclass(frozen=True)
class QKHeads:
    """What a leaf holds of an attention layer.

    Attributes:
        layer: the key of the layer in `max_logits`.
        query: rows of the query heads.
        key: rows of the key heads.
        rotary: rows of the query heads whose key is one for all heads and stays, as in multi-head latent attention.
        shared: how many query heads in turn have one key head.
        axis: the axis of the rows: 1 for a weight stored as `[in, out]`.

    Example:
        >>> rows = HeadRows(size=64)  # one head after the other
        >>> heads = {"wq": QKHeads("attention", query=rows), "wk": QKHeads("attention", key=rows), "wo": None}
        >>> tx = clip_by_qk(100.0, heads)
    """

    layer: str
    query: HeadRows | None = None
    key: HeadRows | None = None
    rotary: HeadRows | None = None
    shared: int = 1
    axis: int = 0


Heads = Tree | Callable[[Params], Tree] | None


def clip_by_qk(
    threshold: Scalar = 100.0, heads: Heads = None, *, key_heads: int | None = None
) -> GradientTransformation:
    """Scale query and key weights down where a head's logits exceed a threshold (QK-Clip of arXiv 2507.20534).

    A head whose largest logit s of the batch is above the threshold has its logits multiplied by `threshold / s`: query
    and key weights by its root each. A key head that several query heads share takes the root of the smallest of their
    factors, and each query head what is left of its own, so that no other head's logits change. It stands last in a
    chain, behind the learning rate: its updates make `params + updates` the clipped weights. The largest logits, over
    all processes, are the extra argument `max_logits` of each update, or, of
    `TransformOptimizer(model.named_parameters(), tx)`, of `optimizer.step(max_logits=logits)`: one number per query
    head, `[heads]`, in a tensor for each layer. A logit that is NaN or infinite tells nothing: its head stays as it is.
    Weights behind which queries and keys are normalised do not limit logits.

    Args:
        threshold: above 0; a number or a 0-dim tensor.
        heads: what each leaf holds: a tree of `QKHeads` and None, or a function of params that makes one. None goes by
            the names in each layer that `max_logits` names: `q_proj`, `k_proj` and the like, or `qkv` and the like for
            a leaf of all query rows, then all key rows, then all value rows.
        key_heads: heads of keys in such a fused leaf; as many as of queries if None.

    Raises:
        ValueError: if the threshold is not above 0, or `key_heads` no int of at least 1; from `update`, without params
            or `max_logits`, which may be None where nothing was measured.
        TypeError: from `update`, if the logits are no tensors.
        StructureError: from `update`, if heads or logits do not fit the leaves.

    Example:
        >>> params = {"attention.q_proj": torch.ones(4, 8), "attention.k_proj": torch.ones(4, 8)}  # 2 heads of 2 rows
        >>> tx, grads = chain(sgd(0.1), clip_by_qk(100.0)), tree_map(torch.zeros_like, params)
        >>> logits = {"attention": torch.tensor([400.0, 50.0])}  # the largest of each head
        >>> updates, state = tx.update(grads, tx.init(params), params, max_logits=logits)
        >>> apply_updates(params, updates)["attention.q_proj"][:, 0]
        tensor([0.5000, 0.5000, 1.0000, 1.0000])
    """
    check_positive("threshold", threshold)
    if key_heads is not None:
        check_int("key_heads", key_heads, 1, "Leave it out where every query head has its own keys.")

    def init(params: Params) -> EmptyState:
        check_tensors(params)
        return EmptyState()

    def update(
        updates: Updates, state: EmptyState, params: Params | None = None, **extra: Any
    ) -> tuple[Updates, EmptyState]:
        check_state(state, EmptyState)
        params, logits = need_params(params, "clip_by_qk"), _logits(extra)
        if not logits:
            return updates, state
        kept = _by_name(params, logits, key_heads) if heads is None else choices_of(heads, updates, params)
        factors = {layer: _factors(values, threshold) for layer, values in logits.items()}

        def leaf(u: Tensor, p: Tensor, own: QKHeads | None, piece: Piece) -> tuple[Tensor]:
            return (u if own is None or own.layer not in factors else _clipped(u, p, own, factors[own.layer], piece),)

        pieces = [None if u is None else piece_of(u) for u in tree_leaves(updates)]
        return map_update(leaf, updates, (), params, each=(kept, pieces))[0], state

    return made(Recipe("clip_by_qk", (threshold, heads), {"key_heads": key_heads}, needs=("max_logits",)), init, update)


def _logits(extra: Mapping[str, Any]) -> Mapping[str, Tensor]:
    """The largest logits by layer; one tensor is that of the only layer."""
    if "max_logits" not in extra:
        raise ValueError(
            "clip_by_qk reads the largest logit of each head: got no `max_logits`. Call `update(updates, state, "
            "params, max_logits={layer: tensor})`, or pass max_logits=None where nothing was measured."
        )
    given = {} if extra["max_logits"] is None else extra["max_logits"]
    logits = given if isinstance(given, Mapping) else {"": given}
    for layer, values in logits.items():
        _check_logits(layer, values)
    return logits


def _check_logits(layer: Any, values: Any) -> None:
    """Refuse what are no logits of a layer: one real number per query head."""
    rule, fix = "`max_logits` must be", "Pass {layer: logits.amax((0, 2, 3))}, of logits `[batch, heads, M, N]`."
    if not isinstance(layer, str) or not isinstance(values, Tensor):
        kind = f"a {type(values).__name__} for layer {layer!r}"
        raise TypeError(f"{rule} a tensor of one number per query head, or a dict of those by layer: got {kind}. {fix}")
    is_plain = values.layout == torch.strided and not values.is_meta and not values.is_complex()
    if values.dim() != 1 or not len(values) or not is_plain or values.dtype == torch.bool:
        form = f"{values.dtype}, {values.layout}, {tuple(values.shape)} on {values.device} for layer {layer!r}"
        raise StructureError(f"{rule} one number per query head of a layer, dense, with data: got {form}. {fix}")


def _factors(logits: Tensor, threshold: Scalar) -> Tensor:
    """What each head's logits are multiplied by, float64 `[heads]`; logits that are not finite tell nothing."""
    values = logits.to(torch.float64)
    clips = values.isfinite() & (values > exact(threshold))
    factors = torch.where(clips, exact(threshold) / torch.where(clips, values, 1.0), 1.0)
    return factors.clamp(min=_LEAST_FACTOR)


def _clipped(u: Tensor, p: Tensor, own: QKHeads, factors: Tensor, piece: Piece) -> Tensor:
    """`f (p + u) - p` where a row's factor f is not 1; heads are numbered in the whole leaf."""
    wide, length, heads = wide_dtype(p.dtype), piece.whole[own.axis], len(factors)
    _check(own, length, heads)
    whole = factors.to(p.device)
    key = whole.reshape(-1, own.shared).amin(-1).sqrt()
    query = whole / key.repeat_interleave(own.shared)
    rows = torch.ones(length, dtype=torch.float64, device=p.device)
    for place, values in ((own.query, query), (own.key, key), (own.rotary, whole)):
        if place is not None:
            index = place.index(len(values), p.device)
            rows = rows.index_copy(0, index, values.repeat_interleave(place.size))
    here = rows.narrow(0, piece.offset[own.axis], piece.shape[own.axis])
    f = here.to(wide).reshape([-1 if n == own.axis % p.dim() else 1 for n in range(p.dim())])
    p, u = p.to(wide), u.to(wide)
    return torch.where(f == 1.0, u, f * (p + u) - p)


def _check(own: QKHeads, length: int, heads: int) -> None:
    ends = [place.end(n) for place, n in _places(own, heads)]
    if heads % own.shared or not ends or max(ends) > length:
        raise StructureError(
            f"Heads must fit their leaf: got {own} for {length} rows and {heads} logits of layer {own.layer!r}. "
            "Pass one logit per query head, and the rows of each."
        )


def _places(own: QKHeads, heads: int) -> list[tuple[HeadRows, int]]:
    """Where rows of heads are, and of how many."""
    pairs = ((own.query, heads), (own.key, heads // own.shared), (own.rotary, heads))
    return [(place, number) for place, number in pairs if place is not None]


def _by_name(params: Params, logits: Mapping[str, Tensor], key_heads: int | None) -> list[QKHeads | None]:
    """What each leaf holds, by the names in its path below its layer's."""
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "clip_by_qk goes by the names of the leaves: got a trace by torch.compile, which reads none. "
            "Pass `heads`, a tree of QKHeads."
        )
    paths, leaves = [readable(path) for path in tree_paths(params)], tree_leaves(params)
    found: list[QKHeads | None] = [None] * len(leaves)
    for layer, values in logits.items():
        below = {
            i: path.removeprefix(layer).strip(".").split(".") for i, path in enumerate(paths) if _is_in(path, layer)
        }
        rows = {i: leaves[i].shape[0] for i in below if leaves[i] is not None and leaves[i].dim()}
        own = _layer(layer, {i: below[i] for i in rows}, rows, len(values), key_heads)
        for i, heads in own.items():
            found[i] = heads
    return found


def _is_in(path: str, layer: str) -> bool:
    return not layer or path == layer or path.startswith(f"{layer}.")


def _layer(
    layer: str, names: Mapping[int, Sequence[str]], rows: Mapping[int, int], heads: int, key_heads: int | None
) -> dict[int, QKHeads]:
    """What the leaves of one layer hold."""
    query, key, fused = (
        [i for i, own in names.items() if any(kind.fullmatch(name) for name in own)] for kind in (_QUERY, _KEY, _FUSED)
    )
    fewer = heads if key_heads is None else key_heads
    if fused and not query and not key:
        size = rows[fused[0]] // (heads + 2 * fewer)
        whole, own = HeadRows(size), HeadRows(size, heads * size)
        fits = all(rows[i] == size * (heads + 2 * fewer) for i in fused) and heads % fewer == 0
        out = {i: QKHeads(layer, whole, own, shared=heads // fewer) for i in fused}
    else:
        size = rows[query[0]] // heads if query else 0
        fewer = rows[key[0]] // size if key and size else 0
        fits = bool(fewer) and all(rows[i] == size * heads for i in query) and all(rows[i] == size * fewer for i in key)
        fits = fits and heads % fewer == 0
        shared = heads // fewer if fits else 1
        out = {i: QKHeads(layer, query=HeadRows(size), shared=shared) for i in query}
        out |= {i: QKHeads(layer, key=HeadRows(size), shared=shared) for i in key}
    if not fits:
        raise StructureError(
            f"A layer of `max_logits` must hold leaves with rows for its {heads} heads, named as q_proj and k_proj or "
            f"qkv: got {[rows[i] for i in (*query, *key, *fused)]} rows under {layer!r}. "
            "Check its name, pass `key_heads`, or say by `heads` where the rows are."
        )
    return out
