"""The names that other people's code calls, with the arguments they call them by: a change here breaks that code."""

import inspect

import pytest

import gefen_fn
import gefen_nn

SIGNATURES = {
    "apply_updates": "params, updates",
    "incremental_update": "new_tensors, old_tensors, step_size",
    "stateless": "f",
    "tree_map": "f, tree, *rest, skip_none=True, is_leaf=None",
    "identity": "",
    "set_to_zero": "",
    "with_extra_args_support": "tx",
    "chain": "*txs",
    "named_chain": "*txs",
    "partition": "transforms, param_labels",
    "masked": "inner, mask",
    "scale": "step_size",
    "scale_by_learning_rate": "learning_rate, *, flip_sign=True",
    "scale_by_schedule": "step_size_fn",
    "add_decayed_weights": "weight_decay=0.0, mask=None",
    "trace": "decay, nesterov=False, accumulator_dtype=None",
    "ema": "decay, debias=True, accumulator_dtype=None",
    "scale_by_adam": "b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, mu_dtype=None, *, nesterov=False",
    "scale_by_lion": "b1=0.9, b2=0.99, mu_dtype=None",
    "clip": "max_delta",
    "clip_by_global_norm": "max_norm",
    "clip_by_block_rms": "threshold",
    "clip_by_qk": "threshold=100.0, heads=None, *, key_heads=None",
    "adaptive_grad_clip": "clipping, eps=0.001",
    "zero_nans": "",
    "stochastic_rounding": "",
    "compensated": "bits=8",
    "apply_if_finite": "inner, max_consecutive_errors",
    "MultiSteps": "opt, every_k_schedule, use_grad_mean=True, should_skip_update_fn=None",
    "has_updated": "state",
    "inject_hyperparams": "inner_factory, static_args=(), hyperparam_dtype=None",
    "scale_by_gefen": "b1=0.9, b2=0.999, eps=1e-08, *, second_moment=Factored(tile=(128, 256)), b2_warmup=0.9, "
    "block=256, codebook='learned', drive='m', rounding='nearest'",
    "constant_schedule": "value",
    "linear_schedule": "init_value, end_value, transition_steps, transition_begin=0",
    "cosine_decay_schedule": "init_value, decay_steps, alpha=0.0, exponent=1.0",
    "exponential_decay": "init_value, transition_steps, decay_rate, transition_begin=0, staircase=False, "
    "end_value=None",
    "polynomial_schedule": "init_value, end_value, power, transition_steps, transition_begin=0",
    "piecewise_constant_schedule": "init_value, boundaries_and_scales=None",
    "warmup_cosine_decay_schedule": "init_value, peak_value, warmup_steps, decay_steps, end_value=0.0, exponent=1.0",
    "join_schedules": "schedules, boundaries",
    "warmup_stable_decay_schedule": "init_value, peak_value, warmup_steps, stable_steps, decay_steps, end_value=0.0",
    "sgd": "learning_rate, momentum=None, nesterov=False, accumulator_dtype=None",
    "adam": "learning_rate, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, mu_dtype=None, *, nesterov=False",
    "adamw": "learning_rate, b1=0.9, b2=0.999, eps=1e-08, eps_root=0.0, mu_dtype=None, weight_decay=0.0001, mask=None, "
    "*, nesterov=False",
    "lion": "learning_rate, b1=0.9, b2=0.99, mu_dtype=None, weight_decay=0.001, mask=None",
    "gefen": "learning_rate, b1=0.9, b2=0.999, eps=1e-08, weight_decay=0.0, *, mask=None, "
    "second_moment=Factored(tile=(128, 256)), b2_warmup=0.9, block=256, codebook='learned', drive='m', "
    "rounding='nearest'",
    "muon": "learning_rate, momentum=0.95, nesterov=True, weight_decay=0.1, *, quantize=True, adjust='original', "
    "coeffs='standard', normuon=False, spec=None, mask=None, eps=1e-07, block=256, codebook='learned', "
    "convention='ema', sharded='auto'",
    "gefen_muon": "learning_rate, *, muon_learning_rate=None, backup='gefen', weight_decay=0.0, "
    "adjust='match_rms_adamw', param_labels=None, require_muon=True, momentum=0.95, nesterov=True, quantize=True, "
    "coeffs='standard', normuon=False, spec=None, mask=None, b1=0.9, b2=0.999, eps=1e-08, "
    "second_moment=Factored(tile=(128, 256)), b2_warmup=0.9, block=256, codebook='learned', drive='m', sharded='auto'",
    "scale_by_muon": "momentum=0.95, nesterov=True, *, quantize=True, coeffs='standard', eps=1e-07, normuon=False, "
    "spec=None, block=256, codebook='learned', convention='ema', sharded='auto'",
    "scale_by_matrix_shape": "rule='original', spec=None",
    "adjust_scale": "shape, rule",
    "MatrixAxes": "rows, cols, split=None",
    "muon_labels": "params, backup='gefen', spec=None",
    "orthogonalize": "x, *, coeffs='standard', eps=1e-07, dtype=torch.bfloat16",
    "quantize": "tree_or_tensor, codebook, *, block=256",
    "dequantize": "q, codebook, *, block=256, like=None",
    "requantize": "q, old, new, *, block=256",
    "learn_codebook": "histogram, *, levels=256, zero=True, symmetric=True",
    "gradient_histogram": "grads, *, block=256",
    "default_codebook": "",
    "calibrate": "tx, grads, state, params=None",
    "refresh": "tx, grads, state, params=None",
    "find_blocks": "grads, *, rule='variance_drop', fallback=True, rowwise=True",
    "fuse": "tx",
    "describe": "tx, params",
    "health": "state, updates=None",
    "flatten_state": "state",
    "unflatten_state": "flat, like, *, strict=True",
    "state_bytes": "state, *, world='local'",
    "move_state": "state, device",
    "decay_mask": "params",
}
ADAPTERS = {
    "TransformOptimizer": "params, tx, *, fused=None, capturable=False",
    "Gefen": "params, lr=0.001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0, amsgrad=False, *, foreach=None, "
    "maximize=False, capturable=False, differentiable=False, fused=None, second_moment=Factored(tile=(128, 256)), "
    "b2_warmup=0.9, block=256, codebook='learned', stochastic_rounding=False, deterministic=False, "
    "error_if_nonfinite=False",
    "Muon": "params, lr=0.001, weight_decay=0.1, momentum=0.95, nesterov=True, "
    "ns_coefficients=(3.4445, -4.775, 2.0315), eps=1e-07, ns_steps=5, adjust_lr_fn=None, *, normuon=False, "
    "quantize=True, sharded='auto', spec=None, block=256, codebook='learned', maximize=False, capturable=False, "
    "stochastic_rounding=False, fused=None, error_if_nonfinite=False",
    "GefenMuon": "model, lr=0.001, *, muon_lr=None, backup_lr=None, backup='gefen', weight_decay=0.0, "
    "adjust_lr_fn='match_rms_adamw', momentum=0.95, nesterov=True, ns_coefficients=(3.4445, -4.775, 2.0315), "
    "ns_steps=5, normuon=False, quantize=True, betas=(0.9, 0.999), eps=1e-08, "
    "second_moment=Factored(tile=(128, 256)), b2_warmup=0.9, block=256, codebook='learned', rules=None, "
    "require_muon=True, sharded='auto', maximize=False, capturable=False, stochastic_rounding=False, fused=None, "
    "error_if_nonfinite=False",
    "save": "path, model, optimizer, **extra",
    "save_async": "path, model, optimizer, **extra",
    "load": "path, model, optimizer, strict=True",
    "OptimizerState": "optimizer",
    "offload": "optimizer, device='cpu'",
    "restore": "optimizer",
    "convert_state": "source_state_dict, optimizer",
    "adamw_state": "optimizer",
    "inspect_checkpoint": "path, *, key=None, watch=None",
    "lr_find": "make_run, optimizer='gefen', *, low=1e-06, high=1.0, range_steps=100, steps=100, runs=10, seed=0, "
    "watch=None",
    "StateTree": "state, params",
    "route": "model, rules=None, *, lr=None, backup='gefen'",
}


def arguments(function):
    """The signature without annotations and positional-only marks."""
    given = [p.replace(annotation=inspect.Parameter.empty) for p in inspect.signature(function).parameters.values()]
    return str(inspect.Signature(given)).removeprefix("(").removesuffix(")")


@pytest.mark.parametrize(("name", "expected"), SIGNATURES.items(), ids=SIGNATURES)
def test_functions_keep_their_arguments(name, expected):
    assert name in gefen_fn.__all__ and arguments(getattr(gefen_fn, name)) == expected


@pytest.mark.parametrize(("name", "expected"), ADAPTERS.items(), ids=ADAPTERS)
def test_optimizers_keep_their_arguments(name, expected):
    assert name in gefen_nn.__all__ and arguments(getattr(gefen_nn, name)) == expected
