# SPDX-License-Identifier: MIT
"""A self-attention layer defined by an attention spec: projections, positions, head groups.

Parameters and buffers have the names and shapes of the C++ module, so checkpoints are
interchangeable: ``q``, ``k``, ``v``, ``out`` (``.weight``, ``.bias``) and, for group g if it has
them, ``group_g.centroids``, ``.counts``, ``.sums`` (buffers) and ``.logit_scale`` (routing),
``group_g.surrogates``, ``.gate.weight``, ``.gate.bias`` (cast), ``group_g.relative.weight`` and
``.relative.bias`` (positions=relative).

Training with routing heads::

    loss = criterion(model(x)) + coterie.nn.commitment_loss(model)
    loss.backward()
    optimizer.step()
    coterie.nn.update_centroids(model)  # after the backward pass; the same on all ranks
"""

from __future__ import annotations

import math
from typing import TypeVar, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from . import centroids as _centroids
from .functional import Options, Rows, check_dropout, options_of
from .groups import HeadGroup, HeadGroups
from .library import group_seed, layer_spec
from .padding import Padding, make_padding
from .spec import Group, head_groups

__all__ = [
    "Attention",
    "commitment_loss",
    "initialise_centroids",
    "swap_attention",
    "update_centroids",
]


class Attention(HeadGroups):
    """Self-attention by a spec; a drop-in for ``nn.MultiheadAttention`` in encoder layers.

    Args:
        embed_dim: E, width of the input, a multiple of ``num_heads``.
        num_heads: H.
        spec: attention spec; its groups divide the heads among them.
        num_kv_heads: key/value heads, ``num_heads`` by default.
        causal: positions attend to no later ones; mechanisms use strict forms by default.
        bias: whether the projections have biases.
        rotary_base: base of the wavelengths of rotary and relative positions.
        seed: seed of the initial centroids and surrogate tokens.
        layer: index of the layer in its model, which its seeds depend on, as in the C++ models;
            None for a single layer.
        batch_first: inputs are (B, N, E) instead of (N, B, E).
        dropout: probability that a weight of the attention is dropped, in training mode; torch's
            CPU generator says which.
    """

    # nn.TransformerEncoderLayer reads these before it takes its fast path.
    in_proj_bias = None
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        spec: str = "full",
        *,
        num_kv_heads: int | None = None,
        causal: bool = False,
        bias: bool = True,
        rotary_base: float = 10000.0,
        seed: int = 0,
        layer: int | None = None,
        batch_first: bool = True,
        dropout: float = 0.0,
    ) -> None:
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(
                f"embed_dim: expected a multiple of {num_heads} heads; got {embed_dim}"
            )
        check_dropout("dropout", dropout)
        head_dim = embed_dim // num_heads
        own_seed = seed if layer is None else group_seed(seed, layer, 0)
        spec = layer_spec(spec, causal)
        super().__init__(spec, num_heads, head_dim, kv_heads, embed_dim, causal, own_seed)
        self.layer = layer or 0
        self.embed_dim, self.rotary_base, self.batch_first = embed_dim, rotary_base, batch_first
        self.dropout = dropout
        key_heads = sum(g.group.key_heads for g in self.groups())
        self.q = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k = nn.Linear(embed_dim, key_heads * head_dim, bias=bias) if key_heads else None
        self.v = nn.Linear(embed_dim, kv_heads * head_dim, bias=bias)
        self.out = nn.Linear(embed_dim, embed_dim, bias=bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        lengths: Tensor | None = None,
        seed: int = 0,
    ) -> tuple[Tensor, None]:
        """Returns (output of the shape of ``query``, None), like ``nn.MultiheadAttention``.

        Args:
            query: (B, N, E). ``key`` and ``value`` must be the same tensor, or None.
            key_padding_mask: (B, N), bool with True or float with -inf in padding rows, which may
                be anywhere; positions are counted without them.
            attn_mask: (N, N) or (B H, N, N), True or -inf where a query may not attend; only for
                groups that support masks (full, local, strided, oracle-top).
            is_causal: states that ``attn_mask`` is the causal mask; only for causal layers.
            lengths: (B) integers instead of key_padding_mask, if valid rows come first.
            seed: seed of the clusterings of the pass, combined with the layer's index.
        """
        self._check_call(query, key, value, need_weights)
        x = query if self.batch_first else query.transpose(0, 1)
        padding = _padding(x, key_padding_mask, lengths)
        valid = padding and padding.lengths
        options = Options(
            self.causal,
            scale=0.0,
            q_lengths=valid,
            k_lengths=valid,
            mask=self._mask(x, attn_mask, is_causal, padding),
            dropout=self.dropout if self.training else 0.0,
        )
        x = x if padding is None else padding.to_front(x, 1)
        out = self._attend(x, options, seed)
        out = out if padding is None else padding.back(out, 1)
        return out if self.batch_first else out.transpose(0, 1), None

    def _check_call(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, need_weights: bool
    ) -> None:
        if query.dim() != 3 or query.shape[2] != self.embed_dim:
            raise ValueError(
                f"query: expected shape (B, N, {self.embed_dim}); got {tuple(query.shape)}"
            )
        for name, tensor in (("key", key), ("value", value)):
            if tensor is not None and tensor is not query:
                raise ValueError(
                    f"{name}: only self-attention is supported; pass the query tensor or None"
                )
        if need_weights:
            raise ValueError("need_weights: attention weights are not kept; use need_weights=False")

    def _mask(
        self, x: Tensor, attn_mask: Tensor | None, is_causal: bool, padding: Padding | None
    ) -> Tensor | None:
        if is_causal and not self.causal:
            raise ValueError("is_causal: expected a layer made with causal=True; got one without")
        if attn_mask is None or is_causal:
            return None
        for group in self.groups():
            if not group.group.takes_mask:
                raise ValueError(
                    f"attn_mask: {group.group.name} does not support masks; use "
                    "key_padding_mask or lengths for padding"
                )
        if padding is not None and padding.order is not None:
            raise ValueError("attn_mask: with a mask, padding must be at the end of the rows")
        allowed = ~_blocked("attn_mask", attn_mask)
        B, N = x.shape[:2]
        return allowed.reshape(-1, 1 if allowed.dim() == 2 else self.num_heads, N, N).expand(
            B, self.num_heads, N, N
        )

    def _attend(self, x: Tensor, options: Options, seed: int) -> Tensor:
        def heads(linear: nn.Linear) -> Tensor:
            rows: Tensor = linear(x)
            return rows.view(*rows.shape[:2], -1, self.head_dim)

        rows = Rows(heads(self.q), None if self.k is None else heads(self.k), heads(self.v))
        parts = []
        for number, group in enumerate(self.groups()):
            g = group.group
            own = options_of(options, g)
            own = own._replace(seed=group_seed(seed, self.layer, number))
            if g.positions == "relative":
                own = own._replace(scale=1 / math.sqrt(self.head_dim))
            placed = group.placed(rows.of(g, 2), self.rotary_base)
            parts.append(group(placed, own, x).transpose(1, 2))
        merged = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
        out: Tensor = self.out(merged.flatten(2))
        return out

    def extra_repr(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"embed_dim={self.embed_dim}, heads={self.num_heads}, spec={self.spec}{causal}"


_Module = TypeVar("_Module", bound=nn.Module)


@overload
def swap_attention(
    module: nn.MultiheadAttention, spec: str, causal: bool = False, seed: int = 0
) -> Attention: ...


@overload
def swap_attention(
    module: _Module, spec: str, causal: bool = False, seed: int = 0
) -> _Module: ...


def swap_attention(
    module: nn.Module, spec: str, causal: bool = False, seed: int = 0
) -> nn.Module:
    """Replaces the self-attention of torch.nn by :class:`Attention` with the same weights.

    Args:
        module: ``nn.TransformerEncoder`` or any module that contains ``nn.MultiheadAttention``,
            changed in place; or one ``nn.MultiheadAttention``, for which the new layer is returned.
            ``nn.TransformerDecoderLayer.multihead_attn``, cross attention, stays.
        spec: attention spec. The model has its own positions: none are added.
        causal: makes causal layers; pass ``is_causal=True`` with torch's causal mask to them.
        seed: seed of the initial centroids of routing heads.
    """
    if isinstance(module, nn.MultiheadAttention):
        return _swapped(module, spec, causal, seed)
    found = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, nn.MultiheadAttention) and name != "multihead_attn"
    ]
    if not found:
        raise ValueError(f"module: no nn.MultiheadAttention in {type(module).__name__}")
    layers = [_swapped(own, spec, causal, seed + i) for i, (_, _, own) in enumerate(found)]
    for (parent, name, _), layer in zip(found, layers, strict=True):
        setattr(parent, name, layer)
    return module


