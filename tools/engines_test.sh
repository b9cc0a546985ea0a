#!/usr/bin/env bash
# winnow inside serving engines: tests against their real classes, on any machine, without a GPU.
#   [VLLM_VERSIONS="0.26.0 0.33.0"] [VLLM_TESTS=<unpacked source archive>] engines_test.sh [pytest's arguments]
# With vLLM's source archive, its own tests of V4.1's kernels run over winnow's verbs.
# .venv-engines holds PyTorch's CPU build, winnow and what the engines import; beside them, a folder
# for each version of an engine, of which PYTHONPATH chooses one. Their compiled parts need CUDA's
# libraries and are left out.
set -euo pipefail
cd "$(dirname "$0")/.."
read -ra versions <<< "${VLLM_VERSIONS:-0.26.0 0.33.0}"
sglang=0.5.23
venv=$PWD/.venv-engines
tests=$PWD/python/tests/engines
pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check)

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
# First what brings dependencies, then what would bring a CUDA build of PyTorch along.
"${pip[@]}" -r "$tests/requirements.txt"
"${pip[@]}" --no-deps -r "$tests/requirements-no-deps.txt"
engines=("sglang-$sglang" "${versions[@]/#/vllm-}")
for engine in "${engines[@]}"; do
  folder=$venv/$engine
  if [ ! -e "$folder/complete" ]; then
    rm -rf "$folder"
    "${pip[@]}" --no-deps --target "$folder" "${engine/-/==}"
    find "$folder" -name '*.so' -delete
    touch "$folder/complete"
  fi
done
# For the CPU, as these tests are, by the names that a compiler cache knows the objects from.
CC=${CC:-cc} CXX=${CXX:-c++} "${pip[@]}" --no-build-isolation --no-deps -C cmake.define.WINNOW_CUDA=OFF .

# Small tensors: more threads than one would only wait for each other.
export OMP_NUM_THREADS=1
cd "$venv"  # the installed package, not the folder
status=0
for version in "${versions[@]}"; do
  echo "vLLM $version"
  PYTHONPATH=$venv/vllm-$version:$venv/sglang-$sglang "$venv/bin/python" -m pytest "$tests" --rootdir "$tests" \
    -c "$tests/../../../pyproject.toml" "$@" || status=1
done
exit $status
