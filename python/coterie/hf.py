# SPDX-License-Identifier: MIT
"""Coterie in Hugging Face models, by name.

>>> import coterie.hf
>>> coterie.hf.register()
>>> model = AutoModel.from_pretrained(name, attn_implementation="coterie")
>>> coterie.hf.use(model, "i-clustered(clusters=25,topk=32)", layers=range(2, 12))

or with the spec in the config: ``config.coterie_spec = "..."``. Supports encoders with padding
anywhere; decoders with strictly causal specs, whose decoding with a growing or a static cache gives
the logits of one parallel pass; encoder-decoder models, whose cross attention stays full. The model
applies its own positions to queries and keys. Attention dropout, biases, soft caps, and masks that
a mechanism does not support are errors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .functional import Options, Rows, options_of
from .groups import HeadGroup, HeadGroups
from .padding import Padding, make_padding
from .spec import Group

_Model = TypeVar("_Model", bound=nn.Module)
NAME = "coterie"
_ATTRIBUTE = "coterie"  # submodule of an attention layer
_REFUSED = ("softcap", "s_aux", "position_bias", "head_mask")


def register() -> None:
    """Registers ``attn_implementation="coterie"``: the attention and the mask function."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, make_mask)


def use(
    model: _Model, spec: str, layers: Iterable[int | str] | None = None, seed: int = 0
) -> _Model:
    """Sets the attention of layers of a model to ``spec``; the others keep theirs or get "full".

    Args:
        model: a transformers model; its attention implementation becomes ``"coterie"``.
        spec: attention spec for the model's number of heads.
        layers: self-attention layers by index (in an encoder-decoder model those of both parts), or
            by the name of their module or of one that contains them, such as ``"encoder"``; all by
            default.
        seed: seed of the initial centroids of routing heads.
    """
    register()
    transformers_model: Any = model
    transformers_model.set_attn_implementation(NAME)
    found = attention_layers(model)
    if not found:
        raise ValueError(
            "model: no attention layers with layer_idx and scaling; use a transformers model"
        )
    wanted = _chosen(found, layers)
    for number, (name, layer) in enumerate(found.items()):
        if name in wanted:
            _attach(layer, spec, seed + number)
        elif not hasattr(layer, _ATTRIBUTE):
            _attach(layer, "full", 0)
    for module in model.modules():
        if _is_attention(module) and _is_cross(module) and not hasattr(module, _ATTRIBUTE):
            _attach(module, "full", 0)
    return model


def _chosen(found: dict[str, Any], layers: Iterable[int | str] | None) -> set[str]:
    """The names of the layers that indices or module names select."""
    if layers is None:
        return set(found)
    wanted: set[str] = set()
    for layer in layers:
        if isinstance(layer, str):
            own = {name for name in found if f"{name}.".startswith(f"{layer}.")}
        else:
            own = {name for name, module in found.items() if module.layer_idx == layer}
        if not own:
            indices = sorted({m.layer_idx for m in found.values() if m.layer_idx is not None})
            raise ValueError(
                f"layers: expected some of {indices} or of {sorted(found)}; got {layer!r}"
            )
        wanted |= own
    return wanted


def attention_layers(model: nn.Module) -> dict[str, Any]:
    """The self-attention layers of a model by the names of their modules."""
    modules = model.named_modules()
    return {name: m for name, m in modules if _is_attention(m) and not _is_cross(m)}


def _is_attention(module: nn.Module) -> bool:
    return hasattr(module, "layer_idx") and hasattr(module, "scaling")


def _is_cross(module: nn.Module) -> bool:
    """Whether keys come from another sequence: in a decoder, attention that is not causal."""
    cross = bool(getattr(module, "is_cross_attention", False))
    decoder = getattr(module, "is_decoder", False) and not getattr(module, "is_causal", True)
    return cross or bool(decoder) or "Cross" in type(module).__name__


def _attach(layer: Any, spec: str, seed: int) -> None:
    config = layer.config
    # Encoder and decoder of a model may differ, so the module's attributes come first.
    heads = getattr(layer, "num_heads", None) or config.num_attention_heads
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(layer, "head_dim", None) or getattr(config, "head_dim", None)
    head_dim = head_dim or config.hidden_size // heads
    causal = bool(getattr(layer, "is_causal", False))
    groups = HeadGroups(spec, heads, head_dim, kv_heads, config.hidden_size, causal, seed)
    for group in groups.groups():
        _check_group(group.group)
    weight = next(layer.parameters())
    setattr(layer, _ATTRIBUTE, groups.to(weight.device).train(layer.training))