def _swapped(own: nn.MultiheadAttention, spec: str, causal: bool, seed: int) -> Attention:
    for name, wrong in (
        ("add_bias_kv", own.bias_k is not None),
        ("add_zero_attn", own.add_zero_attn),
        ("kdim, vdim", not own._qkv_same_embed_dim),
    ):
        if wrong:
            raise ValueError(f"{name}: not supported by coterie.nn.Attention")
    groups = head_groups(spec, own.num_heads, causal)
    for group in groups:
        if group.keys_are_queries:
            raise ValueError(f"spec: {group.text} has no keys, but the module has weights for them")
    bias = own.in_proj_bias is not None
    layer = Attention(
        own.embed_dim,
        own.num_heads,
        "+".join(f"{group.heads}*{_without_positions(group)}" for group in groups),
        causal=causal,
        bias=bias,
        seed=seed,
        batch_first=own.batch_first,
        dropout=own.dropout,
    )
    weight = own.in_proj_weight
    layer.to(weight.device, weight.dtype).train(own.training)
    with torch.no_grad():
        for name, part in zip("qkv", weight.chunk(3), strict=True):
            getattr(layer, name).weight.copy_(part)
        layer.out.weight.copy_(own.out_proj.weight)
        if bias:
            for name, part in zip("qkv", own.in_proj_bias.chunk(3), strict=True):
                getattr(layer, name).bias.copy_(part)
            layer.out.bias.copy_(own.out_proj.bias)
    return layer


