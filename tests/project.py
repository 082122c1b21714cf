# SPDX-License-Identifier: MIT
"""Checks the files that describe the project: versions agree, and YAML files are what their readers expect.

    python3 tests/project.py
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def found(path, pattern):
    """The first group of a pattern in a file."""
    match = re.search(pattern, (ROOT / path).read_text(encoding="utf-8"), re.M)
    return match[1] if match else None


def check_versions():
    """CMakeLists.txt has the version; files that cannot read it repeat it."""
    version = found("CMakeLists.txt", r"^project\(coterie VERSION ([0-9.]+)")
    for path, pattern in [("CITATION.cff", r"^version: (.+)$"), ("CHANGELOG.md", r"^## ([0-9.]+)")]:
        got = found(path, pattern)
        if got != version:
            yield f"{path} has version {got}; CMakeLists.txt has {version}"


def check_yaml():
    """Files for GitHub and for citations parse, and have the fields that are required there."""
    try:
        import yaml
    except ImportError:
        print("PyYAML is not installed: YAML files are not parsed")
        return
    required = {"CITATION.cff": {"cff-version", "message", "title", "authors", "version", "license"},
                ".github/workflows/ci.yml": {"name", "jobs"}}
    for path in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        if path.name != "config.yml":
            required[str(path.relative_to(ROOT))] = {"name", "description", "body"}
    for path, fields in required.items():
        content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
        missing = fields - set(content)
        if missing:
            yield f"{path} has no {', '.join(sorted(missing))}"
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]["tests"]["steps"]
    if not any(step.get("run") == ".ci/run" for step in steps):
        yield ".github/workflows/ci.yml does not run .ci/run"


def main():
    wrong = [*check_versions(), *check_yaml()]
    print("\n".join(wrong) or "the project's files agree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
