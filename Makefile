# SPDX-License-Identifier: MIT
# The commands of the house; CMakePresets.json has the builds behind them.
PREFIX ?= /usr/local
# Where `make run` computes: cpu or cuda.
DEVICE ?= cpu

# ctest runs one test at a time unless told; ninja takes all cores by itself.
export CTEST_PARALLEL_LEVEL ?= $(shell nproc)

# The thread sanitizer of g++ 12 fails now and then where addresses are spread wide; some containers
# do not allow to switch that off, and then it has to do without.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.PHONY: help setup run test dev sanitize coverage fuzz format tidy cuda test-gpu sanitize-gpu wheel test-python install clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## install the tools and libraries that are missing
	@scripts/setup

run:  ## build, then train the same small model with every attention; writes out/report.html
	@scripts/setup torch
	cmake --preset release
	cmake --build --preset release --target coterie_cli
	@mkdir -p out
	build/release/bin/coterie bench --device $(DEVICE) --seconds 30 --json out/bench.jsonl
	build/release/bin/coterie compare --device $(DEVICE) --out out --bench out/bench.jsonl

test:  ## build everything the machine has the tools for and run all tests
	@scripts/setup torch
	cmake --workflow --preset full

dev: setup  ## build and test the core on the CPU: the quick round
	cmake --workflow --preset dev

sanitize: setup  ## the tests under the address, undefined-behaviour and thread sanitizers
	cmake --workflow --preset asan
	$(FIXED_ADDRESSES) cmake --workflow --preset tsan

coverage:  ## lines of src/ops and src/cpu that the tests reach
	@scripts/setup coverage
	find build/coverage -name '*.gcda' -delete 2>/dev/null || true
	cmake --workflow --preset coverage
	gcovr --root . --object-directory build/coverage --filter 'src/(ops|cpu)/' build/coverage/src

# With libFuzzer where clang has it, otherwise with the project's own mutations.
FUZZ_PROGRAMS := fuzz_spec fuzz_config fuzz_report fuzz_safetensors
FUZZ_MAIN := extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
fuzz: setup  ## malformed specs, configs, logs and safetensors files, a minute each, under sanitizers
	@if echo '$(FUZZ_MAIN)' | clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null; \
	then preset=fuzz; minute=-max_total_time=60; \
	else preset=asan; minute=60; echo "no clang++ with libFuzzer: inputs are not guided by coverage"; fi; \
	cmake --preset $$preset && cmake --build --preset $$preset --target $(FUZZ_PROGRAMS) && \
	for program in $(FUZZ_PROGRAMS); do \
	  echo "$$program:"; build/$$preset/bin/$$program $$minute || exit 1; done

format:  ## format all sources with clang-format
	cmake -DFIX=ON -P tests/format.cmake

tidy:  ## clang-tidy over the host sources
	@scripts/setup tidy
	cmake --preset dev
	run-clang-tidy -quiet -p build/dev -extra-arg=-Wno-unknown-warning-option -extra-arg=-Wno-error \
	  '^$(CURDIR)/(src|cases|bench|apps)/.*\.cc$$'

test-gpu: setup  ## the tests of CUDA kernels, on a machine with a GPU
	cmake --preset cuda
	cmake --build --preset cuda
	ctest --preset cuda -L gpu --output-on-failure

sanitize-gpu: setup  ## the tests of CUDA kernels under compute-sanitizer's memcheck, racecheck and synccheck
	cmake --preset racecheck
	cmake --build --preset racecheck
	for tool in memcheck racecheck "synccheck --num-cuda-barriers 16384"; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 build/racecheck/bin/test_gpu \
	    --gtest_filter='-*RepeatsItsBits*:*Graph*' || exit 1; done

cuda: setup  ## build and test with the CUDA room (tests of kernels need a GPU)
	cmake --workflow --preset cuda

wheel:  ## the Python package as one wheel, in build/wheels; WHEEL=cpu or cuda decides about kernels
	@scripts/setup torch
	scripts/wheel $(WHEEL)

test-python: wheel  ## the wheel's tests with the pinned torch and with the newest one, in fresh environments
	scripts/test_python

install: setup  ## install the library and the program under PREFIX
	cmake --workflow --preset release
	cmake --install build/release --prefix $(PREFIX)

clean:  ## remove all builds
	rm -rf build
