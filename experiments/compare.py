#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Compares repeated runs of an experiment with its record: experiments/compare.py small --repeated out/logs

The mean of the seeds of every family and attention must be in the range of the recorded seeds, widened
to both sides by its width, and by --slack where recorded seeds are equal.
"""

from __future__ import annotations

import argparse
import json
import lzma
import statistics
import sys
from pathlib import Path

import plan as plans

Scores = dict[tuple[str, str], list[float]]


def scores_of(path: Path) -> Scores:
    """Scores of all seeds by family and evaluation."""
    found: Scores = {}
    for text in lzma.decompress(path.read_bytes()).decode().splitlines():
        line = json.loads(text)
        if line["kind"] == "score":
            found.setdefault((line["family"], line["evaluation"]), []).append(line["metric"])
    return found


def main() -> None:
    """Prints a line per family and attention; fails if one differs or is missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="Name of a packed log, such as small")
    parser.add_argument("--repeated", type=Path, required=True, help="Folder with the repeated logs")
    parser.add_argument("--record", type=Path, default=plans.HERE / "logs", help="Folder with the record")
    parser.add_argument("--slack", type=float, default=0.01, help="Least difference that counts")
    arguments = parser.parse_args()
    name = f"{arguments.experiment}.jsonl.xz"
    record, repeated = scores_of(arguments.record / name), scores_of(arguments.repeated / name)
    wrong = 0
    for key, seeds in record.items():
        spread = max(max(seeds) - min(seeds), arguments.slack)
        low, high = min(seeds) - spread, max(seeds) + spread
        mean = statistics.mean(repeated[key]) if key in repeated else None
        good = mean is not None and low <= mean <= high
        wrong += not good
        got = "missing" if mean is None else f"{mean:.4f}"
        print(f"{'ok  ' if good else 'DIFFERS'} {', '.join(key)}: {got}, expected {low:.4f} to {high:.4f}")
    if wrong:
        sys.exit(f"compare.py: {wrong} of {len(record)} scores differ from the record")


if __name__ == "__main__":
    main()
