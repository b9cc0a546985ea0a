#!/usr/bin/env python3
"""Compares the C headers with the C++ ones: c_api.py INCLUDE.

Every member of a public C++ struct, every function, every accessor of Plan and every enumerator has
its counterpart in winnow_c*.h. What differs on purpose is listed below, as winnow_c.h says it.
"""

import pathlib
import re
import sys

# C++ members that C spells otherwise: what C has instead.
SPELLED_OUT = {
    "CompressArgs.state": ["state_rows", "state_table", "state_ring"],
    "Compressor.state": ["state_rows", "state_table", "state_ring"],
    "LayerSteps.index_query": [
        "index_q",
        "index_weights",
        "index_hadamard",
        "index_scale",
        "index_factor",
    ],
    "PlanOptions.parallel": ["comm", "control", "spread", "interleave", "wire", "sharded"],
    "PlanOptions.route": [],  # a function without a context: C++ alone
}
# Memory is a pointer and its size.
SIZES = {"struct_size", "workspace_bytes", "prefix_bytes", "rows_bytes", "tile_count"}
SIZES |= {"BatchShare.capacity", "BatchShare.count"}
# Spelled out above, or numbers that C holds as they are.
NO_STRUCT = {"CompressorState", "Parallel", "RawIndexQuery", "bf16", "e4m3"}
STRUCT_NAMES = {
    "Norm": "norm_step",
    "SplitKvBArgs": "split_kv_b_args",
    "V4Chunk": "v4_chunk",
    "V4ChunkArgs": "v4_chunk_args",
}
FUNCTION_NAMES = {"name_of": "format_name"}
FUNCTION_NAMES |= {name: f"shard_{name}" for name in ("owner", "local", "global", "local_length")}
# Overloads and helpers that fill in a C++ struct, or compare two numbers.
NO_FUNCTION = {"tensor", "cpu", "cuda", "size_of", "dtype_of", "owns", "size", "shard", "bool"}
ACCESSOR_NAMES = {"options": "get_options"}
NO_ACCESSOR = {"Plan", "usable"}
ADAPTERS = {"mpi.h", "nccl.h"}


def without_comments(text):
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)


def block(text, begin):
    """What stands between the brace in front of `begin` and its partner."""
    depth, end = 1, begin
    while depth:
        depth += (text[end] == "{") - (text[end] == "}")
        end += 1
    return text[begin : end - 1]


def members(body):
    while re.search(r"\{[^{}]*\}", body):  # initialisers, and the bodies of functions
        body = re.sub(r"\)\s*(const)?\s*\{[^{}]*\}", ");", body)
        body = re.sub(r"\{[^{}]*\}", "", body)
    for statement in body.split(";"):
        statement = " ".join(re.sub(r"<[^<>]*>", "", re.sub(r"<[^<>]*>", "", statement)).split())
        pointer = re.search(r"\(\*(\w+)\)", statement)
        if pointer:
            yield pointer[1]
        elif "(" not in statement and " " in statement:
            for one in statement.split(","):
                name = re.search(r"(\w+)\s*(\[[^\]]*\]\s*)*$", one.split("=")[0])
                if name:
                    yield name[1]


def structs(text, pattern):
    return {m[1]: list(members(block(text, m.end()))) for m in re.finditer(pattern, text, re.M)}


def snake(name):
    return "winnow_" + STRUCT_NAMES.get(name, re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def complaints(include):
    cpp, c = {}, {}
    for path in sorted(include.glob("winnow/*.h")):
        if path.name not in ADAPTERS:
            of = c if path.name.startswith("winnow_c") else cpp
            of[path.name] = without_comments(path.read_text())
    all_c = "\n".join(c.values())
    c_structs = structs(all_c, r"^typedef struct (\w+) \{")
    c_functions = set(re.findall(r"\b(winnow_\w+)\(", all_c))
    # C's enumerators of a group, by their number (src/c_api/ pins what each is).
    groups = [len(re.findall(r"\bWINNOW_\w+", g)) for g in re.findall(r"enum \{([^}]*)\}", all_c)]
    found = 0
    for file, text in cpp.items():
        for name, fields in structs(text, r"^struct (\w+) \{").items():
            if name in NO_STRUCT:
                continue
            expected = []
            for field in fields:
                expected += SPELLED_OUT.get(f"{name}.{field}", [field])
            has = c_structs.get(snake(name))
            if has is None:
                yield f"{file}: {name}: winnow_c.h has no {snake(name)}"
                continue
            found += len(fields)
            for field in expected:
                if field not in has:
                    yield f"{file}: {name}.{field} is not in {snake(name)}"
            for field in has:
                if field not in expected and not {field, f"{name}.{field}"} & SIZES:
                    yield f"{file}: {snake(name)}.{field} is not in {name}"
        plan = re.search(r"^class Plan \{(.*?)^ private:", text, re.M | re.S)
        for name in re.findall(r"(\w+)\([^()]*\)(?: const)?;", plan[1]) if plan else []:
            if name not in NO_ACCESSOR:
                found += 1
                if f"winnow_plan_{ACCESSOR_NAMES.get(name, name)}" not in c_functions:
                    yield f"{file}: Plan::{name}() has no winnow_plan_{name}()"
        text = re.sub(r"^class .*?^\};", "", text, flags=re.M | re.S)
        for name in re.findall(r"^ *[a-z](?:[\w:<>, *&]|\(\*\))*? \**&?(\w+)\(", text, re.M):
            if name not in NO_FUNCTION:
                found += 1
                if f"winnow_{FUNCTION_NAMES.get(name, name)}" not in c_functions:
                    yield f"{file}: {name}() has no winnow_{name}()"
        for name, values in re.findall(r"enum class (\w+)[^{]*\{([^}]*)\}", text):
            found += 1
            if len(re.findall(r"\bk\w+", values)) not in groups:
                yield f"{file}: no enum in C has as many values as {name}"
    if found < 400:
        yield f"only {found} members and functions found: an expression misses most"


def main():
    wrong = list(complaints(pathlib.Path(sys.argv[1])))
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
