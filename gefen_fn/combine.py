"""Putting transforms together: in a row, or on parts of the tree."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from gefen_fn.base import (
    GradientTransformation,
    MaskedNode,
    OptState,
    Params,
    Recipe,
    Updates,
    Waits,
    check_transform,
    made_in_rounds,
    started,
)
from gefen_fn.exchange import at_once, then
from gefen_fn.scalar import check_state
from gefen_fn.tree import (
    StructureError,
    Tree,
    leaf_choices,
    tree_leaves,
    tree_map,
    tree_parts,
    tree_structure,
    tree_unflatten,
)

Mask = Tree | Callable[[Params], Tree]
Labels = Tree | Callable[[Params], Tree]


class MaskedState(NamedTuple):
    """`inner_state`: the inner transform's state, with `None` where a leaf is hidden."""

    inner_state: OptState


class PartitionState(NamedTuple):
    """`inner_states`: each label's state, with `None` at the leaves of other labels."""

    inner_states: dict[Any, OptState]


def chain(*txs: GradientTransformation) -> GradientTransformation:
    """Apply transforms from left to right; the state is a tuple, one entry per transform.

    On shards, stages that exchange with other members do so one after the other; those under masks that follow each
    other and show no leaf twice, like the parts of a `partition`, at one time. The extra argument `global_norm` is the
    norm of what comes in, and is passed on as long as stages keep it.

    Raises:
        TypeError: if an argument is not a transform.
        StructureError: from `update`, if the state is not a tuple of that length.

    Example:
        >>> tx = chain(clip_by_global_norm(1.0), scale_by_adam(), scale_by_learning_rate(1e-3))
        >>> state = tx.init({"w": torch.zeros(3)})
        >>> [type(part).__name__ for part in state]
        ['EmptyState', 'ScaleByAdamState', 'EmptyState']
    """
    for tx in txs:
        check_transform(tx)
    masks = [_mask_of(tx) for tx in txs]
    reach = next((n for n, tx in enumerate(txs) if not keeps_norm(recipe_of(tx))), len(txs))

    def init(params: Params) -> tuple[OptState, ...]:
        return tuple(tx.init(params) for tx in txs)

    def start(updates: Updates, state: tuple[OptState, ...], params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, tuple)
        if len(state) != len(txs):
            raise StructureError(
                f"State must have one entry per stage: {len(txs)} stages, got {len(state)} states. "
                "Use the state that this transform's `init` made."
            )

        stages = list(zip(txs, masks, state, strict=True))
        return _onward(stages, reach, updates, (), params, extra)

    return made_in_rounds(Recipe("chain", txs), init, start)


def _onward(
    stages: Sequence[tuple[Any, ...]],
    reach: int,
    updates: Updates,
    new: tuple[OptState, ...],
    params: Params | None,
    extra: Mapping[str, Any],
) -> Waits:
    """What comes out of the stages that `new` has no state of yet; an inner function that calls itself would keep all
    of it alive until garbage is collected.

    Args:
        stages: transform, mask and state of each.
        reach: how many of them keep the norm.
        updates: that come in.
        new: states of the first stages.
        params: as in `update`.
        extra: as in `update`.
    """
    n = len(new)
    if n == len(stages):
        return updates, new
    shown = _abreast([mask for _, mask, _ in stages[n:]], updates, params)
    known = extra if n <= reach else without_norm(extra)
    outs = at_once([started(tx, updates, s, params, **known) for tx, _, s in stages[n : n + max(1, len(shown))]])
    return then(
        outs,
        lambda outs: _onward(
            stages, reach, _joined(updates, shown, outs), (*new, *(s for _, s in outs)), params, extra
        ),
    )


def _mask_of(tx: GradientTransformation) -> tuple[Mask] | None:
    """The mask of a transform that is `masked`; None for any other."""
    recipe = recipe_of(tx)
    return (recipe.args[1],) if recipe.name == "masked" else None


def recipe_of(tx: GradientTransformation) -> Recipe:
    """How a transform was made, if it tells."""
    return getattr(tx.update, "recipe", Recipe("unknown"))


def keeps_norm(recipe: Recipe) -> bool:
    """Whether what goes out of a stage has the norm of what comes in, whatever that is."""
    value = recipe.args[0] if recipe.name == "scale" else None
    return recipe.name == "identity" or (isinstance(value, (int, float)) and value == -1)


