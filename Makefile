# SPDX-License-Identifier: MIT
# Commands for developers; CMakePresets.json defines the builds they use.
PREFIX ?= /usr/local
# Device for `make run`: cpu or cuda.
DEVICE ?= cpu

# ctest runs one test at a time by default; ninja already uses all cores.
export CTEST_PARALLEL_LEVEL ?= $(shell nproc)

# The thread sanitizer of g++ 12 sometimes fails under address space randomisation. Some containers
# do not allow switching that off; the tests then run with it.
FIXED_ADDRESSES := $(shell setarch -R true 2>/dev/null && echo setarch -R)

.DEFAULT_GOAL := help
.PHONY: help setup run results-small test dev arm sanitize coverage fuzz format tidy cuda test-gpu sanitize-gpu docs wheel test-python install clean

help:  ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup:  ## install the tools and libraries that are missing
	@scripts/setup

# Whether to compile the CUDA kernels: by default if the machine has a GPU, when the build folder is
# configured for the first time. `make run CUDA=ON` or CUDA=OFF decides otherwise.
CUDA ?= $(if $(filter cuda,$(DEVICE)),ON)

# The models of the report are too small for many threads: two are trained at a time, each on half of the cores. What
# the second process prints is in out/compare.log; the last comparison finds all runs finished.
HALF_THE_CORES := $(shell expr \( `nproc` + 1 \) / 2)
COMPARE = build/release/bin/coterie compare --device $(DEVICE) --threads $(HALF_THE_CORES) --out out

run:  ## build, compare long sequences, train a small model with every attention, write out/report.html
	@rm -f build/steps && mkdir -p out
	@scripts/step "Check and install tools and libraries (scripts/setup)" scripts/setup torch
	@scripts/step "Configure the build" cmake --preset release $(if $(CUDA),-DCOTERIE_CUDA=$(CUDA))
	@scripts/step "Build the program" cmake --build --preset release --target coterie_cli
	@scripts/step "Time every attention alone" \
	  build/release/bin/coterie bench --device $(DEVICE) --seconds 16 --json out/bench.jsonl
	@scripts/step "Train small models, two at a time" sh -c '\
	  $(COMPARE) --sections copy >out/compare.log 2>&1 & \
	  $(COMPARE) --sections recall "recall, long" "recall, causal" bytes; status=$$?; \
	  wait $$! || { cat out/compare.log; exit 1; }; exit $$status'
	@scripts/step "Write the report" $(COMPARE) --bench out/bench.jsonl
	@scripts/step --total "make run, its parts"

results-small:  ## repeat the smallest experiment on the CPU and compare it with its record
	scripts/setup torch
	cmake --preset release
	cmake --build --preset release --target coterie_cli
	rm -rf build/results-small
	experiments/run.py small --jobs $(HALF_THE_CORES) --out build/results-small --logs build/results-small
	experiments/compare.py small --repeated build/results-small

test:  ## build everything the machine has the tools for and run all tests
	@rm -f build/steps
	@scripts/step "Check and install tools and libraries (scripts/setup)" scripts/setup torch
	@scripts/step "Configure the build" cmake --preset full
	@scripts/step "Build everything" cmake --build --preset full
	@scripts/step "Run the tests" ctest --preset full
	@scripts/step --total "make test, its parts"

dev: setup  ## build and test the core on the CPU (quick)
	cmake --workflow --preset dev

arm:  ## cross-compile the core for 64-bit ARM and test it under qemu-user
	@scripts/setup arm
	cmake --workflow --preset arm

sanitize: setup  ## run the tests under the address, undefined-behaviour and thread sanitizers
	cmake --workflow --preset asan
	$(FIXED_ADDRESSES) cmake --workflow --preset tsan

coverage:  ## measure the test coverage of src/ops and src/cpu
	@scripts/setup coverage
	find build/coverage -name '*.gcda' -delete 2>/dev/null || true
	cmake --workflow --preset coverage
	gcovr --root . --object-directory build/coverage --filter 'src/(ops|cpu)/' build/coverage/src

# With libFuzzer where clang has it, otherwise with the project's own mutations.
FUZZ_PROGRAMS := fuzz_spec fuzz_config fuzz_report fuzz_safetensors
FUZZ_MAIN := extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }
fuzz: setup  ## fuzz specs, configs, logs and safetensors files under sanitizers, a minute each
	@if echo '$(FUZZ_MAIN)' | clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null; \
	then preset=fuzz; minute=-max_total_time=60; \
	else preset=asan; minute=60; echo "no clang++ with libFuzzer: inputs are not guided by coverage"; fi; \
	cmake --preset $$preset && cmake --build --preset $$preset --target $(FUZZ_PROGRAMS) && \
	for program in $(FUZZ_PROGRAMS); do \
	  echo "$$program:"; build/$$preset/bin/$$program $$minute || exit 1; done

format:  ## format all sources with clang-format
	cmake -DFIX=ON -P tests/format.cmake

tidy:  ## run clang-tidy on the host sources
	@scripts/setup tidy
	cmake --preset dev
	run-clang-tidy -quiet -p build/dev -extra-arg=-Wno-unknown-warning-option -extra-arg=-Wno-error \
	  '^$(CURDIR)/(src|cases|bench|apps)/.*\.cc$$'

test-gpu: setup  ## run the tests of the CUDA kernels (needs a GPU)
	cmake --preset cuda
	cmake --build --preset cuda
	ctest --preset cuda -L gpu --output-on-failure

sanitize-gpu: setup  ## run the CUDA tests under compute-sanitizer's memcheck, racecheck and synccheck
	cmake --preset racecheck
	cmake --build --preset racecheck
	for tool in memcheck racecheck "synccheck --num-cuda-barriers 16384"; do \
	  compute-sanitizer --tool $$tool --error-exitcode 1 build/racecheck/bin/test_gpu \
	    --gtest_filter='-*RepeatsItsBits*:*Graph*' || exit 1; done

cuda: setup  ## build and test with the CUDA back end (kernel tests need a GPU)
	cmake --workflow --preset cuda

docs:  ## build the site of docs/ with both references into build/docs/site
	@scripts/setup torch && scripts/setup docs
	cmake --preset full
	cmake --build --preset full --target coterie_ops
	scripts/docs

wheel:  ## build the Python wheel in build/wheels; WHEEL=cpu or cuda selects the kernels
	@scripts/setup torch
	scripts/wheel $(WHEEL)

test-python: wheel  ## test the wheel with the pinned and the newest torch, in fresh environments
	scripts/test_python

install: setup  ## install the library and the program under PREFIX
	cmake --workflow --preset release
	cmake --install build/release --prefix $(PREFIX)

clean:  ## remove the build directory
	rm -rf build
