"""Shapes of a model's leaves from a description of it: a Hugging Face config, safetensors headers, or its factory.

No weights are read and none are made. Names are those of the safetensors that Hugging Face publishes; leaves alike in
several layers are one row, with `*` for the layer's number.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gefen_nn.errors import WrongArgumentError
from gefen_nn.model_shapes import MODELS, LeafShape, Model
from gefen_nn.route import choose
from gefen_nn.task import model_named

_HEADER = 100_000_000  # bytes; longer ones safetensors refuses too
_KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
_BIASED = ("qwen2", "qwen2_moe")
_NUMBERS = {
    *("hidden_size", "vocab_size", "intermediate_size", "head_dim", "decoder_sparse_step", "num_hidden_layers"),
    *("moe_intermediate_size", "shared_expert_intermediate_size", "num_local_experts", "num_experts"),
    *("num_attention_heads", "num_key_value_heads"),
}
_MOST_LAYERS, _MOST = 10_000, 1 << 31
_LONGEST, _MOST_ENTRIES = 1 << 27, 1 << 45  # of an axis, whose tiles are counted one by one, and of a leaf

Shapes = list[tuple[str, tuple[int, ...]]]


def model_of(text: str) -> Model:
    """The shapes of a model.

    Args:
        text: a name in `MODELS`; a `config.json`, a `.safetensors` file, its index, or a folder with one of those; or
            `module:function`, a factory, which is called with tensors on meta.

    Raises:
        WrongArgumentError: if it is none of these.
        ValueError: if a file is damaged, or of a kind that is not known.
        OSError: if a file cannot be read.
    """
    if text in MODELS:
        return MODELS[text]()
    path = Path(text)
    if path.is_dir():
        names = ("model.safetensors.index.json", "model.safetensors", "config.json")
        path = next((path / name for name in names if (path / name).exists()), path / names[-1])
    if path.suffix == ".safetensors":
        return _grouped(_of_header(path))
    if path.suffix == ".json":
        held = _json_of(path)
        if isinstance(held.get("weight_map"), dict):
            return _grouped([row for file in _files_in(path, held["weight_map"]) for row in _of_header(file)])
        return _grouped(of_config(held))
    if ":" not in text:
        raise WrongArgumentError(
            f"A model must be of {', '.join(sorted(MODELS))}, a config.json, a .safetensors file, a folder of those, "
            f"or module:function: got {text!r}. Correct it."
        )
    with torch.device("meta"):
        net = model_named(text)
    return _grouped(((name, tuple(p.shape)) for name, p in net.named_parameters() if p.requires_grad), net)


def _files_in(path: Path, weights: Mapping[str, Any]) -> list[Path]:
    """The files that an index names, which lie beside it."""
    stray = next((x for x in weights.values() if not isinstance(x, str) or Path(x).name != x), None)
    if stray is not None:
        raise ValueError(f"An index must name files beside it: got {stray!r} in {str(path)!r}. Name the right index.")
    return [path.with_name(name) for name in sorted(set(weights.values()))]


def _json_of(path: Path) -> dict[str, Any]:
    try:
        held = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"A model's .json must be JSON: got {str(path)!r}, which is not ({error}). Mend it."
        ) from error
    if not isinstance(held, dict):
        raise ValueError(f"A model's .json must hold an object: got a {type(held).__name__} in {str(path)!r}. Mend it.")
    return held


def _of_header(path: Path) -> Shapes:
    """A file of safetensors begins with the length of its header, 8 bytes, little-endian; the header is JSON."""
    with path.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        try:
            held = json.loads(stream.read(length)) if length <= _HEADER else None
        except (ValueError, RecursionError):
            held = None
    if not isinstance(held, dict):
        raise ValueError(f"A file of safetensors must begin with its header: got {path}, which does not.")
    return [(name, _shape_in(path, name, x)) for name, x in held.items() if name != "__metadata__"]


def _shape_in(path: Path, name: str, row: Any) -> tuple[int, ...]:
    shape = row.get("shape") if isinstance(row, dict) else None
    if not isinstance(shape, list) or not all(type(x) is int and x >= 0 for x in shape):
        raise ValueError(f"A shape in safetensors must be of integers from 0: got {shape} for {name!r} in {path}.")
    return tuple(shape)


def _grouped(rows: Iterable[tuple[str, tuple[int, ...]]], net: nn.Module | None = None) -> Model:
    """Leaves alike in one row each, with their number; Muon's as `route` would choose them."""
    pairs = [(name, torch.empty(_counted(name, shape), device="meta")) for name, shape in rows]
    own = list(net.named_parameters()) if net is not None else pairs
    rules = choose(own, net, None, "gefen")
    counts = Counter((re.sub(r"(^|\.)\d+(?=\.)", r"\1*", name), tuple(x.shape), rules[name].rule) for name, x in pairs)
    names = Counter(name for name, *_ in counts)
    return {
        name if names[name] == 1 else f"{name} {rule} {'x'.join(map(str, shape))}": LeafShape(
            shape, copies, rule == "muon", _are_experts(shape, name)
        )
        for (name, shape, rule), copies in counts.items()
    }


