# SPDX-License-Identifier: MIT
"""The Python layer and the C++ layer: the same bits for every mechanism."""

from __future__ import annotations

import os
import re
import subprocess

import numpy as np
import pytest
import torch
from torch import Tensor

import coterie.nn
from coterie.library import spec_help

PROGRAM = os.environ.get("COTERIE_LAYER_OUTPUTS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs a C++ build with torch")

DIM, HEADS, SEED = 32, 4, 7
ANY = [
    "full",
    "full(positions=none)",
    "full(positions=relative)",
    "local(window=6)",
    "local(window=6,kind=blocked)",
    "strided(stride=3)",
    "oracle-top(topk=5)",
    "lsh(rounds=2,chunk=4,buckets=4)",
    "lsh(rounds=2,chunk=4,buckets=4,combine=mean)",
    "routing(clusters=3,window=8)",
    "routing(clusters=3,window=8,share_qk=true,positions=rotary)",
    "2*local(window=6)+2*routing(clusters=3,window=8,share_qk=true)",
]
BIDIRECTIONAL = [
    "clustered(clusters=3)",
    "clustered(clusters=3,clustering=hamming)",
    "clustered(clusters=3,clustering=hamming-keys)",
    "i-clustered(clusters=3,topk=4)",
    "i-clustered(clusters=3,topk=4,clustering=hamming)",
    "cast(clusters=3,size=8)",
    "cast(clusters=3,size=8,mode=single,activation=laplace)",
    "routing(clusters=3,membership=balanced)",
    "2*i-clustered(clusters=3,topk=4)+2*cast(clusters=3,size=8)",
]
CAUSAL = [
    "i-clustered(clusters=3,topk=4,causal=reference)",
    "routing(clusters=3,window=8,causal=paper)",
    "routing(clusters=3,window=8,queries_in=2,include_self=true)",
]
CASES = [(spec, causal) for spec in ANY for causal in (False, True)]
CASES += [(spec, False) for spec in BIDIRECTIONAL] + [(spec, True) for spec in CAUSAL]


def _bytes(tensors: dict[str, Tensor]) -> bytes:
    parts = []
    for name, tensor in tensors.items():
        sizes = " ".join(map(str, (tensor.dim(), *tensor.shape)))
        parts += [f"{name} {sizes}\n".encode(), tensor.detach().contiguous().numpy().tobytes()]
    return b"".join(parts)


def _tensors(data: bytes) -> dict[str, Tensor]:
    tensors, at = {}, 0
    while at < len(data):
        end = data.index(b"\n", at)
        name, _, *sizes = data[at:end].decode().split()
        shape = [int(size) for size in sizes]
        count = int(np.prod(shape, dtype=np.int64))
        values = np.frombuffer(data, np.float32, count, end + 1).reshape(shape)
        tensors[name] = torch.from_numpy(values.copy())
        at = end + 1 + 4 * count
    return tensors


def _program(
    spec: str, causal: bool, kv_heads: int, tensors: dict[str, Tensor]
) -> dict[str, Tensor]:
    command = [PROGRAM, spec, *map(str, (DIM, HEADS, kv_heads, int(causal), SEED))]
    done = subprocess.run(command, input=_bytes(tensors), capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    return _tensors(done.stdout)


def test_every_mechanism_is_compared() -> None:
    named = {part.split("(")[0] for spec, _ in CASES for part in spec.replace("2*", "").split("+")}
    # Names begin a line and end with a colon; their keys are indented.
    known = set(re.findall(r"^([a-z-]+): ", spec_help(), re.MULTILINE))
    assert len(known) > 5
    assert named == known


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("spec", "causal"), CASES)
def test_layers_are_those_of_cpp(spec: str, causal: bool, kv_heads: int) -> None:
    torch.manual_seed(3)
    layer = coterie.nn.Attention(DIM, HEADS, spec, num_kv_heads=kv_heads, causal=causal, seed=SEED)
    initial = {f"initial.{name}": value.clone() for name, value in layer.state_dict().items()}
    x = torch.randn(2, 21, DIM, requires_grad=True)
    found = _program(spec, causal, kv_heads, {"x": x, **layer.state_dict()})
    out, _ = layer(x, seed=SEED)
    commitment = coterie.nn.commitment_loss(layer)
    (gradient,) = torch.autograd.grad(out.square().sum() + commitment, x)
    coterie.nn.update_centroids(layer)

    assert torch.equal(out, found["out"])
    # Products of matrices run in another order where rows lie otherwise in memory.
    torch.testing.assert_close(gradient, found["gradient"], rtol=1e-4, atol=1e-5)
    if "routing" in spec:
        assert torch.equal(commitment, found["commitment"])
    moved = dict(layer.named_buffers())
    assert moved.keys() == {name for name in found if name.startswith("group_")}
    for name, buffer in moved.items():
        assert torch.equal(buffer, found[name]), name
        assert torch.equal(initial[f"initial.{name}"], found[f"initial.{name}"]), name
        assert name.endswith("counts") or not torch.equal(buffer, initial[f"initial.{name}"])
    for name in found.keys() & initial.keys():
        assert torch.equal(found[name], initial[name]), name
