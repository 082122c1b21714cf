# SPDX-License-Identifier: MIT
"""Statistics, errors and bounds."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from problems import IDS, SPECS, make_problem, shares_keys
from torch import Tensor

import coterie


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_errors_stay_below_their_bounds(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, N=40, padded=True)
    (report,) = coterie.error(problem.q, problem.k, problem.v, spec, rows=40, **problem.options)
    assert report.relative.isfinite().all()
    if report.row_bound is not None:
        assert (report.row_error <= report.row_bound).all()


@pytest.mark.parametrize("spec", ["full", "i-clustered(clusters=3,topk=64)", "local(window=99)"])
def test_exact_forms_have_no_error_and_keep_all_mass(spec: str) -> None:
    problem = make_problem(spec, N=40, padded=True)
    (report,) = coterie.error(problem.q, problem.k, problem.v, spec, **problem.options)
    (stats,) = coterie.stats(problem.q, problem.k, problem.v, spec, **problem.options)
    assert report.relative.max() < 1e-5
    torch.testing.assert_close(stats.kept_mass, torch.ones(4))


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_cluster_sizes_add_up(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, N=40, padded=True)
    out, (stats,) = problem.run(return_stats=True)
    assert torch.equal(out, problem.run())
    if stats.sizes is None:
        return
    assert torch.equal(stats.empty, (stats.sizes == 0).sum(-1))
    if "clustered" in spec or "balanced" in spec or "single" in spec:
        lengths = problem.options["q_lengths"]
        assert (stats.sizes.sum(-1) == lengths[:, None]).all()


def test_kept_mass_is_the_weight_on_the_listed_keys() -> None:
    problem = make_problem("oracle-top(topk=5)", B=1, H=1, Hkv=1, N=12)
    (stats,) = coterie.stats(problem.q, problem.k, problem.v, problem.spec, rows=12)
    weights = (problem.q @ problem.k.mT / 8**0.5).softmax(-1)
    torch.testing.assert_close(stats.kept_mass, weights.topk(5).values.sum(-1).mean().view(1))


def test_kept_mass_of_routing_counts_members() -> None:
    problem = make_problem("routing(clusters=1,window=64)", N=12)
    (stats,) = coterie.stats(problem.q, problem.k, problem.v, problem.spec, **problem.options)
    torch.testing.assert_close(stats.kept_mass, torch.ones(4))


def test_errors_of_packed_sequences() -> None:
    q, k, v = torch.randn(3, 1, 2, 30, 8)
    cu = torch.tensor([0, 11, 30])
    (report,) = coterie.error(q, k, v, "full", causal=True, cu_seqlens_q=cu, cu_seqlens_k=cu)
    assert report.relative.max() < 1e-5


@pytest.mark.parametrize("spec", ["routing(clusters=3,window=5)", "i-clustered(clusters=3,topk=4)"])
def test_statistics_of_packed_sequences(spec: str) -> None:
    problem = make_problem(spec, B=1, N=30)
    cu = torch.tensor([0, 11, 30])
    options = problem.options | {"cu_seqlens_q": cu, "cu_seqlens_k": cu}
    (stats,) = coterie.stats(problem.q, problem.k, problem.v, spec, **options)
    assert stats.sizes.shape == (2, 4, 3)
    (report,) = coterie.error(problem.q, problem.k, problem.v, spec, **options)
    if report.row_bound is not None:
        assert (report.row_error <= report.row_bound).all()
    if spec.startswith("routing"):  # kept by each item as if it were alone
        whole = torch.zeros(4)
        for begin, end in ((0, 11), (11, 30)):
            q, k, v = (x[:, :, begin:end] for x in (problem.q, problem.k, problem.v))
            (own,) = coterie.stats(q, k, v, spec, **problem.options)
            whole += own.kept_mass * (end - begin) / 30
        torch.testing.assert_close(stats.kept_mass, whole)


@pytest.mark.parametrize("function", [coterie.stats, coterie.error])
def test_positions_in_the_spec_are_refused(function: Callable[..., object]) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="without positions=rotary"):
        function(q, q, q, "full(positions=rotary)")


def test_the_number_of_rows_is_checked() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="rows: expected at least 1"):
        coterie.error(q, q, q, "full", rows=0)


BOUNDED = [
    ("full", False),
    ("full", True),
    ("local(window=2)", False),
    ("local(window=2)", True),
    ("local(window=3,kind=blocked)", True),
    ("strided(stride=3)", False),
    ("strided(stride=3)", True),
    ("oracle-top(topk=2)", False),
    ("oracle-top(topk=2)", True),
    ("clustered(clusters=3)", False),
    ("clustered(clusters=3,clustering=hamming)", False),
    ("i-clustered(clusters=3,topk=2)", False),
    ("routing(clusters=3,window=2)", True),
    ("routing(clusters=3,window=2,queries_in=2)", True),
    ("routing(clusters=3,window=2,include_self=true)", True),
    ("routing(clusters=3,window=1,share_qk=true)", True),
    ("routing(clusters=3,window=2,share_qk=true)", True),
    ("routing(clusters=3,window=2,share_qk=true,self=keep)", True),
]
MASKED = ("full", "local", "strided", "oracle-top")


@st.composite
def _bounded(draw: st.DrawFn) -> dict[str, object]:
    spec, causal = draw(st.sampled_from(BOUNDED))
    B, Hkv, sharing = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    N, S = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    if "routing" in spec:
        S = N
    D = draw(st.sampled_from([2, 5, 16]))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size, shift = draw(st.sampled_from([0.3, 1.0, 4.0])), draw(st.sampled_from([0.0, 100.0]))

    def rows(heads: int, tokens: int) -> Tensor:
        drawn = torch.randn(B, heads, tokens, D, generator=generator, dtype=torch.float64)
        return (drawn * size).to(dtype)

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    options: dict[str, object] = {"causal": causal, "seed": 3}
    options["state"] = coterie.init_state(
        spec, Hkv * sharing, D, num_kv_heads=Hkv, causal=causal, dtype=wide
    )
    options["scale"] = draw(st.sampled_from([None, 1.0, 0.2, -0.5]))
    if spec.startswith(MASKED) and draw(st.booleans()):
        options["mask"] = torch.rand(B, 1, N, S, generator=generator) < draw(st.floats(0.1, 1))
    if draw(st.booleans()):
        k_lengths = torch.randint(0, S + 1, (B,), generator=generator)
        q_lengths = torch.randint(0, N + 1, (B,), generator=generator)
        options |= {"k_lengths": k_lengths}
        options |= {"q_lengths": k_lengths if "routing" in spec else q_lengths}
    k = None if shares_keys(spec) else rows(Hkv, S)
    values = rows(Hkv, S) + shift  # a mean far from 0: empty rows have a large error
    return {"q": rows(Hkv * sharing, N), "k": k, "v": values, "spec": spec, **options}


@hypothesis.given(_bounded())
@hypothesis.settings(max_examples=600)
def test_bounds_hold_for_every_row(arguments: dict[str, object]) -> None:
    (report,) = coterie.error(rows=40, **arguments)
    assert (report.row_bound >= 0).all()
    assert (report.row_error <= report.row_bound).all()


def test_a_row_without_keys_has_a_bound() -> None:
    """The first rows of local attention with more queries than keys have an empty window."""
    q, k, v = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4) + 100
    (report,) = coterie.error(q, k, v, "local(window=2)", rows=9)
    assert report.row_error.max() > 190
    assert (report.row_error <= report.row_bound).all()


def _dense(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    return (q @ k.mT * scale).masked_fill(~allowed, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("combine", ["lse", "mean"])
def test_lsh_is_compared_with_full_attention_over_unit_keys(combine: str, causal: bool) -> None:
    spec, N = f"lsh(rounds=2,chunk=4,buckets=4,combine={combine})", 21
    q, v = torch.randn(2, 2, N, 8) * 3, torch.randn(2, 2, N, 8)
    allowed = torch.ones(N, N).tril().bool() if causal else torch.ones(N, N).bool()
    if combine == "lse":  # the own key only if there is no other
        allowed = allowed & ~torch.eye(N, dtype=torch.bool)
        allowed[0, 0] |= causal
    dense = _dense(q, q / q.norm(dim=-1, keepdim=True), v, allowed, 8**-0.5)
    out = coterie.attention(q, None, v, spec, causal=causal)
    (report,) = coterie.error(q, None, v, spec, causal=causal, rows=N)
    torch.testing.assert_close(report.row_error, (out - dense).norm(dim=-1))


@pytest.mark.parametrize("function", ["chunk", "cluster"])
def test_a_mechanism_that_meets_all_keys_has_no_error_with_demoted_self(function: str) -> None:
    N = 20
    chunk = f"lsh(rounds=1,chunk={N},buckets=2)"
    spec = chunk if function == "chunk" else f"routing(clusters=1,window={N},share_qk=true)"
    causal = function == "cluster"
    q, v = torch.randn(2, 2, N, 8), torch.randn(2, 2, N, 8)
    state = coterie.init_state(spec, 2, 8, causal=causal)
    (report,) = coterie.error(q, None, v, spec, state=state, causal=causal)
    assert report.relative.max() < 1e-5
    (stats,) = coterie.stats(q, None, v, spec, state=state, causal=causal)
    if causal:
        torch.testing.assert_close(stats.kept_mass, torch.ones(2))


@pytest.mark.parametrize("window", [1, 3])
def test_kept_mass_with_demoted_self_is_that_of_the_other_keys(window: int) -> None:
    """A query that sees only itself keeps no mass of full attention, which excludes the own key."""
    N, D = 24, 8
    spec = f"routing(clusters=4,window={window},share_qk=true)"
    state = coterie.init_state(spec, 1, D, causal=True)
    q, v = torch.randn(1, 1, N, D), torch.eye(N)[None, None]
    weights = coterie.attention(q, None, v, spec, state=state, causal=True)[0, 0]
    y = torch.ops.coterie.normalise_rows(q)[0, 0]
    others = torch.ones(N, N).tril(-1).bool()
    others[0, 0] = True
    full = (y @ y.mT * D**-0.5).masked_fill(~others, -torch.inf).softmax(-1)
    (stats,) = coterie.stats(q, None, v, spec, state=state, causal=True, rows=N)
    kept = (full * (weights > 0)).sum(-1).mean()
    torch.testing.assert_close(stats.kept_mass, kept.view(1))
