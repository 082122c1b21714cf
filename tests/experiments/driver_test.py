# SPDX-License-Identifier: MIT
"""Runs a tiny experiment with experiments/run.py: python3 tests/experiments/driver_test.py PROGRAM

Checks that finished work is not repeated, that interrupted work is continued, that packed logs say where
they come from and contain no paths, and that experiments/results.py writes a page from them.
"""

from __future__ import annotations

import json
import lzma
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PLAN = """
title = "A tiny experiment"
text = "Two models."

[options]
task = "masked"
length = 64
threads = 1
"model.dim" = 16
"model.layers" = 1
"model.heads" = 2
"train.steps" = 4
"train.batch" = 2
"train.log-every" = 1
"train.eval-every" = 2
"train.eval-batches" = 1
"train.final-batches" = 1

[family.trained]
seeds = [1, 2]
[family.trained.attention]
full = "1*full+1*full(positions=none)"
"i-clustered, near 8" = "1*i-clustered(clusters=8,topk=4,near=8,positions=rotary)+1*full(positions=none)"

[family.replaced]
[family.replaced.attention]
full = "1*full+1*full(positions=none)"
[family.replaced.evaluate]
local = "1*local(window=16)+1*local(window=16,positions=none)"

[family.mapped]
lengths = [32, 64]
[family.mapped.attention]
"clustered, 4" = "clustered(clusters=4)"
"clustered, 8" = "clustered(clusters=8)"

[family.swapped]
evaluate = "all"
inspect = true
[family.swapped.attention]
all = "full"
windowed = "local(window=8)"

[family.drawn]
file = ""
options = { task = "pathfinder", length = 256, "pathfinder.paddles" = 4 }
[family.drawn.attention]
cast = { spec = "cast(clusters=4,size=64)", options = { "model.layers" = 2 }, pictures = ["clusters"] }

[[section]]
kind = "tradeoff"
family = "drawn"
title = "Drawn"
text = "Quality against time."

[[section]]
kind = "pictures"
family = "drawn"
title = "Clusters"
text = "Of images."

[[section]]
kind = "evaluations"
family = "replaced"
title = "Replaced"
text = "Without training."

[[section]]
kind = "training"
family = "trained"
title = "Trained"
text = "From scratch."

[[section]]
kind = "map"
family = "mapped"
title = "By length"
text = "Clusters after the comma."

[[section]]
kind = "exchange"
family = "swapped"
title = "Swapped"
text = "One for another."

[[section]]
kind = "divergence"
family = "swapped"
title = "Heads"
text = "How they differ."

[[target]]
family = "replaced"
evaluation = "local"
at_most = 10.0
"""


class Experiment:
    """The tiny experiment in a temporary folder."""

    def __init__(self, program: str, folder: Path) -> None:
        self.program, self.folder = program, folder
        self.plan = folder / "plans" / "tiny.toml"
        self.plan.parent.mkdir()
        self.plan.write_text(PLAN)
        text = "".join(f"{i * i} {i % 7}\n" for i in range(2000))
        self.data = folder / "text"
        self.data.write_text(text)

    def run(self, *more: str, status: int = 0) -> str:
        """Output of experiments/run.py."""
        return self._script("run.py", "tiny", "--plan", str(self.plan), "--program", self.program,
                            "--data", str(self.data), "--out", str(self.folder / "out"),
                            "--logs", str(self.folder / "logs"), *more, status=status)

    def results(self, *more: str, status: int = 0) -> str:
        """Output of experiments/results.py."""
        return self._script("results.py", "--plans", str(self.plan.parent), "--logs",
                            str(self.folder / "logs"), "--docs", str(self.folder / "docs"), *more,
                            status=status)

    def packed(self) -> list[dict]:
        """Lines of the packed logs."""
        text = lzma.decompress((self.folder / "logs" / "tiny.jsonl.xz").read_bytes()).decode()
        assert str(self.folder) not in text, "a packed log has a path of this machine"
        return [json.loads(line) for line in text.splitlines()]

    @staticmethod
    def _script(name: str, *words: str, status: int) -> str:
        done = subprocess.run([sys.executable, str(ROOT / "experiments" / name), *words], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=300)
        assert done.returncode == status, f"{name}: status {done.returncode}\n{done.stdout}"
        return done.stdout


def of(lines: list[dict], kind: str) -> list[dict]:
    """Lines of a kind."""
    return [line for line in lines if line["kind"] == kind]


