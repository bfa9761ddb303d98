# Every target creates .venv and installs into it first. `make help` lists them.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.PHONY: demo test mutants faults verify lint docs figures licences sbom clean help
help:
	@echo "make demo    train on the embedded digits, sample with ODE and SDE, write runs/demo/report.html"
	@echo "make test    the test suite without slow tests (14 minutes on 2 cores)"
	@echo "make faults  kill, fill the disk, stop workers, spoil files, crowd the page: nothing is lost (about 15 minutes)"
	@echo "make mutants  break one line at a time: fast tests must see each (about ten minutes)"
	@echo "make verify  check the mathematics on exact oracles (under a minute)"
	@echo "make lint    style, types, import layers, dependencies, spelling"
	@echo "make docs    the documentation site, site/index.html, which opens offline"
	@echo "make figures  redraw the plots of docs/assets from stored results"
	@echo "make licences  docs/reference/licences.md: name, version and licence of every pinned package"
	@echo "make sbom    sbom.json: the same as a bill of materials (CycloneDX 1.6)"
	@echo "make clean   remove .venv and caches; runs/ stays"

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "mvm needs Python >= 3.11; try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt setuptools
	# torch first and alone: the exact pin picks the small CPU build where one is at hand
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[dev]'
	@touch $@

demo: $(INSTALLED)
	$(BIN)/mvm demo

test: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --durations=20 --cov --cov-report=term:skip-covered --cov-fail-under=90

faults: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.crashes --kills 50 --seed 0 --most 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.pairs --most 2 --drawn 1 --share 8
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.soak --cycles 200 --seed 0
	OMP_NUM_THREADS=1 $(BIN)/python tests/faults/fuzz.py --cases 20000 --seed 0 --seconds 120
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.faults.load --requests 1000 --images 10000
	MVM_SLOW=1 $(BIN)/python -m pytest -n 2 tests/faults tests/training/test_processes.py -k "faults or killed or stopped or signals or fewer"

mutants: $(INSTALLED)
	$(BIN)/python tools/mutants.py --jobs 2

verify: $(INSTALLED)
	$(BIN)/mvm verify

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/ty check src
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/codespell

docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

figures: $(INSTALLED)
	$(BIN)/python benchmarks/figures.py --out docs/assets
	$(BIN)/python benchmarks/method_figures.py --out docs/assets

licences: $(INSTALLED)
	$(BIN)/python tools/supply.py licences docs/reference/licences.md

sbom: $(INSTALLED)
	$(BIN)/python tools/supply.py sbom sbom.json

clean:
	rm -rf .venv site .pytest_cache .ruff_cache .coverage .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
