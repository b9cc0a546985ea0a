#!/usr/bin/env bash
# Makes sure that what the build needs is there. Says nothing and touches nothing when it is; else
# installs the Debian packages as root or with sudo, or names them and fails.
#   setup.sh cuda     asks for nvcc as well, which no Debian package of this list brings
#   setup.sh python   for what the Python package's tests need
#   setup.sh fuzz     for a Clang that has libFuzzer
#   setup.sh cache    for a compiler cache: the Python package takes the library's objects from it; goes on
#                     without where it cannot install
#   setup.sh mpi      for ranks as processes: Open MPI and MPICH; goes on without where it cannot install
#   setup.sh tools    for what python needs, and for what tools/requirements.txt lists, in .venv-tools
set -euo pipefail
cd "$(dirname "$0")/.."

at_least() { [ "$(printf '%s\n%s\n' "$1" "$2" | sort -V | head -n1)" = "$1" ]; }

# One line per missing package, the reason behind it.
missing() {
  command -v ninja >/dev/null || echo "ninja-build (ninja)"
  local cmake=0
  command -v cmake >/dev/null && cmake=$(cmake --version | sed -n '1s/[^0-9]*//p')
  at_least 3.25 "$cmake" || echo "cmake (3.25 or newer)"
  command -v python3 >/dev/null || echo "python3 (the documents' pictures are checked with it)"
  if ! echo | "${CXX:-c++}" -std=c++20 -E -x c++ - >/dev/null 2>&1; then
    echo "g++ (a C++20 compiler)"
    return
  fi
  command -v pkg-config >/dev/null || echo "pkg-config (pkg-config)"
  if [ "${1:-}" = python ] || [ "${1:-}" = tools ]; then
    local python=${PYTHON:-python3} header
    "$python" -c 'import ensurepip, venv' 2>/dev/null || echo "python3-venv (python3 -m venv)"
    header=$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))' 2>/dev/null)/Python.h
    [ -f "$header" ] || echo "python3-dev (Python.h)"
  fi
  if [ "${1:-}" = fuzz ] && ! tools/fuzz.sh compiler >/dev/null 2>&1; then
    printf '%s\n' "clang-19 (libFuzzer)" "libclang-rt-19-dev (its runtime)" "llvm-19 (coverage)"
  fi
  if [ "${1:-}" = cache ]; then command -v ccache >/dev/null || echo "ccache (ccache)"; fi
  if [ "${1:-}" = mpi ]; then
    command -v mpicxx >/dev/null || printf '%s\n' "libopenmpi-dev (mpicxx)" "openmpi-bin (mpirun)"
    command -v mpicxx.mpich >/dev/null || printf '%s\n' "libmpich-dev (mpicxx.mpich)" "mpich (mpiexec.mpich)"
  fi
  # Headers anywhere the build would look: the compiler's own folders and CMAKE_PREFIX_PATH.
  local include=() prefix
  while IFS= read -r -d: prefix; do
    [ -n "$prefix" ] && include+=(-isystem "$prefix/include")
  done <<<"${CMAKE_PREFIX_PATH:-}:"
  local pair header
  for pair in libhwy-dev=hwy/highway.h libgtest-dev=gtest/gtest.h libcli11-dev=CLI/CLI.hpp \
              libfmt-dev=fmt/core.h nlohmann-json3-dev=nlohmann/json.hpp; do
    header=${pair#*=}
    printf '#if !__has_include(<%s>)\n%s (%s)\n#endif\n' "$header" "${pair%%=*}" "$header"
  done | "${CXX:-c++}" "${include[@]}" -std=c++20 -E -P -x c++ - | sed '/^$/d'
}

report() {
  if [ "${asked:-}" = cache ]; then
    echo "Without ccache (apt-get install ccache) the library is compiled again for the Python package." >&2
    exit 0
  fi
  if [ "${asked:-}" = mpi ]; then
    echo "Without MPI (apt-get install $2) the tests over several processes are left out." >&2
    exit 0
  fi
  echo "winnow needs what these Debian packages hold:" >&2
  sed 's/^/  /' <<<"$1" >&2
  echo "Install them (apt-get install $2), or have them found by CMAKE_PREFIX_PATH." >&2
  exit 1
}

if [ "${1:-}" = cuda ] && ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ]; then
  echo "winnow's CUDA kernels need nvcc (CUDA toolkit 12.4 or newer) in PATH." >&2
  exit 1
fi

install_packages() {
  local packages as_root=()
  packages=$(sed 's/ .*//' <<<"$1" | xargs)
  if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || report "$1" "$packages"
    as_root=(sudo -n)
  fi
  command -v apt-get >/dev/null || report "$1" "$packages"
  echo "Installing $packages"
  "${as_root[@]}" apt-get update -qq
  # shellcheck disable=SC2086  # a list of words
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends $packages >/dev/null
}

# The list is kept beside what it installed: a changed one is installed again.
install_tools() {
  local venv=.venv-tools
  cmp -s tools/requirements.txt "$venv/requirements.txt" && return
  echo "Installing tools/requirements.txt into $venv"
  "${PYTHON:-python3}" -m venv "$venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -r tools/requirements.txt
  cp tools/requirements.txt "$venv/requirements.txt"
}

asked=${1:-}
lack=$(missing "$@")
if [ -n "$lack" ]; then
  install_packages "$lack" || true  # what is still missing is reported
  lack=$(missing "$@")
  [ -z "$lack" ] || report "$lack" "$(sed 's/ .*//' <<<"$lack" | xargs)"
fi
if [ "${1:-}" = tools ]; then install_tools; fi
