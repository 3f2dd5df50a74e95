# Everything here works from a fresh clone: the environment is made in .venv, downloads go to a cache outside the tree.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
RELEASE ?= 0.16.1
export OMP_NUM_THREADS ?= 1
# Some images set it; then every process would compile anew what the first has imported.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help env demo test lint unit unit-pythons coverage helpers other-torch cells pairs trainers environments matrix patch proofs fuzz mutations engine-mutations gpu gpu-bundle gpu-dry bench docs docs-all docs-site pins history release-of changelog dist fresh clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

env: $(VENV)/.ready  ## make the environment

# pip would compile all of torch, sympy and onnx, with the other core idle; what is imported is a part of that.
$(VENV)/.ready: setup.py tests/requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -r tests/requirements.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	$(BIN)/python -m shim._matrix  # with byte code, what an installation makes
	$(BIN)/python -m compileall -q shim patches
	@touch $@

demo: env  ## train a small GPT with MTP on packed text: stock, shim and the truth (RELEASE=0.16.1)
	mkdir -p build
	PYTHONPATH=$$($(BIN)/python -c "from shim import testing; print(testing.fetch('$(RELEASE)'))") \
		$(BIN)/python examples/trainer/compare.py build/losses.svg 1

test: env  ## everything CI runs, with a table of where the minutes went
	$(BIN)/python tests/support/everything.py

