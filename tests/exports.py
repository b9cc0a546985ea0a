#!/usr/bin/env python3
"""A shared libwinnow shows its contract and nothing else: exports.py LIBRARY INCLUDE [NM].

Every symbol that it exports is named in a public header, and every function that a public header
declares is exported, and so is what a program needs to catch winnow::Error.
"""

import pathlib
import re
import subprocess
import sys

# What the linker and sanitizers add.
OURS_NOT = re.compile(r"^(_init|_fini|__bss_start|_edata|_end|__(asan|tsan|ubsan|odr_asan)\w*)$")
PARTS_OF_A_CLASS = re.compile(r"^(typeinfo|typeinfo name|vtable) for ")


def declared(include):
    """(C functions, C++ functions, every name) of the public headers; of Plan `Plan::name`."""
    c, cpp, names = set(), set(), set()
    for path in include.glob("winnow/*.h"):
        if path.name in {"mpi.h", "nccl.h"}:  # headers alone
            continue
        text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.S)
        if path.name.startswith("winnow_c"):
            text = re.sub(r"static inline[^{]*\{", "", text)
            c |= set(re.findall(r"\b(winnow_[a-z0-9_]+)\(", text))
            continue
        plan = re.search(r"^class Plan \{(.*?)^ private:", text, re.M | re.S)
        for name in re.findall(r"(\w+)\([^()]*\)(?: const)?;", plan[1]) if plan else []:
            cpp.add(f"Plan::{name}")
        text = re.sub(r"^class Plan .*?^\};", "", text, flags=re.M | re.S)
        cpp |= set(
            re.findall(
                r"^(?!inline|constexpr|template)[a-zA-Z][\w:<>, *&]* \**&?(\w+)\([^{}]*?\);",
                text,
                re.M,
            )
        )
        names |= set(re.findall(r"\b[A-Za-z]\w+\b", text))
    names |= {name.split("::")[-1] for name in cpp}
    return c, cpp, names - {"internal"}


def exported(library, nm):
    command = [nm, "-D", "--defined-only", "--format=posix"]
    plain = subprocess.run([*command, library], check=True, capture_output=True, text=True).stdout
    symbols = [line.split()[0] for line in plain.splitlines()]
    both = subprocess.run(
        ["c++filt"], input="\n".join(symbols), capture_output=True, text=True, check=True
    )
    return zip(symbols, both.stdout.splitlines(), strict=True)


def complaints(library, include, nm):
    c, cpp, names = declared(include)
    seen = set()
    for symbol, text in exported(library, nm):
        if symbol.startswith("winnow_"):
            seen.add(symbol)
            if symbol not in c:
                yield f"{symbol} is exported, and no header declares it"
            continue
        if OURS_NOT.match(symbol):
            continue
        seen.add(text)
        text = PARTS_OF_A_CLASS.sub("", text)
        path = re.match(r"(?:winnow::\w+ )?winnow::([\w:~]+)", text)  # behind a template's result
        if not path or path[1].split("::")[0] not in names:
            yield f"{text} ({symbol}) is exported, and no header declares it"
            continue
        seen.add("winnow::" + path[1])
        if path[1].startswith("Plan::") and path[1].split("::")[1] not in names | {"~Plan"}:
            yield f"{text} is exported, and no header declares it"
    wanted = c | {f"winnow::{name}" for name in cpp}
    wanted |= {f"{what} for winnow::Error" for what in ("typeinfo", "typeinfo name", "vtable")}
    for name in sorted(wanted - seen):
        yield f"{name} is declared, and not exported"
    if len(c) < 90 or len(cpp) < 90:
        yield f"found {len(c)} functions in C and {len(cpp)} in C++: an expression misses most"


def main():
    library, include, *nm = sys.argv[1:]
    wrong = list(complaints(library, pathlib.Path(include), nm[0] if nm else "nm"))
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
