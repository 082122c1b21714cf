# SPDX-License-Identifier: MIT
"""A cache whose routing heads keep rings: the latest keys of each cluster, and no others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from ..functional import Options, Rows
from ..groups import HeadGroup, HeadGroups
from ..layout import accumulator
from ..library import operators
from .attention import NAME, RINGS, run_group
from .layers import attention_layers
from .masks import Mask


class RingCache(DynamicCache):  # type: ignore[misc]  # transformers has no types
    """A cache for decoding with strict routing: time and memory per token do not grow.

    Heads of routing keep ``clusters * window`` keys, heads of ``local`` their window, all others
    all keys::

        model.generate(tokens, past_key_values=coterie.hf.RingCache(model))
    """

    def __init__(self, model: nn.Module) -> None:
        own: Any = model
        super().__init__(config=own.config)
        routing = 0
        for layer in attention_layers(model).values():
            groups: HeadGroups | None = getattr(layer, NAME, None)
            if groups is None or not groups.causal or not _has_routing(groups):
                continue
            self.layers[layer.layer_idx] = _RingLayer()
            routing += 1
        if not routing:
            raise ValueError("model: no causal layer has routing heads; use another cache")


def _has_routing(groups: HeadGroups) -> bool:
    return any(group.group.name == "routing" for group in groups.groups())


class _Rings:
    """The rings of one head group (include/coterie/routing.h)."""

    def __init__(self, group: HeadGroup, rows: Rows) -> None:
        (B, _, _, D), (_, heads, _, Dv) = rows.q.shape, rows.v.shape
        clusters, window = group.group.whole("clusters"), group.group.whole("window")
        wide = accumulator(rows.q.dtype)
        self.keys = rows.q.new_zeros((B, heads, clusters * window, D), dtype=wide)
        self.values = rows.q.new_zeros((B, heads, clusters * window, Dv), dtype=wide)
        self.counts = rows.q.new_zeros((B, heads, clusters), dtype=torch.int64)

    def step(self, group: HeadGroup, rows: Rows, valid: Tensor | None) -> Tensor:
        """Attention of new tokens; ``valid`` (B, N) says which exist, None: all."""
        if valid is None:
            return self._step(group, rows, slice(None))
        out = rows.v.new_zeros((*rows.q.shape[:3], rows.v.shape[3]))
        for b, own in enumerate(valid):
            row = Rows(*(x[b : b + 1, :, own] for x in rows if x is not None))
            if row.q.shape[2]:
                out[b : b + 1, :, own] = self._step(group, row, slice(b, b + 1))
        return out

    def _step(self, group: HeadGroup, rows: Rows, batch: slice) -> Tensor:
        wide = accumulator(rows.q.dtype)
        out: Tensor = operators.routing_step(
            self.keys[batch],
            self.values[batch],
            self.counts[batch],
            *rows,
            group.centroids.to(wide).contiguous(),
            group.logit_scale.to(wide),
            group.group.text,
            0.0,
        )
        return out

    def select(self, index: Tensor) -> None:
        for name, tensor in vars(self).items():
            setattr(self, name, tensor.index_select(0, index.to(tensor.device)))


class _RingLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer: rings, or the cache of a plain layer, for each of its head groups.

    ``update`` returns the new keys only; they carry the layer to the attention function.
    """

    is_sliding = False

    def __init__(self) -> None:
        super().__init__()
        self.length = 0
        self.parts: list[Any] = []

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self.length += key_states.shape[2]
        setattr(key_states, RINGS, self)
        return key_states, value_states

    def attend(
        self, groups: HeadGroups, rows: Rows, mask: Mask | Tensor | None, options: Options
    ) -> Tensor:
        """Attention (B, H, N, Dv) of new tokens, which join the cache."""
        if not isinstance(mask, Mask) or mask.pattern != (True, None):
            raise ValueError("past_key_values: RingCache supports causal masks and padding only")
        if torch.is_grad_enabled() and rows.q.requires_grad:
            raise ValueError("past_key_values: RingCache has no gradients; use torch.no_grad()")
        if not self.parts:
            self.parts = [_part(group, rows.of(group.group, 1)) for group in groups.groups()]
        outs = []
        for group, part in zip(groups.groups(), self.parts, strict=True):
            own = rows.of(group.group, 1)
            if isinstance(part, _Rings):
                outs.append(part.step(group, own, _new_tokens(mask)))
            else:
                outs.append(_plain_step(group, part, own, mask, options))
        return torch.cat(outs, 1)

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def _select(self, index: Tensor) -> None:
        for part in self.parts:
            part.select(index) if isinstance(part, _Rings) else part.reorder_cache(index)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select(indices)

    def reset(self) -> None:
        self.length, self.parts = 0, []

    def crop(self, *_: Any) -> None:
        raise ValueError("past_key_values: RingCache cannot be cropped; rings keep no older keys")


def _part(group: HeadGroup, rows: Rows) -> Any:
    g = group.group
    if g.name == "routing":
        return _Rings(group, rows)
    if g.name == "local" and g.parameters["kind"] == "sliding":
        return DynamicSlidingWindowLayer(g.whole("window"))
    return DynamicLayer()


def _new_tokens(mask: Mask) -> Tensor | None:
    """Which new tokens (B, N) exist, None: all; asks the device once per pass."""
    if mask.new_tokens is None:
        valid = mask.valid()
        own = None if valid is None else valid[:, -mask.shape[2] :]
        mask.new_tokens = (None if own is None or bool(own.all()) else own,)
    return mask.new_tokens[0]


def _plain_step(group: HeadGroup, cache: Any, rows: Rows, mask: Mask, options: Options) -> Tensor:
    """A group that keeps plain keys, with a mask of its own."""
    S, first = cache.get_mask_sizes(rows.q.shape[2])
    k, v = cache.update(rows.k, rows.v)
    paddings = Mask({**mask.arguments, "kv_length": S, "kv_offset": first}).paddings()
    if paddings is None:
        return run_group(group, Rows(rows.q, k, v), options)
    queries, keys = paddings
    front = Rows(queries.to_front(rows.q, 2), keys.to_front(k, 2), keys.to_front(v, 2))
    own = options._replace(q_lengths=queries.lengths, k_lengths=keys.lengths)
    return queries.back(run_group(group, front, own), 2)
