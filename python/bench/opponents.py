# SPDX-License-Identifier: MIT
"""What attention specs are compared with, as calls on q, k, v (B, H, N, D)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import coterie

Call = Callable[[Tensor, Tensor, Tensor], Tensor]
Named = Iterator[tuple[str, Call]]


class Setting(NamedTuple):
    """What all attentions of one table have in common."""

    causal: bool
    clusters: int
    window: int


def sdpa_backends(setting: Setting) -> Named:
    """Full attention of torch, by back end."""
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):

        def call(q: Tensor, k: Tensor, v: Tensor, backend: SDPBackend = backend) -> Tensor:
            with sdpa_kernel(backend):
                return sdpa(q, k, v, is_causal=setting.causal)

        yield f"sdpa {backend.name.lower().removesuffix('_attention')}", call


def flex(setting: Setting, q: Tensor) -> Named:
    """FlexAttention, compiled, with a sliding window. Its block mask is made beforehand."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n, window = q.shape[2], setting.window

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        last = 0 if setting.causal else (window + 1) // 2 - 1  # as in local(window=...)
        return (j <= i + last) & (j > i + last - window)

    compiled = torch.compile(flex_attention, dynamic=False)  # fastest when compiled for one length
    blocks = create_block_mask(near, None, None, n, n, device=q.device.type)
    yield f"flex window {window}", lambda q, k, v: compiled(q, k, v, block_mask=blocks)


def fast_transformers(setting: Setting) -> Named:
    """Improved clustered attention of pytorch-fast-transformers."""
    if setting.causal or importlib.util.find_spec("fast_transformers") is None:
        return
    from fast_transformers.attention import ImprovedClusteredAttention
    from fast_transformers.masking import FullMask, LengthMask

    attention = ImprovedClusteredAttention(setting.clusters, topk=32, bits=63, attention_dropout=0)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        n = q.shape[2]
        whole = LengthMask(torch.full((q.shape[0],), n, device=q.device))
        out = attention(*rows, FullMask(n, device=q.device), whole, whole)
        return out.transpose(1, 2)

    yield "fast-transformers", call


def routing_transformer(setting: Setting, q: Tensor) -> Named:
    """The attention module of routing-transformer."""
    if importlib.util.find_spec("routing_transformer") is None:
        return
    from routing_transformer.routing_transformer import KmeansAttention

    heads, head_dim = q.shape[1], q.shape[3]
    module = KmeansAttention(
        setting.clusters, setting.window, heads, head_dim, causal=setting.causal
    )
    module = module.to(q.device).eval()  # keeps its centroids
    yield "routing-transformer", lambda q, k, v: module(q, k, v)[0]


def gathered(setting: Setting, q: Tensor) -> Named:
    """Routing's clusters by our selection, the rest by torch: gather, attention, scatter."""
    causal = ",causal=paper" if setting.causal else ""
    spec = f"routing(clusters={setting.clusters},window={setting.window}{causal})"
    state = coterie.init_state(spec, q.shape[1], q.shape[3], causal=setting.causal, device=q.device)
    assert isinstance(state, coterie.State)
    constants = (None,) * 6

    def select(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        given = (q, k, v, state.centroids, None, state.logit_scale, *constants)
        with torch.no_grad():
            settings = (spec, 0.0, setting.causal, 0, 0.0, 0, 1)
            return torch.ops.coterie.attention_select(*given, *settings)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q_members, k_members = (x.long() for x in select(q, k, v)[:2])  # B H C w
        norm = torch.nn.functional.layer_norm
        q_rows, k_rows = (norm(x, x.shape[-1:], eps=1e-6) for x in (q, k))
        scale = state.logit_scale.to(q.dtype)[:, None, None]
        parts = []
        for rows, members in ((q_rows * scale, q_members), (k_rows, k_members), (v, k_members)):
            index = members.flatten(2).unsqueeze(-1).expand(-1, -1, -1, rows.shape[-1])
            parts.append(rows.gather(2, index).unflatten(2, members.shape[2:]))
        mask = None
        if setting.causal:
            mask = q_members.unsqueeze(-1) >= k_members.unsqueeze(-2)
            mask = mask.flatten(0, 1)
        found = sdpa(*(part.flatten(0, 1) for part in parts), attn_mask=mask, scale=1.0)
        found = found.nan_to_num(0.0).view(*q.shape[:2], -1, v.shape[-1])
        index = q_members.flatten(2).unsqueeze(-1)
        out = torch.zeros_like(v).scatter_add(2, index.expand(found.shape), found)
        count = torch.zeros_like(v[..., :1]).scatter_add(2, index, torch.ones_like(found[..., :1]))
        return out / (count + 0.01)

    yield "gather + sdpa", call


def ours(spec: str, setting: Setting, q: Tensor) -> tuple[str, Call]:
    """A spec, with {clusters} and {window} replaced by those of the table."""
    spec = spec.format(clusters=setting.clusters, window=setting.window)
    causal = setting.causal
    state = coterie.init_state(spec, q.shape[1], q.shape[3], causal=causal, device=q.device)
    shared = all(g.keys_are_queries for g in coterie.head_groups(spec, q.shape[1], causal))
    if isinstance(state, coterie.State) and state.surrogates is not None:
        state = state._replace(gate=torch.zeros(q.shape[0], q.shape[2], device=q.device))

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return coterie.attention(q, None if shared else k, v, spec, state=state, causal=causal)

    return spec, call
