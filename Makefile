# `make demo` and `make test` work on a clean clone with nothing installed: they set up .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: all demo test check types clean

all: .venv/ready

.venv/ready: pyproject.toml requirements.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --upgrade pip
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet -r requirements.txt
	touch $@

demo: .venv/ready
	$(BIN)/dcpcomm demo

# Three at a time, file by file: much of the time goes into waiting for processes to start and deadlines to pass.
test: .venv/ready
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

check: .venv/ready types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(MAKE) test

# mypy doesn't follow setuptools' package-dir, so it is shown the tree as it is installed.
types: .venv/ready
	rm -rf .types && mkdir -p .types/dcpcomm
	ln -s $(CURDIR)/dcpcomm/* .types/dcpcomm/
	ln -s $(CURDIR)/backends $(CURDIR)/bench $(CURDIR)/configs .types/dcpcomm/
	MYPYPATH=.types $(BIN)/mypy -p dcpcomm

clean:
	rm -rf dcpcomm/combine/_native*.so .venv .types build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