def _check_group(group: Group) -> None:
    if group.positions_named and group.positions != "none":
        raise ValueError(
            f"spec: the model applies its own positions; leave out positions={group.positions}"
        )
    if group.keys_are_queries:
        raise ValueError(
            f"spec: {group.text} uses queries as keys; choose one that takes the model's keys"
        )
    if group.name == "cast":
        raise ValueError("spec: cast is not supported, because its gate needs the layer's input")


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask function: None, a bool padding mask (B, S), or a bool mask (B, 1, N, S).

    Plain causal and bidirectional patterns need no mask; every other pattern becomes a mask of all
    pairs, for mechanisms that support it. S excludes the empty slots at the end of a static cache:
    attention_forward cuts keys and values to S.
    """
    from transformers import masking_utils

    bidirectional = mask_function is masking_utils.bidirectional_mask_function
    filled = kv_length
    if not bidirectional:
        filled = min(kv_length, _host_number(q_offset) + q_length - kv_offset)
    if bidirectional or mask_function in (None, masking_utils.causal_mask_function):
        if attention_mask is not None:
            return attention_mask[:, kv_offset : kv_offset + filled]
        if filled == kv_length:
            return None
        return torch.ones(batch_size, filled, dtype=torch.bool, device=kwargs.get("device"))
    for key in ("allow_is_causal_skip", "allow_is_bidirectional_skip"):
        kwargs.pop(key, None)
    return masking_utils.sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=filled,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=False,
        **kwargs,
    )


def _host_number(q_offset: int | Tensor) -> int:
    """The offset as an int; static caches have it on the device."""
    if isinstance(q_offset, Tensor) and torch.compiler.is_compiling():
        raise ValueError(
            "past_key_values: static caches are not supported under torch.compile, because the "
            "number of filled slots is on the device; use a dynamic cache"
        )
    return int(q_offset)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function: query (B, H, N, D), key, value (B, Hkv, S, D) give (B, N, H, D)."""
    if dropout:
        raise ValueError(
            f"dropout: attention dropout is not supported; got {dropout}, set the config's "
            "attention dropout to 0"
        )
    for name in _REFUSED:
        if kwargs.get(name) is not None:
            raise ValueError(f"{name}: not supported; expected None")
    causal = bool(getattr(module, "is_causal", False) if is_causal is None else is_causal)
    if causal and attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
        key, value = (x[:, :, : attention_mask.shape[-1]] for x in (key, value))  # filled slots
    groups = _groups_of(module, query, key, causal)
    if attention_mask is not None and attention_mask.dim() == 4:
        options = Options(causal, scaling or 0.0, mask=_pair_mask(groups, query, attention_mask))
        out = _run(groups, Rows(query, key, value), options)
    else:
        out = _run_padded(module, groups, (query, key, value), attention_mask, scaling)
    return out.transpose(1, 2), None


def _groups_of(module: nn.Module, query: Tensor, key: Tensor, causal: bool) -> HeadGroups:
    groups: HeadGroups | None = getattr(module, _ATTRIBUTE, None)
    if groups is not None and groups.causal == causal:
        return groups
    config = getattr(module, "config", None)
    spec = groups.spec if groups is not None else getattr(config, "coterie_spec", None)
    if spec is None:
        raise ValueError(
            "coterie: expected a spec: set config.coterie_spec or call coterie.hf.use(model, spec)"
        )
    return _stateless_groups(spec, query.shape[1], key.shape[1], query.shape[3], causal)


