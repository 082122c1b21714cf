# SPDX-License-Identifier: MIT
r"""Tokens per second of training steps in plain PyTorch, to compare `coterie train` with.

    python python/bench/train_step.py --attention full window
    python python/bench/train_step.py --attention bidirectional --shapes 32768x1
    python python/bench/train_step.py --device cpu --eager --shapes 1024x4 --layers 2 --width 128
    python python/bench/train_step.py --saved --attention full --shapes 704x1

The model is that of `coterie train --task bytes`: pre-norm blocks, rotary positions, exact GELU in
a hidden layer four times as wide, biases, an output layer that is not tied. bf16 autocast,
compiled, fused AdamW, gradients clipped. `full` and `bidirectional` take the fastest back end of
scaled_dot_product_attention, `window` is FlexAttention with a causal sliding window. Batches are
copied from pinned memory; the loss is read once, at the end. Peak memory is what the allocator gave
out at most.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Sizes(NamedTuple):
    """Sizes of a model."""

    layers: int
    width: int
    heads: int
    vocabulary: int = 256


def rotated(x: Tensor, waves: Tensor) -> Tensor:
    """Rotary positions of x (B, H, N, D); waves is (2, N, D / 2)."""
    first, second = x.chunk(2, -1)
    cosine, sine = waves.to(x.dtype)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), -1)


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, sizes: Sizes, attend: Attend) -> None:
        super().__init__()
        width = sizes.width
        self.heads, self.attend = sizes.heads, attend
        self.attention_norm, self.ffn_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.ffn_in, self.ffn_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor, waves: Tensor) -> Tensor:
        """Of x (B, N, E)."""
        rows = self.qkv(self.attention_norm(x)).unflatten(2, (3, self.heads, -1))
        q, k, v = rows.permute(2, 0, 3, 1, 4)
        attended = self.attend(rotated(q, waves), rotated(k, waves), v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.ffn_out(functional.gelu(self.ffn_in(self.ffn_norm(x))))


class Model(nn.Module):
    """Maps tokens (B, N) to logits (B, N, V)."""

    def __init__(self, sizes: Sizes, attend: Attend, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes, attend) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.output = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        half = sizes.width // sizes.heads // 2
        rates = 10000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(length), rates)
        self.register_buffer("waves", torch.stack((angles.cos(), angles.sin())))

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.waves)
        return self.output(self.norm(x))


def attention_of(name: str, length: int, window: int, device: str) -> Attend:
    """The attention called `name`, on q, k, v (B, H, N, D)."""
    if name != "window":
        causal = name == "full"
        return lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, is_causal=causal)

    def near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j <= i) & (j > i - window)

    blocks = create_block_mask(near, None, None, length, length, device=device)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=blocks)


def optimizer_of(model: Model, device: str) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99), fused=device == "cuda")


class Speed(NamedTuple):
    """Of training steps."""

    tokens: float  # per second
    cpu: float  # seconds of processor time of a step, all threads
    peak: float  # MiB; 0 on the CPU


def speed(name: str, length: int, rows: int, options: argparse.Namespace) -> Speed:
    """Measures training steps."""
    device = options.device
    cuda = device == "cuda"
    torch.manual_seed(0)
    torch._dynamo.reset()
    sizes = Sizes(options.layers, options.width, options.heads)
    model = Model(sizes, attention_of(name, length, options.window, device), length).to(device)
    optimizer = optimizer_of(model, device)

    def loss_of(tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bf16"):
            logits = model(tokens)
        return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    run = loss_of if options.eager else torch.compile(loss_of, dynamic=False)
    text = torch.randint(sizes.vocabulary, (rows, length + 1))
    text = text.pin_memory() if cuda else text

    def step() -> Tensor:
        batch = text.to(device, non_blocking=True)
        optimizer.zero_grad()
        loss = run(batch[:, :-1], batch[:, 1:])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=cuda)
        optimizer.step()
        return loss.detach()

    for _ in range(options.warmup):
        step().item()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    begin, used = time.perf_counter(), time.process_time()
    for _ in range(options.steps):
        loss = step()
    loss.item()
    seconds = (time.perf_counter() - begin) / options.steps
    cpu = (time.process_time() - used) / options.steps
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0.0
    return Speed(rows * length / seconds, cpu, peak)


def print_saved(name: str, length: int, options: argparse.Namespace) -> None:
    """Prints the tensors that a layer keeps for the backward pass, in bytes per token.

    Counts those of two layers that one layer does not have; the length must differ from all widths.
    On the CPU the graph is partitioned as for a GPU but not compiled.
    """
    device = options.device
    backend = "inductor" if device == "cuda" else "aot_eager_decomp_partition"
    found: list[Counter[tuple[int, str]]] = []
    for layers in (1, 2):
        torch._dynamo.reset()
        sizes = Sizes(layers, options.width, options.heads)
        model = Model(sizes, attention_of(name, length, options.window, device), length).to(device)
        constants = {t.data_ptr() for t in (*model.parameters(), *model.buffers())}
        kept: dict[int, Tensor] = {}

        def keep(tensor: Tensor, kept: dict[int, Tensor] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        tokens = torch.randint(sizes.vocabulary, (1, length), device=device)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            run = torch.compile(model, dynamic=False, backend=backend)
            with torch.autocast(device, torch.bfloat16, enabled=options.dtype == "bf16"):
                run(tokens)
        rows = [t for at, t in kept.items() if at not in constants and length in t.shape]
        found.append(Counter((t.untyped_storage().nbytes() // length, str(t.dtype)) for t in rows))
    for (size, dtype), count in sorted((found[1] - found[0]).items(), reverse=True):
        print(f"{count:4} x {size:6} bytes per token  {dtype}")
    total = sum(size * count for (size, _), count in (found[1] - found[0]).items())
    print(f"       {total:6} bytes per token and layer, {name}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = ["full", "window", "bidirectional"]
    parser.add_argument("--attention", nargs="+", default=names[:2], choices=names)
    shapes = ["2048x16", "8192x4", "32768x1"]
    parser.add_argument("--shapes", nargs="+", default=shapes, help="tokens of a row x rows")
    parser.add_argument("--backend", nargs="+", default=list(BACKENDS), choices=list(BACKENDS))
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "f32"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--saved", action="store_true", help="list what a layer keeps for backward")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--steps", type=int, default=30)
    return parser.parse_args()


def main() -> None:
    """Prints the table."""
    options = _options()
    print(f"{'attention':24}{'shape':>12}{'tokens/s':>12}{'CPU s/step':>12}{'peak MiB':>10}")
    for name in options.attention:
        several = options.device == "cuda" and name != "window"
        choices = {label: BACKENDS[label] for label in options.backend} if several else {"": None}
        for shape in options.shapes:
            length, rows = map(int, shape.split("x"))
            if options.saved:
                print_saved(name, length, options)
                continue
            for label, backend in choices.items():
                with contextlib.nullcontext() if backend is None else sdpa_kernel(backend):
                    found = speed(name, length, rows, options)
                print(f"{f'{name} {label}':24}{shape:>12}{found.tokens:12.0f}{found.cpu:12.4f}"
                      f"{found.peak:10.0f}", flush=True)


if __name__ == "__main__":
    main()
