# Everything happens in .venv, made on first use; a changed pyproject.toml (of kinfed or of papers) or constraints.txt renews it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/$(if $(filter Windows_NT,$(OS)),Scripts,bin)
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# What is installed: what the demo needs, what the tests need, what building a release needs.
DEMO   := $(VENV)/.demo
READY  := $(VENV)/.ready
TOOLS  := $(VENV)/.tools

.PHONY: demo test documents test-random test-portable mutants lint reference site site-version gallery coverage durations dist tools clean

# Digits of clients in four groups that nobody names; who finds its kin?
demo: $(DEMO)
	$(BIN)/kinfed run --partition hidden_groups --algorithms local,fedavg,ditto,selffl,fedfomo,cgpfl,kin

# Three workers for two cores: tests that start processes of Flower and Ray mostly wait. Whatever the shell says, modules
# are compiled once and kept, not again in every process that a test starts.
test documents coverage durations: export PYTHONDONTWRITEBYTECODE :=
test: $(READY)
	$(BIN)/python -m pytest -n 3 -m "not documents"

# What README, pages, notebooks and the gallery show does what they say; the site builds, and no link leads nowhere.
documents: $(READY)
	$(BIN)/python -m pytest -n 2 -m documents

test-random: $(READY)
	KINFED_HYPOTHESIS=random $(BIN)/python -m pytest -n 2 -m "not ray and not flower"

# Without what needs Ray, Flower or Chromium, for systems that do not have them.
test-portable: $(READY)
	$(BIN)/python -m pytest -n 2 -m "not ray and not flower and not browser"

# Bugs planted in what protects people, one at a time, and whether the nearest tests notice: all named ones and a tenth of
# the others, in about an hour (SHARE=1 for all).
SHARE ?= 0.1
mutants: $(READY)
	$(BIN)/python benchmarks/mutants.py --share $(SHARE)

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

reference: $(READY)
	$(BIN)/python docs/generate/reference.py > docs/reference.md
	$(BIN)/python docs/generate/method_pages.py docs/methods
	$(BIN)/python docs/generate/method_pictures.py
	$(BIN)/python docs/generate/agent_files.py

# The documentation as pages in site/; a link that leads nowhere is an error. Nothing is fetched.
site: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "site/index.html"

# The site of a version beside those of others, as a commit on the branch gh-pages; nothing is pushed.
# make site-version VERSION=0.2 ALIAS=latest
ALIAS ?= dev
site-version: $(TOOLS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mike deploy --update-aliases $(VERSION) $(ALIAS)
	$(BIN)/mike set-default $(ALIAS)

# Every example of the gallery at full size, and its picture.
gallery: $(READY)
	$(BIN)/python examples/gallery/draw_all.py

coverage: $(TOOLS)
	$(BIN)/python -m pytest -n 3 --cov --cov-report=term:skip-covered --cov-report=html

durations: $(READY)
	$(BIN)/python -m pytest -n 3 --durations=100 --durations-min=1

# A wheel and a source archive that install and run where there is no repository.
dist: $(TOOLS)
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist papers
	$(BIN)/python -m twine check --strict dist/*
	.ci/try_wheel dist $(PYTHON)

tools: $(TOOLS)

$(DEMO): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[fast]" -e papers
	touch $@

$(READY): pyproject.toml papers/pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[dev,docs,dp,tune,ray,flower,audio,text,fast,onnx]" -e papers
	touch $(DEMO) $@

$(TOOLS): $(READY)
	$(PIP) -e ".[release]"
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache site dist htmlcov .coverage
