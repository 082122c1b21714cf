# SPDX-License-Identifier: MIT
"""Several ranks of coterie train on this machine, by Gloo.

The losses of one process, checkpoints for any number of ranks, sequences split over ranks, bytes of
every collective, and what happens when a rank fails.

    python3 tests/train/ranks_test.py build/full/bin/coterie DataParallel [TORCHRUN]

Needs nothing but the standard library. Every wait has a limit.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable, Sequence
from pathlib import Path

_path = Path(__file__).parents[2] / "scripts/scaling"
_loader = importlib.machinery.SourceFileLoader("scaling", str(_path))
_spec = importlib.util.spec_from_loader("scaling", _loader)
assert _spec is not None
scaling = importlib.util.module_from_spec(_spec)
sys.modules["scaling"] = scaling  # dataclasses look there
_loader.exec_module(scaling)

PROGRAM = ""
TORCHRUN = ""
LIMIT = 300  # seconds for anything that must end

# Everything that has state. A batch of 6 is uneven on 4 ranks, and so is the last validation batch.
SMALL = (  # noqa: SIM905
    "--task recall --recall.causal --length 34 --recall.keys 8 --recall.pairs 8 --recall.queries 4 "
    "--attention 2*local(window=8)+2*routing(clusters=3,window=8) --model.dim 16 --model.heads 4 "
    "--train.batch 6 --train.log-every 1 --train.eval-every 4 --train.eval-batches 3 "
    "--train.final-batches 5 --checkpoint.every 4 --checkpoint.keep 100 --threads 1"
).split()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """Processes with their output in files, killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.started = folder, list[subprocess.Popen[bytes]]()

    def start(
        self,
        words: Sequence[str],
        variables: dict[str, str] | None = None,
        limit: Callable[[], None] | None = None,
    ) -> subprocess.Popen[bytes]:
        environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
        number = len(self.started)
        with open(self.folder / f"out{number}", "wb") as out:
            with open(self.folder / f"err{number}", "wb") as err:
                process = subprocess.Popen(
                    words,
                    env=environment | (variables or {}),
                    stdout=out,
                    stderr=err,
                    preexec_fn=limit,
                    start_new_session=True,
                )
        self.started.append(process)
        return process

    def ranks(
        self,
        count: int,
        words: Sequence[str],
        own: dict[int, Sequence[str]] | None = None,
        limit: dict[int, Callable[[], None]] | None = None,
    ) -> list[subprocess.Popen[bytes]]:
        """Ranks by plain variables; ``own`` has further arguments of some."""
        port = str(free_port())
        found = []
        for rank in range(count):
            variables = {
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
            }
            command = [PROGRAM, "train", *words, *(own or {}).get(rank, [])]
            found.append(self.start(command, variables, (limit or {}).get(rank)))
        return found

    def text(self, process: subprocess.Popen[bytes], kind: str = "err") -> str:
        return (self.folder / f"{kind}{self.started.index(process)}").read_text()

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class RankTest(unittest.TestCase):
    def setUp(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="coterie_ranks_"))
        self.processes = Processes(self.folder)

    def tearDown(self) -> None:
        self.processes.close()
        shutil.rmtree(self.folder)

    def wait(self, process: subprocess.Popen[bytes], status: int | None = 0) -> str:
        """Waits for the end; returns stderr."""
        try:
            found = process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self.fail(f"still running after {LIMIT} s: {self.processes.text(process)}")
        text = self.processes.text(process)
        if status is None:
            self.assertNotEqual(found, 0, text)
        else:
            self.assertEqual(found, status, text)
        return text

    def run_ranks(self, count: int, *words: str) -> str:
        """Runs to the end; returns the stderr of rank 0. A count of 1: no variables."""
        if count == 1:
            return self.wait(self.processes.start([PROGRAM, "train", *words]))
        ranks = self.processes.ranks(count, words)
        texts = [self.wait(rank) for rank in ranks]
        for other in ranks[1:]:
            self.assertEqual(self.processes.text(other, "out"), "")
            self.assertEqual(self.processes.text(other), "")
        return texts[0]

    def log(self, name: str, kind: str) -> list[dict[str, float]]:
        lines = (self.folder / name / "log.jsonl").read_text().splitlines()
        return [line for line in map(json.loads, lines) if line["kind"] == kind]

    def numbers(self, name: str) -> list[float]:
        """Losses, commitments, norms and validation scores."""
        keys = ("loss", "commitment", "grad_norm", "metric")
        lines = self.log(name, "step") + self.log(name, "eval") + self.log(name, "final")
        return [line[key] for line in lines for key in keys if key in line]

    def expect_close(self, name: str, other: str, bound: float) -> None:
        ours, theirs = self.numbers(name), self.numbers(other)
        self.assertEqual(len(ours), len(theirs))
        worst = max(abs(a - b) / max(abs(b), 1e-3) for a, b in zip(ours, theirs, strict=True))
        print(f"{name} against {other}: largest relative difference {worst:.2g}")
        self.assertLess(worst, bound, f"{name} {other}\n{ours}\n{theirs}")

    def state(self, name: str, step: int) -> str:
        file = self.folder / name / f"checkpoints/step-{step:08}/optimizer.safetensors"
        return hashlib.sha256(file.read_bytes()).hexdigest()

    def wait_for(self, path: str, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + LIMIT
        while not (self.folder / path).exists():
            self.assertIsNone(process.poll(), self.processes.text(process))
            self.assertLess(time.monotonic(), end, f"no {path}")
            time.sleep(0.02)


# Sums in another order differ in their last bits, and a few steps of training amplify that.
CLOSE = 2e-4


class DataParallel(RankTest):
    def test_ranks_reproduce_one_process_and_share_checkpoints(self) -> None:
        def options(name: str) -> list[str]:
            return [*SMALL, "--out", str(self.folder / name)]

        self.run_ranks(1, *options("one"), "--train.steps", "12")
        text = self.run_ranks(2, *options("two"), "--train.steps", "12")
        self.assertIn("2 ranks by gloo: 3 sequences of each batch on each", text)
        # Equal bits from run to run, and with a sharded optimiser.
        self.run_ranks(2, *options("sharded"), "--train.steps", "12", "--optimizer.shard")
        self.assertEqual(self.numbers("two"), self.numbers("sharded"))
        self.assertEqual(self.state("two", 12), self.state("sharded", 12))
        self.expect_close("two", "one", CLOSE)
        # Four ranks, then two, then one: as if it had been one run.
        text = self.run_ranks(4, *options("four"), "--train.steps", "8", "--optimizer.shard")
        self.assertIn("1 or 2 sequences of each batch", text)
        self.assertIn("optimiser state sharded", text)
        for name in ("to two", "to one"):
            shutil.copytree(self.folder / "four", self.folder / name)
        more = ["--train.steps", "12", "--resume"]
        self.run_ranks(2, "--out", str(self.folder / "to two"), *more)
        self.run_ranks(1, "--out", str(self.folder / "to one"), *more)
        self.expect_close("to two", "to one", CLOSE)
        self.assertEqual(len(self.log("to one", "step")), 12)
        # Loaded into shards or not, the state is the same.
        shutil.copytree(self.folder / "four", self.folder / "whole")
        self.run_ranks(2, "--out", str(self.folder / "whole"), *more, "--optimizer.shard", "false")
        self.assertEqual(self.state("whole", 12), self.state("to two", 12))
        # What docs/scaling.md says about bytes, exactly: causal routing shares queries and keys.
        layers = [scaling.Layer(4, 2, 4, centroids=2 * 3)] * 2
        parameters = self.log("two", "run")[0]["parameters"]
        step = {
            "gradients": 4 * parameters,
            "losses and centroids": scaling.statistics_bytes(layers, 4),
            "counts": 16,
            "votes": 4,
        }
        for name in ("two", "sharded"):
            traffic = self.log(name, "end")[0]["collectives"]
            for kind, size in step.items():
                self.assertEqual(traffic[kind], {"calls": 12, "bytes": 12 * size}, kind)
        # Rank 0 owns about half of the parameters and sends them after each step.
        sent = traffic["parameters"]["bytes"] / (12 * 4 * parameters)
        self.assertAlmostEqual(sent, 0.5, delta=0.1)


class ContextParallel(RankTest):
    def test_split_sequences_reproduce_whole_ones(self) -> None:
        options = [
            *SMALL,
            "--length",
            "34",
            "--train.steps",
            "6",
            "--train.centroids",
            "random",
            "--attention-at",
            "1",
            "4*full(positions=relative)",
            "--model.positions",
            "learned",
        ]
        self.run_ranks(1, *options, "--out", str(self.folder / "one"))
        split = ["--train.context", "2"]
        text = self.run_ranks(2, *options, *split, "--out", str(self.folder / "two"))
        self.assertIn("each of 1 groups of 2, which split sequences and heads", text)
        self.expect_close("two", "one", CLOSE)
        four = [*split, "--model.recompute", "--optimizer.shard"]
        self.run_ranks(4, *options, *four, "--out", str(self.folder / "four"))
        self.expect_close("four", "one", CLOSE)
        # The bytes of docs/scaling.md: 6 steps, and 3 + 3 + 5 validation batches forward only.
        layers = [scaling.Layer(4, 2, 4), scaling.Layer(4, 4, 4)]

        def sent(rows: int, passes: str) -> int:
            size: int = scaling.exchange_bytes(layers, 4, rows, 34, 2, 4, passes)
            return size

        counted = self.log("two", "end")[0]["collectives"]["sequences"]["bytes"]
        self.assertEqual(counted, 6 * sent(6, "fb") + 11 * sent(6, "f"))
        # Two groups: three rows each, and validation batches 0, 2, ... on the first.
        counted = self.log("four", "end")[0]["collectives"]["sequences"]["bytes"]
        self.assertEqual(counted, 6 * sent(3, "ffb") + (2 + 2 + 3) * sent(6, "f"))

    def test_every_mechanism_chooses_as_in_one_process(self) -> None:
        """Random starts, hashes and dropout go by the numbers of all rows and heads."""
        layers = [
            "2*clustered(clusters=5)+2*clustered(clusters=5,clustering=hamming)",
            "4*i-clustered(clusters=4,topk=6,near=4)",
            "2*lsh(rounds=2,chunk=8,buckets=4)+2*i-clustered(clusters=4,topk=6)",
            "2*cast(clusters=4,size=10)+2*full",
            "2*cast(clusters=4,size=10,mode=single)+2*cast(clusters=3,size=9,heads=separate)",
            "2*routing(clusters=3,window=8)+2*oracle-top(topk=5)",
        ]
        options = [*SMALL, "--recall.causal", "false", "--model.attention-dropout", "0.2"]
        # Without positions equal tokens have equal rows, and rounding would decide such ties.
        options += ["--model.positions", "learned"]
        # Without the large epsilon Adam would make steps of the noise in gradients that are 0.
        options += ["--optimizer.eps", "0.1", "--optimizer.lr", "0.1"]
        options += ["--train.steps", "4", "--model.layers", str(len(layers))]
        for number, spec in enumerate(layers):
            options += ["--attention-at", str(number), spec]
        self.run_ranks(1, *options, "--out", str(self.folder / "one"))
        self.run_ranks(2, *options, "--out", str(self.folder / "data"))
        split = ["--train.context", "2"]
        self.run_ranks(2, *options, *split, "--out", str(self.folder / "context"))
        micro = ["--train.micro-batch", "2", "--model.recompute"]
        self.run_ranks(4, *options, *split, *micro, "--out", str(self.folder / "both"))
        for name in ("data", "context", "both"):
            self.expect_close(name, "one", CLOSE)
        sizes = [
            scaling.Layer(4, 4, 4),
            scaling.Layer(4, 4, 4),
            scaling.Layer(4, 2, 4),  # lsh has no keys
            scaling.Layer(4, 4, 4, gates=1, together=4),
            scaling.Layer(4, 4, 4, gates=2, together=4),
            scaling.Layer(4, 4, 4),
        ]

        def sent(passes: str) -> int:
            size: int = scaling.exchange_bytes(sizes, 4, 6, 34, 2, 4, passes)
            return size

        counted = self.log("context", "end")[0]["collectives"]["sequences"]["bytes"]
        # The first pass, for centroids, has a forward pass only.
        self.assertEqual(counted, 4 * sent("fb") + (1 + 3 + 5) * sent("f"))

    def test_heads_that_do_not_divide_are_refused(self) -> None:
        words = [
            *SMALL,
            "--train.context",
            "2",
            "--out",
            str(self.folder / "odd"),
            "--attention",
            "1*local(window=8)+3*full",
        ]
        for rank in self.processes.ranks(2, words):
            text = self.wait(rank, None)
            self.assertIn("has 1 query and 1 key/value heads", text)

    def used_by_a_small_run(self) -> int:
        """Private memory of a process, in bytes: torch's libraries take most of it."""
        words = [*SMALL, "--train.steps", "20", "--out", str(self.folder / "small")]
        one = self.processes.start([PROGRAM, "train", *words])
        most = 0
        while one.poll() is None:
            try:
                status = Path(f"/proc/{one.pid}/status").read_text()
            except OSError:
                break
            for line in status.splitlines():
                if line.startswith("VmData:"):
                    most = max(most, int(line.split()[1]) << 10)
            time.sleep(0.01)
        self.wait(one)
        return most

    def test_a_sequence_too_long_for_one_rank_trains_on_four(self) -> None:
        """One sequence needs more than a process may have, the slice of each of four does not."""
        more = 550 << 20  # bytes of private memory beyond that of a small run
        limit = self.used_by_a_small_run() + more

        def enforce() -> None:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

        words = (  # noqa: SIM905
            "--task copy --length 65536 --copy.symbols 4 --attention local(window=16) "
            "--model.dim 64 --model.layers 2 --model.heads 4 --train.batch 1 --train.steps 1 "
            "--train.eval-batches 1 --train.final-batches 1 --threads 1"
        ).split()
        alone = self.processes.start(
            [PROGRAM, "train", *words, "--out", str(self.folder / "alone")], limit=enforce
        )
        self.assertIn("not enough memory", self.wait(alone, None))
        together = [*words, "--train.context", "4", "--out", str(self.folder / "four")]
        ranks = self.processes.ranks(4, together, limit=dict.fromkeys(range(4), enforce))
        for rank in ranks:
            self.wait(rank)
        peak = self.log("four", "end")[0]["peak_memory_bytes"]
        print(f"65536 tokens on 4 ranks of {more >> 20} MiB each: peak {peak / 2**20:.0f} MiB")


class Faults(RankTest):
    def endless(self, name: str, *more: str) -> list[str]:
        return [
            *SMALL,
            "--train.steps",
            "1000000",
            "--schedule.decay",
            "constant",
            "--train.eval-every",
            "0",
            "--timeout",
            "60",
            "--out",
            str(self.folder / name),
            *more,
        ]

    def test_a_killed_rank_ends_the_others_with_a_message(self) -> None:
        first, second = self.processes.ranks(2, self.endless("killed"))
        self.wait_for("killed/checkpoints/step-00000004", first)
        second.kill()
        self.assertIn("lost another rank", self.wait(first, 1))
        self.wait(second, -signal.SIGKILL)
        # The rank that wrote them is gone, its checkpoints are not.
        last = max((self.folder / "killed/checkpoints").glob("step-*")).name
        done = int(last.removeprefix("step-"))
        self.run_ranks(
            1,
            "--out",
            str(self.folder / "killed"),
            "--resume",
            "--train.steps",
            str(done + 2),
            "--train.final-batches",
            "1",
        )
        self.assertEqual(len(self.log("killed", "step")), done + 2)

    def test_a_rank_that_hangs_is_given_up(self) -> None:
        words = self.endless("hangs", "--timeout", "20")
        first, second = self.processes.ranks(2, words)
        self.wait_for("hangs/checkpoints/step-00000004", first)
        second.send_signal(signal.SIGSTOP)
        text = self.wait(first, 1)
        self.assertIn("did not answer within 20 s", text)

    def test_a_full_disk_of_the_writer_ends_all(self) -> None:
        def full() -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 9, 24 << 9))

        first, second = self.processes.ranks(2, self.endless("full"), limit={0: full})
        text = self.wait(first, 1)
        self.assertIn("cannot write", text)
        self.assertIn("(rank 0 of 2)", text)
        text = self.wait(second, 1)
        self.assertIn("stopped because of rank 0", text)
        self.assertIn("cannot write", text)
        self.assertEqual(list((self.folder / "full/checkpoints").glob("*")), [])

    def test_ranks_with_other_options_are_refused(self) -> None:
        own = {1: ["--model.dim", "32"]}
        first, second = self.processes.ranks(2, self.endless("other"), own)
        self.assertIn("--model.dim is 32 instead of 16", self.wait(second, 2))
        self.assertIn("stopped because of rank 1", self.wait(first, 1))

    def test_sigterm_saves_once(self) -> None:
        first, second = self.processes.ranks(2, self.endless("term"))
        self.wait_for("term/checkpoints/step-00000004", first)
        for rank in (second, first, second, first):
            rank.send_signal(signal.SIGTERM)
        text = self.wait(first, 143)
        self.wait(second, 143)
        self.assertEqual(text.count("finishing the step on all ranks"), 1)
        ends = self.log("term", "end")
        self.assertEqual([line["reason"] for line in ends], ["interrupted"])
        name = f"step-{int(ends[0]['step']):08}"
        self.assertTrue((self.folder / "term/checkpoints" / name).exists())
        self.assertIn("continue with: coterie train", self.processes.text(first, "out"))

    def test_variables_that_make_no_sense(self) -> None:
        for variables, part in (
            ({"RANK": "0"}, "WORLD_SIZE is not set"),
            ({"RANK": "2", "WORLD_SIZE": "2"}, 'expected RANK from 0 to 1; got "2"'),
        ):
            one = self.processes.start([PROGRAM, "train", *SMALL], variables)
            self.assertIn(part, self.wait(one, 2))
        one = self.processes.start([PROGRAM, "train", *SMALL, "--train.context", "2"])
        self.assertIn("got one process", self.wait(one, 2))


