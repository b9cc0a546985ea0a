#!/usr/bin/env bash
# Goes through the steps given, all of them even if one fails, and closes with a line for each: its
# count, and the seconds it took.
#   release asan tsan   builds the preset and runs its tests; release leaves out those of `docs`
#   cuda                the same, on a machine with a GPU, compute-sanitizer, and kernels with delays;
#                       with python-cuda among the steps the extension is built along with the rest
#   cuda-compile        the CUDA code compiled, where there is an nvcc
#   emulated            a part of the GPU's tests on an emulated one, where there is an nvcc
#   emulated-all        all but the largest of them: hours
#   docs                README's programs and table, the documents' links, the length of files
#   python python-cuda  the Python package (python_test.sh)
#   format ruff tidy    the linters (lint.sh)
#   fuzz                the stored corpora and a minute of fuzzing (fuzz.sh)
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
steps=("$@")
export PATH=$PATH:/usr/local/cuda/bin
counts=() status=0

# Adds a line of the closing list; a step that failed fails the whole.
count() {
  counts+=("$1: $3 ($((SECONDS - began)) s)")
  if [ "$2" != 0 ]; then status=1; fi
}

# Runs a command, keeps what it says in build/logs and shows it.
logged() {
  mkdir -p build/logs
  log=build/logs/$1.log
  shift
  "$@" 2>&1 | tee "$log"
}

# ctest of a preset, and its count.
tests_of() {
  local step=$1 preset=$2
  shift 2
  logged "$step" ctest --preset "$preset" "$@"
  count "$step" $? "$(grep -E 'tests? passed|No tests were found' "$log" | tail -n1)"
}

# Builds a preset, or targets of it.
built() {
  local preset=$1
  shift
  cmake --preset "$preset" "${options[@]}" && cmake --build --preset "$preset" -j "$jobs" "$@"
}

# A small set of every stage under the device's own checkers, all of them at once. Racecheck does
# not follow a warp that meets before one of its lanes arrives at an mbarrier: it sees races in the
# rings of attend and of scoring by loads, which delays() tests, and takes a minute for a wide row.
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
      count "${tools[i]}" 0 "$(tail -n1 "build/cuda/${tools[i]}.log")"
    else
      count "${tools[i]}" 1 "failed, see build/cuda/${tools[i]}.log"
    fi
  done
}

# The kernels whose rings racecheck does not follow, compiled with delays at their barriers.
delays() {
  began=$SECONDS
  logged delays build/cuda/tests/cuda_delays_test --gtest_brief=1
  count delays $? "$(tail -n1 "$log")"
}

for step in "${steps[@]}"; do
  began=$SECONDS options=()
  case $step in
    format | ruff | tidy)
      if logged "$step" tools/lint.sh "$step"; then count "$step" 0 clean; else count "$step" 1 "complains"; fi
      ;;
    fuzz)
      logged fuzz tools/fuzz.sh minute
      count fuzz $? "$(awk '/ inputs /{n += $2} END {print n + 0}' "$log") inputs, $(grep -c FOUND "$log") findings"
      ;;
    python*)
      mode=${step#python}
      logged "$step" tools/python_test.sh ${mode#-}
      count "$step" $? "$(tail -n1 "$log")"
      ;;
    docs)
      if built release --target docs; then tests_of docs release -j "$jobs" -L docs
      else count docs 1 "does not build"; fi
      ;;
    cuda-compile)
      # The kernels, and a test that says what is skipped without a GPU: the others hold nothing new.
      if ! command -v nvcc >/dev/null; then count cuda-compile 0 "left out: no nvcc"
      elif built cuda --target cuda_test; then tests_of cuda-compile cuda -R '^cuda_test'
      else count cuda-compile 1 "does not build"; fi
      ;;
    emulated)
      if ! command -v nvcc >/dev/null; then count emulated 0 "left out: no nvcc"
      elif built emulated --target emulated_brief; then tests_of emulated emulated -j "$jobs" -L brief
      else count emulated 1 "does not build"; fi
      ;;
    emulated-all)
      if built emulated; then tests_of emulated-all emulated -j "$jobs" -LE brief
      else count emulated-all 1 "does not build"; fi
      ;;
    *)
      if [[ $step = cuda && " ${steps[*]} " = *" python-cuda "* ]]; then
        mapfile -t options < <(tools/python_test.sh cuda-options)
      fi
      # Where the tests of the CUDA build run, a test that finds no device has failed.
      targets=()
      if [ "$step" = cuda ]; then
        export WINNOW_TEST_DEVICE=cuda
        targets=(--target all cuda_delays_test)
      fi
      some=()
      if [ "$step" = release ]; then some=(-LE docs); fi
      if built "$step" "${targets[@]}"; then
        tests_of "$step" "$step" -j "$jobs" "${some[@]}"
        if [ "$step" = cuda ]; then
          if command -v compute-sanitizer >/dev/null; then sanitize; fi
          delays
        fi
      else
        count "$step" 1 "does not build"
      fi
      ;;
  esac
done

echo
printf '%s\n' "${counts[@]}"
exit $status
