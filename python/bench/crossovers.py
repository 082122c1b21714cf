# SPDX-License-Identifier: MIT
"""Writes python/coterie/crossovers.py, from which coterie.recommend advises, from measured records.

    python python/bench/crossovers.py [--check]

Takes the records of ``coterie bench`` in docs/performance: heads of 64, i-clustered where not
causal, strict routing where causal, against torch's full attention. The slowest run of each spec at
each length counts; the fastest spec is written. --check writes nothing and fails when the file does
not match the records.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "python" / "coterie" / "crossovers.py"
MECHANISMS = {False: "i-clustered", True: "routing"}  # by causal
HEAD_DIM = 64
Key = tuple[str, bool, int]


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


def _slowest() -> dict[Key, dict[str, tuple[bool, float, str]]]:
    """For each device, causality and length, and each spec: both passes?, speed, where."""
    found: dict[Key, dict[str, tuple[bool, float, str]]] = {}
    for run, record in _measurements():
        if not _wanted(run, record):
            continue
        specs = found.setdefault((run["device"], record["causal"], record["N"]), {})
        measured = (run["pass"] == "both", record["speed"], _where(run))
        before = specs.get(record["attention"], measured)
        # A record of both passes replaces one of the forward pass alone.
        if (not measured[0], measured[1]) <= (not before[0], before[1]):
            specs[record["attention"]] = measured
    return found


def table() -> str:
    """The text of the file."""
    lines = [
        "# SPDX-License-Identifier: MIT",
        '"""Measured speeds; written by python/bench/crossovers.py from docs/performance."""',
        "",
        "from __future__ import annotations",
        "",
        "# Device, causal, tokens, the fastest spec, its speed over full attention, where.",
        "MEASURED = [",
    ]
    for (device, causal, tokens), specs in sorted(_slowest().items()):
        spec, (both, speed, where) = max(specs.items(), key=lambda item: item[1][:2])
        place = f"{where}, {'both passes' if both else 'forward'}"
        fields = (device, causal, tokens, spec, round(speed, 2), place)
        lines += ["    (", *(f"        {json_text(field)}," for field in fields), "    ),"]
    return "\n".join([*lines, "]", ""])


def json_text(value: object) -> str:
    """A literal as the formatter writes it."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def main() -> None:
    """Writes or checks the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="fail when the file is out of date")
    if not parser.parse_args().check:
        TARGET.write_text(table())
    elif TARGET.read_text() != table():
        sys.exit(f"{TARGET.name} is out of date; run python/bench/crossovers.py")


if __name__ == "__main__":
    main()
