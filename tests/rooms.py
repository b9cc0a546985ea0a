#!/usr/bin/env python3
"""The rules of docs/design.md that text alone can break, over src/: rooms.py ROOT.

- A stage includes core/, model/, cpu/ and cuda/, and nothing of another stage.
- Code lives in the namespace of its folder: src/score/ is winnow::internal::score.
- A folder has at most 30 sources, a function at most 150 lines.
"""

import pathlib
import re
import sys

MACHINERY = {"core", "model", "cpu", "cuda"}
# Where stages meet: these name the stages that they put together. `parallel` is what the stages of
# several ranks share; only they, the plan and the pipeline use it.
MEETINGS = {"plan", "pipeline", "norm_write", "prepare_queries", "c_api"}
OVER_RANKS = {"cut", "combine", "plan", "pipeline", "c_api"}
# These call the public verbs, whose names are namespaces inside winnow::internal: their code may
# stay in winnow itself.
CALLERS = {"pipeline"}
# Tables of instructions: an asm statement for each shape, and no steps to name.
TABLES = {"cuda/wgmma_f16.h"}
SOURCES = {".h", ".cpp", ".cu", ".cuh"}
MOST_SOURCES, MOST_LINES = 30, 150


def without_text(code):
    """The code with comments and strings blanked out, line for line."""
    blank = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.S)
    return blank.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), code)


def functions(code):
    """(line, lines, head) of every function that is not inside another one."""
    scope = re.compile(r"\b(namespace|struct|class|enum|union|extern)\b[^()]*$")
    open_braces, begin, line, begin_line = [], 0, 1, 1
    for i, c in enumerate(code):
        if c == "\n":
            line += 1
        if c == "{":
            head = " ".join(code[begin:i].split())
            inside = any(kind == "function" for kind, _, _ in open_braces)
            is_function = ")" in head and not scope.search(head) and not inside
            first = begin_line + code[begin:i][
                : len(code[begin:i]) - len(code[begin:i].lstrip())
            ].count("\n")
            open_braces.append(("function" if is_function else "other", first, head))
        if c == "}" and open_braces:
            kind, first, head = open_braces.pop()
            if kind == "function":
                yield first, line - first + 1, head
        if c in ";{}":
            begin, begin_line = i + 1, line


def complaints(root):
    src = root / "src"
    rooms = {p.name for p in src.iterdir() if p.is_dir()}
    count = {}
    for path in sorted(p for p in src.rglob("*") if p.suffix in SOURCES):
        name = path.relative_to(src)
        text = path.read_text()
        code = without_text(text)
        count[name.parent] = count.get(name.parent, 0) + 1
        for line, lines, head in functions(code):
            if lines > MOST_LINES and str(name) not in TABLES:
                yield f"src/{name}:{line}: {lines} lines: {head[-60:]}"
        room = name.parts[0] if len(name.parts) > 1 else ""
        if not room:
            continue
        for other in re.findall(r'^#include "(\w+)/', text, re.M):
            allowed = other == room or other in MACHINERY or room in MEETINGS
            if other == "parallel":
                allowed = room in OVER_RANKS or room == other
            if other in rooms and not allowed:
                yield f"src/{name}: includes {other}/"
        folder = "::".join(name.parts[:-1])
        spaces = re.findall(r"^namespace (?:winnow::)?internal::([\w:]+)", code, re.M)
        wrong = [s for s in spaces if s.split("::")[0] != room]
        if wrong and str(name) != "core/namespaces.h":
            yield f"src/{name}: opens winnow::internal::{wrong[0]}, expected {folder}"
        if path.suffix in {".h", ".cuh"} and "namespace" in code and room not in CALLERS:
            if not any(f"{s.rstrip(':')}::".startswith(f"{folder}::") for s in spaces):
                yield f"src/{name}: expected winnow::internal::{folder}, found none"
    for folder, sources in count.items():
        if sources > MOST_SOURCES:
            yield f"src/{folder}: {sources} sources"


found = list(complaints(pathlib.Path(sys.argv[1])))
print("\n".join(found))
sys.exit(1 if found else 0)
