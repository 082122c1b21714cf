# SPDX-License-Identifier: MIT
"""The attention layers of a transformers model: which modules, which stack, which sizes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from torch import nn

_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what attention modules call, see transformers' docs
_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_HEAD_DIMS = ("head_dim", "attention_head_size", "key_value_proj_dim", "qk_head_dim", "head_size")

LayerChoice = Iterable[int | str] | Mapping[str, Iterable[int] | None] | None


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """The self-attention layers of a model by the names of their modules."""
    found = attention_modules(model)
    return {name: m for name, m in found.items() if not is_cross(m, name)}


def attention_modules(model: nn.Module) -> dict[str, Any]:
    """All modules that call transformers' AttentionInterface, cross attention included."""
    return {name: m for name, m in model.named_modules() if _calls_interface(type(m))}


def _calls_interface(module: type[nn.Module]) -> bool:
    for base in module.__mro__:
        if base is nn.Module or base.__module__ == "transformers.modeling_utils":
            return False
        for member in vars(base).values():
            code = getattr(_unwrapped(member), "__code__", None)
            if isinstance(code, types.CodeType) and _INTERFACE in code.co_names:
                return True
    return False


def _unwrapped(member: Any) -> Any:
    return inspect.unwrap(member) if isinstance(member, types.FunctionType) else member


def is_cross(module: Any, name: str = "") -> bool:
    """Whether keys come from another sequence: in a decoder, attention that is not causal."""
    if getattr(module, "is_cross_attention", False) or "cross" in type(module).__name__.lower():
        return True
    own = name.rpartition(".")[2].lower()
    decoder = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    return bool(decoder) or "cross" in own


def has_window(module: Any) -> bool:
    """Whether the model gives a layer a window or chunks of its own."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window is not None
    config = getattr(module, "config", None)
    kinds, index = getattr(config, "layer_types", None), getattr(module, "layer_idx", None)
    if kinds and index is not None:
        return bool(kinds[index] in ("sliding_attention", "chunked_attention"))
    # Mistral, Phi 3: all layers or none.
    return (
        getattr(module, "is_causal", False) and getattr(config, "sliding_window", None) is not None
    )


def _number(name: str) -> int | None:
    """The index of a layer in its stack: the first number in its name."""
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def _within(name: str, part: str) -> bool:
    return f".{part}." in f".{name}."


def chosen_layers(found: dict[str, Any], layers: LayerChoice) -> set[str]:
    """The names of the layers that ``layers`` selects; see :func:`coterie.hf.use`."""
    if layers is None:
        own = {name for name, module in found.items() if not has_window(module)}
        if not own:
            raise ValueError(
                "layers: the model gives a window to each of its attention layers; name the "
                f"ones to replace, such as layers=range({len(found)})"
            )
        return own
    if isinstance(layers, str):
        layers = [layers]
    if isinstance(layers, Mapping):
        return set().union(*(_of_stack(found, *item) for item in layers.items()))
    return set().union(*(_selected(found, layer) for layer in layers))


def _of_stack(found: dict[str, Any], stack: str, layers: Iterable[int] | None) -> set[str]:
    own = _selected(found, stack)
    if layers is None:
        return own
    inside = {name: found[name] for name in own}
    return set().union(*(_selected(inside, layer) for layer in layers))


def _selected(found: dict[str, Any], layer: int | str) -> set[str]:
    if isinstance(layer, str):
        own = {name for name in found if _within(name, layer)}
    else:
        own = {name for name in found if _number(name) == layer}
    if not own:
        numbers = sorted({n for name in found if (n := _number(name)) is not None})
        raise ValueError(f"layers: expected some of {numbers} or of {sorted(found)}; got {layer!r}")
    return own


class Sizes(NamedTuple):
    """Sizes of an attention layer."""

    heads: int
    kv_heads: int
    head_dim: int


def _attribute(names: Iterable[str], *owners: Any) -> int | None:
    for owner in owners:
        for name in names:
            value = getattr(owner, name, None)
            if isinstance(value, int):
                return value
    return None


def layer_sizes(name: str, module: Any) -> Sizes:
    """The sizes of a layer; encoder and decoder may differ, so its attributes come first."""
    config = getattr(module, "config", None)
    heads = _attribute(_HEADS, module, config)
    if heads is None:
        raise ValueError(f"model: {name} does not tell its number of heads in {', '.join(_HEADS)}")
    head_dim = _attribute(_HEAD_DIMS, module, config)
    if head_dim is None:
        width = _attribute(("embed_dim", "hidden_size"), module, config)
        if width is None:
            raise ValueError(
                f"model: {name} does not tell its head dimension in {', '.join(_HEAD_DIMS)}"
            )
        head_dim = width // heads
    groups = _attribute(("num_key_value_groups",), module)
    kv_heads = _attribute(("num_key_value_heads",), module)
    if kv_heads is None:
        kv_heads = heads // groups if groups else heads
    return Sizes(heads, kv_heads, head_dim)
