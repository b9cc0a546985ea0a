#!/usr/bin/env bash
# Wheels for other machines: dist/cpu and, where there is an nvcc, dist/cuda, or those given. auditwheel puts
# the shared libraries in and gives the tag, which names the oldest glibc that the wheel runs on.
set -euo pipefail
cd "$(dirname "$0")/.."
export PATH=$PWD/.venv-tools/bin:$PATH:/usr/local/cuda/bin
variants=("$@")
if [ $# = 0 ]; then
  variants=(cpu)
  if command -v nvcc >/dev/null; then variants+=(cuda); fi
fi

declare -A cuda=([cpu]=OFF [cuda]=ON)
for variant in "${variants[@]}"; do
  raw=build/wheel/$variant dist=dist/$variant
  rm -rf "$raw" "$dist"
  python -m pip wheel -q --disable-pip-version-check --no-deps -w "$raw" \
    -C "build-dir=build/wheel-$variant" -C "cmake.define.WINNOW_CUDA=${cuda[$variant]}" .
  auditwheel repair -w "$dist" "$raw"/*.whl
  tools/python_test.sh wheel "$dist"/*.whl
done
for variant in "${variants[@]}"; do ls -sh "dist/$variant"/*.whl; done