def check(experiment: Experiment) -> None:
    """The whole course of an experiment."""
    # Only one family; then the rest, and nothing twice.
    experiment.run("--family", "replaced")
    assert {line["run"] for line in of(experiment.packed(), "run")} == {"replaced-full-1"}
    experiment.run()
    lines = experiment.packed()
    assert len(of(lines, "run")) == 12 and len(of(lines, "end")) == 12
    swapped = [(line["label"], line["evaluation"]) for line in of(lines, "score") if line["family"] == "swapped"]
    assert sorted(swapped) == [(a, b) for a in ("all", "windowed") for b in ("all", "windowed")]
    assert [line["evaluation"] for line in of(lines, "score")].count("local") == 1
    assert "coterie train" not in experiment.run()
    assert experiment.packed() == lines
    for line in of(lines, "command"):
        assert line["status"] == 0 and line["seconds"] > 0
        assert line["command"][0] == "coterie" and re.match(r"\d{4}-\d\d-\d\dT", line["date"])
        assert {"commit", "cpu", "compiler", "coterie"} <= set(line["machine"])

    # A cut log line and a missing evaluation: only that is evaluated again.
    log = experiment.folder / "out" / "tiny" / "replaced-full-1.jsonl"
    kept = [text for text in log.read_text().splitlines() if '"evaluation": "local"' not in text]
    log.write_text("\n".join(kept) + '\n{"kind": "sco')
    again = experiment.run()
    assert again.count("coterie eval") == 1 and "local(window=16)" in again
    assert len(of(experiment.packed(), "score")) == len(of(lines, "score"))

    # The page: numbers from the logs, plots, and a check that finds changes.
    experiment.results()
    page = (experiment.folder / "docs" / "results.md").read_text()
    scores = [f"{line['metric']:.4f}" for line in of(lines, "score") if line["family"] == "replaced"]
    assert all(score in page for score in scores) and "| yes |" in page
    for name in ("trained-steps", "trained-seconds"):
        assert (experiment.folder / "docs" / "results" / f"{name}.svg").read_text().startswith("<svg")
    assert "| trained with | with all | with windowed |" in page
    assert "| layer | full and full | local and local |" in page
    assert len(of(lines, "inspection")) == 2
    assert "| attention | 32 tokens | 64 tokens |" in page
    picture = (experiment.folder / "docs" / "results" / "mapped-map.svg").read_text()
    assert picture.startswith("<svg") and picture.count("<rect") == 1 + 4
    drawn = [line["command"] for line in of(lines, "command") if line["run"].startswith("drawn")]
    assert drawn[0][drawn[0].index("--model.layers") + 1] == "2"
    assert len(of(lines, "picture")) == 1 and "![clusters](results/drawn-cast-clusters.svg)" in page
    for name in ("drawn-cast-clusters", "drawn-tradeoff"):
        xml.etree.ElementTree.parse(experiment.folder / "docs" / "results" / f"{name}.svg")
    experiment.results("--check")
    (experiment.folder / "docs" / "results.md").write_text(page + "typed by hand\n")
    assert "not what the logs say" in experiment.results("--check", status=1)
    experiment.plan.write_text(PLAN.replace("at_most = 10.0", "at_most = -10.0"))
    experiment.results()
    assert "**no**" in (experiment.folder / "docs" / "results.md").read_text()

    # Equal logs agree with their record, others do not; runs side by side have equal scores.
    repeated = experiment.folder / "repeated"
    compare = ["tiny", "--record", str(experiment.folder / "logs"), "--repeated", str(repeated)]
    experiment.run("--jobs", "2", "--out", str(experiment.folder / "again"), "--logs", str(repeated))
    assert "DIFFERS" not in experiment._script("compare.py", *compare, status=0)
    record = experiment.folder / "logs" / "tiny.jsonl.xz"
    changed = [{**line, "metric": line["metric"] + 1} if line["kind"] == "score" else line for line in lines]
    record.write_bytes(lzma.compress("".join(json.dumps(line) + "\n" for line in changed).encode()))
    assert "DIFFERS" in experiment._script("compare.py", *compare, status=1)

    # Mistakes.
    assert "expected one of trained, replaced, mapped-32, mapped-64, swapped, drawn" in experiment.run("--family", "none", status=1)
    experiment.plan.write_text(PLAN.replace("seeds", "seedlings"))
    assert "got seedlings" in experiment.run(status=1)
    experiment.plan.write_text(PLAN.replace('task = "masked"', 'task = "sing"').replace("4\n", "5\n"))
    assert "status" in experiment.run("--out", str(experiment.folder / "other"), status=1)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        check(Experiment(sys.argv[1], Path(temporary)))
    print("the driver of experiments works")