class Torchrun(RankTest):
    def test_processes_and_restart(self) -> None:
        words = [*SMALL, "--train.steps", "8", "--out", str(self.folder / "local")]
        one = self.processes.start([PROGRAM, "train", "--processes", "2", *words])
        self.assertIn("2 ranks by gloo", self.wait(one))
        self.assertIn("8 of 8 steps", self.processes.text(one, "out"))
        # A rank that is killed: the run continues from its last checkpoint.
        out = self.folder / "again"
        words = [*SMALL, "--train.steps", "400", "--train.eval-every", "0", "--out", str(out)]
        agent = self.processes.start(
            [
                TORCHRUN,
                "--standalone",
                "--nproc-per-node",
                "2",
                "--max-restarts",
                "1",
                "--no-python",
                PROGRAM,
                "train",
                *words,
            ],
            {"OMP_NUM_THREADS": "1"},
        )
        self.wait_for("again/checkpoints/step-00000008", agent)
        os.kill(self.child_of(agent), signal.SIGKILL)
        self.wait(agent)
        self.assertEqual([line["step"] for line in self.log("again", "step")], list(range(1, 401)))
        resumed = self.log("again", "resume")
        self.assertEqual(len(resumed), 1)
        self.assertGreaterEqual(resumed[0]["step"], 8)

    def child_of(self, agent: subprocess.Popen[bytes]) -> int:
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                fields = (folder / "stat").read_text().rsplit(")", 1)[1].split()
                command = (folder / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if int(fields[1]) == agent.pid and command[0].decode() == PROGRAM:
                return int(folder.name)
        self.fail("no worker")

    def test_two_agents_stand_for_two_nodes(self) -> None:
        """The job file of the examples, twice, one rank each."""
        script = Path(__file__).parents[2] / "examples/torchrun.sh"
        folders = [str(Path(PROGRAM).parent), str(Path(TORCHRUN).parent), os.environ["PATH"]]
        variables = {
            "OMP_NUM_THREADS": "1",
            "PATH": ":".join(folders),
            "NODES": "2",
            "RANKS": "1",
            "DEVICE": "cpu",
            "FIRST": "127.0.0.1",
            "PORT": str(free_port()),
            "TORCHRUN_OPTIONS": "--local-addr 127.0.0.1",
            "OUT": str(self.folder / "nodes"),
        }
        words = ["sh", str(script), *SMALL, "--train.steps", "4"]
        agents = [self.processes.start(words, variables) for _ in range(2)]
        for agent in agents:
            self.wait(agent)
        self.assertEqual(len(self.log("nodes", "step")), 4)
        self.assertEqual(self.log("nodes", "run")[0]["ranks"]["size"], 2)


if __name__ == "__main__":
    PROGRAM, name, TORCHRUN = os.path.abspath(sys.argv[1]), sys.argv[2], ([*sys.argv, ""])[3]
    unittest.main(argv=[sys.argv[0], "-v", *name.split()])
