# SPDX-License-Identifier: MIT
"""Sequences split over ranks, and models sharded by FSDP2, give what one process computes."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import coterie
import coterie.nn
from coterie.distributed import positions, ulysses

WORLD = 4
SPECS = [
    ("full", False),
    ("local(window=5)", True),
    ("strided(stride=3)", True),
    ("oracle-top(topk=4)", False),
    ("routing(clusters=3,window=6)", True),
    ("2*full+2*local(window=4)", True),
    ("2*local(window=4)+2*routing(clusters=3,window=6,share_qk=true)", True),
    ("clustered(clusters=4)", False),
    ("clustered(clusters=4,clustering=hamming)", False),
    ("i-clustered(clusters=4,topk=6)", False),
    ("i-clustered(clusters=4,topk=6,near=4)", False),
    ("lsh(rounds=2,chunk=8,buckets=4)", False),
    ("cast(clusters=3,size=8)", False),
    ("cast(clusters=3,size=8,mode=single,activation=laplace)", False),
    ("cast(clusters=3,size=8,heads=separate)", False),
    ("2*full+2*cast(clusters=3,size=8,gate_scale=false)", False),
]


def _rows(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).double()


def _states(spec: str, causal: bool, gate: Tensor, leaves: list[Tensor]) -> list[coterie.State]:
    """One per group; surrogate tokens become leaves."""
    state = coterie.init_state(spec, 4, 8, causal=causal, dtype=torch.float64)
    states = [state] if isinstance(state, coterie.State) else list(state)
    for i, own in enumerate(states):
        if own.surrogates is not None:
            leaves.append(own.surrogates.requires_grad_())
            states[i] = own._replace(gate=gate)
    return states


def _check_spec(
    spec: str, causal: bool, group: DeviceMesh, N: int, dropout: float = 0.0
) -> None:
    leaves = [_rows(2, 4, N, 8, seed=s).requires_grad_() for s in (1, 2, 3)]
    gate = _rows(2, N, seed=4).requires_grad_()
    states = _states(spec, causal, gate, leaves)
    mine = positions(N, group)

    def call(attend: Callable[..., Tensor], own: slice) -> Tensor:
        q, k, v = (x[:, :, own] for x in leaves[:3])
        keys = sum(g.key_heads for g in coterie.head_groups(spec, 4, causal))
        k = k[:, :keys] if keys else None  # of the groups that take keys
        state = [x if x.gate is None else x._replace(gate=gate[:, own]) for x in states]
        torch.manual_seed(5)
        options = {"causal": causal, "seed": 3, "dropout_p": dropout}
        return attend(q, k, v, spec, state=state, **options)

    if len(leaves) > 3:
        leaves.append(gate)
    whole = call(coterie.attention, slice(0, N))
    weights = _rows(*whole.shape, seed=5)
    wanted = torch.autograd.grad((whole * weights).sum(), leaves, materialize_grads=True)

    def split(*args: object, **options: object) -> Tensor:
        return ulysses(coterie.attention, *args, group=group, length=N, **options)

    part = call(split, mine)
    torch.testing.assert_close(part, whole[:, :, mine], msg=lambda text: f"{spec}: {text}")
    got = torch.autograd.grad(
        (part * weights[:, :, mine]).sum(), leaves, materialize_grads=True
    )
    for ours, theirs in zip(got, wanted, strict=True):
        dist.all_reduce(ours, group=group.get_group())
        torch.testing.assert_close(ours, theirs)


def _check_any_attention(group: DeviceMesh) -> None:
    """Torch's own attention, by a process group, with equal slices and without a length."""
    q, k, v = (_rows(2, 4, 12, 8, seed=s) for s in (1, 2, 3))
    mine = positions(12, group.get_group())
    part = ulysses(
        F.scaled_dot_product_attention,
        q[:, :, mine],
        k[:, :, mine],
        v[:, :, mine],
        is_causal=True,
        group=group.get_group(),
    )
    torch.testing.assert_close(
        part, F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, :, mine]
    )
    with pytest.raises(ValueError, match="3 query and 3 key/value heads"):
        ulysses(coterie.attention, *[x[:, :3, mine] for x in (q, k, v)], "full", group=group)
    with pytest.raises(ValueError, match="heads of full"):
        spec = "1*full+3*local(window=4)"
        ulysses(coterie.attention, *[x[:, :, mine] for x in (q, k, v)], spec, group=group)
    with pytest.raises(ValueError, match="expected 6 of 12 positions"):
        ulysses(
            coterie.attention, *[x[:, :, :5] for x in (q, k, v)], "full", group=group, length=12
        )


