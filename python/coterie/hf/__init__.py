# SPDX-License-Identifier: MIT
"""Coterie in Hugging Face models.

>>> import coterie.hf
>>> coterie.hf.use(model, "i-clustered(clusters=25,topk=32)", layers=range(2, 12))

or with the spec in the config, for mechanisms without parameters::

    coterie.hf.register()
    config.coterie_spec = "..."
    model = AutoModel.from_pretrained(name, config=config, attn_implementation="coterie")

Any model whose attention goes through transformers' AttentionInterface: encoders with padding
anywhere; decoders with strictly causal specs, whose decoding with a cache gives the logits of one
parallel pass. The model applies its own positions to queries and keys. Layers without a spec, cross
attention and, unless named, layers with a window of their own keep the model's attention.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import transformers
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from ..groups import HeadGroups
from .attention import NAME, OWN, attention_forward, check_group
from .calibration import Calibration, calibrate, read_specs
from .files import from_pretrained, same_name
from .layers import (
    LayerChoice,
    attention_layers,
    attention_modules,
    chosen_layers,
    layer_sizes,
)
from .masks import make_mask
from .rings import RingCache
from .training import Callback

__all__ = [
    "Calibration",
    "Callback",
    "RingCache",
    "attention_layers",
    "calibrate",
    "from_pretrained",
    "register",
    "use",
]

_Model = TypeVar("_Model", bound=nn.Module)
_OLDEST = (5, 17)  # of transformers; earlier ones ask for masks in another way


def check_version(version: str) -> None:
    """Refuses a transformers that is too old."""
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise ImportError(f"coterie.hf needs transformers 5.17 or newer; this is {version}")


check_version(transformers.__version__)


def register() -> None:
    """Registers ``attn_implementation="coterie"``: the attention and the mask function."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def use(
    model: _Model, spec: str | os.PathLike[str], layers: LayerChoice = None, seed: int = 0
) -> _Model:
    """Sets the attention of layers of a model to ``spec``; the others keep theirs.

    Args:
        model: a transformers model; its attention implementation becomes ``"coterie"``.
        spec: attention spec for the model's number of heads, or a file of specs (``.json``) that
            :meth:`Calibration.save` or ``coterie approximate`` has written.
        layers: self-attention layers by their index in their stack (in a model with several stacks
            those of all), or by the name of their module or of one that contains them, such as
            ``"encoder"``; or a dict from names of stacks to indices, such as
            ``{"encoder": range(2, 6)}``. By default all that have no window of their own.
        seed: seed of the initial centroids of routing heads.
    """
    found = attention_layers(model)
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} does not compute its attention by transformers' "
            "AttentionInterface; if it calls scaled_dot_product_attention, use coterie.apply"
        )
    if not isinstance(spec, str) or spec.endswith(".json"):
        if layers is not None:
            raise ValueError(f"layers: {os.fspath(spec)} names its layers; leave layers out")
        return use_specs(model, _layers_of(found, spec), seed)
    wanted = chosen_layers(found, layers)
    _set(model, found, {name: spec for name in found if name in wanted}, seed)
    return model


def _layers_of(found: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, str]:
    """The specs of a file by the names of the model's layers; in order if the file has no names."""
    pairs = read_specs(path)
    if not any(name for name, _ in pairs):
        if len(pairs) != len(found):
            raise ValueError(f"{path}: expected specs of {len(found)} layers; got {len(pairs)}")
        return {name: spec for name, (_, spec) in zip(found, pairs, strict=True)}
    specs = {}
    for saved, spec in pairs:
        name = next((name for name in found if same_name(saved, name)), None)
        if name is None:
            raise ValueError(f"{path}: expected layers among {sorted(found)}; got {saved!r}")
        specs[name] = spec
    return specs


def use_specs(model: _Model, specs: Mapping[str, str], seed: int = 0) -> _Model:
    """Sets the spec of each named layer; those with ``full`` keep the model's own attention."""
    found = attention_layers(model)
    wrong = sorted(set(specs) - set(found))
    if wrong:
        raise ValueError(f"layers: expected some of {sorted(found)}; got {wrong}")
    _set(model, found, {name: spec for name, spec in specs.items() if spec != "full"}, seed)
    config: Any = model.config
    for name in (name for name, spec in specs.items() if spec == "full"):
        found[name]._modules.pop(NAME, None)
        config.coterie_layers.pop(name, None)
    return model


def _set(model: nn.Module, found: dict[str, Any], specs: Mapping[str, str], seed: int) -> None:
    made = {
        name: make_groups(name, found[name], specs[name], seed + i)
        for i, name in enumerate(found)
        if name in specs
    }
    adopt(model)
    for name, groups in made.items():
        setattr(found[name], NAME, groups)
    config: Any = model.config
    config.coterie_layers = {
        **(getattr(config, "coterie_layers", None) or {}),
        **specs,
    }


def adopt(model: nn.Module) -> None:
    """Makes ``"coterie"`` the attention implementation; layers remember the one they had."""
    register()
    modules = attention_modules(model).values()
    for module in modules:
        before = module.config._attn_implementation
        if before != NAME:
            setattr(module, OWN, before)
    transformers_model: Any = model
    transformers_model.set_attn_implementation(NAME)
    # Stacks with copies of the config (T5 in transformers 5.17) are not told.
    stacks = (m for m in model.modules() if isinstance(m, PreTrainedModel) and attention_modules(m))
    for part in (*stacks, *modules):
        if part.config._attn_implementation != NAME:
            part.config._attn_implementation = NAME


def make_groups(name: str, layer: Any, spec: str, seed: int) -> HeadGroups:
    """The head groups of a layer."""
    heads, kv_heads, head_dim = layer_sizes(name, layer)
    causal = bool(getattr(layer, "is_causal", False))
    groups = HeadGroups(spec, heads, head_dim, kv_heads, heads * head_dim, causal, seed)
    for group in groups.groups():
        check_group(group.group)
    weight = next(layer.parameters())
    return groups.to(weight.device).train(layer.training)
