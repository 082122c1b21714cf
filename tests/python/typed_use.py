# SPDX-License-Identifier: MIT
"""The public functions as used by a program with strict types: checked by mypy, never run."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import coterie
import coterie.diffusers
import coterie.hf
import coterie.nn


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    lengths = torch.tensor([3, 4])
    return coterie.attention(q, k, v, "full", causal=True, q_lengths=lengths, k_lengths=lengths)


def with_stats(q: Tensor, v: Tensor) -> tuple[Tensor, list[Tensor | None]]:
    spec = "routing(clusters=4,window=8,share_qk=true)"
    state = coterie.init_state(spec, q.shape[1], q.shape[3], device=q.device)
    out, stats = coterie.attention(q, None, v, spec, state=state, return_stats=True)
    return out, [group.kept_mass for group in stats]


def errors(q: Tensor, k: Tensor, v: Tensor) -> list[float]:
    spec = coterie.recommend(q.shape[2], head_dim=q.shape[3]).spec
    return [report.relative.max().item() for report in coterie.error(q, k, v, spec, rows=16)]


def layer() -> nn.TransformerEncoderLayer:
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    block.add_module("self_attn", coterie.nn.Attention(32, 4, "i-clustered(clusters=4)"))
    return block


def swapped(encoder: nn.TransformerEncoder) -> tuple[nn.TransformerEncoder, coterie.nn.Attention]:
    one = coterie.nn.swap_attention(nn.MultiheadAttention(32, 4), "full")
    return coterie.nn.swap_attention(encoder, "i-clustered(clusters=4)", causal=False), one


def hosts(model: nn.Sequential) -> nn.Sequential:
    coterie.diffusers.use(model, "full", layers=["attn1"])
    coterie.hf.use(model, "full", layers={"encoder": range(2), "decoder": None})
    return coterie.apply(model, "i-clustered(clusters=4)", layers=["blocks"])


def by_names_of_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return coterie.attention(q, k, v, "full", attn_mask=mask, is_causal=False, enable_gqa=True)


def train(model: nn.Module, x: Tensor) -> None:
    loss = model(x).square().mean() + coterie.nn.commitment_loss(model)
    loss.backward()
    coterie.nn.update_centroids(model)


def calibrated(model: nn.Module, samples: list[Tensor]) -> coterie.hf.Calibration:
    found = coterie.calibrate(model, samples, length=64, target=0.05, ladder=["local(window=8)"])
    coterie.hf.use(model, "specs.json")
    return found


def hugging_face(model: nn.Linear) -> nn.Linear:
    return coterie.hf.use(model, "full", layers=range(2), seed=1)