def _layer() -> coterie.nn.Attention:
    torch.manual_seed(0)
    layer = coterie.nn.Attention(
        32, 4, "2*local(window=4)+2*routing(clusters=3,window=8)", causal=True
    )
    return layer.double()


def _steps(
    layer: torch.nn.Module, part: slice, group: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    for step in range(3):
        x = _rows(4, 20, 32, seed=10 + step)[part]
        optimizer.zero_grad()
        # Means of equal parts of the batch, which both wrappers average.
        (layer(x)[0].square().mean() + coterie.nn.commitment_loss(layer)).backward()
        optimizer.step()
        coterie.nn.update_centroids(layer, group)
    return optimizer


def _check_wrappers(rank: int, folder: str) -> None:
    """DDP and FSDP2 train as one process; the checkpoint of one loads into the other."""
    alone = _layer()
    torch.set_grad_enabled(True)
    wanted_optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(3):
        wanted_optimizer.zero_grad()
        # The commitment is a mean over the tokens of a pass: as many in each part.
        loss = torch.zeros((), dtype=torch.float64)
        for part in range(WORLD):
            x = _rows(4, 20, 32, seed=10 + step)[part : part + 1]
            loss = loss + alone(x)[0].square().mean() + coterie.nn.commitment_loss(alone)
        (loss / WORLD).backward()
        wanted_optimizer.step()
        coterie.nn.update_centroids(alone, dist.new_group([rank], use_local_synchronization=True))
    own = slice(rank, rank + 1)
    ddp = DistributedDataParallel(_layer())
    _steps(ddp, own, None)
    sharded = _layer()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (WORLD,)))
    optimizer = _steps(sharded, own, None)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(sharded, options=options)
    get_optimizer_state_dict(sharded, optimizer, options=options)
    for name, tensor in alone.state_dict().items():
        torch.testing.assert_close(ddp.module.state_dict()[name], tensor, msg=f"DDP {name}")
        if rank == 0:  # full state is gathered there
            torch.testing.assert_close(full[name], tensor, msg=f"FSDP2 {name}")
    if rank == 0:
        torch.save(full, f"{folder}/full.pt")
    dist.barrier()
    again = _layer()
    fully_shard(again, mesh=init_device_mesh("cpu", (WORLD,)))
    set_model_state_dict(again, torch.load(f"{folder}/full.pt"), options=options)
    x = _rows(1, 20, 32, seed=9)
    torch.testing.assert_close(again(x)[0], sharded(x)[0])


def _work(rank: int, folder: str) -> None:
    report = "passed"
    try:
        torch.set_num_threads(1)
        coterie.set_threads(1)
        meeting = f"file://{folder}/meet"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=WORLD)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
        with pytest.raises(ValueError, match="one dimension"):
            positions(4, mesh)
        for spec, causal in SPECS:
            _check_spec(spec, causal, mesh["context"], 21)
            _check_spec(spec, causal, mesh["context"], 20, dropout=0.3)
        _check_any_attention(mesh["context"])
        for spec in ("full", "i-clustered(clusters=4,topk=6)", "cast(clusters=3,size=8)"):
            _check_spec(spec, False, init_device_mesh("cpu", (WORLD,)), 22)
        _check_wrappers(rank, folder)
    except BaseException:
        report = traceback.format_exc()
    Path(f"{folder}/unfinished{rank}").write_text(report)
    os.rename(f"{folder}/unfinished{rank}", f"{folder}/rank{rank}")


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_four_ranks_agree_with_one(tmp_path: Path) -> None:
    context = mp.spawn(_work, (str(tmp_path),), nprocs=WORLD, join=False)
    reports = [tmp_path / f"rank{rank}" for rank in range(WORLD)]
    end = time.monotonic() + 300
    while time.monotonic() < end and not all(report.exists() for report in reports):
        failed = [r for r in reports if r.exists() and r.read_text() != "passed"]
        if failed or context.join(timeout=0.2):
            break
    for process in context.processes:  # Gloo's threads may wait for each other at the end
        if process.is_alive():
            process.kill()
    for report in reports:
        if report.exists():
            assert report.read_text() == "passed", report.read_text()
    assert all(report.exists() for report in reports)
