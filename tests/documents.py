# SPDX-License-Identifier: MIT
"""Runs the code in documents: README.md and docs/tutorials.

    PYTHONPATH=build/full/python python tests/documents.py PROGRAM [PAGE...]

Blocks marked python run one after the other, in one namespace per page. Lines of blocks marked sh that begin with
"coterie " run PROGRAM, in a folder per page.
"""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs" / "tutorials").glob("*.md"))]


def blocks(text):
    """(language, line, code) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S):
        yield match[1], text.count("\n", 0, match.start()) + 2, match[2]


def run_commands(code, program):
    for line in code.splitlines():
        words = shlex.split(line)
        if words[:1] != ["coterie"]:
            raise SystemExit(f"blocks marked sh have commands of coterie only; got: {line}")
        done = subprocess.run([program, *words[1:]], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{line}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def run_page(page, program):
    """The number of blocks that ran."""
    names, count = {"__name__": page}, 0
    for language, line, code in blocks((ROOT / page).read_text(encoding="utf-8")):
        if language == "python":
            exec(compile("\n" * (line - 1) + code, page, "exec"), names)
        elif language == "sh":
            run_commands(code, program)
        else:
            continue
        count += 1
    return count


def main():
    program = os.path.abspath(sys.argv[1])
    for page in sys.argv[2:] or PAGES:
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            count = run_page(page, program)
            os.chdir(ROOT)
        print(f"{page}: {count} blocks, {time.monotonic() - start:.1f} s", flush=True)


if __name__ == "__main__":
    main()
