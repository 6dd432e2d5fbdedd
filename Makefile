# make demo         fine-tune a small pretrained model, export it, and open it in transformers
# make test         run ruff, mypy and every test that takes seconds
# make test-long    run each night what takes minutes, and the tests of other people's products
# make test-oldest  run the tests of the core on the oldest versions that pyproject.toml allows
# make test-newest  the same on the newest versions; PYTHON=<interpreter> is the Python of both, and
#                   TORCH_BACKEND= lets their torch come from the usual index, as a build for CUDA
# make coverage     run the tests with branch coverage, print it, and write build/coverage/html
# make lint         run only ruff and mypy
# make site         build the documentation into build/site; warnings are errors
# make parity       compare with transformers, and write docs/parity.md
# make parity-gpu   the same at real vocabulary sizes on a GPU: write docs/parity_gpu.md
# make outside-tools  train in Axolotl, LLaMA-Factory and Unsloth, in separate environments
# make bench-ops    measure every op and its peers on a GPU: write benchmarks/results/ops.*
#
# Each target first creates .venv from constraints.txt. Variables: MODEL=<hub id or folder> is another
# model for the demo, PYTHON=<interpreter> is the Python that creates .venv, and WORKERS=<n> is the
# number of processes that run the tests, each of which computes in OMP_NUM_THREADS=<n> threads.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
OMP_NUM_THREADS ?= 1
TORCH_BACKEND ?= cpu
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
# The tests start many processes, which would otherwise compile every module again.
unexport PYTHONDONTWRITEBYTECODE
SMOLLM2 := build/smollm2
# The last transformers 4. It reads the older spelling of configs, and exports must open in it, too.
OLD := build/transformers-4.57.6
# Tools that conflict with the tested versions. Each gets an environment in build/, of 2.5 GB.
OUTSIDE_TOOLS := axolotl llamafactory unsloth
CORE := tests/test_progress.py tests/cli/test_cli.py tests/converters/test_export.py \
	tests/converters/test_weight_map.py tests/training/test_run.py
INTERPRETED := tests/kernels tests/interpreter tests/test_docs.py
# Each process runs a half of the tests, so that it makes few fixtures a second time. The one that is
# done first takes over some of the other's.
SHARED := -n $(WORKERS) --dist worksteal

.PHONY: demo test test-long test-oldest test-newest coverage lint format site parity parity-gpu outside-tools bench-ops clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(DEMO_ARGS)

# Triton reads TRITON_INTERPRET when it is imported, so the interpreter's tests have their own process.
# It imports only the files that have such tests, since importing all of them takes seconds.
# The larger run comes last, so that its summary is the last line.
test: lint $(SMOLLM2)/config.json $(OLD)/transformers
	TRITON_INTERPRET=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -q $(SHARED) -m interpreter $(INTERPRETED)
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -q $(SHARED) -m "not interpreter"

# tests/conftest.py leaves these out of every run that does not ask for them.
test-long: $(SMOLLM2)/config.json $(OLD)/transformers
	$(PIP) uv
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m pytest -q -n $(WORKERS) -m long

# The core with the oldest or the newest versions that pyproject.toml allows. The other tests compare
# with exact versions of transformers and TRL, or answer for the hub as its newer client asks.
test-oldest: RESOLUTION := lowest-direct
test-newest: RESOLUTION := highest
test-oldest test-newest: $(VENV)/.test
	$(PIP) uv
	$(BIN)/uv venv --quiet --clear --python $(PYTHON) build/$@
	$(BIN)/uv pip install --quiet --python build/$@/bin/python --resolution $(RESOLUTION) \
		$(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND)) -e ".[demo]" "protobuf>=4" "pytest>=9"
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) build/$@/bin/python -m pytest -q $(CORE)

# Both processes write data files of their own, which `combine` puts together. A test that fails does
# not keep the report back. Its total counts lines and branches together.
coverage: $(SMOLLM2)/config.json $(OLD)/transformers
	rm -rf build/coverage && mkdir -p build/coverage
	-TRITON_INTERPRET=1 OMP_NUM_THREADS=$(OMP_NUM_THREADS) COVERAGE_FILE=$(CURDIR)/build/coverage/data.interpreter \
		$(BIN)/python -m pytest -q $(SHARED) -m interpreter $(INTERPRETED) \
		--cov --cov-report=
	-OMP_NUM_THREADS=$(OMP_NUM_THREADS) COVERAGE_FILE=$(CURDIR)/build/coverage/data.rest \
		$(BIN)/python -m pytest -q $(SHARED) -m "not interpreter" --cov --cov-report=
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover
	$(BIN)/python -m coverage json --quiet -o build/coverage/totals.json
	@$(BIN)/python -c "import json; t = json.load(open('build/coverage/totals.json'))['totals']; \
		print(f'all: {t[\"percent_covered\"]:.2f}%, branches alone:', \
		f'{100 * t[\"covered_branches\"] / t[\"num_branches\"]:.2f}%')"

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

site: $(VENV)/.test
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

parity: $(VENV)/.test
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m tests.models.parity_table -n $(WORKERS)

parity-gpu: $(VENV)/.test
	$(BIN)/python -m tests.models.parity_table --gpu -n $(WORKERS)

outside-tools: $(OUTSIDE_TOOLS:%=build/%/.made) | $(VENV)/.test
	OMP_NUM_THREADS=$(OMP_NUM_THREADS) $(BIN)/python -m tests.integrations.outside_tools

bench-ops: $(VENV)/.bench
	$(BIN)/python -m benchmarks.ops --sizes all

format: $(VENV)/.test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

$(SMOLLM2)/config.json: | $(VENV)/.test
	$(BIN)/python examples/smollm2.py $(SMOLLM2)

# These versions conflict with the tested ones, so they are installed outside of the environment.
$(OLD)/transformers: | $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLD) \
		transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2

# Each list is complete, and --no-deps keeps pip from adding packages that are not needed here, and from
# refusing a newer transformers than LLaMA-Factory asks for. LLaMA-Factory imports torchaudio. Its
# compiled part is for CUDA, and its import fails where torch is a CPU build, so it is removed.
build/%/.made: tests/integrations/environments/%.txt constraints.txt
	$(PYTHON) -m venv --clear build/$*
	build/$*/bin/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	build/$*/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -r $<
	rm -f build/$*/lib/python*/site-packages/torchaudio/lib/*.so
	@touch $@

# torch is installed first and alone, so that pip keeps a CPU build that it already knows.
$(VENV)/.base: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) $(TORCH)
	$(PIP) -e .
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) -e ".[demo]"
	@touch $@

$(VENV)/.test: $(VENV)/.base
	$(PIP) -e ".[test]"
	@touch $@

$(VENV)/.bench: $(VENV)/.base
	$(PIP) -e ".[bench]"
	@touch $@

clean:
	rm -rf $(VENV) build .pytest_cache .mypy_cache .ruff_cache *.egg-info
