# SPDX-License-Identifier: MIT
"""Models trained by the program coterie in Python, and the other way round."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import coterie.nn

safetensors = pytest.importorskip("safetensors.torch")
PROGRAM = os.environ.get("COTERIE_PROGRAM", "")
LOGITS = os.environ.get("COTERIE_MODEL_LOGITS", "")
pytestmark = pytest.mark.skipif(not PROGRAM, reason="needs the C++ program with training")

LENGTH, DIM, HEADS, LAYERS = 24, 32, 4, 3
CAUSAL = [
    "2*local(window=8)+2*routing(clusters=3,window=8)",
    "full(positions=relative)",
    "routing(clusters=3,window=8,share_qk=true,positions=rotary)",
    "oracle-top(topk=5)",
]
# Every mechanism that draws random numbers in a pass, and others that are not causal.
BIDIRECTIONAL = [
    "cast(clusters=3,size=8)",
    "clustered(clusters=3)",
    "clustered(clusters=3,clustering=hamming)",
    "i-clustered(clusters=3,topk=4)",
    "i-clustered(clusters=3,topk=4,clustering=hamming-keys)",
    "lsh(rounds=2,chunk=4,buckets=4)",
    "lsh(rounds=2,chunk=4,buckets=4,combine=mean)",
    "2*i-clustered(clusters=3,topk=4)+2*lsh(rounds=1,chunk=4,buckets=4)",
]
LEAKING = ["i-clustered(clusters=3,topk=4,causal=reference)", "lsh(rounds=2,chunk=4,buckets=4)"]


class Block(nn.Module):
    def __init__(self, spec: str, causal: bool, layer: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(DIM)
        self.attention = coterie.nn.Attention(DIM, HEADS, spec, causal=causal, layer=layer)
        self.ffn_norm = nn.LayerNorm(DIM)
        self.ffn_in, self.ffn_out = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, seed: int) -> Tensor:
        x = x + self.attention(self.attention_norm(x), seed=seed)[0]
        return x + self.ffn_out(nn.functional.gelu(self.ffn_in(self.ffn_norm(x))))


class Model(nn.Module):
    """The same model as LanguageModel in torch/include/coterie/torch/models.h."""

    def __init__(self, spec: str, causal: bool, vocabulary: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, DIM)
        self.transformer = nn.Module()
        self.transformer.layers = nn.ModuleList(Block(spec, causal, i) for i in range(LAYERS))
        self.transformer.norm = nn.LayerNorm(DIM)
        self.output = nn.Linear(DIM, vocabulary, bias=False)

    def forward(self, tokens: Tensor, seed: int = 0) -> Tensor:
        x = self.embedding(tokens)
        for block in self.transformer.layers:
            x = block(x, seed)
        return self.output(self.transformer.norm(x))


def _run(*arguments: object) -> str:
    command = [PROGRAM, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _train(folder: Path, *options: object) -> Path:
    """Runs a short training; returns the folder of its checkpoint."""
    sizes = ("--model.dim", DIM, "--model.heads", HEADS, "--model.layers", LAYERS)
    fixed = ("--model.positions", "none", "--length", LENGTH, "--threads", 1)
    _run("train", "--out", folder / "run", *sizes, *fixed, *options)
    (checkpoint,) = (folder / "run" / "checkpoints").glob("step-*")
    return checkpoint


def _texts(folder: Path) -> Tensor:
    """Writes a training and a validation text; returns the latter."""
    drawn = torch.randint(97, 109, (2, 40 * LENGTH + 1), generator=torch.Generator().manual_seed(2))
    for name, text in zip(("train", "valid"), drawn, strict=True):
        (folder / f"{name}.txt").write_bytes(bytes(text.tolist()))
    return drawn[1]


def _loss(model: nn.Module, text: Tensor) -> Tensor:
    rows, targets = text[:-1].view(-1, LENGTH), text[1:].view(-1, LENGTH)
    return nn.functional.cross_entropy(model(rows).flatten(0, 1), targets.flatten())


def _program_loss(checkpoint: Path) -> float:
    return json.loads(_run("eval", checkpoint, "--json"))["loss"]


@pytest.mark.parametrize("spec", CAUSAL)
def test_models_go_from_the_program_to_python_and_back(spec: str, tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    text = _texts(tmp_path / "text")
    options = ("--task", "bytes", "--data", tmp_path / "text", "--attention", spec)
    checkpoint = _train(tmp_path, *options, "--train.steps", 20, "--train.batch", 4)
    model = Model(spec, causal=True)
    path = checkpoint / "model.safetensors"
    model.load_state_dict(safetensors.load_file(path))
    model.eval()
    # Both sum the same floats in different orders, over a few thousand terms.
    with torch.no_grad():
        loss = _loss(model, text).item()
    assert loss == pytest.approx(_program_loss(checkpoint), rel=1e-6)

    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        _loss(model, text).backward()
        optimizer.step()
        coterie.nn.update_centroids(model)
    with torch.no_grad():
        trained = _loss(model.eval(), text).item()
    assert abs(trained - loss) > 1e-3
    safetensors.save_file(model.state_dict(), path)
    state = json.loads((checkpoint / "state.json").read_text())
    del state["checksums"]["model.safetensors"]
    (checkpoint / "state.json").write_text(json.dumps(state))
    assert _program_loss(checkpoint) == pytest.approx(trained, rel=1e-6)


def _program_logits(checkpoint: Path, tokens: Tensor, seed: int) -> Tensor:
    command = [LOGITS, str(checkpoint), str(seed), *map(str, tokens.shape)]
    done = subprocess.run(command, input=tokens.numpy().tobytes(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return torch.frombuffer(bytearray(done.stdout), dtype=torch.float32).view(*tokens.shape, -1)


@pytest.mark.parametrize(
    ("spec", "task"),
    [(spec, "copy") for spec in BIDIRECTIONAL] + [(spec, "bytes") for spec in LEAKING],
)
@torch.no_grad()
def test_models_have_the_logits_of_the_program(spec: str, task: str, tmp_path: Path) -> None:
    """Names, shapes, and the seeds of every layer and group: selections equal the program's."""
    options = ("--task", task, "--attention", spec, "--train.steps", 2, "--train.batch", 2)
    checkpoint = _train(tmp_path, *options)
    stored = safetensors.load_file(checkpoint / "model.safetensors")
    vocabulary = stored["embedding.weight"].shape[0]
    model = Model(spec, causal=task == "bytes", vocabulary=vocabulary).eval()
    model.load_state_dict(stored)
    tokens = torch.randint(0, vocabulary, (3, LENGTH))
    for seed in (0, 12345):
        expected = _program_logits(checkpoint, tokens, seed)
        torch.testing.assert_close(model(tokens, seed), expected)
