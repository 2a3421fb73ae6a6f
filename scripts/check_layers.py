#!/usr/bin/env python3
"""Checks the layer order on the #include lines: a module includes only what is below it.

core -> layout -> {sim, comm, quant} -> dtensor -> nn -> shard -> {plan, optim} -> checkpoint
-> {model, data} -> train -> tools. `testing` may include up to dtensor, and only tests include it.
Modules in one pair of braces do not include each other.
"""

import sys

import source_tree as tree


def allowed(user, used, test):
    """Returns None when `user` may include `used`, else the reason why not."""
    if user == used:
        return None
    if used == "testing":
        return None if test else "only tests may include testing/"
    used_layer = tree.layer_of(used)
    if used_layer is None:
        return f"'{used}' is no module of the layer order (scripts/source_tree.py lists it)"
    if user == "testing":
        highest = tree.layer_of("dtensor")
        return None if used_layer <= highest else "testing/ may include up to dtensor/"
    if user is None:  # tools, tests, examples, benchmarks
        return None
    if used_layer < tree.layer_of(user):
        return None
    return f"'{user}' is not above '{used}' in the layer order"


def main():
    report = tree.Report("check_layers")
    names = tree.cpp_files()
    test_headers = tree.test_headers()
    count = 0
    for name in names:
        user = tree.module_of(name)
        if user and user != "testing" and tree.layer_of(user) is None:
            report.add(name, 1, f"'{user}' is no module of the layer order")
            continue
        for line, path, quoted in tree.includes(tree.read(name)):
            used = tree.module_of(path)
            if used is None:
                if quoted and not name.startswith(("tools/", "examples/", "tests/", "benchmarks/")):
                    report.add(name, line, f'"{path}": write the path from the root, '
                                           '"hypershard/<module>/<file>.h"')
                continue
            count += 1
            if not quoted:
                report.add(name, line, f"<{path}>: our own headers go in quotes")
            if not (tree.ROOT / path).is_file():
                report.add(name, line, f'"{path}" does not exist')
            reason = allowed(user, used, tree.is_test(name) or name in test_headers)
            if reason:
                report.add(name, line, f'must not include "{path}": {reason}')
    return report.finish(f"{count} includes in {len(names)} files keep the layer order")


if __name__ == "__main__":
    sys.exit(main())
