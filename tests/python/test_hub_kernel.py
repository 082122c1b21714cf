# SPDX-License-Identifier: MIT
"""The package as a kernel of the Hugging Face Hub: layout, rules, two builds in one process."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.library import NAMESPACE

SCRIPT = Path(__file__).parents[2] / "scripts" / "hub_kernel"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = os.environ.get("COTERIE_HUB_OPERATORS")
    if not library:
        pytest.skip("no second build of the operators")
    out = tmp_path_factory.mktemp("hub")
    command = [sys.executable, str(SCRIPT), "--out", str(out), "--library", library, "--local"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


def _load(variant: Path, name: str) -> Any:
    """As the library kernels does it: a path outside of sys.path, a unique name."""
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_kernel_runs_beside_the_package(folder: Path) -> None:
    (variant,) = (folder / "build").iterdir()
    assert variant.name.startswith("torch-stable-abi211-")
    kernel = _load(variant, "_coterie_test_build")
    assert kernel.library.NAMESPACE == "coterie_test_build" != NAMESPACE
    rows = [x.requires_grad_() for x in torch.randn(3, 1, 4, 50, 8)]
    spec = "i-clustered(clusters=4,topk=4)"
    results = [module.attention(*rows, spec) for module in (kernel, coterie)]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(out.square().sum(), rows) for out in results]
    assert all(map(torch.equal, *gradients))
    call = torch.compile(lambda *x: kernel.attention(*x, spec), fullgraph=True, backend="aot_eager")
    assert torch.equal(call(*rows), results[0])


READ = """
import sys
from pathlib import Path
from kernels import get_local_kernel
from kernels._rust import Build
folder = Path(sys.argv[1])
assert [str(b) for b in Build.open(folder).general.backends] == ["cpu"]
kernel = get_local_kernel(folder, backend="cpu", trust_remote_code=True)
assert kernel.library.NAMESPACE == "coterie_test_build"
"""


def test_the_library_kernels_reads_the_layout(folder: Path) -> None:
    pytest.importorskip("kernels")
    if not list(folder.glob("build/*-cpu-*")):
        pytest.skip("the build has CUDA kernels")
    done = subprocess.run([sys.executable, "-c", READ, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rules_are_checked(folder: Path, tmp_path: Path) -> None:
    loader = SourceFileLoader("hub_kernel", str(SCRIPT))
    spec = importlib.util.spec_from_loader("hub_kernel", loader)
    assert spec is not None
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    text = (
        "import math, numpy\nfrom . import ops\nfrom coterie.nn import Attention\nimport torch.nn"
    )
    assert script.imports_of(text) == ["line 1 imports numpy", "line 3 imports coterie.nn"]
    (variant,) = (folder / "build").iterdir()
    assert script.check(variant, "coterie_test_build", local=True) == []
    (wrong,) = script.check(variant, "coterie", local=True)
    assert "not unique" in wrong
    for wrong in script.check(variant, "coterie_test_build", local=False):
        assert "newer than manylinux_2_28" in wrong  # where the compiler's libraries are newer
    assert script.namespace().startswith("coterie_")
