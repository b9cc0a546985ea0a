# Thin front of the CMake presets (CMakePresets.json); each target also installs what is missing.
JOBS ?= $(shell nproc)
PREFIX ?= /usr/local
SECONDS ?= 600
ARGS ?=
WINNOW = build/release/winnow

.PHONY: build run test check bench asan tsan python-test engines-test fuzz format wheel cuda gpu-test emulated-test install readme clean help \
        setup

build: setup  ## the library and the program: build/release/winnow
	cmake --preset release
	cmake --build --preset release --target winnow-cli -j $(JOBS)

run: build  ## a continuous-batching step loop through all stages (ARGS="--model v4 --check")
	$(WINNOW) run $(ARGS)

test: setup  ## the tests of the library and of the Python package
	@tools/setup.sh cache
	@tools/setup.sh python
	@tools/setup.sh mpi
	@JOBS=$(JOBS) tools/test.sh release python

check: setup  ## what test leaves out: format, lint, docs, ASan + UBSan, TSan, a minute of fuzzing; CUDA compiled, and emulated in part
	@tools/setup.sh tools
	@tools/setup.sh fuzz
	@JOBS=$(JOBS) tools/test.sh format ruff tidy docs asan tsan fuzz cuda-compile emulated

bench: build  ## every stage's benchmark (ARGS="attend" for one)
	$(WINNOW) bench $(ARGS)

asan: setup  ## tests under AddressSanitizer and UndefinedBehaviorSanitizer
	@JOBS=$(JOBS) tools/test.sh asan

tsan: setup  ## tests under ThreadSanitizer
	@JOBS=$(JOBS) tools/test.sh tsan

python-test: setup  ## the Python package, installed into .venv, and its tests
	@tools/setup.sh python
	@JOBS=$(JOBS) tools/test.sh python

engines-test: setup  ## the package inside vLLM's real classes, in .venv-engines (1 GB is downloaded once)
	@tools/setup.sh python
	@tools/engines_test.sh $(ARGS)

fuzz: setup  ## libFuzzer over every target, SECONDS (600) each; tools/fuzz.sh has more
	@tools/setup.sh fuzz
	@JOBS=$(JOBS) tools/fuzz.sh long $(SECONDS)

format: setup  ## clang-format and ruff, applied
	@tools/setup.sh tools
	@tools/lint.sh format --fix
	@tools/lint.sh ruff --fix

wheel: setup  ## wheels for other machines: dist/cpu and, where nvcc is, dist/cuda
	@tools/setup.sh tools
	@tools/wheel.sh

cuda:  ## the program with the Hopper kernels: build/cuda/winnow
	@tools/setup.sh cuda
	cmake --preset cuda
	cmake --build --preset cuda --target winnow-cli -j $(JOBS)

gpu-test:  ## every test of the CUDA build and compute-sanitizer, on a machine with a Hopper GPU
	@nvidia-smi -L || { echo "gpu-test needs an NVIDIA GPU"; exit 1; }
	@tools/setup.sh cuda
	@JOBS=$(JOBS) tools/test.sh cuda python-cuda

emulated-test:  ## the GPU's tests, but the largest, on an emulated GPU: hours (tests/emulated/README.md)
	@tools/setup.sh cuda
	@JOBS=$(JOBS) tools/test.sh emulated-all

install: build  ## headers, library, program and CMake package, under PREFIX (/usr/local)
	cmake --install build/release --prefix $(PREFIX)

readme: build  ## README's table of kernels (from the program), its plot and tables of speed (from bench/results)
	cmake -Dprogram=$(WINNOW) -Dreadme=README.md -Dupdate=ON -P tests/support_table.cmake
	python3 tools/plot_readme.py

clean:  ## removes every build
	rm -rf build

help:  ## this list
	@sed -nE 's/^([a-z-]+):.*## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

setup:
	@tools/setup.sh
