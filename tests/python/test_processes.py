# SPDX-License-Identifier: MIT
"""Concurrent callers: threads that release the GIL, forked processes, workers of data loaders."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from problems import IDS, SPECS, Problem, make_problem
from torch.utils.data import DataLoader, Dataset

import coterie

# A child that hangs must not hang the tests.
LIMIT_S = 60
CALL = """
import os, sys, threading
import torch, coterie
q, k, v = torch.randn(3, 2, 4, 300, 16, generator=torch.Generator().manual_seed(0))
def call():
    return coterie.attention(q, k, v, "i-clustered(clusters=8,topk=8)", seed=3)
def child(work):
    pid = os.fork()
    if pid == 0:
        work()
        sys.exit(0)
    status = os.waitpid(pid, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0, f"child ended with {status}"
coterie.set_threads(3)
expected = call()
"""


def _results(problem: Problem) -> list[torch.Tensor]:
    """Output and gradients."""
    own = problem.differentiable()
    out = own.run()
    inputs = [x for x in (own.q, own.k, own.v) if x is not None]
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


@pytest.mark.parametrize("threads", [1, 3])
def test_concurrent_calls_give_the_bits_of_sequential_ones(threads: int) -> None:
    """Eight Python threads, each with all mechanisms in its own order; forward and backward."""
    before = int(coterie.library.build_facts()["threads"])
    coterie.set_threads(threads)
    problems = [make_problem(spec, causal, N=65, padded=True) for spec, causal in SPECS]
    expected = [_results(problem) for problem in problems]
    callers = 8
    start, wrong = threading.Barrier(callers), []

    def call(first: int) -> None:
        start.wait()
        try:
            for i in range(2 * len(problems)):
                number = (first * 3 + i) % len(problems)
                found = _results(problems[number])
                if not all(map(torch.equal, found, expected[number])):
                    wrong.append(IDS[number])
        except Exception as error:
            wrong.append(repr(error))

    callers_list = [threading.Thread(target=call, args=(i,)) for i in range(callers)]
    for caller in callers_list:
        caller.start()
    for caller in callers_list:
        caller.join(LIMIT_S)
    coterie.set_threads(before)
    assert not any(caller.is_alive() for caller in callers_list)
    assert wrong == []


FORKS = {
    "a child that exits at once": "child(lambda: None)",
    "a child that calls": "child(lambda: check(call()))",
    "a child that calls, of a child that calls": "child(lambda: child(lambda: check(call())))",
    "two children": "child(lambda: check(call())); child(lambda: check(call()))",
    "a child that changes the threads": """
def work():
    coterie.set_threads(2)
    check(call())
child(work)
""",
    "a child forked while another thread calls": """
stop = threading.Event()
def loop():
    while not stop.is_set():
        call()
caller = threading.Thread(target=loop, daemon=True)
caller.start()
for _ in range(5):
    child(lambda: None)
stop.set()
caller.join()
""",
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("name", FORKS)
def test_forked_processes_end_and_compute(name: str) -> None:
    check = "def check(found):\n    assert torch.equal(found, expected)\n"
    parent = "\ncheck(call())\nprint('parent done')\n"
    program = CALL + check + FORKS[name] + parent
    run = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = run.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        os.killpg(run.pid, signal.SIGKILL)  # children too: they keep the pipe open
        pytest.fail(f"not finished after {LIMIT_S} s: {run.communicate()[0]}")
    assert run.returncode == 0, output
    assert output.endswith("parent done\n")


class _Attended(Dataset):
    """Rows that workers compute with attention."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        q = self.rows[index][None]
        return coterie.attention(q, q, q, "i-clustered(clusters=4,topk=4)", seed=index)[0]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader_compute(method: str) -> None:
    data = _Attended(torch.randn(6, 2, 40, 8))
    expected = torch.stack([data[i] for i in range(len(data))])  # the pool exists before the fork
    loader = DataLoader(
        data, batch_size=3, num_workers=2, multiprocessing_context=method, timeout=LIMIT_S
    )
    for _ in range(2):  # workers of the first round have ended
        assert torch.equal(torch.cat(list(loader)), expected)


def _attended(index: int) -> torch.Tensor:
    return _Attended(torch.full((8, 2, 40, 8), 0.5) * torch.arange(8).view(8, 1, 1, 1))[index]


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_processes_of_a_pool_compute(method: str) -> None:
    expected = [_attended(i) for i in range(8)]
    context = torch.multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        found = pool.map_async(_attended, range(8)).get(timeout=LIMIT_S)
        pool.close()
        pool.join()
    assert all(map(torch.equal, found, expected))
