#!/usr/bin/env python3
"""Checks that every C++ source is named in a CMakeLists.txt of its folder or one above it.

A test that is in no target never runs and never fails.
"""

import re
import sys

import source_tree as tree


def named_sources():
    named = set()
    for name in tree.files("CMakeLists.txt"):
        folder = (tree.ROOT / name).parent
        text = re.sub(r"#[^\n]*", "", tree.read(name))
        for word in re.findall(r"[\w./-]+\.(?:cpp|cu)\b", text):
            named.add((folder / word).resolve())
    return named


def main():
    report = tree.Report("check_tests_listed")
    named = named_sources()
    tests = 0
    for name in tree.files(".cpp", ".cu"):
        if name.startswith("cmake/"):
            continue
        tests += name.endswith("_test.cpp")
        if (tree.ROOT / name).resolve() not in named:
            kind = "test never runs" if name.endswith("_test.cpp") else "source is never compiled"
            report.add(name, 1, f"in no CMakeLists.txt: this {kind}")
    return report.finish(f"{tests} test files are all in a target")


if __name__ == "__main__":
    sys.exit(main())
