# SPDX-License-Identifier: MIT
"""Reads the description of an experiment (experiments/NAME.toml) and lists its runs.

A description has options of ``coterie train`` for all runs and families of runs. A family has options
and seeds, attentions by label (one run per label and seed), and attentions with which every trained
model is evaluated in addition to its own ("all": with those of the family). An attention is a spec, or a table with
``spec``, ``options`` of its runs, and ``pictures`` that are drawn from its models: "samples" of one of images, "clusters"
of held-out images. ``{runs}`` in an option is the folder of the experiment's runs: ``"{runs}/FAMILY-LABEL-SEED"``, for
``init-from``, names one that was trained before, by ``--family``. ``lengths`` makes it several
families, NAME-LENGTH, that differ in their length. ``file`` names its data in the folder of ``--data``; ""
if it needs none. With ``inspect`` the heads of every trained model are compared with each other.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
FAMILY_KEYS = {"seeds", "options", "attention", "evaluate", "inspect", "file", "lengths"}
ATTENTION_KEYS = {"spec", "options", "pictures"}
PICTURES = {"samples", "clusters"}
KEYS = {"title", "data", "text", "options", "family", "section", "target", "file"}


class Run(NamedTuple):
    """One training run and what its model is evaluated with."""

    name: str  # also its folder
    family: str
    label: str
    seed: int
    options: dict[str, str]  # of coterie train, without --data, --device and --out
    evaluate: dict[str, str]  # spec by label
    inspect: bool = False
    pictures: tuple[str, ...] = ()
    file: str | None = None  # in the folder of --data; "": no data; None: --data itself


class PlanError(Exception):
    """A mistake in a description."""


def slug(text: str) -> str:
    """A folder name: "i-clustered, near 32" -> "i-clustered-near-32"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _check_keys(where: str, found: dict[str, Any], known: set[str]) -> None:
    for key in found:
        if key not in known:
            raise PlanError(f"{where}: expected one of {', '.join(sorted(known))}; got {key}")


def of_length(name: str, length: int) -> str:
    """The family of one of the lengths of a family."""
    return f"{name}-{length}"


def _one_family_per_length(families: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, family in families.items():
        if "lengths" not in family:
            found[name] = family
        for length in family.get("lengths", []):
            options = {**family.get("options", {}), "length": length}
            found[of_length(name, length)] = {**family, "options": options}
    return found


def load(path: Path) -> dict[str, Any]:
    """The description in a file, checked; families of several lengths are in "lengths" by name, and apart in "family"."""
    try:
        plan = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"{path.name}: {error}") from error
    _check_keys(path.name, plan, KEYS)
    for key in ("title", "family"):
        if key not in plan:
            raise PlanError(f"{path.name}: {key} is missing")
    for name, family in plan["family"].items():
        _check_keys(f"{path.name}: family.{name}", family, FAMILY_KEYS)
        if not family.get("attention"):
            raise PlanError(f"{path.name}: family.{name} has no attention")
        for label, value in family["attention"].items():
            run = {"spec": value} if isinstance(value, str) else value
            where = f"{path.name}: family.{name}: {label}"
            _check_keys(where, run, ATTENTION_KEYS)
            _check_keys(f"{where}: pictures", dict.fromkeys(run.get("pictures", [])), PICTURES)
            family["attention"][label] = run["spec"]
            family.setdefault("of_label", {})[label] = run
        if family.get("evaluate") == "all":
            family["evaluate"] = dict(family["attention"])
    plan["lengths"] = {name: family["lengths"] for name, family in plan["family"].items() if "lengths" in family}
    plan["family"] = _one_family_per_length(plan["family"])
    for part in plan.get("section", []) + plan.get("target", []):
        known = plan["lengths"] if part.get("kind") == "map" else plan["family"]
        if part.get("family") not in known:
            raise PlanError(f"{path.name}: expected one of {', '.join(known)}; got {part.get('family')}")
    return plan


def runs_of(plan: dict[str, Any]) -> list[Run]:
    """All runs, in the order of the description."""
    runs = []
    for name, family in plan["family"].items():
        for seed in family.get("seeds", [1]):
            for label, spec in family["attention"].items():
                table = family["of_label"][label]
                options = {**plan.get("options", {}), **family.get("options", {}), **table.get("options", {})}
                texts = {key: str(value).lower() if isinstance(value, bool) else str(value)
                         for key, value in options.items()}
                own = {**texts, "attention": spec, "seed": str(seed)}
                runs.append(Run(f"{name}-{slug(label)}-{seed}", name, label, seed, own,
                                dict(family.get("evaluate", {})), family.get("inspect", False),
                                tuple(table.get("pictures", [])), family.get("file", plan.get("file"))))
    return runs
