# SPDX-License-Identifier: MIT
"""Statistics, errors and bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from problems import IDS, SPECS, make_problem

import coterie


@pytest.mark.parametrize(("spec", "causal"), SPECS, ids=IDS)
def test_errors_stay_below_their_bounds(spec: str, causal: bool) -> None:
    problem = make_problem(spec, causal, N=40, padded=True)
    (report,) = coterie.error(problem.q, problem.k, problem.v, spec, rows=40, **problem.options)
    assert report.relative.isfinite().all()
    if report.row_bound is not None:
        assert (report.row_error <= report.row_bound + 1e-4).all()


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
    assert (stats.kept_mass is None) == spec.startswith("routing")


@pytest.mark.parametrize("function", [coterie.stats, coterie.error])
def test_positions_in_the_spec_are_refused(function: Callable[..., object]) -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="spec: expected no positions"):
        function(q, q, q, "full(positions=rotary)")


def test_the_number_of_rows_is_checked() -> None:
    q = torch.randn(1, 1, 4, 8)
    with pytest.raises(ValueError, match="rows: expected at least 1"):
        coterie.error(q, q, q, "full", rows=0)
