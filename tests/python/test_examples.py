# SPDX-License-Identifier: MIT
"""The examples run."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_example_runs(example: Path) -> None:
    for host in ("transformers", "diffusers"):
        if f"from {host} import" in example.read_text() and not importlib.util.find_spec(host):
            pytest.skip(f"{host} is not installed")
    done = subprocess.run([sys.executable, str(example)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_comparison_prints_a_row_for_each_attention() -> None:
    script = Path(__file__).parents[2] / "python" / "bench" / "compare.py"
    command = [sys.executable, str(script), "--lengths", "40", "--repeats", "1", "--heads", "2"]
    specs = ["i-clustered(clusters=4,topk=8)", "cast(clusters=2,size=9)"]
    command += ["--device", "cpu", "--spec", *specs]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for name in ("sdpa math", *specs):
        assert any(line.startswith(name) for line in done.stdout.splitlines()), done.stdout
