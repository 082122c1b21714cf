# SPDX-License-Identifier: MIT
"""Specs of every mechanism and inputs for them, shared by the tests."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

import coterie

# (spec, causal): every mechanism and every form with a different layout.
SPECS = [
    ("full", False),
    ("full", True),
    ("local(window=5)", False),
    ("local(window=4,kind=blocked)", True),
    ("strided(stride=3)", True),
    ("oracle-top(topk=5)", False),
    ("clustered(clusters=3)", False),
    ("clustered(clusters=3,clustering=hamming)", False),
    ("i-clustered(clusters=3,topk=4)", False),
    ("i-clustered(clusters=3,topk=4,causal=reference)", True),
    ("lsh(rounds=2,chunk=8,buckets=4)", False),
    ("lsh(rounds=2,chunk=8,buckets=4,combine=mean)", False),
    ("routing(clusters=3,window=5)", False),
    ("routing(clusters=3,window=5,share_qk=true)", False),
    ("routing(clusters=3,membership=balanced)", False),
    ("routing(clusters=3,window=5)", True),
    ("routing(clusters=3,window=5,share_qk=true)", True),
    ("routing(clusters=3,window=4,queries_in=2)", True),
    ("cast(clusters=3,size=6)", False),
    ("cast(clusters=3,size=3,mode=single,heads=separate)", False),
    ("cast(clusters=3,size=6,activation=laplace)", False),
]
IDS = [f"{spec}{' causal' if causal else ''}" for spec, causal in SPECS]


@dataclasses.dataclass
class Problem:
    """Inputs of one call of coterie.attention."""

    q: Tensor
    k: Tensor | None
    v: Tensor
    spec: str
    options: dict[str, Any]

    def run(self, **changes: Any) -> Tensor:
        return coterie.attention(self.q, self.k, self.v, self.spec, **{**self.options, **changes})

    def arguments(self, dropout: float = 0.0) -> tuple[Any, ...]:
        """Arguments of the operator coterie::attention."""
        state = self.options["state"] or coterie.State()
        centroids = state.surrogates if "cast" in self.spec else state.centroids
        tensors = (self.q, self.k, self.v, centroids, state.gate, state.logit_scale)
        lengths = self.options.get("q_lengths"), self.options.get("k_lengths")
        dropout_seed = torch.tensor([5]) if dropout else None
        rest = (self.spec, 0.0, self.options["causal"], self.options["seed"], dropout)
        rest += (0, 1)  # all heads
        return (*tensors, *lengths, *[None] * 3, dropout_seed, *rest)

    def differentiable(self) -> Problem:
        """The same problem with inputs that require gradients."""
        rows = [None if x is None else x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        return dataclasses.replace(self, q=rows[0], k=rows[1], v=rows[2])


def shares_keys(spec: str) -> bool:
    return "share_qk" in spec or spec.startswith("lsh")


def make_problem(
    spec: str,
    causal: bool = False,
    *,
    B: int = 2,
    H: int = 4,
    Hkv: int = 2,
    N: int = 19,
    D: int = 8,
    dtype: torch.dtype = torch.float32,
    padded: bool = False,
    seed: int = 0,
) -> Problem:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state = coterie.init_state(spec, H, D, num_kv_heads=Hkv, causal=causal, dtype=wide)
    if "cast" in spec:
        state = state._replace(gate=draw(B, N).to(wide))
    options: dict[str, Any] = {"state": state, "causal": causal, "seed": 7}
    if padded:
        lengths = torch.tensor([N - 5 * (b % 2) for b in range(B)], dtype=torch.int32)
        options |= {"q_lengths": lengths, "k_lengths": lengths}
    q, v = draw(B, H, N, D), draw(B, Hkv, N, D)
    return Problem(q, None if shares_keys(spec) else draw(B, Hkv, N, D), v, spec, options)