def without_norm(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Extra arguments for a stage that sees other updates than those whose norm may be known."""
    return {key: value for key, value in extra.items() if key != "global_norm"}


def _abreast(masks: Sequence[tuple[Mask] | None], updates: Updates, params: Params | None) -> list[list[bool]]:
    """What each of the first stages shows, if two or more are under masks that show no leaf twice; else nothing."""
    shown: list[list[bool]] = []
    if len(masks) < 2 or None in masks[:2]:
        return shown
    for mask in masks:
        row = None if mask is None else bools(choices_of(mask[0], updates, params))
        if row is None or any(sum(column) > 1 for column in zip(*shown, row, strict=True)):
            break
        shown.append(row)
    return shown if len(shown) > 1 else []


def _joined(updates: Updates, shown: list[list[bool]], outs: list[tuple[Updates, OptState]]) -> Updates:
    """What comes out of stages that stand abreast, or of one."""
    if not shown:
        return outs[0][0]
    picks = [row.index(True) + 1 if True in row else 0 for row in zip(*shown, strict=True)]
    return _merge(updates, picks, updates, *(out for out, _ in outs))


def _check_names(expected: Any, got: Any) -> None:
    if list(expected) != list(got):
        raise StructureError(
            f"State must have one entry per stage: expected {list(expected)}, got {list(got)}. "
            "Use the state that this transform's `init` made."
        )


def named_chain(*txs: tuple[str, GradientTransformation]) -> GradientTransformation:
    """Apply transforms from left to right; the state is a dict from each one's name to its state.

    Args:
        *txs: pairs `(name, transform)`.

    Raises:
        ValueError: if a name stands twice.
        TypeError: if an argument is not such a pair.

    Example:
        >>> tx = named_chain(("clip", clip(1.0)), ("adam", scale_by_adam()), ("descend", scale(-1e-3)))
        >>> state = tx.init(torch.zeros(3))
        >>> state["adam"].mu
        tensor([0., 0., 0.])
    """
    for pair in txs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise TypeError(
                f"Stages must be pairs (name, transform): got {type(pair).__name__}. "
                'Write `named_chain(("clip", clip(1.0)))`.'
            )
    names = [name for name, _ in txs]
    if len(set(names)) != len(names):
        raise ValueError(f"Names must differ: got {names}. Rename the repeated stage.")
    inner = chain(*(tx for _, tx in txs))

    def init(params: Params) -> dict[str, OptState]:
        return dict(zip(names, inner.init(params), strict=True))

    def start(updates: Updates, state: dict[str, OptState], params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, dict)
        _check_names(sorted(names), sorted(state))
        whole = started(inner, updates, tuple(state[name] for name in names), params, **extra)
        return then(whole, lambda out: (out[0], dict(zip(names, out[1], strict=True))))

    return made_in_rounds(Recipe("named_chain", txs), init, start)


def choices_of(choice: Any, updates: Tree, params: Params | None) -> list[Any]:
    """The mask or label of each leaf of `updates`, in order; a function sees params where there are any."""
    # A compiled graph cannot ask a container whether it is callable.
    asks = not isinstance(choice, (dict, list, tuple)) and callable(choice)
    return leaf_choices(choice(updates if params is None else params) if asks else choice, updates)


def _select(updates: Tree, tree: Tree | None, picked: list[bool]) -> Tree | None:
    """`tree`, which is like `updates`, with `None` at the leaves that are not picked; `MaskedNode()` for a bare one."""
    if tree is None:
        return None
    leaves = [x if keep else None for x, keep in zip(tree_parts(updates, tree), picked, strict=True)]
    shown = tree_unflatten(tree_structure(updates), leaves)
    # `None` for all of the params would mean that the caller gave none.
    return MaskedNode() if shown is None else shown


def _merge(updates: Tree, picks: list[int], *sources: Tree) -> Tree:
    """A tree like `updates` whose every leaf is taken from the source that its pick numbers."""
    columns = [tree_leaves(source) for source in sources]
    return tree_unflatten(tree_structure(updates), [columns[pick][i] for i, pick in enumerate(picks)])


def bools(mask: list[Any]) -> list[bool]:
    bad = [m for m in mask if not isinstance(m, bool)]
    if bad:
        raise TypeError(f"Masks must hold bools: got {type(bad[0]).__name__}. True keeps a leaf, False hides it.")
    return mask


def _hidden(state: OptState) -> OptState:
    """`state` with a tree without leaves for every `None`, which torch.vmap neither takes nor returns."""
    return tree_map(lambda x: MaskedNode() if x is None else x, state, skip_none=False)


def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Apply `inner` to the leaves where `mask` is True; the others pass unchanged.

    Args:
        inner: sees `None` at the hidden leaves, so it keeps no state for them.
        mask: a tree of bools that is a prefix of the params, or a function of params that makes one.

    Raises:
        TypeError: if `inner` is not a transform, or the mask holds something other than bools.
        StructureError: if the mask does not fit the params.

    Example:
        >>> tx = masked(scale(10.0), {"body": False, "head": True})
        >>> grads = {"body": {"w": torch.ones(2)}, "head": {"w": torch.ones(2)}}
        >>> tx.update(grads, tx.init(grads))[0]
        {'body': {'w': tensor([1., 1.])}, 'head': {'w': tensor([10., 10.])}}
    """
    check_transform(inner)

    def init(params: Params) -> MaskedState:
        return MaskedState(_hidden(inner.init(_select(params, params, bools(choices_of(mask, params, params))))))

    def start(updates: Updates, state: MaskedState, params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, MaskedState)
        keep = bools(choices_of(mask, updates, params))
        shown = _select(updates, updates, keep)
        shown_params, picks = _select(updates, params, keep), [int(k) for k in keep]
        whole = started(inner, shown, state.inner_state, shown_params, **without_norm(extra))
        return then(whole, lambda out: (_merge(updates, picks, updates, out[0]), MaskedState(out[1])))

    return made_in_rounds(Recipe("masked", (inner, mask)), init, start)


def partition(transforms: Mapping[Hashable, GradientTransformation], param_labels: Labels) -> GradientTransformation:
    """Apply to each leaf the transform of its label; what waits for other members does so in the same rounds.

    Args:
        transforms: from label to transform; each sees `None` at the leaves of other labels.
        param_labels: a tree of labels that is a prefix of the params, or a function of params that makes one.

    Raises:
        TypeError: if a value of `transforms` is not a transform.
        ValueError: from `init` or `update`, if a label has no transform.
        StructureError: if the labels do not fit the params.

    Example:
        >>> def matrices(params):
        ...     return {name: "muon" if p.ndim == 2 else "rest" for name, p in params.items()}
        >>> tx = partition({"muon": muon(0.02), "rest": adamw(3e-4)}, matrices)
        >>> state = tx.init({"w": torch.ones(64, 64), "b": torch.ones(64)})
        >>> sorted(state.inner_states)
        ['muon', 'rest']
    """
    if not isinstance(transforms, Mapping):
        raise TypeError(f"`transforms` must be a dict by label: got {type(transforms).__name__}. Give each a label.")
    for tx in transforms.values():
        check_transform(tx)
    known = list(transforms)

    def picks_of(updates: Tree, params: Params | None) -> list[int]:
        labels = choices_of(param_labels, updates, params)
        unknown = {str(label) for label in labels if label not in known}
        if unknown:
            raise ValueError(f"Every label needs a transform: got {sorted(unknown)}. Known are {known}.")
        return [known.index(label) for label in labels]

    def init(params: Params) -> PartitionState:
        picks = picks_of(params, params)
        shown = [_select(params, params, [pick == i for pick in picks]) for i in range(len(known))]
        return PartitionState({k: _hidden(transforms[k].init(part)) for k, part in zip(known, shown, strict=True)})

    def start(updates: Updates, state: PartitionState, params: Params | None = None, **extra: Any) -> Waits:
        check_state(state, PartitionState)
        _check_names(sorted(map(str, known)), sorted(map(str, state.inner_states)))
        picks = picks_of(updates, params)
        parts = []
        for i, (label, tx) in enumerate(transforms.items()):
            mine = [pick == i for pick in picks]
            shown, shown_params = _select(updates, updates, mine), _select(updates, params, mine)
            parts.append(started(tx, shown, state.inner_states[label], shown_params, **without_norm(extra)))

        def merged(outs: list[tuple[Updates, OptState]]) -> tuple[Updates, PartitionState]:
            states = PartitionState({label: inner for label, (_, inner) in zip(known, outs, strict=True)})
            return _merge(updates, picks, *(out for out, _ in outs)), states

        return then(at_once(parts), merged)

    return made_in_rounds(Recipe("partition", (dict(transforms), param_labels)), init, start)
