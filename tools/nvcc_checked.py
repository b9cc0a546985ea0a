#!/usr/bin/env python3
"""Compiler launcher of the CUDA build (WINNOW_CUDA_STRICT).

Runs the command it is given: nvcc with `-Xptxas=-v`, alone or behind ccache. Fails where ptxas says
that it serialises wgmma (C75xx) or spills more bytes than cmake/spills.txt allows. ccache replays
what ptxas said, so that a hit is checked like a compilation.
"""

import pathlib
import re
import subprocess
import sys

ALLOWED = pathlib.Path(__file__).parents[1] / "cmake" / "spills.txt"
FUNCTION = re.compile(r"Function properties for (\S+)")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
SERIALISED = re.compile(r"\(C75\d\d\)")
# What `ptxas -v` adds to the output of a compilation that is in order.
CHATTER = re.compile(r"ptxas info\s*:|\s+\d+ bytes stack frame")


def demangled(name):
    """The function's name in C++, as far as binutils are there to say it."""
    try:
        return subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
    except OSError:
        return name


def allowed():
    """(file, bytes, part of the name) of each line of the list."""
    for line in ALLOWED.read_text().splitlines():
        if line and not line.startswith("#"):
            file, size, name = line.split(maxsplit=2)
            yield file, int(size), name


def complaints(source, said):
    """A line for each thing in ptxas' report that fails the build of this source."""
    function = ""
    for line in said.splitlines():
        if SERIALISED.search(line):
            yield line.strip()
        if found := FUNCTION.search(line):
            function = found[1]
        if found := SPILLS.search(line):
            size = max(int(found[2]), int(found[3]))
            if size == 0:
                continue
            name = demangled(function)
            limits = [n for file, n, part in allowed() if source.endswith(file) and part in name]
            limit = max(limits, default=0)
            if size > limit:
                yield f"{name} spills {size} bytes, {ALLOWED.name} allows {limit}"


def main(command):
    done = subprocess.run(command, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True)
    for line in done.stdout.splitlines():
        if SERIALISED.search(line) or not CHATTER.match(line):
            print(line)
    if done.returncode != 0 or "-c" not in command:
        return done.returncode
    source = command[command.index("-c") + 1]
    failed = list(complaints(source, done.stdout))
    for line in failed:
        print(f"{source}: {line}")
    if failed:
        # Without its object the file is compiled again, and fails again, at the next build.
        pathlib.Path(command[command.index("-o") + 1]).unlink(missing_ok=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
