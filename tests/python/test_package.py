# SPDX-License-Identifier: MIT
"""The package itself: version, information, types, advice, threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from problems import make_problem

import coterie
from coterie.crossovers import MEASURED
from coterie.library import build_facts, spec_help


def test_info_says_what_is_installed() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "coterie.info"], capture_output=True, text=True, check=True
    )
    for text in (coterie.__version__, torch.__version__, "i-clustered", "CPU"):
        assert text in done.stdout


def test_the_package_is_typed(tmp_path: Path) -> None:
    package = Path(coterie.__file__).parent
    assert (package / "py.typed").exists()
    pytest.importorskip("mypy")
    settings = Path(__file__).parents[2] / "pyproject.toml"
    mypy = [sys.executable, "-m", "mypy", "--config-file", str(settings), "--cache-dir"]
    for what in (["-p", "coterie"], [str(Path(__file__).parent / "typed_use.py")]):
        done = subprocess.run([*mypy, str(tmp_path), *what], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_library_needs_no_python_and_no_path_of_torch() -> None:
    library = Path(coterie.__file__).parent / "libcoterie_ops.so"
    try:
        done = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("no readelf")
    assert "libtorch_cpu.so" in done.stdout
    assert "libpython" not in done.stdout
    assert "site-packages" not in done.stdout


def test_facts_and_help_have_what_info_shows() -> None:
    assert {"version", "compiler", "cuda_toolkit", "cpu", "threads"} <= build_facts().keys()
    for name in ("full", "local", "clustered", "routing", "cast"):
        assert name in spec_help()


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    problem = make_problem("i-clustered(clusters=3,topk=4)", N=70)
    before = int(build_facts()["threads"])
    results = []
    for count in (1, 3, before):
        coterie.set_threads(count)
        results.append(problem.run())
    assert torch.equal(results[0], results[1])
    with pytest.raises(ValueError, match="threads"):
        coterie.set_threads(0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_recommendations_are_specs_that_were_measured(
    positions: bool, causal: bool, device: str
) -> None:
    rows = [row for row in MEASURED if row[:3] == (device, causal, positions)]
    measured = {row[4] for row in rows if row[5] >= 1}
    found = [
        coterie.recommend(2**i, causal=causal, device=device, positions=positions)
        for i in range(21)
    ]
    for advice in found:
        assert advice.reason
        coterie.head_groups(advice.spec, 8, causal)
        assert advice.spec == "full" or advice.spec in measured
        assert advice.spec == "full" or ("near=" in advice.spec) == positions
    begins = [advice.spec != "full" for advice in found]
    assert begins == sorted(begins)  # full attention up to some length
    assert not begins[0]
    assert begins[-1] == bool(measured)


def test_heads_with_positions_are_recommended_near_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        ("cpu", False, False, 4096, "i-clustered(clusters=256)", 4.0, "here"),
        ("cpu", False, True, 4096, "i-clustered(clusters=256,near=32)", 3.0, "here"),
    ]
    monkeypatch.setattr("coterie.advice.MEASURED", rows)
    assert coterie.recommend(8192).spec == "i-clustered(clusters=256)"
    advice = coterie.recommend(8192, positions=True)
    assert advice.spec == "i-clustered(clusters=256,near=32)"
    assert "3.0 times as fast at 4096 tokens" in advice.reason
    assert coterie.recommend(2048, positions=True).spec == "full"
    causal = coterie.recommend(8192, positions=True, causal=True)
    assert causal.reason == "no causal spec with near keys was measured to be faster on cpu"


def test_recommendations_name_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="n: expected"):
        coterie.recommend(0)
    with pytest.raises(ValueError, match="device: expected"):
        coterie.recommend(10, device="tpu")
    assert coterie.recommend(10**6, device="cuda", head_dim=256).spec == "full"


def test_state_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="got 4 and 3"):
        coterie.init_state("full", 4, 8, num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim"):
        coterie.init_state("full", 4, 0)
    state = coterie.init_state("cast(clusters=3,size=4)", 4, 8)
    assert state.surrogates.shape == (4, 3, 8)
    groups = coterie.init_state("2*full+2*routing(clusters=3,window=4)", 4, 8, num_kv_heads=2)
    assert groups[1].centroids.shape == (1, 3, 8)


def test_the_package_needs_no_hosts() -> None:
    """Only torch is installed with it: coterie.hf says what it needs when it is used."""
    script = """
import sys
sys.modules["transformers"] = sys.modules["diffusers"] = None
import coterie, coterie.diffusers
try:
    coterie.hf
except ImportError as error:
    assert "transformers" in str(error), error
else:
    raise AssertionError
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
