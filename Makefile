# `make demo` and `make test` set up everything they need on a fresh machine.
PYTHON ?= python3
BIN := .venv/bin
NATIVE := $(wildcard CMakeLists.txt src/einsight/engines/native/kernel/*)

.PHONY: demo test coverage check lint docs model browser sanitize ship
demo: .venv/installed
	$(BIN)/einsight look --file examples/passage.txt --html report.html

# A worker for each core, up to four: most tests keep one busy, and each worker reads the default model.
test: .venv/installed model browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal

# The same, and which lines of the package no test comes to.
coverage: .venv/installed model browser
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal --cov --cov-report term-missing

# What a change has to pass beside the tests: style, types, and the documentation, of which every block of code is run.
check: lint docs model
	$(BIN)/python -m pytest tests/docs

docs: .venv/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

lint: .venv/installed
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python

# The kernel under the sanitizers of GCC: built apart from the installed one, and run over drawn calls.
sanitize: .venv/installed
	tests/sanitize.sh address,undefined build/sanitize/address tests/engines/test_native_fuzz.py
	tests/sanitize.sh thread build/sanitize/thread tests/engines/test_native_fuzz.py

# The sdist and a wheel, built and tried with a compiler and without.
ship: .venv/installed
	tests/ship.sh

# Quick when the model is there already.
model: .venv/installed
	$(BIN)/python -m einsight.models

# The report is tested in Debian's Chromium; without one its tests fail, and say what to install.
browser:
	@command -v chromium chromium-browser google-chrome >/dev/null || { \
		[ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq chromium >/dev/null; } || \
		echo "no Chromium: the report's tests will fail; install it (Debian: apt-get install chromium)"

# An editable install knows the modules that it found; a new or moved one asks for another.
.venv/modules: FORCE
	@mkdir -p .venv
	@find src -name '*.py' | sort | cmp -s - $@ || find src -name '*.py' | sort > $@
FORCE:

.venv/installed: pyproject.toml constraints.txt .venv/modules $(NATIVE)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[look,test,lint,docs]"
	touch $@
