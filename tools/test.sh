#!/usr/bin/env bash
# Builds and tests the presets given (default: release, the sanitizers, the Python package; then,
# where there is an nvcc, compiles the CUDA code) and closes with the runner's count of each. Goes
# through all of them even if one fails. `test.sh cuda` is for machines with a GPU: it goes on with
# compute-sanitizer; with python-cuda, the extension is built along with the rest.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
presets=("$@")
export PATH=$PATH:/usr/local/cuda/bin
if [ $# -eq 0 ]; then
  presets=(release asan tsan python)
  if command -v nvcc >/dev/null; then presets+=(cuda-compile); fi
fi

counts=() status=0

# A small set of every stage under the device's own checkers, all of them at once. Racecheck does
# not follow a warp that meets before one of its lanes arrives at an mbarrier: it sees races in the
# rings of attend and of scoring by loads, and takes a minute for a wide row.
sanitize() {
  local tools=(memcheck racecheck initcheck synccheck) pids=() i filter
  for i in "${!tools[@]}"; do
    filter='*Replays*'
    if [ "${tools[i]}" = racecheck ]; then
      filter+='-*attend_v*:*CudaPipeline*:*score_rows*:*select_wide*'
    fi
    compute-sanitizer --tool "${tools[i]}" --error-exitcode 9 build/cuda/tests/cuda_test \
      --gtest_brief=1 --gtest_filter="$filter" >"build/cuda/${tools[i]}.log" 2>&1 &
    pids+=($!)
  done
  for i in "${!tools[@]}"; do
    if wait "${pids[i]}"; then
      counts+=("${tools[i]}: $(tail -n1 "build/cuda/${tools[i]}.log")")
    else
      counts+=("${tools[i]}: failed, see build/cuda/${tools[i]}.log") status=1
    fi
  done
}

for preset in "${presets[@]}"; do
  if [ "$preset" = cuda-compile ]; then
    # The kernels, and a test that says what is skipped without a GPU: the others hold nothing new.
    log=build/cuda/test.log
    if cmake --preset cuda && cmake --build --preset cuda -j "$jobs" --target cuda_test; then
      ctest --preset cuda -R '^cuda_test' 2>&1 | tee "$log" || status=1
      counts+=("$preset: $(grep -E 'tests? passed|No tests were found' "$log" | tail -n1)")
    else
      counts+=("$preset: does not build") status=1
    fi
    continue
  fi
  log=build/$preset/test.log
  if [[ $preset = python* ]]; then
    mkdir -p "build/$preset"
    mode=${preset#python}
    tools/python_test.sh ${mode#-} 2>&1 | tee "$log" || status=1
    counts+=("$preset: $(tail -n1 "$log")")
    continue
  fi
  options=()
  if [[ $preset = cuda && " ${presets[*]} " = *" python-cuda "* ]]; then
    mapfile -t options < <(tools/python_test.sh cuda-options)
  fi
  if cmake --preset "$preset" "${options[@]}" && cmake --build --preset "$preset" -j "$jobs"; then
    ctest --preset "$preset" -j "$jobs" 2>&1 | tee "$log" || status=1
    counts+=("$preset: $(grep -E 'tests? passed|No tests were found' "$log" | tail -n1)")
    if [ "$preset" = cuda ] && command -v compute-sanitizer >/dev/null; then sanitize; fi
  else
    counts+=("$preset: does not build") status=1
  fi
done

echo
printf '%s\n' "${counts[@]}"
exit $status
