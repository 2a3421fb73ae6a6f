"""docs/config.md, docs/environment.md and docs/operators.md say what the program says.

Run it with --write to bring them up to date.
"""

import os
import subprocess
import sys
import unittest

from program import PROGRAM

DOCS = os.path.join(
    os.environ.get("HS_SOURCE_DIR", os.path.join(os.path.dirname(__file__), "..", "..")), "docs")
TABLES = {"config.md": "config", "environment.md": "env", "operators.md": "operators"}


def current(table):
    made = subprocess.run([PROGRAM, "info", table, "--markdown"], capture_output=True, text=True,
                          timeout=60, check=True)
    return made.stdout


class DocsTest(unittest.TestCase):

    def test_tables_are_current(self):
        for name, table in TABLES.items():
            with open(os.path.join(DOCS, name), encoding="utf-8") as file:
                self.assertEqual(file.read(), current(table),
                                 f"docs/{name} is stale: python3 tests/e2e/docs_test.py --write")


if __name__ == "__main__":
    if "--write" in sys.argv:
        for file_name, table_name in TABLES.items():
            with open(os.path.join(DOCS, file_name), "w", encoding="utf-8") as out:
                out.write(current(table_name))
    else:
        unittest.main()
