# SPDX-License-Identifier: MIT
"""Draws docs/results/generate.svg from experiments/logs/generate.jsonl (python/bench/generate.py).

    experiments/generation.py           # writes the plot
    experiments/generation.py --check   # fails if it is not up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from plot import Curve, line_plot

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Writes or checks the plot."""
    lines = (ROOT / "experiments/logs/generate.jsonl").read_text().splitlines()
    points: dict[str, list[tuple[float, float]]] = {}
    for record in map(json.loads, lines):
        name = f"{record['program']}: {record['attention']}"
        points.setdefault(name, []).append((record["context"] / 1024, record["ms_per_token"]))
    curves = [Curve(name, sorted(own)) for name, own in points.items()]
    text = line_plot("Time per generated token (one H200; above 20 ms cut off)",
                     "tokens before it, in thousands (1024)", "milliseconds", curves, (0.0, 20.0))
    plot = ROOT / "docs/results/generate.svg"
    if "--check" not in sys.argv:
        plot.write_text(text)
    elif plot.read_text() != text:
        print("docs/results/generate.svg is not up to date: run experiments/generation.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
