#!/usr/bin/env python3
"""Checks how the library fails: messages with values, typed errors, no exit.

Counts the checks whose message holds no value: HS_CHECK(cond, "text") and the like. Comparison
forms print both operands and count as valued. Fails when fewer than 90 % are valued.

Usage: scripts/check_errors.py [--list]     --list prints every check without a value
"""

import re
import sys

import source_tree as tree

MESSAGE_MACROS = {"HS_CHECK": 1, "HS_SUPPORTED": 1, "HS_FAIL": 1, "HS_ASSERT": 1}
COMPARING = ("HS_CHECK_EQ", "HS_CHECK_NE", "HS_CHECK_LT", "HS_CHECK_LE", "HS_CHECK_GT",
             "HS_CHECK_GE")
VALUED_SHARE = 0.90
ENOUGH = 20  # below this many checks a share says nothing


def arguments_of(text, start):
    """Splits the arguments of the call whose opening bracket is at `start`."""
    depth, begin, parts, position = 0, start + 1, [], start
    while position < len(text):
        letter = text[position]
        if letter in "\"'":
            end = position + 1
            while end < len(text) and text[end] != letter:
                end += 2 if text[end] == "\\" else 1
            position = end
        elif letter in "([{":
            depth += 1
        elif letter in ")]}":
            depth -= 1
            if depth == 0:
                parts.append(text[begin:position])
                return [part.strip() for part in parts]
        elif letter == "," and depth == 1:
            parts.append(text[begin:position])
            begin = position + 1
        position += 1
    return []


def is_literal(part):
    return re.fullmatch(r'(?:"(?:\\.|[^"\\])*"\s*)+', part) is not None


def check_messages(report, name, text, unvalued):
    code = tree.blank_out(text, strings=False)
    total = 0
    for match in re.finditer(r"\b(HS_[A-Z_]+)\s*\(", code):
        macro = match.group(1)
        line_start = code.rfind("\n", 0, match.start()) + 1
        if code[line_start:match.start()].lstrip().startswith("#"):
            continue  # the definition itself
        line = code.count("\n", 0, match.start()) + 1
        if macro in COMPARING:
            total += 1
        elif macro in MESSAGE_MACROS:
            parts = arguments_of(code, match.end() - 1)
            words = parts[MESSAGE_MACROS[macro]:]
            if macro != "HS_ASSERT" and not words:
                report.add(name, line, f"{macro} without a message")
            if macro == "HS_ASSERT":
                continue  # our own invariants carry the expression and a stack
            total += 1
            if all(is_literal(part) for part in words):
                unvalued.append((name, line, macro))
    return total


def check_rules(report, name, text):
    code = tree.blank_out(text)
    for number, (line, original) in enumerate(zip(code.split("\n"), text.split("\n")), 1):
        if re.search(r"\bthrow\s+[^;]", line) and "raw-throw:" not in original:
            before = text.split("\n")[number - 2] if number > 1 else ""
            if "raw-throw:" not in before:
                report.add(name, number, "raw throw: use HS_CHECK or HS_FAIL, or say why in a "
                                         "'// raw-throw:' comment")
        ends = re.search(r"(?:\bstd::|(?<![\w.>:]))(?:_?exit|abort|quick_exit|terminate)\s*\(", line)
        if ends and "NOLINT" not in original and not re.search(r"\b(void|auto|bool)\s+\w+\(", line):
            report.add(name, number, "the library must not end the process")
        if re.search(r"\bstd::(cout|cerr)\b", line):
            report.add(name, number, "the library must not print; use the log")
        if re.search(r"catch\s*\(\s*\.\.\.\s*\)", line):
            tail = "\n".join(code.split("\n")[number - 1:number + 15])
            if not re.search(r"\bthrow\s*;|rethrow|current_exception", tail):
                report.add(name, number, "catch (...) that neither keeps nor rethrows the error")


def main():
    report = tree.Report("check_errors")
    unvalued, total = [], 0
    for name in tree.cpp_files():
        module = tree.module_of(name)
        if tree.is_test(name) or module in (None, "testing") or "/gloo_decl/" in name:
            continue
        text = tree.read(name)
        total += check_messages(report, name, text, unvalued)
        check_rules(report, name, text)
    share = 1.0 if total == 0 else 1.0 - len(unvalued) / total
    if "--list" in sys.argv[1:]:
        for name, line, macro in unvalued:
            print(f"{name}:{line}: {macro} without a value")
    if total >= ENOUGH and share < VALUED_SHARE:
        report.add("scripts/check_errors.py", 1,
                   f"{100 * share:.0f} % of {total} checks print a value (expected at least "
                   f"{100 * VALUED_SHARE:.0f} %); --list names the others")
    return report.finish(f"{100 * share:.0f} % of {total} checks print a value")


if __name__ == "__main__":
    sys.exit(main())
