"""Muon for a tree of matrices, and for whole models with another optimizer beside it."""

from collections.abc import Sequence
from typing import Any

from gefen_fn.alias import adamw, gefen
from gefen_fn.base import GradientTransformation, OptState, Params, ScalarOrSchedule
from gefen_fn.combine import Labels, Mask, chain, choices_of, partition
from gefen_fn.matrix_scale import scale_by_matrix_shape
from gefen_fn.muon import scale_by_muon
from gefen_fn.routing import MUON, check_muon, muon_labels
from gefen_fn.scalar import check_choice, is_schedule
from gefen_fn.scale import add_decayed_weights, scale_by_learning_rate
from gefen_fn.second_moment import DEFAULT_SECOND_MOMENT, SecondMoment
from gefen_fn.spec import Spec
from gefen_fn.tree import Tree


def muon(
    learning_rate: ScalarOrSchedule,
    momentum: Any = 0.95,
    nesterov: bool = True,
    weight_decay: Any = 0.1,
    *,
    quantize: bool = True,
    adjust: str | None = "original",
    coeffs: str | Sequence[Sequence[float]] = "standard",
    normuon: bool | str = False,
    spec: Spec = None,
    mask: Mask | None = None,
    eps: float = 1e-7,
    block: Any = 256,
    codebook: Any = "learned",
    convention: str = "ema",
    sharded: str = "auto",
) -> GradientTransformation:
    """Muon (Jordan 2024) with an 8-bit momentum; every leaf must be a matrix, see `gefen_muon` for whole models.

    Per matrix, `p = p - learning_rate (scale U V^T + weight_decay p)`, where `U S V^T` is the momentum looked ahead,
    and `scale` follows from its shape. With `quantize=False` it is torch.optim.Muon.

    Args:
        learning_rate: a number, a scalar tensor or a schedule.
        momentum: decay of the momentum.
        nesterov: look one step ahead.
        weight_decay: decoupled decay, multiplied by the learning rate.
        quantize: False keeps the momentum in fp32.
        adjust: scale of the learning rate by shape, see `adjust_scale`.
        coeffs: of the iterations, a name in `NS_COEFFS` or a list of triples.
        normuon: `"norm_kept"` or `"paper"` normalises rows, see `scale_by_muon`.
        spec: which axes are the matrix, see `scale_by_muon`.
        mask: which leaves decay: a tree of bool, or a function of params that returns one.
        eps: least Frobenius norm that a matrix is divided by.
        block: entries per scale of the codes: an int, a tree of int, or `FlatBlocks(tree)`.
        codebook: `"learned"`, `"fixed"`, a tensor of levels, or a `Scope` that learns one together.
        convention: of the momentum, `"ema"`, `"sum"` or `"nadam"`.
        sharded: what becomes of matrices cut by shards, see `scale_by_muon`.

    Raises:
        ValueError: if an argument is out of its range; from `init`, naming it, if a leaf is no matrix.

    Example:
        >>> w = torch.randn(64, 64)
        >>> tx = muon(0.02, weight_decay=0.1, adjust="match_rms_adamw")
        >>> updates, state = tx.update(torch.randn(64, 64), tx.init(w), w)
        >>> type(state[0]).__name__, state[0].mu.codes.dtype
        ('ScaleByMuonState', torch.uint8)
    """
    direction = scale_by_muon(
        momentum,
        nesterov,
        quantize=quantize,
        coeffs=coeffs,
        eps=eps,
        normuon=normuon,
        spec=spec,
        block=block,
        codebook=codebook,
        convention=convention,
        sharded=sharded,
    )
    decay, rate = add_decayed_weights(weight_decay, mask), scale_by_learning_rate(learning_rate)
    return chain(direction, scale_by_matrix_shape(adjust, spec), decay, rate)