def _without_positions(group: Group) -> str:
    if group.positions_named:
        return group.text
    if group.text.endswith(")"):
        return f"{group.text[:-1]},positions=none)"
    return f"{group.text}(positions=none)"


def _blocked(name: str, mask: Tensor) -> Tensor:
    """Where a mask of torch.nn forbids attention: True, or -inf in a float mask."""
    if mask.dtype == torch.bool:
        return mask
    blocked = mask == -torch.inf
    if not torch.compiler.is_compiling() and not torch.equal(blocked, mask != 0):
        raise ValueError(f"{name}: expected a bool mask, or a float mask of 0 and -inf only")
    return blocked


def _padding(x: Tensor, mask: Tensor | None, lengths: Tensor | None) -> Padding | None:
    if lengths is not None:
        if mask is not None:
            raise ValueError("lengths: expected either lengths or key_padding_mask; got both")
        if lengths.shape != x.shape[:1]:
            raise ValueError(f"lengths: expected shape ({x.shape[0]},); got {tuple(lengths.shape)}")
        return Padding(lengths.to(torch.int32), None)
    if mask is None:
        return None
    if mask.shape != x.shape[:2]:
        raise ValueError(
            f"key_padding_mask: expected shape {tuple(x.shape[:2])}; got {tuple(mask.shape)}"
        )
    return make_padding(~_blocked("key_padding_mask", mask))


def _routing_groups(module: nn.Module) -> list[HeadGroup]:
    return [m for m in module.modules() if isinstance(m, HeadGroup) and m.group.name == "routing"]


def update_centroids(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Moves the routing centroids of all layers by the training passes since the last call.

    Call it once per optimiser step, after the last backward pass: the tokens of all micro-batches
    count as one batch. Under torch.distributed all ranks must call it: the average is over the
    tokens of all ranks, and the centroids stay equal on all of them.
    """
    for group in _routing_groups(module):
        for statistics in group.take_statistics():
            _centroids.move(
                group.buffers_of_centroids(), statistics, group.group.number("decay"), process_group
            )


def initialise_centroids(
    module: nn.Module, seed: int = 0, process_group: dist.ProcessGroup | None = None
) -> None:
    """Sets the routing centroids of all layers by spherical k-means of the last training pass.

    Under torch.distributed all ranks get the centroids of the group's first rank.
    """
    for number, group in enumerate(_routing_groups(module)):
        tokens = group.take_tokens()
        if not tokens:
            raise ValueError("module: no pass in training mode to take tokens from; run one first")
        own = group_seed(seed, 0, number)
        _centroids.initialise(group.buffers_of_centroids(), tokens, own, process_group)


def commitment_loss(module: nn.Module) -> Tensor:
    """Weighted sum of the commitment losses of all routing heads in the last training pass."""
    groups = [group for group in _routing_groups(module) if group.commitment is not None]
    if torch.is_grad_enabled() and not all(group.commitment_differentiable for group in groups):
        raise RuntimeError(
            "commitment_loss: the last training pass recorded no gradients, because it ran under "
            "torch.no_grad or checkpoint(..., use_reentrant=True); checkpoint with "
            "use_reentrant=False, or call this under torch.no_grad for the value alone"
        )
    losses = [group.commitment for group in groups if group.commitment is not None]
    if losses:
        return torch.stack(losses).sum()
    parameter = next(module.parameters(), None)
    return torch.zeros((), device=None if parameter is None else parameter.device)
