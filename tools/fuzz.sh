#!/usr/bin/env bash
# Coverage-guided fuzzing of tests/fuzz with Clang's libFuzzer (16 or newer), under AddressSanitizer.
#   fuzz.sh compiler                    the version of the Clang that it takes; fails without one
#   fuzz.sh build                       the programs: build/fuzz/tests/fuzz_<target>
#   fuzz.sh replay                      every input of the stored corpora (tests/fuzz/corpus), once
#   fuzz.sh minute                      that, and a minute of fuzzing, shared by all targets
#   fuzz.sh long [SECONDS [TARGET...]]  so long for each target (600); inputs that reach something
#                                       new are kept in build/fuzz/corpus
#   fuzz.sh coverage                    lines of src/ that the stored and the kept inputs reach
# Closes with a line for each target: inputs run, and what they found. A finding leaves its input in
# build/fuzz/findings; `build/fuzz/tests/fuzz_<target> FILE` runs it again.
set -uo pipefail
cd "$(dirname "$0")/.."
jobs=${JOBS:-$(nproc)}
programs=build/fuzz/tests
stored=tests/fuzz/corpus
kept=build/fuzz/corpus
findings=build/fuzz/findings

# The newest Clang of the system that links with its libFuzzer.
clang_version() {
  local version
  for version in 22 21 20 19 18 17 16; do
    if echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
      "clang++-$version" -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null; then
      echo "$version"
      return
    fi
  done
  echo "fuzz.sh needs Clang 16 or newer: apt-get install clang-19 libclang-rt-19-dev llvm-19" >&2
  exit 1
}

build() {
  local version
  version=$(clang_version) || exit 1
  cmake --preset fuzz -DCMAKE_C_COMPILER="clang-$version" -DCMAKE_CXX_COMPILER="clang++-$version" \
    >/dev/null && cmake --build --preset fuzz -j "$jobs" --target fuzz || exit 1
}

targets() { find "$programs" -maxdepth 1 -type f -name 'fuzz_*' -executable -printf '%f\n' | sed s/fuzz_// | grep -v test | sort; }

# fuzz TARGET OPTION...: one run; prints the target, the inputs run and the verdict.
fuzz() {
  local target=$1 log=build/fuzz/$1.log verdict=clean
  shift
  mkdir -p "$kept/$target" "$findings"
  local options=(-max_len=512 -timeout=60 -rss_limit_mb=4096 -print_final_stats=1)
  if [ "$target" = files ]; then options+=(-max_len=4096 -dict=tests/fuzz/files.dict); fi
  if ! ASAN_OPTIONS=allocator_may_return_null=1:detect_stack_use_after_return=0 WINNOW_THREADS=${WINNOW_THREADS:-2} \
    "$programs/fuzz_$target" "${options[@]}" -artifact_prefix="$findings/$target-" "$@" \
    >"$log" 2>&1; then
    verdict="FOUND something: $log"
  fi
  printf '%-14s %12s inputs  %s\n' "$target" \
    "$(sed -n 's/^stat::number_of_executed_units: *//p' "$log" | tail -n1)" "$verdict"
  [ "$verdict" = clean ]
}

status=0
case ${1:-} in
  compiler) clang_version ;;
  build) build ;;
  replay | minute)
    build
    mapfile -t all < <(targets)
    for target in "${all[@]}"; do
      fuzz "$target" -runs=0 "$stored/$target" || status=1
    done
    if [ "$1" = minute ]; then
      for target in "${all[@]}"; do
        fuzz "$target" -max_total_time=$((60 / ${#all[@]})) -seed="$(date +%s)" "$kept/$target" \
          "$stored/$target" || status=1
      done
    fi
    ;;
  long)
    build
    shift
    seconds=${1:-600}
    if [ $# -gt 0 ]; then shift; fi
    if [ $# -eq 0 ]; then mapfile -t all < <(targets); else all=("$@"); fi
    for target in "${all[@]}"; do
      fuzz "$target" -max_total_time="$seconds" "$kept/$target" "$stored/$target" || status=1
    done
    ;;
  coverage)
    version=$(clang_version) || exit 1
    cmake --preset fuzz -B build/coverage -DCMAKE_C_COMPILER="clang-$version" \
      -DCMAKE_CXX_COMPILER="clang++-$version" -DWINNOW_SANITIZE=fuzzer-no-link \
      -DCMAKE_CXX_FLAGS="-march=native -DHWY_COMPILE_ONLY_STATIC -fprofile-instr-generate -fcoverage-mapping" \
      >/dev/null && cmake --build build/coverage -j "$jobs" --target fuzz || exit 1
    objects=()
    for target in $(targets); do
      mkdir -p "$kept/$target"
      LLVM_PROFILE_FILE=build/coverage/$target.profraw "build/coverage/tests/fuzz_$target" -runs=0 \
        "$stored/$target" "$kept/$target" >"build/coverage/$target.log" 2>&1 || status=1
      objects+=(-object "build/coverage/tests/fuzz_$target")
    done
    "llvm-profdata-$version" merge -o build/coverage/all.profdata build/coverage/*.profraw || exit 1
    "llvm-cov-$version" report "${objects[@]}" -instr-profile=build/coverage/all.profdata \
      src tools/safetensors.cpp 2>/dev/null | tee build/coverage/report.txt | tail -n 3
    ;;
  *)
    sed -n 's/^#   //p' "$0"
    exit 2
    ;;
esac
exit $status
