# make demo   fine-tune a small pretrained model on this machine, export it, open it in transformers
# make test   lint, types and every test that takes seconds
# make test-long  the fuzz and the kill tests that take minutes
# make coverage   the tests with branch coverage: prints it, and writes build/coverage/html
# make lint   ruff and mypy alone
# make parity run the comparison with transformers and write docs/parity.md
# make parity-gpu   the same at real vocabulary sizes on a GPU: docs/parity_gpu.md
# make bench-ops    measure every op beside its peers on a GPU: benchmarks/results/ops.*
#
# Each makes .venv first, from constraints.txt. MODEL=<hub id or folder> gives the demo another model;
# PYTHON=<interpreter> makes the environment with another Python; WORKERS=<n> sets how many
# processes run the tests.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= 2
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
TORCH := $(shell sed -n '/^torch==/p' constraints.txt)
SMOLLM2 := build/smollm2
# The last transformers 4, which reads configs spelt the older way: exports must open there, too.
OLD := build/transformers-4.57.6

.PHONY: demo test test-long coverage lint format parity parity-gpu bench-ops clean

demo: $(VENV)/.demo
	$(BIN)/python examples/demo.py $(if $(MODEL),--model "$(MODEL)") $(DEMO_ARGS)

# The interpreter's choice is made when triton is imported, so its tests have their own process.
# The larger run comes last: its summary is the last line.
test: lint $(SMOLLM2)/config.json $(OLD)/transformers
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m interpreter
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m "not interpreter"

# tests/conftest.py leaves these out of every run that does not ask for them.
test-long: $(SMOLLM2)/config.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n $(WORKERS) -m long

# Both processes write data files of their own, which `combine` puts together.
coverage: $(SMOLLM2)/config.json $(OLD)/transformers
	rm -rf build/coverage && mkdir -p build/coverage
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 COVERAGE_FILE=$(CURDIR)/build/coverage/data.interpreter \
		$(BIN)/python -m pytest -q -n $(WORKERS) -m interpreter --cov --cov-report=
	OMP_NUM_THREADS=1 COVERAGE_FILE=$(CURDIR)/build/coverage/data.rest \
		$(BIN)/python -m pytest -q -n $(WORKERS) -m "not interpreter" --cov --cov-report=
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage html --quiet
	$(BIN)/python -m coverage report --skip-covered --sort=cover

lint: $(VENV)/.test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy

parity: $(VENV)/.test
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.models.parity_table -n $(WORKERS)

parity-gpu: $(VENV)/.test
	$(BIN)/python -m tests.models.parity_table --gpu -n $(WORKERS)

bench-ops: $(VENV)/.bench
	$(BIN)/python -m benchmarks.ops --sizes all

format: $(VENV)/.test
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

$(SMOLLM2)/config.json: | $(VENV)/.test
	$(BIN)/python examples/smollm2.py $(SMOLLM2)

# Beside the environment, not in it: these versions exclude the tested ones.
$(OLD)/transformers: | $(VENV)/.test
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLD) \
		transformers==4.57.6 tokenizers==0.22.2 huggingface-hub==0.36.2

# torch goes first and alone, so that a CPU build that pip already knows of is taken as it is.
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
