#!/usr/bin/env python3
"""What the lints share: which files belong to the tree, and how a finding is reported.

Run as a program it prints the C++ files of the tree, one a line.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

# Tests of the lints point them at a tree of their own.
ROOT = Path(os.environ.get("HS_LINT_ROOT") or Path(__file__).resolve().parent.parent)
FOLDERS = ("hypershard", "tools", "tests", "examples", "benchmarks", "cmake")

# The layer order: a file includes only what stands in an earlier row (or in its own module).
LAYERS = (
    ("core",),
    ("layout",),
    ("sim", "comm", "quant"),
    ("dtensor",),
    ("nn",),
    ("shard",),
    ("plan", "optim"),
    ("checkpoint",),
    ("model", "data"),
    ("train",),
)
TORCH_FREE = ("core", "layout", "sim")


def files(*suffixes):
    """Returns the tree's files with one of the suffixes, relative to the root, sorted."""
    try:
        if not (ROOT / ".git").exists():
            raise OSError("no git history")
        listed = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard", "--", *FOLDERS],
            cwd=ROOT, check=True, capture_output=True, text=True,
        ).stdout.split("\n")
    except (OSError, subprocess.CalledProcessError):
        # A source archive has no git history; then everything in the folders counts.
        listed = [
            os.path.relpath(os.path.join(folder, name), ROOT)
            for top in FOLDERS
            for folder, _, names in os.walk(ROOT / top)
            for name in names
        ]
    found = sorted({name for name in listed if name.endswith(suffixes)})
    return [name for name in found if (ROOT / name).is_file()]


def cpp_files():
    return files(".h", ".cpp", ".cu")


def read(name):
    return (ROOT / name).read_text(encoding="utf-8")


def module_of(name):
    """Returns the module that a path (of a file or an include) belongs to, or None."""
    match = re.match(r"hypershard/([a-z0-9_]+)/", name)
    return match.group(1) if match else None


def layer_of(module):
    for index, layer in enumerate(LAYERS):
        if module in layer:
            return index
    return None


def is_test(name):
    return name.endswith(("_test.cpp", "_bench.cpp")) or name.startswith(("tests/", "benchmarks/"))


def includes(text):
    """Yields (line number, included path, whether it is in quotes)."""
    for number, line in enumerate(text.split("\n"), 1):
        match = re.match(r'\s*#\s*include\s*([<"])([^>"]+)[>"]', line)
        if match:
            yield number, match.group(2), match.group(1) == '"'


def blank_out(text, strings=True):
    """Replaces comments (and string contents) by spaces, so that offsets and lines stay."""
    pattern = re.compile(
        r'//[^\n]*|/\*.*?\*/|R"([^()\\ ]{0,16})\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'',
        re.S)

    def spaces(match):
        found = match.group(0)
        if found[0] in "\"'R":
            if not strings:
                return found
            quote = found[-1]
            inner = re.sub(r"[^\n]", " ", found[1:-1])
            return quote + inner + quote
        return re.sub(r"[^\n]", " ", found)

    # A digit separator (1'000) is not the start of a character.
    return pattern.sub(spaces, re.sub(r"(?<=[0-9a-fA-F])'(?=[0-9a-fA-F])", "_", text))


def test_headers():
    """Returns the headers that only tests include, which follow the rules of tests.

    A header counts when it is included at all, and by nothing but tests and other such headers.
    """
    users = {}
    for name in cpp_files():
        for _, path, _ in includes(read(name)):
            if path.startswith("hypershard/") and path.endswith(".h"):
                users.setdefault(path, set()).add(name)
    found, grew = set(), True
    while grew:
        grew = False
        for path, names in users.items():
            own_source = path[:-2] + ".cpp"
            if path in found or module_of(path) == "testing":
                continue
            named = {name for name in names if name != own_source}
            if named and all(is_test(name) or name in found for name in named) and \
                    path not in listed_headers():
                found.add(path)
                grew = True
    return found


_LISTED = {}


def listed_headers():
    """Returns {header: "PUBLIC_HEADERS" or "PRIVATE_HEADERS"} from the hs_module calls."""
    if not _LISTED:
        for name in files("CMakeLists.txt"):
            folder = os.path.dirname(name)
            text = re.sub(r"#[^\n]*", "", read(name))
            for call in re.findall(r"hs_module\s*\((.*?)\)", text, re.S):
                keyword = ""
                for word in call.split():
                    if re.fullmatch(r"[A-Z_]+", word):
                        keyword = word
                    elif word.endswith(".h"):
                        _LISTED[os.path.normpath(os.path.join(folder, word))] = keyword
    return _LISTED


class Report:
    """Collects findings and turns them into the lint's exit code."""

    def __init__(self, lint):
        self.lint = lint
        self.findings = []
        self.notes = []

    def add(self, name, line, text):
        self.findings.append(f"{name}:{line}: {text}")

    def note(self, name, line, text):
        self.notes.append(f"{name}:{line}: note: {text}")

    def finish(self, summary):
        for line in self.notes + self.findings:
            print(line)
        if self.findings:
            print(f"[{self.lint}] {len(self.findings)} findings", file=sys.stderr)
            return 1
        print(f"[{self.lint}] {summary}")
        return 0


if __name__ == "__main__":
    print("\n".join(cpp_files()))
