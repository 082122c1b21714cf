#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Time and memory of a whole training step by length: experiments/steps.py --device cuda

Runs ``coterie train --dry-run`` on masked copy and writes experiments/logs/steps.jsonl, from which
experiments/results.py writes a chapter. What is in the log and ended is not measured again. Centroids start at
random: k-means of the first batch, on the CPU, is not part of a step and takes minutes for 4,096 of them.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import plan as plans

LOG = plans.HERE / "logs" / "steps.jsonl"
LENGTHS = ["512", "4k", "32k", "64k", "256k", "1M"]
SPECS = ["full(positions=none)", "local(window=256,positions=none)", "clustered(clusters=256)",
         "i-clustered(clusters=256,topk=32)", "routing(clusters=N/256,window=256)",
         "cast(clusters=256,size=N/256)"]
OPTIONS = ["--task", "copy", "--train.batch", "1", "--model.dim", "256", "--model.layers", "4",
           "--model.heads", "4", "--model.position-base", "1000000", "--train.dtype", "bf16", "--threads", "8",
           "--train.centroids", "random"]
Line = dict[str, Any]


def tokens(length: str) -> int:
    """512, 4k, 1M as numbers."""
    return int(length.rstrip("kM")) * {"k": 1024, "M": 1024**2}.get(length[-1], 1)


def chapter(lines: list[Line]) -> str:
    """The table of results.md."""
    machine = lines[0]["machine"]
    text = ("\n## A training step up to a million tokens\n\nMasked copy, one sequence a step, forward and backward pass and "
            f"the optimiser, bf16: 4 layers of 256, 4 heads, without recomputation. {machine['device'].split(',')[0]}, "
            f"{lines[0]['date'][:10]}, commit {machine['commit']}; other combinations of `experiments/steps.py` have not been "
            f"measured.\n\n```\n{' '.join(lines[0]['command'])}\n```\n\n"
            "| tokens | attention | ms per step | thousand tokens/s | peak MiB |\n| ---: | --- | ---: | ---: | ---: |\n")
    newest = {(line["spec"], line["length"]): line for line in lines}
    for line in sorted(newest.values(), key=lambda line: tokens(line["length"])):
        speed = re.search(r"([0-9.e-]+) s per step", line["output"])
        memory = re.search(r"memory +([0-9]+) MiB", line["output"])
        count = tokens(line["length"])
        cells = [f"not finished in {line['limit']} s", "", ""]
        if line["status"] == 0 and speed and memory:
            seconds = float(speed[1])
            cells = [f"{1000 * seconds:.0f}", f"{count / seconds / 1000:.0f}", memory[1]]
        text += f"| {count:,} | `{line['spec']}` | {' | '.join(cells)} |\n"
    return text


def main() -> None:
    """Measures what is missing in the log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--limit", type=int, default=120, help="Seconds for one measurement")
    parser.add_argument("--program", default=str(plans.ROOT / "build/release/bin/coterie"))
    arguments = parser.parse_args()
    facts = subprocess.run([arguments.program, "info"], check=True, capture_output=True, text=True).stdout
    machine = dict(line.split(maxsplit=1) for line in facts.splitlines() if len(line.split()) > 1)
    old = LOG.read_text(encoding="utf-8").splitlines() if LOG.exists() else []
    done = {(line["spec"], line["length"]) for line in map(json.loads, old) if line["status"] == 0}
    for length in LENGTHS:
        for form in SPECS:
            spec = form.replace("N/256", str(max(2, tokens(length) // 256)))
            if (spec, length) in done or (spec.startswith("full") and tokens(length) > 2**18):
                continue
            words = ["train", "--dry-run", *OPTIONS, "--length", length, "--device", arguments.device,
                     "--attention", spec]
            date = subprocess.run(["date", "-u", "+%Y-%m-%dT%H:%M:%SZ"], check=True, capture_output=True,
                                  text=True).stdout.strip()
            ended = subprocess.run(["timeout", str(arguments.limit), arguments.program, *words],
                                   capture_output=True, text=True, check=False)
            line = {"spec": spec, "length": length, "command": ["coterie", *words], "date": date,
                    "machine": {key: machine[key] for key in ("commit", "cpu", "device") if key in machine},
                    "limit": arguments.limit, "status": ended.returncode, "output": ended.stdout}
            with LOG.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line, sort_keys=True) + "\n")
            print(f"{length} {spec}: status {ended.returncode}")


if __name__ == "__main__":
    main()
