#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs an experiment: trains its models, evaluates them, and packs the logs.

    experiments/run.py near --data runs/data/wiki100m --device cuda
    experiments/run.py speech --data packs --device cuda --jobs 8

Runs are spread over the GPUs, --jobs at a time. Finished runs and evaluations are not repeated and interrupted ones are resumed, so the same command
continues after an interruption. The logs are packed into experiments/logs/NAME.jsonl.xz, from which
experiments/results.py writes docs/results.md.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import json
import lzma
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import plan as plans

Line = dict[str, Any]


class RunError(Exception):
    """A command that failed."""


def devices(wanted: str) -> list[str]:
    """cuda: all GPUs; otherwise what was asked for."""
    if wanted != "cuda":
        return [wanted]
    found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout
    return [f"cuda:{i}" for i in range(max(1, found.count("GPU ")))]


class Driver:
    """Runs commands of one experiment and keeps their logs in a folder."""

    def __init__(self, arguments: argparse.Namespace, plan: dict[str, Any]) -> None:
        self.program: str = arguments.program
        self.data: str | None = arguments.data
        self.devices = devices(arguments.device)
        self.jobs: int = arguments.jobs or len(self.devices)
        self.split: str = arguments.split
        self.folder = Path(arguments.out) / arguments.experiment
        self.data_name: str = plan.get("data", "packs" if self.data else "built-in text")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.machine = self._machine()
        self._running: set[subprocess.Popen[str]] = set()
        self._place = threading.local()  # of a job
        self._places = iter(range(self.jobs))

    def start_job(self) -> None:
        """Called once by every thread: its device."""
        self._place.device = self.devices[next(self._places) % len(self.devices)]

    def interrupt(self) -> None:
        """Asks the commands that run to stop."""
        for process in list(self._running):
            process.terminate()

    def data_words(self, run: plans.Run) -> list[str]:
        """The option that names a run's data, if it has any."""
        if run.file == "" or not self.data:
            return []
        return ["--data", self.data if run.file is None else str(Path(self.data) / run.file)]

    def _machine(self) -> dict[str, str]:
        """What ``coterie info`` prints, by the first word of each line."""
        text = subprocess.run([self.program, "info"], check=True, capture_output=True, text=True).stdout
        facts = dict(line.split(maxsplit=1) for line in text.splitlines() if len(line.split()) > 1)
        kept = ("coterie", "commit", "compiler", "cuda", "cpu", "isa", "threads", "device")
        return {key: value for key, value in facts.items() if key in kept}

    def log(self, run: plans.Run) -> Path:
        """Commands and evaluations of a run; the trainer's own log is in the run's folder."""
        return self.folder / f"{run.name}.jsonl"

    def read_log(self, run: plans.Run) -> list[Line]:
        """The lines of the log; one that was cut off by an interruption is left out."""
        lines = []
        if self.log(run).exists():
            for text in self.log(run).read_text(encoding="utf-8").splitlines():
                try:
                    lines.append(json.loads(text))
                except json.JSONDecodeError:
                    continue
        return lines

    def write(self, run: plans.Run, line: Line) -> None:
        """Adds a line to the log, below a line that was cut off."""
        path = self.log(run)
        cut = path.exists() and not path.read_text(encoding="utf-8").endswith("\n")
        with path.open("a", encoding="utf-8") as file:
            file.write(("\n" if cut else "") + json.dumps(line) + "\n")

    def command(self, run: plans.Run, words: list[str]) -> Iterator[str]:
        """Runs the program, logs it, and gives its output line by line; a failure ends this program."""
        date = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        print("coterie " + shlex.join(words), flush=True)
        start = time.monotonic()
        with subprocess.Popen([self.program, *words], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            self._running.add(process)
            yield from process.stdout
            status = process.wait()
        self._running.discard(process)
        self.write(run, {"kind": "command", "command": ["coterie", *words], "date": date,
                         "status": status, "seconds": round(time.monotonic() - start, 2),
                         "jobs": self.jobs, "machine": self.machine})
        if status != 0:
            raise RunError(f"{run.name}: coterie {words[0]} ended with status {status}")

    def train(self, run: plans.Run) -> None:
        """Trains unless the run has finished."""
        folder = self.folder / run.name
        if (folder / "log.jsonl").exists():
            if _has_ended(folder):
                return
            words = ["train", "--out", str(folder), "--resume"]
        else:
            words = ["train", "--out", str(folder), "--device", self._place.device]
            words += self.data_words(run)
            for key, value in run.options.items():
                words += [f"--{key}", value.replace("{runs}", str(self.folder))]
        for line in self.command(run, words):
            print(f"  {run.name}: {line}", end="")

    def evaluate(self, run: plans.Run) -> None:
        """Evaluates with the attention of the run and with those that are not in the log yet."""
        done = {line["evaluation"] for line in self.read_log(run) if line["kind"] == "score"}
        missing = {label: spec for label, spec in run.evaluate.items() if label not in {*done, run.label}}
        if run.label in done and not missing:
            return
        words = ["eval", str(self.folder / run.name), "--split", self.split, "--json"]
        words += self.data_words(run)
        words += ["--device", self._place.device]
        words += ["--attention", *missing.values()] if missing else []
        labels = iter([run.label, *missing])  # the program begins with the trained attention
        for text in self.command(run, words):
            label = next(labels)
            line = json.loads(text)
            print(f"  {run.name}, {label}: {line['metric']:.4f}", flush=True)
            if label not in done:
                self.write(run, {**line, "kind": "score", "evaluation": label})

    def inspect(self, run: plans.Run) -> None:
        """How different the heads of each layer are, unless the log says it."""
        if not run.inspect or any(line["kind"] == "inspection" for line in self.read_log(run)):
            return
        words = ["inspect", str(self.folder / run.name), "--json", "--rows", "16", "--device", self._place.device]
        words += self.data_words(run)
        found = json.loads("".join(self.command(run, words)))
        self.write(run, {"kind": "inspection", "divergences": found["divergences"]})

    def draw(self, run: plans.Run) -> None:
        """Pictures of a trained model that are not in the log yet."""
        done = {line["name"] for line in self.read_log(run) if line["kind"] == "picture"}
        for name in run.pictures:
            if name in done:
                continue
            folder = self.folder / run.name
            path = folder / f"{name}.png"  # where the report looks for it
            if name == "samples":
                words = ["generate", str(folder), "--samples", "8", "--out", str(path)]
            else:
                words = ["inspect", str(folder), "--rows", "4", "--picture", str(path)]
                words += self.data_words(run)
            for _ in self.command(run, [*words, "--device", self._place.device]):
                pass
            self.write(run, {"kind": "picture", "name": name, "png": base64.b64encode(path.read_bytes()).decode()})

    def lines(self, run: plans.Run) -> Iterator[Line]:
        """All lines about a run, without paths of this machine."""
        facts = {"run": run.name, "family": run.family, "label": run.label, "seed": run.seed}
        own = self.folder / run.name / "log.jsonl"
        texts = own.read_text(encoding="utf-8").splitlines() if own.exists() else []
        for line in [json.loads(text) for text in texts] + self.read_log(run):
            yield {**facts, **_without_paths(line, self._names())}

    def _names(self) -> dict[str, str]:
        """What paths are called in packed logs, longest paths first."""
        names = {str(self.folder): "runs", str(self.folder.resolve()): "runs"}
        if self.data and self.data_name:
            names |= {self.data: self.data_name, str(Path(self.data).resolve()): self.data_name}
        names[str(plans.ROOT)] = "."
        return dict(sorted(names.items(), key=lambda item: -len(item[0])))


def _has_ended(folder: Path) -> bool:
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    last = json.loads(lines[-1]) if lines else {}
    return last.get("kind") == "end" and last.get("reason") != "interrupted"


def _without_paths(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _without_paths(part, names) for key, part in value.items()}
    if isinstance(value, list):
        return [_without_paths(part, names) for part in value]
    if isinstance(value, str):
        for path, name in names.items():
            value = value.replace(path, name)
    return value


def run_all(driver: Driver, runs: list[plans.Run]) -> None:
    """Trains and evaluates, some at a time. After a failure no more are started."""
    def work(run: plans.Run) -> None:
        driver.train(run)
        driver.evaluate(run)
        driver.inspect(run)
        driver.draw(run)

    with ThreadPoolExecutor(driver.jobs, initializer=driver.start_job) as pool:
        started = [pool.submit(work, run) for run in runs]
        try:
            for future in wait(started, return_when=FIRST_EXCEPTION).done:
                future.result()
        except SystemExit:  # interrupted: what runs saves a checkpoint
            driver.interrupt()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def pack(path: Path, lines: Iterator[Line]) -> None:
    """Writes lines as a compressed file; equal lines give equal bytes."""
    text = "".join(json.dumps(line, sort_keys=True) + "\n" for line in lines)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(text.encode(), preset=9))


