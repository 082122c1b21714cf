# SPDX-License-Identifier: MIT
"""All processes have the same centroids, equal to those of one process over all batches."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import coterie.nn

SPEC = "routing(clusters=3,window=8,decay=0.8)"
STEPS = 3


def _train(
    layer: torch.nn.Module,
    batches: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        out = layer(x)[0]
        (out.square().mean() + coterie.nn.commitment_loss(layer)).backward()
        optimizer.step()
        coterie.nn.update_centroids(layer, group)


def _layer() -> coterie.nn.Attention:
    torch.manual_seed(0)
    layer = coterie.nn.Attention(32, 4, SPEC, causal=True)
    return layer.double()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 20, 32, generator=generator).double() for _ in range(STEPS)]


def _work(rank: int, folder: str, world: int, members: list[int], sync_buffers: bool) -> None:
    """Trains on the ranks of ``members``; the others only take part in making the group."""
    meeting = f"file://{folder}/meet"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    dist.barrier()  # no rank leaves before all are connected
    group = None if len(members) == world else dist.new_group(members)
    if rank in members:
        place = members.index(rank)
        layer = DistributedDataParallel(
            _layer(), process_group=group, broadcast_buffers=sync_buffers
        )
        layer.module(_batches()[0])
        coterie.nn.initialise_centroids(layer, process_group=group)
        _train(layer, [x[2 * place : 2 * place + 2] for x in _batches()], group)
        torch.save(layer.module.state_dict(), f"{folder}/unfinished{place}")
        os.rename(f"{folder}/unfinished{place}", f"{folder}/place{place}.pt")
    dist.destroy_process_group()


def _run_ranks(folder: str, world: int, members: list[int], sync_buffers: bool) -> None:
    # Destroying a Gloo group sometimes hangs; the results are saved before that.
    context = mp.spawn(_work, (folder, world, members, sync_buffers), nprocs=world, join=False)
    end = time.monotonic() + 200
    saved = [Path(folder) / f"place{place}.pt" for place in range(len(members))]
    while time.monotonic() < end and not all(path.exists() for path in saved):
        if context.join(timeout=0.2):
            break
    for process in context.processes:
        if process.is_alive():
            process.kill()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
@pytest.mark.parametrize("sync_buffers", [False, True])  # True is DDP's default
@pytest.mark.parametrize(("world", "members"), [(2, [0, 1]), (3, [1, 2])])
def test_ranks_agree_with_each_other_and_with_one_process(
    tmp_path: object, world: int, members: list[int], sync_buffers: bool
) -> None:
    _run_ranks(str(tmp_path), world, members, sync_buffers)
    first, second = (torch.load(f"{tmp_path}/place{place}.pt") for place in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    layer = _layer()
    layer(_batches()[0])
    coterie.nn.initialise_centroids(layer)
    _train(layer, _batches())
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, first[name])
