# `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(wildcard CMakeLists.txt src/einsight/engines/native/kernel/*)

.PHONY: demo test lint model
demo: .venv/installed
	$(BIN)/einsight look --file examples/passage.txt

test: .venv/installed model
	$(BIN)/python -m pytest

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

# Quick when the model is there already.
model: .venv/installed
	$(BIN)/python -m einsight.models

# An editable install knows the modules that it found; a new or moved one asks for another.
.venv/modules: FORCE
	@mkdir -p .venv
	@find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort > $@
FORCE:

.venv/installed: pyproject.toml constraints.txt .venv/modules $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[look,test,lint]"
	touch $@
