# SPDX-License-Identifier: MIT
"""Content-clustered attention for PyTorch: clustered, improved clustered, routing and CAST.

    import torch, coterie
    q, k, v = torch.randn(3, 1, 8, 1024, 64)
    out = coterie.attention(q, k, v, "i-clustered(clusters=64,topk=32)")

:func:`attention` is the functional form, :mod:`coterie.nn` has the module. Models of others get
specs by :mod:`coterie.hf` (transformers), :mod:`coterie.diffusers`,
:func:`coterie.nn.swap_attention` (torch.nn) and :func:`apply` (all that call torch's attention).
``python -m coterie.info`` prints what is installed and how to write specs.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import torch
from torch import Tensor

from . import nn
from .advice import Recommendation, recommend
from .analysis import ErrorReport, Stats, collect_stats, error, stats
from .clusters import KMeans, kmeans
from .functional import CallOptions, Options, run_spec
from .library import build_facts, set_fast, set_threads
from .sdpa import apply, bool_mask, check_alignment
from .spec import Group, head_groups
from .state import State, init_state

if TYPE_CHECKING:
    from . import diffusers as diffusers
    from . import distributed as distributed
    from . import hf as hf
    from .hf.calibration import calibrate as calibrate

__version__ = build_facts()["version"]
__all__ = [
    "ErrorReport",
    "Group",
    "KMeans",
    "Recommendation",
    "State",
    "Stats",
    "apply",
    "attention",
    "error",
    "head_groups",
    "init_state",
    "kmeans",
    "nn",
    "recommend",
    "set_fast",
    "set_threads",
    "stats",
]


def __getattr__(name: str) -> Any:
    """Modules that need more than this one, imported on first use."""
    if name in ("diffusers", "distributed", "hf"):
        return importlib.import_module(f".{name}", __name__)
    if name == "calibrate":
        return importlib.import_module(".hf", __name__).calibrate
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@overload
def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    is_causal: bool | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool | None = None,
    dropout_p: float = 0.0,
    return_stats: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> Tensor: ...


@overload
def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    is_causal: bool | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool | None = None,
    dropout_p: float = 0.0,
    return_stats: Literal[True],
    **options: Unpack[CallOptions],
) -> tuple[Tensor, list[Stats]]: ...


def attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    spec: str,
    *,
    state: State | Sequence[State] | None = None,
    causal: bool | None = None,
    scale: float | None = None,
    seed: int = 0,
    q_lengths: Tensor | None = None,
    k_lengths: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    mask: Tensor | None = None,
    is_causal: bool | None = None,
    attn_mask: Tensor | None = None,
    enable_gqa: bool | None = None,
    dropout_p: float = 0.0,
    part: tuple[int, int] = (0, 1),
    selection: Sequence[Tensor] = (),
    return_stats: bool = False,
) -> Tensor | tuple[Tensor, list[Stats]]:
    """Attention of q over k and v by the mechanisms that ``spec`` names.

    Args:
        q: queries (B, H, N, Dk) of float32, bfloat16, float16, or float64 on the CPU; any strides.
        k: keys (B, Hkv, S, Dk), H a multiple of Hkv. None if the keys are the queries: lsh, and
            routing with share_qk. With several groups: the heads of those that take keys, in order.
        v: values (B, Hkv, S, Dv).
        spec: attention spec, such as ``"i-clustered(clusters=100,topk=32)"``.
        state: parameters of routing and cast, from :func:`init_state`: one for each group.
        causal: query i of an item is at key position i + (key length - query length) and attends
            to no later key.
        scale: factor of the logits; 1/sqrt(Dk) by default, 1 for routing.
        seed: seed of the clusterings; equal seeds and inputs give bitwise equal results.
        q_lengths, k_lengths: (B) integers: valid rows of each batch entry.
        cu_seqlens_q, cu_seqlens_k: (items + 1) integers, B = 1: packed sequences.
        mask: bool, broadcast to (B, H, N, S), True where a query may attend; full, local, strided
            and oracle-top only.
        is_causal: torch's name of ``causal``, for as many queries as keys.
        attn_mask: torch's name of ``mask``; also a float mask of 0 and -inf.
        enable_gqa: torch's permission for H other than Hkv; not needed, False forbids it.
        dropout_p: probability that a weight is dropped (``docs/mechanisms.md``); torch's CPU
            generator says which, so ``torch.manual_seed`` repeats it. 0 outside of training.
        part: number and count: the heads are this one of equal parts of those of a larger call,
            and draw its random numbers (:func:`coterie.distributed.ulysses`).
        selection: of ``torch.ops.coterie.attention_select``, for one group; chosen by default.
        return_stats: also return what :func:`stats` returns.

    Returns:
        (B, H, N, Dv), in the memory order of q; padding rows are 0. Gradients flow to q, k, v,
        the surrogate tokens, the gate and the logit scale; selections are constants. Double
        backward is not supported.

    Raises ValueError or TypeError that names the argument, or RuntimeError from the core.
    """
    if is_causal is not None or attn_mask is not None or enable_gqa is False:
        causal, mask = _torch_names(q, v, (causal, is_causal), (mask, attn_mask), enable_gqa)
    lengths = (q_lengths, k_lengths, cu_seqlens_q, cu_seqlens_k)
    if return_stats and dropout_p:
        raise ValueError(f"return_stats: expected dropout_p 0.0, as in evaluation; got {dropout_p}")
    options = Options(
        bool(causal), scale, seed, *lengths, mask, dropout_p, part, tuple(selection)
    )
    calls, results = run_spec(q, k, v, spec, state, options, return_stats)
    out = results[0].out
    if len(results) > 1:
        out = torch.cat([result.out for result in results], 1)
    return (out, collect_stats(calls, results)) if return_stats else out


def _torch_names(
    q: Tensor,
    v: Tensor,
    causal: tuple[bool | None, bool | None],
    mask: tuple[Tensor | None, Tensor | None],
    enable_gqa: bool | None,
) -> tuple[bool | None, Tensor | None]:
    """``causal`` and ``mask`` by our names or by torch's, each by one of them."""
    for ours, torchs, values in (("causal", "is_causal", causal), ("mask", "attn_mask", mask)):
        if None not in values:
            raise ValueError(f"{torchs}: another name of {ours}; expected one of them, got both")
    if enable_gqa is False and q.shape[1] != v.shape[1]:
        raise ValueError(
            f"enable_gqa: False needs as many heads of v as of q; got {v.shape[1]} and {q.shape[1]}"
        )
    if causal[1]:
        check_alignment(q, v)
    own = mask[0] if mask[1] is None else bool_mask("attn_mask", mask[1])
    return causal[0] if causal[1] is None else causal[1], own
