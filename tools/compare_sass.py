#!/usr/bin/env python3
"""Compares the machine code of two builds, kernel by kernel.

    tools/compare_sass.py BEFORE AFTER    two objects, libraries or programs with sm_90a code

Prints a line for every kernel whose instructions differ: how many it had and has, and how many of
them are of another kind. Addresses do not count. Needs cuobjdump (CUDA toolkit) and c++filt.
Exits with 1 where something differs.
"""

import collections
import re
import subprocess
import sys

FUNCTION = re.compile(r"\s*Function : (\S+)")
INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);")


def kernels(path):
    """Instructions of each kernel, by its name in C++."""
    command = ["cuobjdump", "--dump-sass", path]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = {}
    for line in said.splitlines():
        if found := FUNCTION.match(line):
            here = code.setdefault(found[1], [])
        elif found := INSTRUCTION.match(line):
            here.append(found[1])
    mangled = "\n".join(code)
    names = subprocess.run(["c++filt"], input=mangled, capture_output=True, text=True).stdout
    return {
        re.sub(r"^void |winnow::internal::", "", name): instructions
        for name, instructions in zip(names.splitlines(), code.values(), strict=True)
    }


def kinds(instructions):
    """How often each instruction occurs, whatever its registers and predicate."""
    return collections.Counter(re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in instructions)


def main(before, after):
    before, after = kernels(before), kernels(after)
    different = 0
    for name in sorted(before | after):
        old, new = before.get(name), after.get(name)
        if old == new:
            continue
        different += 1
        if old is None or new is None:
            print(f"{'after' if old is None else 'before'} alone: {name}")
            continue
        changed = (kinds(new) - kinds(old)).total()
        print(f"{len(old)} -> {len(new)} instructions, {changed} of another kind: {name}")
    print(f"{different} of {len(before | after)} kernels differ")
    return 1 if different else 0


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
