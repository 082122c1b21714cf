#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes docs/results.md and its plots from the packed logs of experiments.

    experiments/results.py           writes the files
    experiments/results.py --check   compares them with what is in the tree
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import approximate
import certificates
import plan as plans
import plot
import steps

Line = dict[str, Any]
Files = dict[str, str]  # text by path under docs/

HEAD = """# Results

Scores of trained models. `experiments/results.py` writes this page from the logs in `experiments/logs`, and a test checks
that it is up to date. `experiments/run.py` and `experiments/approximate.py` run them again. Speeds and errors of single calls are in
`docs/performance.md`.
"""


class Logs:
    """The lines of one experiment."""

    def __init__(self, path: Path) -> None:
        text = lzma.decompress(path.read_bytes()).decode()
        self.lines: list[Line] = [json.loads(line) for line in text.splitlines()]

    def of(self, kind: str, **wanted: Any) -> list[Line]:
        """Lines of a kind whose fields have the wanted values."""
        return [line for line in self.lines if line["kind"] == kind
                and all(line.get(key) == value for key, value in wanted.items())]


read = functools.cache(Logs)  # every file once


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def provenance(logs: Logs, family: str) -> str:
    """Machine, dates, commits and the command of the first run of a family."""
    commands = logs.of("command", family=family)
    machine = commands[0]["machine"]
    dates = sorted({line["date"][:10] for line in commands})
    commits = sorted({line["machine"]["commit"] for line in commands})
    train = next(line for line in commands if line["command"][1] == "train")
    on_cpu = "cpu" in train["command"]
    place = (machine["cpu"] if on_cpu else machine.get("device", machine["cpu"])).split(",")[0]
    words = [f'"{word}"' if any(c in word for c in "()* ") else word for word in train["command"]]
    facts = logs.of("run", family=family)[0]
    head = (f"{place}, torch {facts['machine']['torch']}, {' and '.join(dates)}, "
            f"commit {', '.join(commits)}; {facts['parameters']:,} parameters. "
            f"Seeds {', '.join(str(s) for s in sorted({r['seed'] for r in logs.of('run', family=family)}))}.")
    jobs = max(line.get("jobs", 1) for line in commands)
    if jobs > 1:
        head += f" {jobs} runs shared the machine: their times and memory compare roughly."
    return f"{head} The first run:\n\n```\n{' '.join(words)}\n```\n"


def percent(value: float, reference: float) -> str:
    """The relative difference: "+0.42 %"."""
    return f"{100 * (value / reference - 1):+.2f} %"


def strata_of(score: Line) -> list[str]:
    """Names of the parts of a score, by the first number in them: "distance 2-3" before "distance 16-31"."""
    def number(name: str) -> int:
        found = re.search(r"\d+", name)
        return int(found[0]) if found else 0

    return sorted(score["strata"], key=number)