def _counted(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape of which bytes can be counted."""
    if max(shape, default=0) > _LONGEST or math.prod(shape) > _MOST_ENTRIES:
        raise ValueError(
            f"A leaf must have at most {_LONGEST:,} entries along an axis and {_MOST_ENTRIES:,} in all: got {shape} "
            f"for {name!r}. Correct the shape."
        )
    return shape


def _are_experts(shape: tuple[int, ...], name: str) -> bool:
    return len(shape) == 3 and "expert" in name


def of_config(config: Mapping[str, Any]) -> Shapes:
    """The leaves of a decoder that a Hugging Face `config.json` describes.

    Args:
        config: with the keys of Llama, Mistral, Mixtral, Qwen 2 and 3, their MoE forms, or Gemma 1 to 3 (text).

    Raises:
        ValueError: for another kind, if a key is missing, or for a number that none can be.
    """
    kind = config.get("model_type")
    if isinstance(config.get("text_config"), Mapping):
        return of_config(config["text_config"])
    if kind not in _KNOWN:
        raise ValueError(
            f"`model_type` must be of {', '.join(_KNOWN)}: got {kind!r}. Name a .safetensors file or module:function."
        )
    _check_numbers(config)
    try:
        return list(_decoder({key: x for key, x in config.items() if x is not None}, str(kind)))
    except KeyError as error:
        raise ValueError(f"A config of {kind} must have {error}: got none. Name its .safetensors instead.") from error


def _check_numbers(config: Mapping[str, Any]) -> None:
    """Refuse sizes that no model has; a missing one, or None, is for `_decoder` to judge."""
    for key in _NUMBERS & config.keys():
        least, most = int(key == "num_attention_heads"), _MOST_LAYERS if key == "num_hidden_layers" else _MOST
        value = config[key]
        if value is not None and (type(value) is not int or not least <= value <= most):
            rule = f"must be an integer from {least} to {most:,}"
            raise ValueError(f"`{key}` of a config {rule}: got {value!r}. Correct it.")
    dense = config.get("mlp_only_layers")
    if dense is not None and not isinstance(dense, list):
        raise ValueError(f"`mlp_only_layers` of a config must be a list: got {dense!r}. Correct it.")


def _decoder(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, words = config["hidden_size"], config["vocab_size"]
    yield "model.embed_tokens.weight", (words, width)
    for n in range(config["num_hidden_layers"]):
        for name, shape in (*_attention(config, kind), *_feed_forward(config, n), *_norms(kind, width)):
            yield f"model.layers.{n}.{name}", shape
    yield "model.norm.weight", (width,)
    if not config.get("tie_word_embeddings", kind.startswith("gemma")):
        yield "lm_head.weight", (words, width)


def _attention(config: Mapping[str, Any], kind: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    head = config.get("head_dim") or width // heads
    pairs = config.get("num_key_value_heads") or heads
    biased = config.get("attention_bias", kind in _BIASED)
    for name, rows in (("q", heads * head), ("k", pairs * head), ("v", pairs * head)):
        yield f"self_attn.{name}_proj.weight", (rows, width)
        if biased:
            yield f"self_attn.{name}_proj.bias", (rows,)
    yield "self_attn.o_proj.weight", (width, heads * head)
    if biased and kind not in _BIASED:
        yield "self_attn.o_proj.bias", (width,)
    if kind.startswith(("qwen3", "gemma3")):
        yield "self_attn.q_norm.weight", (head,)
        yield "self_attn.k_norm.weight", (head,)


def _norms(kind: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "input_layernorm.weight", (width,)
    yield "post_attention_layernorm.weight", (width,)
    if kind in ("gemma2", "gemma3_text"):
        yield "pre_feedforward_layernorm.weight", (width,)
        yield "post_feedforward_layernorm.weight", (width,)


def _feed_forward(config: Mapping[str, Any], layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, hidden = config["hidden_size"], config["intermediate_size"]
    experts = config.get("num_local_experts") or config.get("num_experts") or 0
    every = config.get("decoder_sparse_step") or 1
    if not experts or layer in (config.get("mlp_only_layers") or ()) or (layer + 1) % every:
        yield from _gated("mlp", width, hidden)
        return
    inner = config.get("moe_intermediate_size") or hidden
    yield "mlp.gate.weight", (experts, width)
    yield "mlp.experts.gate_proj", (experts, inner, width)
    yield "mlp.experts.up_proj", (experts, inner, width)
    yield "mlp.experts.down_proj", (experts, width, inner)
    shared = config.get("shared_expert_intermediate_size")
    if shared:
        yield from _gated("mlp.shared_expert", width, shared)
        yield "mlp.shared_expert_gate.weight", (1, width)


def _gated(name: str, width: int, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.gate_proj.weight", (hidden, width)
    yield f"{name}.up_proj.weight", (hidden, width)
    yield f"{name}.down_proj.weight", (width, hidden)