@functools.lru_cache(maxsize=64)
def _stateless_groups(
    spec: str, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> HeadGroups:
    groups = HeadGroups(spec, heads, head_dim, kv_heads, heads * head_dim, causal, 0)
    for group in groups.groups():
        _check_group(group.group)
        if group.group.name == "routing":
            raise ValueError(
                "config.coterie_spec: expected mechanisms without parameters; got routing. Use "
                "coterie.hf.use(model, spec), which keeps its centroids in the layers"
            )
    return groups


def _pair_mask(groups: HeadGroups, query: Tensor, mask: Tensor) -> Tensor:
    for group in groups.groups():
        if not group.group.takes_mask:
            raise ValueError(
                f"attention_mask: {group.group.name} supports padding only; got a mask of pairs"
            )
    return _allowed(mask).expand(query.shape[0], query.shape[1], query.shape[2], mask.shape[3])


_BLOCKS = torch.finfo(torch.float16).min  # or less: -inf, and the lowest values of other types


def _allowed(mask: Tensor) -> Tensor:
    """A mask of pairs as bool; True, 1, or 0 in a float mask, means that a query may attend."""
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point():
        allowed, blocked = mask == 0, mask <= _BLOCKS
        meaning = "a float mask of 0 and -inf (or the lowest value of its type) only, because a "
        meaning += "bias of the logits is not supported"
    else:
        allowed, blocked = mask == 1, mask == 0
        meaning = "an integer mask of 1, where a query may attend, and 0 only"
    clear = (allowed | blocked).all()
    if torch.compiler.is_compiling():
        torch._assert_async(clear, f"attention_mask: expected {meaning}")
    elif not clear:
        wrong = mask[~(allowed | blocked)][0].item()
        raise ValueError(f"attention_mask: expected {meaning}; got {wrong}")
    return allowed


def _run_padded(
    module: nn.Module,
    groups: HeadGroups,
    rows: tuple[Tensor, Tensor, Tensor],
    mask: Tensor | None,
    scaling: float | None,
) -> Tensor:
    q, k, v = rows
    options = Options(groups.causal, scaling or 0.0)
    if mask is None:
        return _run(groups, Rows(*rows), options)
    if mask.shape != (k.shape[0], k.shape[2]):
        raise ValueError(
            f"attention_mask: expected shape {(k.shape[0], k.shape[2])}, one entry for each key; "
            f"got {tuple(mask.shape)}"
        )
    keys = make_padding(mask.bool())
    queries = _query_padding(module, q, mask.bool(), keys)
    options = options._replace(q_lengths=queries.lengths, k_lengths=keys.lengths)
    front = Rows(queries.to_front(q, 2), keys.to_front(k, 2), keys.to_front(v, 2))
    return queries.back(_run(groups, front, options), 2)


def _query_padding(module: nn.Module, q: Tensor, mask: Tensor, keys: Padding) -> Padding:
    """Queries are at the last key positions; in cross attention all queries are valid."""
    B, N = q.shape[0], q.shape[2]
    if _is_cross(module):
        return Padding(torch.full((B,), N, dtype=torch.int32, device=q.device), None)
    return keys if mask.shape[1] == N else make_padding(mask[:, -N:])


def _run(groups: HeadGroups, rows: Rows, options: Options) -> Tensor:
    parts = []
    for group in groups.groups():
        own = options_of(options, group.group)
        parts.append(_run_group(group, rows.of(group.group, 1), own))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _run_group(group: HeadGroup, rows: Rows, options: Options) -> Tensor:
    decoding = options.causal and rows.q.shape[2] != rows.v.shape[2]
    if decoding and group.group.causality == "leaking":
        raise ValueError(
            f"spec: decoding needs a strictly causal spec; {group.group.text} selects by later "
            "positions too"
        )
    if group.group.name == "routing":
        options = options._replace(scale=0.0)  # the model's scale is not for normalised rows
        if decoding:
            return _decode_routing(group, rows, options)
    out: Tensor = group(rows, options)
    return out


def _decode_routing(group: HeadGroup, rows: Rows, options: Options) -> Tensor:
    """Strict routing needs a query for each key; those of earlier positions have no effect."""
    q, k, v = rows
    B, heads, N, D = q.shape
    S = v.shape[2]
    whole = torch.full((B,), S, dtype=torch.int32, device=q.device)
    lengths = whole if options.k_lengths is None else options.k_lengths
    count = whole - (S - N) if options.q_lengths is None else options.q_lengths
    places = torch.arange(N, device=q.device) + (lengths - count)[:, None]
    index = (places % S).long()[:, None, :, None].expand(B, heads, N, D)
    padded = q.new_zeros(B, heads, S, D).scatter(2, index, q)
    whole_pass = options._replace(q_lengths=lengths, k_lengths=lengths)
    out = group(Rows(padded, k, v), whole_pass)
    return torch.gather(out, 2, index[..., :1].expand(B, heads, N, out.shape[3]))