def main() -> None:
    """Runs what is missing and packs the logs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", help="Name of a description in experiments/, such as near")
    parser.add_argument("--data", help="Folder with the text; the built-in text if not given")
    parser.add_argument("--device", default="cpu",
                        help="Device: cpu, cuda (all GPUs) or cuda:N (default: cpu)")
    parser.add_argument("--jobs", type=int, default=0,
                        help="Runs at a time; they share the GPUs, so times are not comparable if there "
                             "are more (default: one for each GPU)")
    parser.add_argument("--split", default="test", help="Held-out data of the evaluations")
    parser.add_argument("--family", action="append", help="Only this family of runs; repeatable")
    parser.add_argument("--out", default="runs", help="Folder for runs and logs (default: runs)")
    parser.add_argument("--program", default=str(plans.ROOT / "build/release/bin/coterie"),
                        help="The program coterie (default: that of the release build)")
    parser.add_argument("--plan", type=Path, help="Description, if it is not in experiments/")
    parser.add_argument("--logs", type=Path, default=plans.HERE / "logs",
                        help="Folder for the packed logs (default: experiments/logs)")
    parser.add_argument("--pack-only", action="store_true", help="Run nothing, pack the logs")
    arguments = parser.parse_args()
    try:
        plan = plans.load(arguments.plan or plans.HERE / f"{arguments.experiment}.toml")
    except plans.PlanError as error:
        sys.exit(f"run.py: {error}")
    for family in arguments.family or []:
        if family not in plan["family"]:
            sys.exit(f"run.py: expected one of {', '.join(plan['family'])}; got {family}")
    runs = plans.runs_of(plan)
    driver = Driver(arguments, plan)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # still packs the logs
    try:
        wanted = [run for run in runs if not arguments.family or run.family in arguments.family]
        if not arguments.pack_only:
            run_all(driver, wanted)
    except RunError as error:
        sys.exit(f"run.py: {error}")
    finally:
        pack(arguments.logs / f"{arguments.experiment}.jsonl.xz",
             (line for run in runs for line in driver.lines(run)))


if __name__ == "__main__":
    main()
