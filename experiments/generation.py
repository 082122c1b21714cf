# SPDX-License-Identifier: MIT
"""Draws docs/results/generate.svg from experiments/logs/generate.jsonl (python/bench/generate.py)."""

from __future__ import annotations

import json
from pathlib import Path

from plot import Curve, line_plot

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Writes the plot."""
    lines = (ROOT / "experiments/logs/generate.jsonl").read_text().splitlines()
    points: dict[str, list[tuple[float, float]]] = {}
    for record in map(json.loads, lines):
        name = f"{record['program']}: {record['attention']}"
        points.setdefault(name, []).append((record["context"] / 1024, record["ms_per_token"]))
    curves = [Curve(name, sorted(own)) for name, own in points.items()]
    text = line_plot("Time per generated token (one H200; above 20 ms cut off)",
                     "tokens before it, in thousands (1024)", "milliseconds", curves, (0.0, 20.0))
    (ROOT / "docs/results/generate.svg").write_text(text)


if __name__ == "__main__":
    main()
