#!/usr/bin/env python3
"""Runs every lint on small trees: a clean one passes, and each broken rule is found and named."""

import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parent.parent.parent / "scripts"

HEADER = """// Adds numbers: the smallest module that keeps every rule.
// Why: the tests of the lints need one.
#pragma once

namespace hypershard {

/// Adds two numbers.
int add(int a, int b);

}  // namespace hypershard
"""
SOURCE = """// Adds numbers.
#include "hypershard/core/add.h"

namespace hypershard {

int add(int a, int b) { return a + b; }

}  // namespace hypershard
"""
TEST = """// Checks add.
#include "hypershard/core/add.h"

#include <gtest/gtest.h>
"""
CMAKE = """hs_module(core SOURCES add.cpp PUBLIC_HEADERS add.h)
hs_test(unit.core SOURCES add_test.cpp DEPS core)
"""
CLEAN = {
    "hypershard/core/add.h": HEADER,
    "hypershard/core/add.cpp": SOURCE,
    "hypershard/core/add_test.cpp": TEST,
    "hypershard/core/CMakeLists.txt": CMAKE,
}


def run(lint, changes):
    """Runs one lint on the clean tree with `changes`; returns (exit code, output)."""
    with tempfile.TemporaryDirectory() as root:
        for name, text in {**CLEAN, **changes}.items():
            path = Path(root) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(
            [sys.executable, SCRIPTS / f"check_{lint}.py"], capture_output=True, text=True,
            check=False, env={**os.environ, "HS_LINT_ROOT": root})
        return done.returncode, done.stdout + done.stderr


class LintsTest(unittest.TestCase):
    def finds(self, lint, changes, fragment):
        code, output = run(lint, changes)
        self.assertEqual(code, 1, output)
        self.assertIn(fragment, output)

    def test_clean_tree_passes_every_lint(self):
        for lint in ("layers", "headers", "tests_listed", "doc_blocks", "errors"):
            code, output = run(lint, {})
            self.assertEqual(code, 0, f"{lint}: {output}")

    def test_include_of_a_higher_layer_is_found(self):
        self.finds("layers", {
            "hypershard/core/add.cpp": SOURCE + '#include "hypershard/layout/mesh.h"\n',
            "hypershard/layout/mesh.h": "// a\n// b\n#pragma once\n",
        }, "add.cpp:9: must not include \"hypershard/layout/mesh.h\"")

    def test_include_of_a_neighbour_layer_is_found(self):
        self.finds("layers", {
            "hypershard/model/gpt.h": '// a\n#include "hypershard/data/dataset.h"\n',
            "hypershard/data/dataset.h": "// a\n",
        }, "'model' is not above 'data'")

    def test_test_support_outside_tests_is_found(self):
        self.finds("layers", {
            "hypershard/comm/world.cpp": '// a\n#include "hypershard/testing/run_ranks.h"\n',
            "hypershard/testing/run_ranks.h": "// a\n",
        }, "only tests may include testing/")

    def test_torch_in_a_torch_free_module_is_found(self):
        self.finds("headers", {
            "hypershard/core/add.cpp": SOURCE + "#include <c10/core/Device.h>\n",
        }, "'core' is free of torch")

    def test_heavy_include_in_a_header_is_found(self):
        self.finds("headers", {
            "hypershard/comm/work.h": "// a\n#pragma once\n#include <ATen/ATen.h>\n",
            "hypershard/comm/CMakeLists.txt": "hs_module(comm PUBLIC_HEADERS work.h)\n",
        }, "work.h:3: <ATen/ATen.h>")

    def test_header_in_no_target_is_found(self):
        self.finds("headers", {"hypershard/core/lost.h": "// a\n#pragma once\n"},
                   "lost.h:1: is in no CMakeLists.txt")

    def test_test_in_no_target_is_found(self):
        self.finds("tests_listed", {"hypershard/core/lost_test.cpp": "// a\n"},
                   "lost_test.cpp:1: in no CMakeLists.txt: this test never runs")

    def test_commented_out_target_does_not_count(self):
        self.finds("tests_listed", {
            "hypershard/core/CMakeLists.txt": CMAKE.replace("hs_test", "# hs_test"),
        }, "add_test.cpp:1")

    def test_undocumented_function_is_found(self):
        self.finds("doc_blocks", {
            "hypershard/core/add.h": HEADER.replace("/// Adds two numbers.\n", ""),
        }, "undocumented function: int add(int a, int b);")

    def test_undocumented_public_member_is_found_and_private_is_not(self):
        text = HEADER.replace("int add(int a, int b);", """class Sum {
 public:
  /// Adds.
  void add(int a);

  void forget(int a);

 private:
  void hidden(int a);
};""")
        self.finds("doc_blocks", {"hypershard/core/add.h": text}, "void forget(int a);")
        self.assertNotIn("hidden", run("doc_blocks", {"hypershard/core/add.h": text})[1])

    def test_collective_without_errors_is_found(self):
        self.finds("doc_blocks", {
            "hypershard/core/add.h": HEADER.replace(
                "/// Adds two numbers.\n", "/// Adds two numbers.\n/// Collective: all ranks.\n"),
        }, "must also say 'Errors:'")

    def test_raw_throw_and_exit_are_found(self):
        self.finds("errors", {
            "hypershard/core/add.cpp": SOURCE.replace("return a + b;", "throw 1;"),
        }, "raw throw")
        self.finds("errors", {
            "hypershard/core/add.cpp": SOURCE.replace("return a + b;", "std::exit(a + b);"),
        }, "must not end the process")

    def test_checks_without_values_are_found(self):
        checks = 'HS_CHECK(a > 0, "add: a must be positive");\n' * 3
        checks += 'HS_CHECK_GT(a, 0, "add: a");\n' * 18
        self.finds("errors", {
            "hypershard/core/add.cpp": SOURCE.replace("return a + b;", checks),
        }, "86 % of 21 checks print a value")


if __name__ == "__main__":
    unittest.main()
