# Everything happens in .venv, made on first use; a changed pyproject.toml or constraints.txt renews it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test test-random lint reference clean

# Digits of clients in four groups that nobody names; who finds its kin?
demo: $(READY)
	$(BIN)/kinfed run --partition hidden_groups --algorithms local,fedavg,ditto,selffl,fedfomo,cgpfl,kin

# Three workers for two cores: tests that start processes of Flower and Ray mostly wait.
test: $(READY)
	$(BIN)/python -m pytest -n 3

test-random: $(READY)
	KINFED_HYPOTHESIS=random $(BIN)/python -m pytest -n 2 -m "not ray and not flower"

lint: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev,dp,tune,ray,flower,audio,text,fast,onnx]"
	touch $@

reference: $(READY)
	$(BIN)/python -m kinfed.cli.reference > docs/reference.md
	$(BIN)/python -m kinfed.cli.method_pages docs/methods

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
