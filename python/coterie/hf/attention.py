# SPDX-License-Identifier: MIT
"""The attention function: a layer's spec, or the attention that the model had before."""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..dense import Terms, check_terms, dense_attention
from ..functional import Options, Rows, options_of
from ..groups import HeadGroup, HeadGroups
from ..padding import Padding, make_padding
from ..spec import Group
from .layers import has_window, is_cross
from .masks import Mask

NAME = "coterie"  # of the implementation, and of the submodule of a layer that has a spec
OWN = "coterie_own"  # attribute of a layer: the implementation it had before
RINGS = "_coterie_rings"  # attribute of keys that a RingCache returns
_REFUSED = ("head_mask", "indices", "block_indices", "sinks", "cache")  # cache: paged
_GPU_HEAD_DIM = 128


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Mask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Query (B, H, N, D), key, value (B, Hkv, S, D) give (B, N, H, D) and no weights."""
    causal = _causal(module, attention_mask, is_causal)
    terms = Terms(kwargs.get("position_bias"), kwargs.get("softcap"), kwargs.get("s_aux"))
    rows = Rows(query, key, value)
    groups = _groups_of(module, rows, causal)
    if groups is None and not (dropout or terms.named() or _refused(kwargs)):
        groups = _window(attention_mask, rows, causal)
    if groups is None:
        return _own(
            module, rows, attention_mask, terms, scaling, dropout, is_causal=is_causal, **kwargs
        )
    if _refused(kwargs):
        raise ValueError(f"{_refused(kwargs)}: not supported in layers with a spec")
    if isinstance(attention_mask, Mask):
        _check_dropped(groups, attention_mask)
    options = Options(causal, scaling or 0.0, dropout=dropout)
    rings = None if torch.compiler.is_compiling() else getattr(key, RINGS, None)
    if terms.named():
        out = _dense(groups, rows, attention_mask, options, terms)
    elif rings is not None:
        if dropout:
            raise ValueError(f"dropout: rings decode without it, in eval mode; got {dropout}")
        out = rings.attend(groups, rows, attention_mask, options)
    else:
        out = _run_masked(groups, rows, attention_mask, options)
    return out.transpose(1, 2), None


def _refused(kwargs: dict[str, Any]) -> str | None:
    """The name of an argument that mechanisms do not support, None without one."""
    if kwargs.get("output_attentions"):  # weights are not kept
        return "output_attentions"
    return next((name for name in _REFUSED if kwargs.get(name) is not None), None)


def _causal(module: nn.Module, mask: Mask | Tensor | None, given: bool | None) -> bool:
    """By the mask, else as transformers' sdpa attention finds it."""
    if isinstance(mask, Mask) and mask.pattern is not None:
        return mask.pattern.causal
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _own(
    module: nn.Module,
    rows: Rows,
    mask: Mask | Tensor | None,
    terms: Terms,
    scaling: float | None,
    dropout: float,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention that the layer had before, with the mask that belongs to it."""
    name = getattr(module, OWN, None)
    if name is None:  # loaded with attn_implementation="coterie"
        name = "sdpa" if terms.softcap is None and terms.s_aux is None else "eager"
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    attend: Any = ALL_ATTENTION_FUNCTIONS.get_interface(name, eager)
    if attend is None:
        raise ValueError(
            f"model: {type(module).__name__} has no eager attention; load the model with "
            'attn_implementation="sdpa" before coterie.hf.use'
        )
    given = mask.own(name) if isinstance(mask, Mask) else mask
    if kwargs["is_causal"] is None:
        del kwargs["is_causal"]
    found: tuple[Tensor, Tensor | None] = attend(
        module, rows.q, rows.k, rows.v, given, scaling=scaling, dropout=dropout, **kwargs
    )
    return found


def _window(mask: Mask | Tensor | None, rows: Rows, causal: bool) -> HeadGroups | None:
    """Local attention by the model's own window, None where only the model's code is exact."""
    if not isinstance(mask, Mask) or mask.pattern is None or mask.pattern.window is None:
        return None
    if torch.compiler.is_compiling():  # where padding is must be asked of the device
        return None
    if rows.q.is_cuda and rows.q.shape[3] > _GPU_HEAD_DIM:
        return None
    if not mask.padding_is_outside():  # local counts positions without padding
        return None
    return _stateless_groups(f"local(window={mask.pattern.window})", *_sizes(rows), causal)


def check_group(group: Group) -> None:
    """Refuses mechanisms that need more than a model provides."""
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


def _sizes(rows: Rows) -> tuple[int, int, int]:
    return rows.q.shape[1], rows.v.shape[1], rows.q.shape[3]


def _groups_of(module: nn.Module, rows: Rows, causal: bool) -> HeadGroups | None:
    """The head groups of a layer, None if it keeps the model's attention."""
    groups: HeadGroups | None = getattr(module, NAME, None)
    if groups is not None:
        if (groups.num_heads, groups.kv_heads, groups.head_dim) != _sizes(rows):
            raise ValueError(
                f"model: expected {groups.num_heads} heads, {groups.kv_heads} of keys, of "
                f"{groups.head_dim} elements; got {_sizes(rows)}"
            )
        if groups.causal == causal:
            return groups
        return _stateless_groups(groups.spec, *_sizes(rows), causal)
    config = getattr(module, "config", None)
    if hasattr(module, OWN):
        return None
    spec = getattr(config, "coterie_spec", None)
    if spec is None:
        raise ValueError(
            "coterie: expected a spec: set config.coterie_spec, call coterie.hf.use(model, spec), "
            "or load a model that was saved with one by coterie.hf.from_pretrained"
        )
    if has_window(module) or is_cross(module):
        return None
    return _stateless_groups(spec, *_sizes(rows), causal)


@functools.lru_cache(maxsize=64)
def _stateless_groups(
    spec: str, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> HeadGroups:
    groups = HeadGroups(spec, heads, head_dim, kv_heads, heads * head_dim, causal, 0)
    for group in groups.groups():
        check_group(group.group)
        if group.group.name == "routing":
            raise ValueError(
                "config.coterie_spec: expected mechanisms without parameters; got routing. Use "
                "coterie.hf.use(model, spec), which keeps its centroids in the layers"
            )
    return groups


def _check_dropped(groups: HeadGroups, mask: Mask) -> None:
    """A cache of a layer with a window keeps the last keys only, which may be too few."""
    if not isinstance(mask.dropped_keys(), int) or mask.dropped_keys() == 0:
        return
    kept = mask.pattern.window if mask.pattern is not None else None
    for group in groups.groups():
        g = group.group
        if kept is None or g.name != "local" or g.whole("window") > kept:
            raise ValueError(
                f"past_key_values: the cache keeps the last {kept} keys of this layer, but "
                f"{g.text} needs earlier ones; pass past_key_values=DynamicCache()"
            )


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


def _dense(
    groups: HeadGroups,
    rows: Rows,
    mask: Mask | Tensor | None,
    options: Options,
    terms: Terms,
) -> Tensor:
    """With biases, soft caps or sinks."""
    for group in groups.groups():
        check_terms(group.group, terms)
    first: int | Tensor = rows.v.shape[2] - rows.q.shape[2]
    pairs: Tensor | None = None
    if isinstance(mask, Mask):
        first = mask.arguments["q_offset"] - mask.arguments["kv_offset"]
        pairs = mask.windowless().pairs()
    elif mask is not None:
        pairs = _allowed(mask if mask.dim() == 4 else mask[:, None, None].bool())
    parts = []
    for group in groups.groups():
        g = group.group
        own = rows.of(g, 1)
        parts.append(dense_attention(g, own, options._replace(mask=pairs), first, terms.of(g)))
    return torch.cat(parts, 1)


def _run_masked(
    groups: HeadGroups, rows: Rows, mask: Mask | Tensor | None, options: Options
) -> Tensor:
    if isinstance(mask, Mask):
        if mask.pattern is not None:
            return _run_padded(groups, rows, mask.paddings(), options)
        pairs = _pair_mask(groups, rows.q, mask.pairs())
        return _run_pairs(groups, rows, pairs, options)
    if mask is None:
        return _run(groups, rows, options)
    if mask.dim() == 4:
        return _run_pairs(groups, rows, _pair_mask(groups, rows.q, mask), options)
    if mask.shape != (rows.v.shape[0], rows.v.shape[2]):
        raise ValueError(
            f"attention_mask: expected shape {(rows.v.shape[0], rows.v.shape[2])}, one entry for "
            f"each key; got {tuple(mask.shape)}"
        )
    keys = make_padding(mask.bool())
    N = rows.q.shape[2]
    queries = keys if mask.shape[1] == N else make_padding(mask.bool()[:, -N:])
    return _run_padded(groups, rows, (queries, keys), options)


def _run_pairs(groups: HeadGroups, rows: Rows, pairs: Tensor, options: Options) -> Tensor:
    """A mask of pairs says everything, causality included; only windows ask for more."""
    if options.causal and any(g.group.name in ("local", "strided") for g in groups.groups()):
        N, S = pairs.shape[2:]
        later = torch.ones(N, S, dtype=torch.bool, device=pairs.device).triu(S - N + 1)
        ahead = (pairs & later).any()
        if torch.compiler.is_compiling():
            torch._assert_async(~ahead, "attention_mask: a causal window has no later keys")
        elif ahead:
            raise ValueError(
                f"attention_mask: {groups.spec} is causal here, but the mask of pairs allows later "
                "keys"
            )
        return _run(groups, rows, options._replace(mask=pairs))
    return _run(groups, rows, options._replace(mask=pairs, causal=False))


def _run_padded(
    groups: HeadGroups, rows: Rows, paddings: tuple[Padding, Padding] | None, options: Options
) -> Tensor:
    if paddings is None:
        return _run(groups, rows, options)
    queries, keys = paddings
    options = options._replace(q_lengths=queries.lengths, k_lengths=keys.lengths)
    q, k, v = rows
    front = Rows(queries.to_front(q, 2), keys.to_front(k, 2), keys.to_front(v, 2))  # type: ignore[arg-type]
    return queries.back(_run(groups, front, options), 2)


def _run(groups: HeadGroups, rows: Rows, options: Options) -> Tensor:
    parts = []
    for group in groups.groups():
        own = options_of(options, group.group)
        parts.append(run_group(group, rows.of(group.group, 1), own))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def run_group(group: HeadGroup, rows: Rows, options: Options) -> Tensor:
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