def evaluations(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """One row per attention that a trained model was evaluated with: means of the seeds."""
    name = section["family"]
    family = plan["family"][name]
    own = next(iter(family["attention"]))
    first = logs.of("score", family=name, evaluation=own)[0]
    strata = strata_of(first)
    seeds = len(family.get("seeds", [1]))
    reference, rows = None, []
    for label, spec in {**family["attention"], **family["evaluate"]}.items():
        lines = logs.of("score", family=name, evaluation=label)
        scores = [line["metric"] for line in lines]
        mean = statistics.mean(scores)
        reference = reference or mean
        spread = [f"{min(scores):.4f} to {max(scores):.4f}"] if seeds > 1 else []
        parts = [f"{statistics.mean(line['strata'][part] for line in lines):.4f}" for part in strata]
        rows.append([label, f"{mean:.4f}", *spread, percent(mean, reference), *parts,
                     f"{statistics.mean(line['seconds'] for line in lines):.1f}", f"`{spec}`"])
    ranges = [f"range of {seeds} seeds"] if seeds > 1 else []
    return table(["attention", first["metric_name"], *ranges, f"against {own}", *strata, "seconds", "spec"], rows), {}


def step_ms(logs: Logs, family: str, label: str) -> float:
    """Milliseconds of a step: a tenth of the logged steps of all seeds were faster. Other work on the machine makes steps
    slower, so the fast ones compare."""
    found = []
    for run in logs.of("run", family=family, label=label):
        lines = logs.of("step", run=run["run"])
        found += [1000 * (after["seconds"] - before["seconds"]) / (after["step"] - before["step"])
                  for before, after in zip(lines, lines[1:]) if after["step"] > before["step"]]
    return sorted(found)[len(found) // 10]


def training(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """One row per attention that models were trained with, and plots over steps and time."""
    name = section["family"]
    family = plan["family"][name]
    scores = {label: [line["metric"] for line in logs.of("score", family=name, evaluation=label)]
              for label in family["attention"]}
    best = statistics.mean(next(iter(scores.values())))
    strata = strata_of(logs.of("score", family=name)[0])
    seeds = len(family.get("seeds", [1]))
    rows = []
    for label, spec in family["attention"].items():
        ends = logs.of("end", family=name, label=label)
        step = step_ms(logs, name, label)
        mean = statistics.mean(scores[label])
        lines = logs.of("score", family=name, evaluation=label)
        parts = [f"{statistics.mean(line['strata'][part] for line in lines):.4f}" for part in strata]
        peak = max(line["peak_memory_bytes"] for line in ends) / 2**20
        spread = [f"{min(scores[label]):.4f} to {max(scores[label]):.4f}"] if seeds > 1 else []
        rows.append([label, f"{mean:.4f}", *spread, percent(mean, best), *parts, f"{step:.1f}",
                     f"{step * ends[0]['step'] / 1000:.1f}", f"{peak:.0f}", f"`{spec}`"])
    metric = logs.of("score", family=name)[0]["metric_name"]
    head = ["attention", metric, *([f"range of {seeds} seeds"] if seeds > 1 else []),
            f"against {next(iter(scores))}", *strata, "ms per step", "seconds", "peak MiB", "spec"]
    pictures = {f"results/{name}-steps.svg": curves(logs, name, "step", "steps", metric),
                f"results/{name}-seconds.svg": curves(logs, name, "seconds", "seconds of training", metric)}
    links = "".join(f"![{Path(path).stem}]({path})\n" for path in pictures)
    return table(head, rows) + "\n" + links, pictures


def tradeoff(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """What training() writes, and scores against the time of a step."""
    text, files = training(plan, logs, section)
    name = section["family"]
    marks = []
    for label in plan["family"][name]["attention"]:
        scores = [line["metric"] for line in logs.of("score", family=name, evaluation=label)]
        marks.append(plot.Mark(label, step_ms(logs, name, label), statistics.mean(scores), min(scores), max(scores)))
    metric = logs.of("score", family=name)[0]["metric_name"]
    path = f"results/{name}-tradeoff.svg"
    files[path] = plot.scatter_plot(f"{metric} against the time of a training step", "ms per step", metric, marks)
    return text + f"![{name}-tradeoff]({path})\n", files


def pictures(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """What was drawn from the models of the first seed."""
    name = section["family"]
    files, rows = {}, []
    for label in plan["family"][name]["attention"]:
        for line in logs.of("picture", family=name, label=label)[:1]:
            path = f"results/{name}-{plans.slug(label)}-{line['name']}.svg"
            files[path] = plot.picture(line["png"])
            rows.append([label, f"![{line['name']}]({path})"])
    return table(["attention", "picture"], rows), files


def curves(logs: Logs, family: str, over: str, label: str, metric: str) -> str:
    """Validation scores of every run of a family over steps or seconds."""
    lines = []
    for run in logs.of("run", family=family):
        seconds = {line["step"]: line["seconds"] for line in logs.of("step", run=run["run"])}
        points = [(line["step"] if over == "step" else seconds[line["step"]], line["metric"])
                  for line in logs.of("eval", run=run["run"])]
        lines.append(plot.Curve(run["label"], points))
    ys = sorted(y for line in lines for _, y in line.points)
    # The first validations are far from the others.
    tenth = ys[int((0.1 if metric == "accuracy" else 0.9) * (len(ys) - 1))]
    bounds = (tenth, ys[-1]) if metric == "accuracy" else (ys[0], tenth)
    return plot.line_plot(f"{metric} over {label}", label, metric, lines, bounds)


def exchange(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """Models trained with one attention (a row), evaluated with another (a column): mean over the seeds."""
    name = section["family"]
    family = plan["family"][name]
    columns = list(family["evaluate"])
    rows = []
    for label in family["attention"]:
        scores = {column: [line["metric"] for line in logs.of("score", family=name, label=label, evaluation=column)]
                  for column in columns}
        own = [f"**{statistics.mean(found):.3f}**" if column == label else f"{statistics.mean(found):.3f}"
               for column, found in scores.items()]
        most = max(max(found) - min(found) for found in scores.values())
        rows.append([label, *own, f"{most:.3f}"])
    specs = ", ".join(f"{label}: `{spec}`" for label, spec in family["evaluate"].items())
    head = ["trained with", *[f"with {label}" for label in columns], "largest range of seeds"]
    return table(head, rows) + f"\n{specs}.\n", {}


def length_map(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """Scores by length and by the number after the comma of a label, as a table and as one heat map per name before it."""
    name = section["family"]
    lengths = plan["lengths"][name]
    families = [plans.of_length(name, length) for length in lengths]
    labels = list(plan["family"][families[0]]["attention"])
    scores = {(label, family): [line["metric"] for line in logs.of("score", family=family, label=label)]
              for label in labels for family in families}
    maps: dict[str, dict[str, list[float]]] = {}  # by name, then by number: a score per length
    rows = []
    for label in labels:
        found = [scores[label, family] for family in families]
        kind, _, number = label.partition(", ")
        if number:
            maps.setdefault(kind, {})[number] = [statistics.mean(own) for own in found]
        seconds = [statistics.median(line["seconds"] for line in logs.of("end", family=family, label=label))
                   for family in families]
        rows.append([label, *[f"{statistics.mean(own):.3f}" for own in found],
                     f"{max(max(own) - min(own) for own in found):.3f}", *[f"{value:.0f}" for value in seconds]])
    metric = logs.of("score", family=families[0])[0]["metric_name"]
    picture = f"results/{name}-map.svg"
    head = ["attention", *[f"{length} tokens" for length in lengths], "largest range of seeds",
            *[f"seconds, {length}" for length in lengths]]
    drawn = plot.heat_maps(metric, "tokens", [str(length) for length in lengths], maps)
    return table(head, rows) + f"\n![{name}-map]({picture})\n", {picture: drawn}


def divergence(plan: Line, logs: Logs, section: Line) -> tuple[str, Files]:
    """How different the heads of a layer are: mean and range over the seeds."""
    name = section["family"]
    found: dict[int, dict[str, list[float]]] = {}
    for line in logs.of("inspection", family=name):
        for pair in line["divergences"]:
            heads = " and ".join(part.partition("(")[0] for part in (pair["a"], pair["b"]))
            found.setdefault(pair["layer"], {}).setdefault(heads, []).append(pair["mean"])
    columns = list(dict.fromkeys(heads for pairs in found.values() for heads in pairs))
    cells = {(layer, heads): f"{statistics.mean(means):.3f} ({min(means):.3f} to {max(means):.3f})"
             for layer, pairs in found.items() for heads, means in pairs.items()}
    rows = [[str(layer), *[cells.get((layer, heads), "") for heads in columns]] for layer in sorted(found)]
    return table(["layer", *columns], rows), {}


KINDS = {"evaluations": evaluations, "training": training, "tradeoff": tradeoff, "pictures": pictures, "exchange": exchange, "map": length_map,
         "divergence": divergence}


def absolute(target: Line, logs: Logs) -> list[str]:
    """A number to reach: at least of an accuracy, at most of other metrics."""
    lines = logs.of("score", family=target["family"], evaluation=target["evaluation"])
    mean, higher = statistics.mean(line["metric"] for line in lines), lines[0]["metric_name"] == "accuracy"
    reached = mean >= target["value"] if higher else mean <= target["value"]
    bound = f"{lines[0]['metric_name']} of {target['value']:g} or {'more' if higher else 'less'}"
    return [f"{target['evaluation']}, {target['family']}", bound, f"{mean:.4f}", "yes" if reached else "**no**"]


def targets(plan: Line, logs: Logs) -> str:
    """The targets of a description, what was measured, and whether they were reached."""
    rows = []
    for target in plan.get("target", []):
        family = target["family"]
        if "value" in target:
            rows.append(absolute(target, logs))
            continue
        own = next(iter(plan["family"][family]["attention"]))
        scores = {line["evaluation"]: line["metric"] for line in logs.of("score", family=family)}
        found = scores[target["evaluation"]]
        reached = found / scores[own] - 1 <= target["at_most"]
        rows.append([target["evaluation"], f"within {100 * target['at_most']:g} % of {own}",
                     percent(found, scores[own]), "yes" if reached else "**no**"])
    return "\n" + table(["attention", "target", "measured", "reached"], rows) if rows else ""


def chapter(plan: Line, logs: Logs) -> tuple[str, Files]:
    """The text and the plots of one experiment."""
    text, pictures = f"\n## {plan['title']}\n\n{plan['text'].strip()}\n", {}
    for section in plan["section"]:
        body, more = KINDS[section["kind"]](plan, logs, section)
        pictures |= more
        text += f"\n### {section['title']}\n\n{section['text'].strip()}\n\n{body}\n"
        lengths = plan["lengths"].get(section["family"])
        text += provenance(logs, plans.of_length(section["family"], lengths[0]) if lengths else section["family"])
    text += targets(plan, logs)
    return text, pictures


def summary(logs: Path, descriptions: Path) -> str:
    """summary.md with the mean score of the seeds in place of every [[EXPERIMENT/FAMILY/EVALUATION]]."""
    template = descriptions / "summary.md"
    if not template.exists():
        return ""

    def score(match: re.Match[str]) -> str:
        experiment, family, evaluation = match[1].split("/")
        lines = read(logs / f"{experiment}.jsonl.xz").of("score", family=family, evaluation=evaluation)
        if not lines:
            sys.exit(f"results.py: summary.md: no score of {match[1]} in the logs")
        return f"{statistics.mean(line['metric'] for line in lines):.3f}"

    return "\n" + re.sub(r"\[\[(.*?)\]\]", score, template.read_text(encoding="utf-8"))


def results(logs: Path, descriptions: Path) -> Files:
    """All files under docs/."""
    page, files = HEAD + summary(logs, descriptions), {}
    for path in sorted(logs.glob("*.jsonl.xz")):
        if path.name == certificates.LOG.name:
            page += certificates.chapter(read(path).lines)
            continue
        if path.name == "approximate.jsonl.xz":
            text, pictures = approximate.chapter(read(path).lines)
            page += text
            files |= pictures
            continue
        plan = plans.load(descriptions / path.name.replace(".jsonl.xz", ".toml"))
        text, pictures = chapter(plan, read(path))
        page += text
        files |= pictures
    if (logs / steps.LOG.name).exists():
        page += steps.chapter([json.loads(line) for line in (logs / steps.LOG.name).read_text().splitlines()])
    return {"results.md": page, **files}


def main() -> None:
    """Writes or checks the files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="Write nothing; fail if files differ")
    parser.add_argument("--logs", type=Path, default=plans.HERE / "logs", help="Packed logs")
    parser.add_argument("--plans", type=Path, default=plans.HERE, help="Folder with descriptions")
    parser.add_argument("--docs", type=Path, default=plans.ROOT / "docs", help="Folder to write to")
    arguments = parser.parse_args()
    wrong = []
    for name, text in results(arguments.logs, arguments.plans).items():
        path = arguments.docs / name
        if not arguments.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            wrong.append(f"{name} is not what the logs say; run experiments/results.py")
    if wrong:
        sys.exit("results.py: " + "\nresults.py: ".join(wrong))


if __name__ == "__main__":
    main()
