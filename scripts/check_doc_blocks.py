#!/usr/bin/env python3
"""Checks that the public headers are documented.

Every class, struct, enum and function at namespace scope and every public member function of the
installed headers has a `///` line above it. Exempt: constructors, destructors, operators,
overrides, deleted and defaulted functions, getters (const, without parameters), members with a
body on the spot, questions (`is_x`, `has_x`), `to_text` overloads, types inside a class, headers
that only tests include, declarations that follow a documented one without a blank line (an overload
set), and functions that a block of the same header names in backquotes. A block that says
`Collective:` also says `Errors:`, unless a class's own block does.
"""

import re
import sys

import source_tree as tree

SKIP_KEYWORDS = ("using", "typedef", "friend", "static_assert", "extern", "template<>", "return",
                 "namespace", "public", "private", "protected")


def declarations(code):
    """Yields (offset, head, scope kinds) of every declaration; scopes are namespaces and classes.

    `head` is the text of the declaration up to its body or semicolon. Function bodies and
    initializers are skipped. A class scope is "public" or "hidden" by its current access.
    """
    scopes = []  # (kind, access): kind is namespace, class, or other
    position, begin = 0, 0
    brackets = 0
    while position < len(code):
        letter = code[position]
        if letter == "#" and code[code.rfind("\n", 0, position) + 1:position].strip() == "":
            end = position
            while True:
                end = code.find("\n", end)
                if end < 0:
                    return
                if code[end - 1] != "\\":
                    break
                end += 1
            position = begin = end + 1
            continue
        if letter == "(":
            brackets += 1
        elif letter == ")":
            brackets -= 1
        elif brackets == 0 and letter == ":" and scopes and scopes[-1][0] == "class":
            access = re.search(r"\b(public|protected|private)\s*$", code[begin:position])
            if access and code[position + 1:position + 2] != ":":
                scopes[-1] = ("class", access.group(1))
                begin = position + 1
        elif letter == ";" and brackets == 0:
            yield begin, code[begin:position], list(scopes)
            begin = position + 1
        elif letter == "{" and brackets == 0:
            head = code[begin:position]
            kind = scope_kind(head)
            if kind != "namespace":
                yield begin, head, list(scopes)
            if kind == "other":
                position = skip_braces(code, position)
                # An initializer ends at its semicolon, a function body at its brace.
                rest = re.match(r"\s*[;,]", code[position + 1:])
                if rest:
                    position += rest.end()
                begin = position + 1
            else:
                access = "private" if re.search(r"\bclass\b", head) else "public"
                scopes.append((kind, access))
                begin = position + 1
        elif letter == "}" and brackets == 0:
            if scopes:
                scopes.pop()
            rest = re.match(r"\s*;", code[position + 1:])
            if rest:
                position += rest.end()
            begin = position + 1
        position += 1


def scope_kind(head):
    bare = re.sub(r"template\s*<[^;{]*?>\s*(?=class|struct|inline|[A-Za-z])", "", head)
    if re.search(r"\bnamespace\b", head) or re.search(r'\bextern\s+"', head):
        return "namespace"
    if re.match(r"\s*(?:\[\[[^\]]*\]\]\s*)*(class|struct|union)\b", bare) and "(" not in bare:
        return "class"
    return "other"


def skip_braces(code, position):
    depth = 0
    while position < len(code):
        if code[position] == "{":
            depth += 1
        elif code[position] == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return position


