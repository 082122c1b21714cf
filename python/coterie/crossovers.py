# SPDX-License-Identifier: MIT
"""Measured speeds; written by python/bench/crossovers.py from docs/performance."""

from __future__ import annotations

# Device, causal, tokens, the fastest spec, its speed over full attention, where.
MEASURED = [
    (
        "cuda",
        False,
        1024,
        "i-clustered(clusters=256)",
        0.09,
        "bf16, 16 heads of 64, NVIDIA H200, forward",
    ),
    (
        "cuda",
        False,
        2048,
        "i-clustered(clusters=256)",
        0.2,
        "bf16, 16 heads of 64, NVIDIA H200, forward",
    ),
    (
        "cuda",
        False,
        4096,
        "i-clustered(clusters=256)",
        1.25,
        "bf16, 16 heads of 64, NVIDIA H200, both passes",
    ),
    (
        "cuda",
        False,
        8192,
        "i-clustered(clusters=256)",
        1.8,
        "bf16, 16 heads of 64, NVIDIA H200, forward",
    ),
    (
        "cuda",
        False,
        16384,
        "i-clustered(clusters=256)",
        9.53,
        "bf16, 16 heads of 64, NVIDIA H200, both passes",
    ),
    (
        "cuda",
        False,
        65536,
        "i-clustered(clusters=256)",
        58.94,
        "bf16, 16 heads of 64, NVIDIA H200, both passes",
    ),
    (
        "cuda",
        False,
        262144,
        "i-clustered(clusters=256)",
        167.01,
        "bf16, 16 heads of 64, NVIDIA H200, forward",
    ),
]
