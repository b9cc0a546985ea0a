#!/usr/bin/env bash
# Builds and tests the presets given (default: release, the sanitizers, the Python package) and closes
# with the runner's count of each. Goes through all of them even if one fails.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
presets=("$@")
[ $# -gt 0 ] || presets=(release asan tsan python)

counts=() status=0
for preset in "${presets[@]}"; do
  log=build/$preset/test.log
  if [[ $preset = python* ]]; then
    mkdir -p "build/$preset"
    mode=${preset#python}
    tools/python_test.sh ${mode#-} 2>&1 | tee "$log" || status=1
    counts+=("$preset: $(tail -n1 "$log")")
    continue
  fi
  if cmake --preset "$preset" && cmake --build --preset "$preset" -j "$jobs"; then
    ctest --preset "$preset" -j "$jobs" 2>&1 | tee "$log" || status=1
    counts+=("$preset: $(grep -E 'tests? passed|No tests were found' "$log" | tail -n1)")
  else
    counts+=("$preset: does not build") status=1
  fi
done
echo
printf '%s\n' "${counts[@]}"
exit $status
