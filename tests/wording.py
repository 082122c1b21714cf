# SPDX-License-Identifier: MIT
"""Keeps phrasings that readers stumble over out of help texts and error messages.

Scans the string literals of C++, CUDA and Python sources: python3 tests/wording.py [FOLDER...]
Adjacent literals count as one. Comments and docstrings are not scanned.
"""
import ast
import pathlib
import re
import sys

FOLDERS = "src torch python formats fuzz train report apps bench".split()

# (regular expression, what to write instead)
BANNED = [
    (r"\bfor (it|they|there|this|these|those) (is|are|has|have|was|were|needs?)\b", '"because"'),
    (r", for (it|its|they|their|we|you|there)\b", '"because", or a new sentence'),
    (r"(^|[.;:!?] |\n)Of [a-z]", 'the subject first: "Random seed of clusters"'),
    (r"\b(has|have) no use (of|for)\b", '"X is only used by Y"'),
    (r"\bderivatives? of (the )?(first|second) order\b", '"double backward is not supported"'),
    (r"\b(must|should) be there\b|\b(is|are) not there\b", '"X is required" or "X is missing"'),
    (r"[a-z,] beside\b", '"next to", "in addition to" or "compared with"'),
    (r"\bof (its|their) own\b|\bby (itself|themselves)\b", '"own", "separate" or "alone"'),
    (r"\bwhom\b|\bwhatever\b", "what is meant"),
    (r"\bof such\b", '"of these", or the noun again'),
    (r"\bmeets?\b|\bon (its|their) way\b", '"attends to", "computes" or "in flight"'),
    (r"\bstands? (in|for|on|at|where)\b", '"is in" or "means"'),
    (r"\bgot (it|them)( alone)?($|[.,;])", "the value that was given"),
    (r"\b(come|comes|came) to (its|their|an) end\b", '"finish"'),
    (r"\b(go|goes|went) on from\b|\b(is|was|were) broken off\b", '"resume" or "interrupted"'),
    (r"\b(is|are) no (JSON|number|integer|string|file|folder|list)\b", '"is not a ..."'),
    (r"\b(expected|with|has|have|no) room\b", '"at least N" or "too small"'),
    (r"\bnobody\b|\banybody\b|\bno use to\b", "what is affected"),
    (r"\ball there (is|are)\b", '"all"'),
    (r"\bPull of\b|\btakes from\b|\btells more\b", "the term of the field"),
]

# Comments, raw strings, strings and characters.
CPP = re.compile(
    r"(?P<comment>//[^\n]*|/\*.*?\*/)"
    r'|R"(?P<mark>[^(\s"]*)\((?P<raw>.*?)\)(?P=mark)"'
    r'|"(?P<plain>(?:[^"\\\n]|\\.)*)"'
    r"|(?<!\w)'(?:[^'\\\n]|\\.)+'",
    re.S,
)


def cpp_literals(text):
    """(line, value) of every literal; adjacent ones are joined."""
    start, value, end = 0, "", -1  # of the literal so far; end < 0: none
    for match in CPP.finditer(text):
        adjacent = end >= 0 and not text[end : match.start()].strip()
        if match["comment"] is not None:
            end = match.end() if adjacent else end
            continue
        if not adjacent:
            yield text.count("\n", 0, start) + 1, value
            start, value = match.start(), ""
        plain = match["plain"]
        if plain is None and match["raw"] is None:  # a character
            end = -1
            continue
        value += match["raw"] or (plain or "").replace("\\n", "\n").replace('\\"', '"')
        end = match.end()
    yield text.count("\n", 0, start) + 1, value


def python_literals(text):
    """(line, value) of every string except docstrings."""
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.lineno, node.value


def hits_in(path):
    text = path.read_text(encoding="utf-8")
    literals = python_literals(text) if path.suffix == ".py" else cpp_literals(text)
    for line, value in literals:
        for pattern, hint in BANNED:
            found = re.search(pattern, value)
            if found:
                yield line, found.group().strip(), hint


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    folders = sys.argv[1:] or FOLDERS
    wrong = []
    files = 0
    for folder in folders:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in (".h", ".cc", ".cu", ".cuh", ".py"):
                continue
            files += 1
            for line, found, hint in hits_in(path):
                wrong.append(f'{path.relative_to(root)}:{line}: "{found}"; write {hint}')
    if wrong:
        print("Phrasings to replace in help texts and messages:\n  " + "\n  ".join(wrong))
        return 1
    print(f"{files} files have none of {len(BANNED)} phrasings")
    return 0


if __name__ == "__main__":
    sys.exit(main())