def gefen_muon(
    learning_rate: ScalarOrSchedule,
    *,
    muon_learning_rate: ScalarOrSchedule | None = None,
    backup: str = "gefen",
    weight_decay: Any = 0.0,
    adjust: str | None = "match_rms_adamw",
    param_labels: Labels | None = None,
    require_muon: bool = True,
    momentum: Any = 0.95,
    nesterov: bool = True,
    quantize: bool = True,
    coeffs: str | Sequence[Sequence[float]] = "standard",
    normuon: bool | str = False,
    spec: Spec = None,
    mask: Mask | None = None,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    second_moment: SecondMoment = DEFAULT_SECOND_MOMENT,
    b2_warmup: Any = 0.9,
    block: Any = 256,
    codebook: Any = "learned",
    drive: str = "m",
    sharded: str = "auto",
) -> GradientTransformation:
    """Muon for the matrices of a model, Gefen or AdamW for its other leaves.

    With `adjust="match_rms_adamw"` an update of Muon has the size of one of AdamW's, so that both parts take AdamW's
    learning rate.

    Args:
        learning_rate: of both parts: a number, a scalar tensor or a schedule.
        muon_learning_rate: of Muon's part; None for `learning_rate`. Beside a schedule it is a schedule, such as
            `lambda count: 10 * schedule(count)`.
        backup: the transform of the other leaves: `"gefen"` or `"adamw"`.
        weight_decay: decoupled decay of both parts, multiplied by their learning rates.
        adjust: scale of Muon's learning rate by shape, see `adjust_scale`.
        param_labels: `"muon"` or the name of the backup for each leaf: a tree, or a function of params; None for
            `muon_labels`.
        require_muon: refuse params of which no leaf is Muon's.
        momentum: as of `muon`, like the next five.
        nesterov: see there.
        quantize: see there.
        coeffs: see there.
        normuon: see there.
        spec: see there; a leaf that a tree of specs names is Muon's.
        mask: which leaves decay, in both parts.
        b1: of the backup, like the next two.
        b2: see `gefen`.
        eps: see `gefen`.
        second_moment: of Gefen.
        b2_warmup: of Gefen.
        block: of every quantized moment.
        codebook: of each part: `"learned"`, `"fixed"`, a tensor of levels, or a `Scope`.
        drive: of Gefen.
        sharded: of `muon`.

    Raises:
        ValueError: if an argument is out of its range, or from `init`, if no leaf is Muon's.

    Example:
        >>> params = {"embed": torch.ones(100, 64), "w": torch.ones(64, 64)}
        >>> tx = gefen_muon(1e-3, weight_decay=0.1)
        >>> {leaf.path: leaf.rule for leaf in describe(tx, params).leaves}
        {'embed': 'scale_by_gefen', 'w': 'scale_by_muon'}
    """
    check_choice("backup", backup, ("gefen", "adamw"))
    rate = learning_rate if muon_learning_rate is None else muon_learning_rate
    if is_schedule(learning_rate) and not is_schedule(rate):
        raise ValueError(
            f"Both learning rates must follow a schedule if one does: got muon_learning_rate={rate!r} beside one. "
            "Use `lambda count: ratio * schedule(count)`, or `constant_schedule`."
        )
    both: dict[str, Any] = {"mask": mask, "block": block, "codebook": codebook}
    form: dict[str, Any] = {"coeffs": coeffs, "normuon": normuon, "sharded": sharded}
    own = muon(rate, momentum, nesterov, weight_decay, quantize=quantize, adjust=adjust, spec=spec, **form, **both)
    if backup == "adamw":
        others = adamw(learning_rate, b1, b2, eps, weight_decay=weight_decay, mask=mask)
    else:
        second: dict[str, Any] = {"second_moment": second_moment, "b2_warmup": b2_warmup}
        others = gefen(learning_rate, b1, b2, eps, weight_decay, drive=drive, **second, **both)

    def by_path_and_shape(params: Params) -> Tree:
        return muon_labels(params, backup, spec)

    labels: Labels = by_path_and_shape if param_labels is None else param_labels
    tx = partition({MUON: own, backup: others}, labels)

    def init(params: Params) -> OptState:
        if require_muon:
            check_muon(params, choices_of(labels, params, params))
        return tx.init(params)

    return GradientTransformation(init, tx.update)