# mypy finds shim.patches and shim.maintenance if they lie in the package, as in a wheel; in the tree both are unknown.
lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf build/typed && mkdir -p build/typed/shim && ln -s $(CURDIR)/shim/* $(CURDIR)/patches $(CURDIR)/maintenance build/typed/shim
	cd build/typed && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml -p shim

# Not in one process: what is loaded counts as installed.
WITHOUT_TORCH := tests/unit tests/engine --ignore tests/engine/test_with_torch.py
WITH_TORCH := tests/testing tests/ops tests/engine/test_with_torch.py
# A file in one process: what its tests share is made once. The dearest files come first.
BY_FILE := --dist loadfile --no-loadscope-reorder

comma := ,
# COVERAGE="--cov --cov-report=" measures coverage too, which takes as long again; `make coverage` is whole.
COVERAGE ?=

# Each process collects all tests, for sixteen CPU seconds here and nine in helpers. Cells have three for two cores: a
# test that waits for ranks leaves its core to another.
unit: env  ## the engine, without torch
	$(BIN)/python -m pytest -q -n 2 $(COVERAGE) $(WITHOUT_TORCH)
	$(if $(COVERAGE),$(BIN)/python -m coverage report --omit "patches/*$(comma)shim/ops/*$(comma)shim/testing/*")

# Processes of cells write a file each; those that a test kills leave one behind that cannot be read.
MEASURED := COVERAGE_ROOT=$(CURDIR) COVERAGE_PROCESS_START=$(CURDIR)/tests/measured.toml

coverage: env  ## of shim and patches, branches included, by what make test runs; half an hour
	$(BIN)/python -m pytest -q -n 3 --cov --cov-report= $(WITHOUT_TORCH)
	$(BIN)/python -m pytest -q -n 3 $(BY_FILE) --cov --cov-append --cov-report= $(WITH_TORCH)
	$(MAKE) cells pairs CELLS_ENVIRONMENT="$(MEASURED)" RUN_CELLS="-m shim.testing.cells"
	COVERAGE_ROOT=$(CURDIR) $(BIN)/python -m coverage combine --quiet --append --rcfile tests/measured.toml
	$(BIN)/python -m coverage report

unit-pythons: env  ## what can differ there, on the oldest and the newest other Python
	PYTHON=$(BIN)/python sh tests/other_pythons.sh

helpers: env  ## shim.testing, shim.ops, and the engine with torch
	$(BIN)/python -m pytest -q -n 2 $(BY_FILE) $(WITH_TORCH)

# The newest torch of the axis, if `make environments` has made it here; else a line says that it is skipped.
OTHER := --torch 2.14.1 --python 3.11 --if-made
other-torch: env  ## private names of torch, and layouts and operators, with another torch if it is at hand
	$(BIN)/python -m shim.maintenance.other_torch $(OTHER) --releases torch -- -q -p no:warnings -p no:cacheprovider \
		tests/testing/test_torch_names.py tests/testing/test_layout.py tests/ops/test_packed_roll.py tests/ops/test_packing.py
	$(BIN)/python -m shim.maintenance.other_torch $(OTHER) --releases 0.16.1 -- -q -p no:warnings -p no:cacheprovider \
		tests/cells/test_rope_fusion.py tests/cells/test_frozen_recompute.py

environments: env  ## tests and proofs with torch 2.6.0, 2.9.1, 2.12.1 and 2.14.1, for docs/environments.md; some GB, two hours
	$(BIN)/python -m shim.maintenance.environments
	$(BIN)/python -m shim.maintenance.docs

# One release per set of bodies. A file of tests says in its CELLS which of them run it, and with which cases (make
# matrix: all on all). Three cells at once, with one thread each.
CELLS ?= --everyday
RUN_CELLS := tests/support/warm_cells.py
LOGS := build/logs
cells: env  ## real megatron-core, one process per release (CELLS="--releases 0.16.1")
	SHIM_TEST_ONCE_PER_VARIANT=1 $(CELLS_ENVIRONMENT) $(BIN)/python $(RUN_CELLS) $(CELLS) --jobs 3 --logs $(LOGS) -- -q -p no:warnings tests/cells tests/examples

pairs: env  ## real megatron-core with Transformer Engine's Python layer
	SHIM_TEST_ONCE_PER_VARIANT=1 $(CELLS_ENVIRONMENT) $(BIN)/python $(RUN_CELLS) --everyday-pairs --jobs 3 --logs $(LOGS) -- -q -p no:warnings tests/pairs

# One release of each, and one order of imports for each: a process each, with no test that asks for another, as of
# stock; make integration runs all. Without a package index, and with an empty cache, they are skipped.
trainers: env  ## mcore-bridge and verl themselves, on one release
	SHIM_TEST_SKIP_UNFETCHED=1 $(BIN)/python -m pytest -q -rs -n 2 --dist loadfile tests/integration/test_mcore_bridge.py tests/integration/test_verl.py \
		-k "0.18.2 and not (ranks or trainer or both_orders or stock or without_shim or other_models or reverted or hides_the_fix or blocks) \
		and not (test_verl and shim)"

matrix: export SHIM_TEST_THOROUGH = 1
matrix: env  ## the same on all 21 releases and main, in every order of imports, and on all pairs with Transformer Engine
	$(BIN)/python -m pytest -q -n 2 $(WITHOUT_TORCH)
	SHIM_TEST_EVERY_RELEASE=1 $(BIN)/python -m pytest -q -n 3 $(BY_FILE) $(WITH_TORCH)
	PYTHON=$(BIN)/python SHIM_TEST_EVERY_FILE=1 sh tests/other_pythons.sh
	SHIM_TEST_ALL_ORDERS=1 $(BIN)/python -m shim.testing.cells --all -- -q -p no:warnings tests/cells tests/examples --ignore tests/cells/layouts
	$(BIN)/python -m shim.testing.cells --all --jobs 1 -- -q -p no:warnings tests/cells/layouts
	$(BIN)/python -m shim.testing.cells --all-pairs -- -q -p no:warnings tests/pairs
	$(MAKE) proofs

patch: env  ## of one patch (ID=...): its pins, tests, proofs and page on few releases, and what it lacks; two minutes
	$(BIN)/python -m shim.maintenance.one_patch $(ID); code=$$?; $(BIN)/python -m shim._matrix && exit $$code

proofs: env  ## run all proofs on all releases, and write their results
	$(BIN)/python -m shim.maintenance.prove_all
	$(BIN)/python -m shim.maintenance.docs

SEEDS ?= 0:100
fuzz: env  ## training steps with random options against one rank and one sequence (SEEDS=0:300 RELEASE=0.16.1)
	SHIM_FUZZ_SEEDS=$(SEEDS) $(BIN)/python -m shim.testing.cells --releases $(RELEASE) -- -q -p no:warnings tests/cells/test_drawn_steps.py

mutations: env  ## what was measured on mutated releases and on fixes, measured again; two hours
	$(BIN)/python maintenance/mutations/measure.py
	$(BIN)/python maintenance/mutations/fixing.py

# EVERY=1 takes all four thousand, and about two hours of one core; FILES names some of them.
EVERY ?= 10
FILES ?= shim/_engine/*.py shim/_planning/*.py shim/_api.py shim/_config_override/*.py
engine-mutations: env  ## mutants of the engine and the planning that no test notices: every tenth; a quarter of an hour
	$(BIN)/python maintenance/mutations/engine.py $(FILES) --every $(EVERY) --jobs 2 --last tests/engine/test_state_machine.py

gpu:  ## FP8, FP4 and fused rotations, where $(PYTHON) has torch, megatron-core and Transformer Engine with an NVIDIA GPU
	$(PYTHON) -m pytest -q -rs -m gpu tests/gpu

gpu-bundle: env  ## what a machine with a GPU and without a network lacks for gpu/run.sh; half an hour of CPU the first time
	$(BIN)/python gpu/bundle.py

gpu-dry: gpu-bundle  ## each step of gpu/run.sh but its kernels, without a GPU
	PYTHON="$$($(BIN)/python gpu/bundle.py --interpreter)" gpu/run.sh --dry

.PHONY: integration
integration: env  ## shim in workers of a real Ray and beside real trainers, which are fetched, and its pages in a Chromium
	$(BIN)/python -m pip install --quiet --disable-pip-version-check ray
	$(BIN)/python -m pytest -q tests/integration/test_ray.py
	$(BIN)/python -m pytest -q -n 2 --dist loadfile tests/integration --ignore tests/integration/test_ray.py

bench: env  ## all benchmarks, as ratios
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/audit.py
	$(BIN)/python benchmarks/workers.py
	$(BIN)/python benchmarks/overhead.py
	$(BIN)/python benchmarks/counts.py --record
	$(BIN)/python benchmarks/step_times.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/checkpoints.py
	$(BIN)/python benchmarks/packed_roll.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/rope_thd.py
	$(BIN)/python benchmarks/logprob.py
	$(BIN)/python benchmarks/packed_logprob.py
	$(BIN)/python benchmarks/linear_losses.py
	$(BIN)/python benchmarks/linear_losses.py --real --repeats 3
	$(BIN)/python benchmarks/te_cross_entropy.py
	$(BIN)/python benchmarks/paged_stash.py
	$(BIN)/python benchmarks/device.py
	$(BIN)/python benchmarks/gpu_steps.py

docs: env  ## write the generated parts of README.md and docs/ that a commit keeps current
	$(BIN)/python -m shim.maintenance.docs
	$(BIN)/python -m shim._matrix
	$(BIN)/python tests/support/stash_operators.py

docs-all: docs  ## for a release, write also what all patches make together, and docs/explore.html
	$(BIN)/python -m shim.maintenance.docs --all

SITE := .venv-site
$(SITE)/.ready: docs/requirements.txt
	$(PYTHON) -m venv $(SITE)
	$(SITE)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	@touch $@

docs-site: $(SITE)/.ready  ## the documentation as a site in build/site, with its links checked
	PYTHONPATH=. $(SITE)/bin/python -m shim.maintenance.docs_site prepare
	NO_MKDOCS_2_WARNING=1 $(SITE)/bin/mkdocs build --strict --clean --config-file build/mkdocs.yml
	PYTHONPATH=. $(SITE)/bin/python -m shim.maintenance.docs_site check

pins: env  ## fingerprint all supported releases and write them into version_matrix.lock.json
	$(BIN)/python -m shim pin --releases
	$(BIN)/python -m shim._matrix

# COMMITS=20 also runs the proofs on so many commits, the next ones; up to three CPU minutes each.
COMMITS ?= 0
release-of: env  ## add a release: R=0.20.0, and DIR with its sources if it is on no index
	$(BIN)/python -m shim.maintenance.release_of $(R) $(DIR)

history: env  ## bodies on every commit of upstream's branches, and proofs of those that no release has (COMMITS=20)
	$(BIN)/python -m shim.maintenance.history --commits $(COMMITS)

changelog: env  ## collect the fragments of changes/ in CHANGELOG.md, as the section of shim.__version__
	$(BIN)/towncrier build --yes --version "$$($(BIN)/python -c 'import shim; print(shim.__version__)')"

dist: export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct)
dist: env  ## the wheel and the source distribution of a commit: always the same bytes
	rm -rf build dist *.egg-info/SOURCES.txt
	$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir dist .
	$(BIN)/python -c "from setuptools import build_meta; build_meta.build_sdist('dist')" >/dev/null
	@ls -l dist

fresh: dist  ## use both as a user does, in fresh environments on every Python there is
	sh tests/fresh_environments.sh

clean:
	rm -rf $(VENV) .venv-* build dist *.egg-info
