"""Functional optimizer transforms for torch: pure `init` and `update` over explicit trees of tensors.

An optimizer is an expression over any tree of tensors, in optax's grammar; its state is a tree of tensors too:

    >>> tx = chain(clip_by_global_norm(1.0), gefen(1e-3, weight_decay=0.1))
    >>> state = tx.init(params)
    >>> updates, state = tx.update(grads, state, params)
    >>> params = apply_updates(params, updates)

`gefen_nn` runs such an expression as a `torch.optim.Optimizer`. The names, all in this module:

- optimizers: `gefen`, `muon`, `gefen_muon`, `adam`, `adamw`, `lion`, `sgd`
- base: `GradientTransformation`, `apply_updates`, `incremental_update`, `identity`, `set_to_zero`, `stateless`,
  `with_extra_args_support`
- combine: `chain`, `named_chain`, `masked`, `partition`, `inject_hyperparams`, `MultiSteps` with `has_updated`,
  `apply_if_finite`
- directions: `scale_by_gefen`, `scale_by_muon`, `scale_by_adam`, `scale_by_lion`, `trace`, `ema`
- Muon's parts: `MatrixAxes`, `muon_labels`, `scale_by_matrix_shape`, `adjust_scale`, `orthogonalize`, `NS_COEFFS`
- scale, decay and clip: `scale`, `scale_by_learning_rate`, `scale_by_schedule`, `add_decayed_weights`, `decay_mask`,
  `clip`, `clip_by_global_norm`, `clip_by_block_rms`, `clip_by_qk`, `adaptive_grad_clip`, `zero_nans`, `global_norm`;
  `stochastic_rounding` of bf16 parameters, `compensated` ones
- schedules: `constant_schedule`, `linear_schedule`, `polynomial_schedule`, `piecewise_constant_schedule`,
  `exponential_decay`, `cosine_decay_schedule`, `warmup_cosine_decay_schedule`, `warmup_stable_decay_schedule`,
  `join_schedules`
- quantization: `Dense`, `Block` and `Factored` (the second moment), `FlatBlocks`, `find_block`, `find_blocks`,
  `calibrate`, `refresh`, `learn_codebook`, `default_codebook`, `gradient_histogram`, `Quantized`, `quantize`,
  `dequantize`, `requantize`; `Scope`: processes named by hand that learn one codebook
- states and reports: `describe`, `health`, `state_bytes`, `flatten_state`, `unflatten_state`, `compare_names`,
  `tree_get`, `tree_set`, `move_state` to another device, `tree_map` for transforms of your own, `fuse`; a state's class
  is named like its transform, as `ScaleByAdamState`; what does not fit together raises `StructureError`
"""

from gefen_fn.accumulate import ApplyIfFiniteState, MultiSteps, MultiStepsState, apply_if_finite, has_updated
from gefen_fn.adam import ScaleByAdamState, ScaleByLionState, scale_by_adam, scale_by_lion
from gefen_fn.alias import adam, adamw, gefen, lion, sgd
from gefen_fn.base import (
    EmptyState,
    GradientTransformation,
    GradientTransformationExtraArgs,
    MaskedNode,
    OptState,
    Params,
    ScalarOrSchedule,
    Schedule,
    Updates,
    apply_updates,
    identity,
    incremental_update,
    set_to_zero,
    stateless,
    with_extra_args_support,
)
from gefen_fn.blocks import FlatBlocks, find_blocks
from gefen_fn.calibrate import calibrate, refresh
from gefen_fn.clip import adaptive_grad_clip, clip, clip_by_block_rms, clip_by_global_norm, global_norm
from gefen_fn.combine import MaskedState, PartitionState, chain, masked, named_chain, partition
from gefen_fn.compensate import CompensatedState, compensated
from gefen_fn.describe import LeafReport, Report, describe
from gefen_fn.fuse import Step, fuse
from gefen_fn.gefen import ScaleByGefenState, scale_by_gefen
from gefen_fn.health import LeafHealth, health
from gefen_fn.inject import InjectHyperparamsState, inject_hyperparams
from gefen_fn.masks import decay_mask
from gefen_fn.matrix_scale import scale_by_matrix_shape
from gefen_fn.move import move_state
from gefen_fn.muon import ScaleByMuonState, scale_by_muon
from gefen_fn.muon_alias import gefen_muon, muon
from gefen_fn.qk_clip import HeadRows, QKHeads, clip_by_qk
from gefen_fn.quantize import Quantized, dequantize, gradient_histogram, quantize, requantize
from gefen_fn.rounding import StochasticRoundingState, stochastic_rounding
from gefen_fn.routing import muon_labels
from gefen_fn.scale import (
    EmaState,
    ScaleByScheduleState,
    TraceState,
    ZeroNansState,
    add_decayed_weights,
    ema,
    scale,
    scale_by_learning_rate,
    scale_by_schedule,
    trace,
    zero_nans,
)
from gefen_fn.schedule import (
    constant_schedule,
    cosine_decay_schedule,
    exponential_decay,
    join_schedules,
    linear_schedule,
    piecewise_constant_schedule,
    polynomial_schedule,
    warmup_cosine_decay_schedule,
    warmup_stable_decay_schedule,
)
from gefen_fn.scope import Scope
from gefen_fn.second_moment import Block, Dense, Factored, FactoredState
from gefen_fn.spec import MatrixAxes, adjust_scale
from gefen_fn.state_io import (
    NamesReport,
    compare_names,
    flatten_state,
    state_bytes,
    tree_get,
    tree_set,
    unflatten_state,
)
from gefen_fn.tree import StructureError, tree_map
from gefen_kernels import NS_COEFFS, default_codebook, find_block, learn_codebook, orthogonalize

