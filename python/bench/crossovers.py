# SPDX-License-Identifier: MIT
"""Writes the module coterie.crossovers, which coterie.recommend reads, from measured records.

    python python/bench/crossovers.py OUTPUT

The build runs it. Takes the records of ``coterie bench`` in docs/performance: heads of 64,
i-clustered where not causal, strict routing where causal, against torch's full attention. The
slowest run of each spec at each length counts; the fastest spec is written, and the fastest of those
with near keys.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
MECHANISMS = {False: "i-clustered", True: "routing"}  # by causal
HEAD_DIM = 64
LEAST_NEAR = 32  # smaller neighbourhoods lose more of a model's score (docs/results.md)
Key = tuple[str, bool, bool, int]  # device, causal, near keys, tokens


def _where(run: dict[str, Any]) -> str:
    machine = run["gpu"].split(",")[0] if run["device"] == "cuda" else run["cpu"]
    return f"{run['dtype']}, {run['batch'] * run['heads']} heads of {run['dim']}, {machine}"


def _measurements() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    for path in sorted((ROOT / "docs" / "performance").glob("*.jsonl")):
        run: dict[str, Any] = {}
        for line in path.read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "run":
                run = record
            elif record["kind"] == "measurement":
                yield run, record


def _wanted(run: dict[str, Any], record: dict[str, Any]) -> bool:
    mechanisms = [group["mechanism"] for group in record["groups"]]
    return (
        run["dim"] == HEAD_DIM
        and record["speed"] is not None
        and not record["leaks_future"]
        and mechanisms == [MECHANISMS[record["causal"]]]
    )


def _near(record: dict[str, Any]) -> int:
    found = re.search(r"near=(\d+)", record["attention"])
    return int(found[1]) if found else 0


def _slowest() -> dict[Key, dict[str, tuple[bool, float, str]]]:
    """For each key, and each spec: both passes?, speed, where."""
    found: dict[Key, dict[str, tuple[bool, float, str]]] = {}
    for run, record in _measurements():
        near = _near(record)
        if not _wanted(run, record) or 0 < near < LEAST_NEAR:
            continue
        specs = found.setdefault((run["device"], record["causal"], near > 0, record["N"]), {})
        measured = (run["pass"] == "both", record["speed"], _where(run))
        before = specs.get(record["attention"], measured)
        # A record of both passes replaces one of the forward pass alone.
        if (not measured[0], measured[1]) <= (not before[0], before[1]):
            specs[record["attention"]] = measured
    return found


def main(output: Path) -> None:
    """Writes the file."""
    rows = []
    for (device, causal, near, tokens), specs in sorted(_slowest().items()):
        spec, (both, speed, where) = max(specs.items(), key=lambda item: item[1][:2])
        place = f"{where}, {'both passes' if both else 'forward'}"
        rows.append(f"    {(device, causal, near, tokens, spec, round(speed, 2), place)!r},\n")
    output.unlink(missing_ok=True)
    output.write_text(
        '"""Measured speeds, written by python/bench/crossovers.py."""\n\n'
        "# Device, causal, near keys, tokens, the fastest spec, its speed over full attention, where.\n"
        f"MEASURED = [\n{''.join(rows)}]\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
