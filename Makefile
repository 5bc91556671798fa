# Everything runs in .venv, which make builds from a lock and repairs by itself.
# `make PYTHON=/path/to/python TARGET` uses that environment as it is and installs nothing.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

HOPPERS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| grep -c '^9\.' || true)
ON_HOPPER := $(filter-out 0,$(HOPPERS))
# GPUs that `make test-gpu` may rely on.
GPUS ?= $(HOPPERS)
# Processes that `make test` shares its tests between; 0: none beside pytest's own.
WORKERS ?= $(shell nproc)

ifeq ($(origin PYTHON),command line)
PY := $(or $(shell realpath -s "$$(command -v '$(PYTHON)')" 2>/dev/null),$(error PYTHON=$(PYTHON) does not run))
MAKE_ENV := true
else
PY := $(CURDIR)/.venv/bin/python
MAKE_ENV := .ci/make_env.sh $(if $(ON_HOPPER),.ci/locks/cuda13.txt,.ci/locks/cpu.txt)
endif

# The package is used from the checkout; the environment's tools come first on PATH.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
export PATH := $(shell dirname '$(PY)'):$(PATH):/usr/local/cuda/bin
HAVE_NVCC := $(shell PATH='$(PATH)' command -v nvcc || true)

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

.PHONY: env
env: ## make or repair .venv
	@$(MAKE_ENV)

.PHONY: train
train: extension ## train the example language model; ARGS="--data PATH ..."
	'$(PY)' examples/train_lm.py $(ARGS)

.PHONY: test
test: env ## the tests that need no GPU, on every core; ARGS="-k name", WORKERS=n
	'$(PY)' -m pytest -n $(WORKERS) --dist worksteal $(ARGS)

.PHONY: test-gpu
test-gpu: DELAYS := ON
test-gpu: need-hopper extension ## the GPU tests; no skip passes; GPUS=n declares n GPUs
	JAX_MEGAMOE_GPUS=$(GPUS) '$(PY)' -m pytest -m gpu $(ARGS)

.PHONY: scorecard
scorecard: DELAYS := ON
scorecard: need-hopper extension ## the scorecard of reliability; ARGS="PART ..." for some parts, 8 minutes each at most
	'$(PY)' benchmarks/scorecard.py --gpus $(GPUS) \
		--out benchmarks/results/scorecard-gpus$(GPUS).json $(ARGS)

.PHONY: bench
bench: need-hopper extension ## every benchmark, on a Hopper GPU; ARGS="--peers-path DIR" for layer.py, latency.py and step.py
	'$(PY)' benchmarks/plan.py --out benchmarks/results/plan.json
	'$(PY)' benchmarks/fault_path.py --out benchmarks/results/fault_path.json
	for pass in forward backward; do \
		'$(PY)' benchmarks/timeline.py --pass $$pass --png docs/$$pass-timeline.png \
			--out benchmarks/results/$$pass-timeline.json; \
	done
	if [ '$(HOPPERS)' -ge 2 ]; then for pass in forward backward; do \
		'$(PY)' benchmarks/timeline.py --ranks 2 --pass $$pass --png docs/$$pass-timeline-ep2.png \
			--out benchmarks/results/$$pass-timeline-ep2.json; \
	done; \
	'$(PY)' benchmarks/layer.py --set ranks --out benchmarks/results/layer-ep2.json \
		--png docs/layer-ep2.png $(ARGS); \
	'$(PY)' benchmarks/layer.py --set ranks-cliffs --out benchmarks/results/cliffs-ep2.json; \
	fi
	'$(PY)' benchmarks/layer.py --out benchmarks/results/layer.json --png docs/layer.png $(ARGS)
	'$(PY)' benchmarks/layer.py --set cliffs --out benchmarks/results/cliffs.json
	'$(PY)' benchmarks/layer.py --set fp8 --out benchmarks/results/fp8.json
	'$(PY)' benchmarks/fp8_errors.py --out benchmarks/results/fp8_errors.json
	'$(PY)' benchmarks/latency.py --out benchmarks/results/latency.json $(ARGS)
	'$(PY)' benchmarks/step.py --layers 6 --out benchmarks/results/step.json --png docs/step.png $(ARGS)
	'$(PY)' benchmarks/training.py --out benchmarks/results/training.json --png docs/training.png
	'$(PY)' benchmarks/model.py --docs docs/scaling.md

.PHONY: headline
headline: need-hopper extension ## the layer over the GPUs of one node, in under 10 minutes; GPUS=n, ARGS="--peers-path DIR"
	'$(PY)' benchmarks/headline.py --gpus $(GPUS) \
		--out benchmarks/results/headline-gpus$(GPUS).json $(ARGS)

.PHONY: lint lint-python lint-types lint-cpp
lint: lint-python lint-types lint-cpp ## ruff, pyright, clang-format

lint-python: env
	'$(PY)' -m ruff check .
	'$(PY)' -m ruff format --check .

lint-types: env
	'$(PY)' -m pyright --project . --pythonpath '$(PY)'

CPP_SOURCES = find cuda tests/emulator tests/ranks -name '*.cu' -o -name '*.cuh' -o -name '*.cc' -o -name '*.h'

lint-cpp: env
	$(CPP_SOURCES) | xargs -r clang-format --dry-run -Werror

.PHONY: format
format: env ## let ruff and clang-format rewrite the sources
	'$(PY)' -m ruff check --fix .
	'$(PY)' -m ruff format .
	$(CPP_SOURCES) | xargs -r clang-format -i

.PHONY: docs
docs: env ## write docs/api.md anew from the docstrings
	'$(PY)' docs/make_api.py

CONFIGURE = cmake -S . -B build -G Ninja -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE='$(PY)' \
	-DMEGAMOE_REPORT=ON -DMEGAMOE_DELAYS=$(or $(DELAYS),OFF)

.PHONY: compile
compile: env ## every kernel for sm_90a: registers, shared memory; fails on spills and stack frames
	$(CONFIGURE)
	cmake --build build --target megamoe_kernels_cuda
	'$(PY)' cuda/compile_lane.py build/CMakeFiles/megamoe_kernels_cuda.dir

.PHONY: build
build: env ## the extension, with CMake and nvcc, placed beside the package; DELAYS=ON: the test build too
	$(CONFIGURE)
	cmake --build build
	@ls jax_megamoe/*.so

# What a GPU run needs, where it can be made; elsewhere the reference backend serves.
.PHONY: extension
extension: $(if $(and $(ON_HOPPER),$(HAVE_NVCC)),build,env)
	@$(if $(and $(ON_HOPPER),$(if $(HAVE_NVCC),,no)),echo "No nvcc on PATH: the extension is not built")

.PHONY: need-hopper
need-hopper:
	@$(if $(ON_HOPPER),,echo "This needs a Hopper GPU, and nvidia-smi shows none" >&2; exit 1)

LOCK = uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate \
	--custom-compile-command "make lock" --group dev --extra examples pyproject.toml

.PHONY: lock
lock: env ## resolve the locks anew; LOCK_ARGS=--upgrade takes newer releases
	$(LOCK) $(LOCK_ARGS) --output-file .ci/locks/cpu.txt
	$(LOCK) $(LOCK_ARGS) --extra cuda13 --constraint .ci/locks/cpu.txt \
		--output-file .ci/locks/cuda13.txt