__version__ = "0.1.0"

__all__ = [
    "NS_COEFFS",
    "ApplyIfFiniteState",
    "Block",
    "CompensatedState",
    "Dense",
    "EmaState",
    "EmptyState",
    "Factored",
    "FactoredState",
    "FlatBlocks",
    "GradientTransformation",
    "GradientTransformationExtraArgs",
    "HeadRows",
    "InjectHyperparamsState",
    "LeafHealth",
    "LeafReport",
    "MaskedNode",
    "MaskedState",
    "MatrixAxes",
    "MultiSteps",
    "MultiStepsState",
    "NamesReport",
    "OptState",
    "Params",
    "PartitionState",
    "QKHeads",
    "Quantized",
    "Report",
    "ScalarOrSchedule",
    "ScaleByAdamState",
    "ScaleByGefenState",
    "ScaleByLionState",
    "ScaleByMuonState",
    "ScaleByScheduleState",
    "Schedule",
    "Scope",
    "Step",
    "StochasticRoundingState",
    "StructureError",
    "TraceState",
    "Updates",
    "ZeroNansState",
    "adam",
    "adamw",
    "adaptive_grad_clip",
    "add_decayed_weights",
    "adjust_scale",
    "apply_if_finite",
    "apply_updates",
    "calibrate",
    "chain",
    "clip",
    "clip_by_block_rms",
    "clip_by_global_norm",
    "clip_by_qk",
    "compare_names",
    "compensated",
    "constant_schedule",
    "cosine_decay_schedule",
    "decay_mask",
    "default_codebook",
    "dequantize",
    "describe",
    "ema",
    "exponential_decay",
    "find_block",
    "find_blocks",
    "flatten_state",
    "fuse",
    "gefen",
    "gefen_muon",
    "global_norm",
    "gradient_histogram",
    "has_updated",
    "health",
    "identity",
    "incremental_update",
    "inject_hyperparams",
    "join_schedules",
    "learn_codebook",
    "linear_schedule",
    "lion",
    "masked",
    "move_state",
    "muon",
    "muon_labels",
    "named_chain",
    "orthogonalize",
    "partition",
    "piecewise_constant_schedule",
    "polynomial_schedule",
    "quantize",
    "refresh",
    "requantize",
    "scale",
    "scale_by_adam",
    "scale_by_gefen",
    "scale_by_learning_rate",
    "scale_by_lion",
    "scale_by_matrix_shape",
    "scale_by_muon",
    "scale_by_schedule",
    "set_to_zero",
    "sgd",
    "state_bytes",
    "stateless",
    "stochastic_rounding",
    "trace",
    "tree_get",
    "tree_map",
    "tree_set",
    "unflatten_state",
    "warmup_cosine_decay_schedule",
    "warmup_stable_decay_schedule",
    "with_extra_args_support",
    "zero_nans",
]
