# SPDX-License-Identifier: MIT
"""Two processes keep the same centroids, and those of one process over both batches."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

import coterie.nn

SPEC = "routing(clusters=3,window=8,decay=0.8)"
STEPS = 3


def _train(layer: torch.nn.Module, batches: list[torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for x in batches:
        optimizer.zero_grad()
        out = layer(x)[0]
        (out.square().mean() + coterie.nn.commitment_loss(layer)).backward()
        optimizer.step()
        coterie.nn.update_centroids(layer)


def _layer() -> coterie.nn.Attention:
    torch.manual_seed(0)
    layer = coterie.nn.Attention(32, 4, SPEC, causal=True)
    return layer.double()


def _batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(4, 20, 32, generator=generator).double() for _ in range(STEPS)]


def _work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    layer = DistributedDataParallel(_layer(), broadcast_buffers=False)
    layer.module(_batches()[0])
    coterie.nn.initialise_centroids(layer)
    _train(layer, [x[2 * rank : 2 * rank + 2] for x in _batches()])
    torch.save(layer.module.state_dict(), f"{folder}/rank{rank}.pt")
    dist.destroy_process_group()


def _run_ranks(folder: str) -> None:
    # The end of a Gloo group now and then never comes; what counts is saved before it.
    context = mp.spawn(_work, (folder,), nprocs=2, join=False)
    end = time.monotonic() + 40
    while not context.join(timeout=5) and time.monotonic() < end:
        pass
    for process in context.processes:
        if process.is_alive():
            process.kill()


@pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
def test_ranks_agree_with_each_other_and_with_one_process(tmp_path: object) -> None:
    _run_ranks(str(tmp_path))
    first, second = (torch.load(f"{tmp_path}/rank{rank}.pt") for rank in range(2))
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    layer = _layer()
    layer(_batches()[0])
    coterie.nn.initialise_centroids(layer)
    _train(layer, _batches())
    for name, tensor in layer.state_dict().items():
        torch.testing.assert_close(tensor, first[name])
