# SPDX-License-Identifier: MIT
"""Every operator: schema, fake kernel and derivative by opcheck."""

from __future__ import annotations

import pytest
import torch
from problems import IDS, SPECS, make_problem

import coterie
from coterie.layout import saved_layout, sizes_of

C = torch.ops.coterie


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_attention_passes_opcheck(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    torch.library.opcheck(C.attention.default, problem.differentiable().arguments())
    torch.library.opcheck(C.attention_forward.default, problem.arguments())
    torch.library.opcheck(C.attention_select.default, problem.arguments())
    dropped = problem.differentiable().arguments(dropout=0.3)
    torch.library.opcheck(C.attention.default, dropped)


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_attention_backward_passes_opcheck(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, padded=True)
    arguments = problem.arguments()
    out, saved = C.attention(*arguments)
    needs = 0b111 if problem.k is not None else 0b101
    needs |= 0b011000 if "cast" in spec else 0b100000 if "routing" in spec else 0
    given = (torch.randn_like(out), *arguments, out, saved, needs)
    torch.library.opcheck(C.attention_backward.default, given)


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_selection_comes_first_among_the_saved_tensors(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal)
    saved = C.attention(*problem.arguments())[1]
    selection = C.attention_select(*problem.arguments())
    (group,) = coterie.head_groups(spec, 4, causal)
    layout = saved_layout(group, sizes_of(group, problem.q, problem.v, None), on_gpu=False)
    assert len(selection) == sum(entry.selection for entry in layout)
    for one, other in zip(selection, saved, strict=False):
        assert torch.equal(one, other)


def test_saved_tensors_of_packed_sequences_have_the_layout() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    cu = torch.tensor([0, 7, 7, 20], dtype=torch.int32)
    none = (None, None, None, None, None)
    settings = ("i-clustered(clusters=3,topk=4)", 0.0, False, 0, 0.0, 0, 1)
    arguments = (q, k, v, *none, cu, cu, None, None, *settings)
    torch.library.opcheck(C.attention.default, arguments)


def _lengths() -> torch.Tensor:
    return torch.tensor([19, 14], dtype=torch.int32)


def test_centroid_operators_pass_opcheck() -> None:
    x = torch.randn(2, 4, 19, 8)
    arguments = (x, _lengths(), None, 3, 5, 1)
    torch.library.opcheck(C.spherical_kmeans.default, arguments)
    centroids = C.spherical_kmeans(*arguments)
    labels = torch.randint(0, 3, (2, 4, 19), dtype=torch.int32)
    state = (centroids, torch.ones(4, 3), centroids.clone())
    statistics = (torch.zeros(4, 3, dtype=torch.float64), torch.zeros(4, 3, 8, dtype=torch.float64))
    rows = (x, labels, _lengths(), None)
    torch.library.opcheck(C.add_centroid_statistics.default, (*statistics, *rows))
    torch.library.opcheck(C.move_centroids.default, (*state, *statistics, 0.9))
    torch.library.opcheck(C.normalise_rows.default, (x.bfloat16(),))
    torch.library.opcheck(C.routing_labels.default, (x, centroids, _lengths(), None))
    given = (x.requires_grad_(), centroids, labels, _lengths(), None)
    torch.library.opcheck(C.commitment_loss.default, given)
    torch.library.opcheck(C.commitment_loss_backward.default, (x.detach(), *given[1:]))


def test_commitment_loss_has_the_right_gradient() -> None:
    x = torch.randn(2, 4, 7, 6, dtype=torch.float64, requires_grad=True)
    centroids = torch.randn(2, 3, 6, dtype=torch.float64)
    labels = torch.randint(0, 3, (2, 4, 7), dtype=torch.int32)
    lengths = torch.tensor([7, 4], dtype=torch.int32)
    assert torch.autograd.gradcheck(
        lambda x: C.commitment_loss(x, centroids, labels, lengths, None), (x,)
    )


def test_rotations_pass_opcheck_and_are_differentiable() -> None:
    x = torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True)
    torch.library.opcheck(C.rotate_rows.default, (x, 3, 100.0, False))
    torch.library.opcheck(C.rotate_rows.default, (x.transpose(1, 2), 0, 1e4, True))
    assert torch.autograd.gradcheck(lambda x: C.rotate_rows(x, 3, 100.0, False), (x,))
    turned = C.rotate_rows(x, 3, 100.0, False)
    assert torch.equal(C.rotate_rows(x[:, :, 4:5], 7, 100.0, False), turned[:, :, 4:5])


@pytest.mark.parametrize("queries_in", [1, 2])
@pytest.mark.parametrize("self_attention", ["keep", "demote"])
@pytest.mark.parametrize("form", ["", ",share_qk=true", ",include_self=true"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_of_strict_routing_are_the_parallel_pass(
    form: str, self_attention: str, queries_in: int, dtype: torch.dtype
) -> None:
    """Position by position, with two query heads for each key/value head."""
    shared = "share_qk" in form
    if shared and queries_in > 1:
        pytest.skip("queries_in is of separate keys")
    spec = f"routing(clusters=3,window=4,self={self_attention},queries_in={queries_in}{form})"
    B, H, Hkv, N, D, C_ = 2, 4, 2, 23, 8, 3
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    q, k, v = (torch.randn(B, h, N, D, dtype=dtype) for h in (H, Hkv, Hkv))
    centroids, scale = torch.randn(Hkv, C_, D, dtype=wide), torch.rand(H, dtype=wide) + 0.2
    keys = None if shared else k
    none = (None,) * 6
    settings = (spec, 0.0, True, 0, 0.0, 0, 1)
    out, _ = C.attention(q, keys, v, centroids, None, scale, *none, *settings)
    key_heads = H if shared else Hkv
    rings = [torch.zeros(B, key_heads, C_ * 4, D, dtype=wide) for _ in range(2)]
    rings.append(torch.zeros(B, key_heads, C_, dtype=torch.int64))
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-13, torch.bfloat16: 1e-2}[dtype]
    for n in range(N):
        token = [None if x is None else x[:, :, n : n + 1] for x in (q, keys, v)]
        found = C.routing_step(*rings, *token, centroids, scale, spec, 0.0)
        expected = out[:, :, n : n + 1]
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert rings[2].sum() == B * key_heads * N
    token = [None if x is None else x[:, :, :1].contiguous() for x in (q, keys, v)]
    torch.library.opcheck(C.routing_step.default, (*rings, *token, centroids, scale, spec, 0.0))


def test_a_wrong_spec_is_named_by_the_operator() -> None:
    arguments = list(make_problem("full").arguments())
    arguments[12] = "2*full"
    with pytest.raises(RuntimeError, match="expected the spec of one group"):
        C.attention(*arguments)
