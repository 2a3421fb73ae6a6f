#!/usr/bin/env python3
"""Checks the header policy: light includes, a target for every header, sizes, opening comments."""

import re
import sys

import source_tree as tree

# What no header may include, each with the reason. Order matters: the first match is reported.
FORBIDDEN = (
    (r"^torch/torch\.h$", "16 s a file; only examples may include it, and no header"),
    (r"^ATen/(ATen|Functions)\.h$|^ATen/ops/", "include it in the .cpp; a header needs "
                                               "<ATen/core/Tensor.h> or a forward declaration"),
    (r"^torch/csrc/distributed/|^gloo/|^nccl", "c10d stays behind comm/c10d's sources"),
    (r"^torch/", "torch's C++ front end costs 10 s a file; forward-declare"),
    (r"^(spdlog|fmt|nlohmann|toml\+\+|CLI|sentencepiece)", "third party stays in sources, so that "
                                                           "users need not have it"),
    (r"^(regex|iostream)$", "slow to compile, or a static object; include it in the .cpp"),
)
# Modules whose headers may use some of torch's front end, since their classes derive from it.
EXCEPTIONS = (
    (("nn", "shard", "plan", "model", "train"),
     r"^torch/(nn/(module|cloneable|pimpl)\.h|nn/modules/container/[a-z_]+\.h|ordered_dict\.h)$"),
    (("optim", "train"), r"^torch/optim/(optimizer|schedulers/[a-z_]+)\.h$"),
)
TORCH = r"^(torch|ATen|c10|caffe2)/"
HEADER_LINES, HEADER_LINES_HARD = 250, 400
SOURCE_LINES, SOURCE_LINES_HARD = 500, 800


def check_includes(report, name, text, for_tests):
    module = tree.module_of(name)
    header = name.endswith(".h") and not for_tests
    for line, path, quoted in tree.includes(text):
        if module in tree.TORCH_FREE and re.match(TORCH, path):
            report.add(name, line, f"<{path}>: '{module}' is free of torch")
        elif path == "torch/torch.h" and not name.startswith("examples/"):
            report.add(name, line, f"<{path}>: {FORBIDDEN[0][1]}")
        elif re.match(r"^(doctest|catch2)/", path):
            report.add(name, line, f"<{path}>: tests use GoogleTest")
        if not header or quoted or path == "torch/torch.h":
            continue
        if any(module in modules and re.match(allowed, path) for modules, allowed in EXCEPTIONS):
            continue
        for pattern, reason in FORBIDDEN:
            if re.match(pattern, path):
                report.add(name, line, f"<{path}>: {reason}")
                break
        if path.startswith(("gtest/", "gmock/", "benchmark/")) and module not in (None, "testing"):
            report.add(name, line, f"<{path}>: only testing/ may use it in a header")


def check_form(report, name, text):
    lines = text.split("\n")
    header = name.endswith(".h")
    if not re.match(r"//|/\*", lines[0]):
        report.add(name, 1, "must open with two lines of comment on why the file exists")
    if header:
        if not re.search(r"^#pragma once$", text, re.M):
            report.add(name, 1, "lacks #pragma once")
        for number, line in enumerate(tree.blank_out(text).split("\n"), 1):
            if re.match(r"\s*using\s+namespace\b", line):
                report.add(name, number, "using namespace in a header")
    soft, hard = (HEADER_LINES, HEADER_LINES_HARD) if header else (SOURCE_LINES, SOURCE_LINES_HARD)
    if len(lines) - 1 > hard:
        report.add(name, 1, f"{len(lines) - 1} lines (expected at most {soft}); split it")
    elif len(lines) - 1 > soft:
        report.note(name, 1, f"{len(lines) - 1} lines (expected at most {soft})")
    if re.search(r"(^|/|_)(utils?|helpers?|common|misc|manager)(_|\.|/)", name):
        report.add(name, 1, "forbidden word in a file name (utils, helpers, common, misc, manager)")


def owned_headers():
    """Returns the headers that some CMakeLists.txt names."""
    owned = set()
    for name in tree.files("CMakeLists.txt"):
        folder = (tree.ROOT / name).parent
        text = re.sub(r"#[^\n]*", "", tree.read(name))
        for word in re.findall(r"[\w./-]+\.h\b", text):
            owned.add((folder / word).resolve())
    return owned


def main():
    report = tree.Report("check_headers")
    names = tree.cpp_files()
    owned = owned_headers()
    test_headers = tree.test_headers()
    headers = 0
    for name in names:
        # Stand-ins for somebody else's headers follow that project's shape, not ours.
        if "/gloo_decl/" in name:
            continue
        text = tree.read(name)
        check_includes(report, name, text, name in test_headers)
        check_form(report, name, text)
        if name.endswith(".h") and tree.module_of(name):
            headers += 1
            if (tree.ROOT / name).resolve() not in owned and tree.module_of(name) != "testing":
                report.add(name, 1, "is in no CMakeLists.txt (PUBLIC_HEADERS or PRIVATE_HEADERS of "
                                    "hs_module, or SOURCES of hs_test)")
    return report.finish(f"{headers} headers keep the policy")


if __name__ == "__main__":
    sys.exit(main())
