#!/usr/bin/env bash
# The Python package and its tests.
#   python_test.sh        `pip install .` for the CPU into .venv, with what the tests need, then pytest
#   python_test.sh wheel FILE   the wheel alone in an empty environment, then what the tests need, then pytest
#   python_test.sh cuda   the extension of the cuda preset with the python3 in PATH, which brings
#                         torch; needs nanobind, installed or as a folder: nanobind_DIR=<its cmake folder>
#   python_test.sh cuda-options   what that adds to `cmake --preset cuda`: nothing where it is skipped
set -euo pipefail
cd "$(dirname "$0")/.."
tests=("$PWD/python/tests" --rootdir "$PWD" -c "$PWD/pyproject.toml" ${PYTEST_ARGS:-})

if [[ "${1:-}" = cuda* ]]; then
  nanobind_DIR=${nanobind_DIR:-$(python3 -m nanobind --cmake_dir 2>/dev/null || true)}
  there='import sys; from importlib.util import find_spec; sys.exit(not (find_spec("torch") and find_spec("pytest")))'
  options=()
  if [ -n "$nanobind_DIR" ] && python3 -c "$there"; then
    options=(-DWINNOW_PYTHON=ON -Dnanobind_DIR="$nanobind_DIR" -DPython_EXECUTABLE="$(command -v python3)")
  fi
  if [ "$1" = cuda-options ]; then
    for option in "${options[@]}"; do echo "$option"; done
    exit 0
  fi
  if [ ${#options[@]} = 0 ]; then
    echo "skipped: needs torch, pytest and nanobind (nanobind_DIR=<its cmake folder>) for python3"
    exit 0
  fi
  cmake --preset cuda "${options[@]}"
  cmake --build --preset cuda --target _winnow -j "${JOBS:-$(nproc)}"
  PYTHONPATH=$PWD/build/cuda/python${PYTHONPATH:+:$PYTHONPATH} exec python3 -m pytest "${tests[@]}"
fi

if [ "${1:-}" = wheel ]; then
  venv=$PWD/build/wheel/try
  wheel=$(realpath "$2")
  rm -rf "$venv"
  "${PYTHON:-python3}" -m venv "$venv"
  cd "$venv"  # the installed package, not the folder
  bin/python -m pip install -q --disable-pip-version-check "$wheel"
  bin/python -c 'import winnow; print(*winnow.support(), sep="\n")'
  bin/python -m pip install -q --disable-pip-version-check -r "$OLDPWD/python/tests/requirements.txt"
  exec bin/python -m pytest "${tests[@]}"
fi

venv=$PWD/.venv
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# Most of what is installed is never imported: modules are compiled when they are.
"$venv/bin/python" -m pip install -q --disable-pip-version-check --no-compile -r python/tests/requirements.txt
# The build folder stays, so that a second run compiles what changed. The compiler has the name that
# the other builds call it by, so that a compiler cache knows the library's objects from them.
CC=${CC:-cc} CXX=${CXX:-c++} "$venv/bin/python" -m pip install -q --disable-pip-version-check \
  --no-build-isolation --no-deps -C cmake.define.WINNOW_CUDA=OFF .
cd "$venv"  # the installed package, not the folder
exec "$venv/bin/python" -m pytest "${tests[@]}"
