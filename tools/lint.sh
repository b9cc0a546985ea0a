#!/usr/bin/env bash
# The linters that `setup.sh tools` installs.
#   lint.sh format [--fix]   clang-format over C, C++ and CUDA sources
#   lint.sh ruff [--fix]     ruff over Python: its rules and its format
#   lint.sh tidy [FILE...]   clang-tidy over the sources that are not tests, or over some of them
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv-tools/bin
jobs=${JOBS:-$(nproc)}
fix=${2:-}

case $1 in
  format)
    mode=(--dry-run -Werror)
    if [ "$fix" = --fix ]; then mode=(-i); fi
    git ls-files -z -- '*.c' '*.cpp' '*.h' '*.cu' '*.cuh' |
      xargs -0 -n 16 -P "$jobs" "$bin/clang-format" "${mode[@]}"
    ;;
  ruff)
    if [ "$fix" = --fix ]; then
      "$bin/ruff" check -q --fix
      "$bin/ruff" format -q
    else
      "$bin/ruff" check -q
      "$bin/ruff" format -q --check
    fi
    ;;
  tidy)
    shift
    # A build of its own, configured and never compiled: no tests, and each portable kernel for AVX2
    # alone (NEON on ARM). The program's commands are checked as they are compiled, several at once.
    cmake --preset release -B build/tidy -DWINNOW_TESTS=OFF >/dev/null
    cmake --build build/tidy --target winnow_commit >/dev/null
    files=("$@")
    if [ $# = 0 ]; then
      mapfile -t files < <(sed -nE 's/^ *"file": "(.*\.(cpp|cxx))",?$/\1/p' build/tidy/compile_commands.json)
    fi
    vectors=()
    if [ "$(uname -m)" = x86_64 ]; then vectors=(--extra-arg=-march=haswell); fi
    printf '%s\0' "${files[@]}" |
      xargs -0 -n 1 -P "$jobs" "$bin/clang-tidy" -p build/tidy --quiet --warnings-as-errors='*' \
        --extra-arg={-DHWY_COMPILE_ONLY_STATIC,-Wno-unknown-warning-option} "${vectors[@]}" 2>/dev/null
    ;;
esac
