# SPDX-License-Identifier: MIT
"""Names and shapes of what a forward pass saves: ``src/ops/saved.cc`` in terms of symbolic sizes.

The selection comes first: int32 indices that count from the start of the item, -1 in empty slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor

from .spec import Group


class Sizes(NamedTuple):
    """Sizes of q (B, H, N, Dk), k (B, key_heads, S, Dk), v (B, ., S, Dv); and where they are."""

    B: int
    H: int
    N: int
    Dk: int
    S: int
    Dv: int
    key_heads: int
    items: int
    on_gpu: bool


class Saved(NamedTuple):
    """One saved tensor, of int32 where it is ``whole``, else of the accumulator's type."""

    name: str
    shape: Sequence[int]
    selection: bool
    whole: bool


def sizes_of(group: Group, q: Tensor, v: Tensor, cu_seqlens_q: Tensor | None) -> Sizes:
    """The sizes of a call; shapes must be right."""
    B, H, N, Dk = q.shape
    items = B if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    key_heads = H if group.keys_are_queries else v.shape[1]
    return Sizes(B, H, N, Dk, v.shape[2], v.shape[3], key_heads, items, q.is_cuda)


def saved_layout(group: Group, sizes: Sizes) -> list[Saved]:
    """What the mechanism of ``group`` saves, in order."""
    indices, values = _LAYOUTS.get(group.name, _exact)(group, sizes)
    return [Saved(name, shape, True, True) for name, shape in indices.items()] + [
        Saved(name, shape, False, name in _WHOLE) for name, shape in values.items()
    ]


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of everything that is accumulated or saved for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


_Shapes = dict[str, Sequence[int]]
_Layout = tuple[_Shapes, _Shapes]


def _least(one: int, other: int) -> int:
    """Of numbers that may be symbols of a tracer."""
    return cast(int, torch.sym_min(one, other))


def _most(one: int, other: int) -> int:
    return cast(int, torch.sym_max(one, other))


def _rows(s: Sizes) -> Sequence[int]:
    return (s.B, s.H, s.N)


def _exact(_: Group, s: Sizes) -> _Layout:
    return {}, {"lse": _rows(s)}


def _oracle(group: Group, s: Sizes) -> _Layout:
    top = _least(group.whole("topk"), s.S)
    return {"top_keys": (*_rows(s), top)}, {"lse": _rows(s)}


def _clustered(group: Group, s: Sizes) -> _Layout:
    clusters = group.whole("clusters")
    indices: _Shapes = {
        "labels": _rows(s),
        "order": _rows(s),
        "offsets": (s.items, s.H, clusters + 1),
    }
    values: _Shapes = {
        "centroids": (s.items, s.H, clusters, s.Dk),
        "centroid_lse": (s.items, s.H, clusters),
        "centroid_out": (s.items, s.H, clusters, s.Dv),
    }
    return indices, values


def _improved(group: Group, s: Sizes) -> _Layout:
    clusters = group.whole("clusters")
    indices, values = _clustered(group, s)
    indices["top_keys"] = (s.items, s.H, clusters, _least(group.whole("topk"), s.S))
    del values["centroid_out"]
    values["mass"] = (s.items, s.H, clusters)
    values["bottom"] = (s.items, s.H, clusters, s.Dv)
    if group.causality != "none":
        values = {}
    values["lse"] = _rows(s)
    return indices, values


def _lsh(group: Group, s: Sizes) -> _Layout:
    rounds = group.whole("rounds")
    indices: _Shapes = {"order": (s.B, s.H, rounds, s.N)}
    if group.parameters["combine"] == "lse":
        return indices, {"lse": _rows(s)}
    return indices, {"round_lse": (s.B, s.H, rounds, s.N)}


_WHOLE = {"ends", *(f"{side}_{name}" for side in "qk" for name in ("first", "count", "slots"))}


def _facts(group: Group, s: Sizes, slots: Sequence[int], ends: bool) -> _Shapes:
    """What the GPU's kernels find out about rows and lists once for both passes."""
    if not s.on_gpu:
        return {}
    values: _Shapes = {"q_statistics": (s.B, s.H, s.N, 2)}
    if not group.keys_are_queries:
        values["k_statistics"] = (s.B, s.key_heads, s.S, 2)
    if ends:
        values["ends"] = slots
    return values


def _strict_routing(group: Group, s: Sizes) -> _Layout:
    clusters = group.whole("clusters")
    places = min(group.whole("queries_in"), clusters)
    indices: _Shapes = {"q_labels": _rows(s)}
    if not group.keys_are_queries:
        indices["k_labels"] = (s.B, s.key_heads, s.S)
    indices["q_order"] = (s.B, s.H, s.N * places)
    indices["q_offsets"] = (s.items, s.H, clusters + 1)
    indices["k_order"] = (s.B, s.key_heads, s.S)
    indices["k_offsets"] = (s.items, s.key_heads, clusters + 1)
    ends = not group.keys_are_queries or places > 1
    return indices, {"lse": _rows(s), **_facts(group, s, (s.B, s.H, s.N * places), ends)}


def _routing(group: Group, s: Sizes) -> _Layout:
    if group.parameters["membership"] == "nearest":
        return _strict_routing(group, s)
    clusters = group.whole("clusters")

    def width(rows: int) -> int:
        if group.parameters["membership"] == "balanced":
            return (rows + clusters - 1) // clusters
        return _least(group.whole("window"), rows)

    slots = (s.items, s.H, clusters, width(s.N))
    key_slots = (s.items, s.key_heads, clusters, width(s.S))
    indices: _Shapes = {"q_members": slots}
    if not group.keys_are_queries:
        indices["k_members"] = key_slots
    ends = group.causality != "none" and not group.keys_are_queries
    values: _Shapes = {"member_lse": slots, **_facts(group, s, slots, ends)}
    if s.on_gpu:
        values.update({"q_first": _rows(s), "q_count": _rows(s), "q_slots": slots})
        if not group.keys_are_queries:
            rows = (s.B, s.key_heads, s.S)
            values.update({"k_first": rows, "k_count": rows, "k_slots": key_slots})
        values["weights"] = _rows(s)
    return indices, values


def _cast(group: Group, s: Sizes) -> _Layout:
    clusters, size = group.whole("clusters"), group.whole("size")
    if group.parameters["mode"] == "single":
        size = _most(size, (s.N + clusters - 1) // clusters)
    size = _least(size, s.N)
    heads = 1 if group.parameters["share_heads"] == "1" else s.H
    softmax = group.parameters["activation"] == "softmax"
    values: _Shapes = {}
    if softmax:
        values["member_lse"] = (s.items, s.H, clusters, size)
    values["summary"] = (s.items, s.H, clusters, s.Dv)
    if softmax:
        values["summary_lse"] = (s.items, s.H, clusters)
        values["combine_lse"] = _rows(s)
    return {"members": (s.items, heads, clusters, size)}, values


_LAYOUTS = {
    "oracle-top": _oracle,
    "clustered": _clustered,
    "i-clustered": _improved,
    "lsh": _lsh,
    "routing": _routing,
    "cast": _cast,
}