def needs_doc(head, scopes, has_body):
    """Returns what the declaration is ("class", "function") when it must be documented."""
    text = " ".join(head.split())
    if not text or any(kind == "other" for kind, _ in scopes):
        return None
    in_class = bool(scopes) and scopes[-1][0] == "class"
    if any(kind == "class" and access != "public" for kind, access in scopes):
        return None
    text = re.sub(r"^template\s*<.*?>\s*(?=[A-Za-z\[])", "", text)
    text = re.sub(r"^(\[\[[^\]]*\]\]\s*)+", "", text)
    if text.startswith(SKIP_KEYWORDS):
        return None
    if re.match(r"(class|struct|union|enum)\b", text) and "(" not in text:
        return None if in_class or not has_body else "class"
    if "(" not in text or re.search(r"\boperator\b", text):
        return None
    if re.match(r"[A-Z_]+\(", text):  # a macro call
        return None
    name = re.search(r"(~?\w+)\s*\(", text).group(1)
    if f"::{name}" in text.split("(")[0]:
        return None  # the definition of a member outside its class
    # A declared variable with an initializer in brackets or a default member value.
    if "=" in text.split("(")[0]:
        return None
    if re.search(r"(\boverride\b|=\s*(default|delete)\s*$)", text):
        return None
    before = text[:text.find(name + "(") if name + "(" in text else 0].strip()
    if in_class and re.sub(r"\b(explicit|constexpr|inline|virtual|noexcept)\b", "", before).strip() in ("", "~"):
        return None  # constructor or destructor
    if name == "to_text" or name.startswith(("is_", "has_")) or (in_class and has_body):
        return None
    parameters = text[text.find("(") + 1:]
    if in_class and parameters.startswith(")") and re.search(r"\)\s*const\b", text):
        return None
    return "function"


def function_name(head):
    match = re.search(r"(\w+)\s*\(", re.sub(r"template\s*<.*?>\s*(?=[A-Za-z\[])", "", head, flags=re.S))
    return match.group(1) if match else ""


def is_documented(lines, index):
    """Whether the declaration that starts at line `index` has a block, or follows one closely."""
    above = index - 1
    while above >= 0 and lines[above].strip() != "":
        stripped = lines[above].strip()
        if stripped.startswith("///"):
            return True
        if stripped.endswith((":", "{")) and not stripped.startswith("//"):
            return False
        above -= 1
    return False


def check_blocks(report, name, lines):
    block, start = [], 0
    for number, line in enumerate(lines):
        if re.match(r"(class|struct)\b", line) and not line.rstrip().endswith(";"):
            above = number - 1
            while above >= 0 and lines[above].startswith("///"):
                if "Errors:" in lines[above]:
                    return
                above -= 1
    for number, line in enumerate(lines + [""], 1):
        if line.strip().startswith("///"):
            if not block:
                start = number
            block.append(line.strip()[3:])
        elif block:
            text = "\n".join(block)
            if re.search(r"^\s*Collective:", text, re.M) and "Errors:" not in text:
                report.add(name, start, "a block that says 'Collective:' must also say 'Errors:'")
            block = []


def main():
    report = tree.Report("check_doc_blocks")
    documented = 0
    test_headers, listed = tree.test_headers(), tree.listed_headers()
    for name in tree.files(".h"):
        module = tree.module_of(name)
        if not module or "/internal/" in name or "/gloo_decl/" in name or name.endswith("_inl.h") \
                or name in test_headers or listed.get(name) == "PRIVATE_HEADERS":
            continue
        text = tree.read(name)
        lines = text.split("\n")
        code = tree.blank_out(text)
        for offset, head, scopes in declarations(code):
            has_body = code[offset + len(head):offset + len(head) + 1] == "{"
            what = needs_doc(head, scopes, has_body)
            if not what or any("internal" in part for part in enclosing(code, offset)):
                continue
            offset += len(head) - len(head.lstrip())
            index = code.count("\n", 0, offset)
            named = what == "function" and re.search(
                r"///[^\n]*`" + re.escape(function_name(head)) + r"\b", text)
            if is_documented(lines, index) or "///<" in lines[index] or named:
                documented += 1
            else:
                report.add(name, index + 1, f"undocumented {what}: {lines[index].strip()[:70]}")
        check_blocks(report, name, lines)
    return report.finish(f"{documented} public declarations are documented")


def enclosing(code, offset):
    """Returns the names of the namespaces that are open at `offset`."""
    names, depth = [], 0
    for match in re.finditer(r"namespace\s+([\w:]*)\s*\{|[{}]", code[:offset]):
        if match.group(0).startswith("namespace"):
            names.append((depth, match.group(1)))
            depth += 1
        elif match.group(0) == "{":
            depth += 1
        else:
            depth -= 1
            if names and names[-1][0] == depth:
                names.pop()
    return [found for _, found in names]


if __name__ == "__main__":
    sys.exit(main())
