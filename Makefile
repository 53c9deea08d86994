# make serve: install, fetch the default model, serve it.   make test: install, run the whole suite.
PYTHON ?= python3
PORT ?= 8000
MODEL ?= smollm2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP_VENV := $(VENV)/.made
STAMP_SERVE := $(VENV)/.installed-serve
STAMP_DEV := $(VENV)/.installed-dev
# The engine is compiled when Sterna is installed.
BUILT_FROM := pyproject.toml CMakeLists.txt $(shell find csrc -type f)

SANITIZED := build/sanitize

.PHONY: serve test check fmt bench faults soak sanitize clean

serve: $(STAMP_SERVE)
	@$(BIN)/sterna serve "$(MODEL)" --port "$(PORT)" $(ARGS)

# The tests of the default model want it fetched: here, with its progress bar, not inside a test with a deadline. A file's tests stay together:
# they share what is dear to make. Files go out in their order, the long ones of e2e/ first.
test: $(STAMP_DEV)
	@$(BIN)/sterna pull
	$(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile --no-loadscope-reorder

check: $(STAMP_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(BIN)/pytest tests/house

fmt: $(STAMP_DEV)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP_DEV)
	$(BIN)/python bench/run.py $(ARGS)

# Every process killed, stopped and delayed at every point that a request passes; `make test` has a slice of it.
faults: $(STAMP_DEV)
	@$(BIN)/sterna pull
	$(BIN)/pytest tests/faults -m 'exhaustive or not exhaustive' $(ARGS)

# Ten minutes of everything at once; ARGS="--minutes 60" for longer. docs/reliability.md has the last figures.
soak: $(STAMP_DEV)
	@$(BIN)/sterna pull
	PYTHONPATH=tests $(BIN)/python -m faults.soak $(ARGS)

# The engine's tests under AddressSanitizer and UBSan (GCC's), AMX's products among them, on emulated tiles. Python itself has leaks by design. The
# standard library is preloaded because the sanitizer looks for its throw when it starts.
sanitize: $(STAMP_DEV)
	$(BIN)/python -m cmake -S . -B $(SANITIZED) -DPython_EXECUTABLE="$(abspath $(BIN))/python" -DCMAKE_CXX_COMPILER=g++ \
		-DSTERNA_SANITIZE=ON -DSTERNA_EMULATE_AMX=ON -DSTERNA_OPTIMIZE=-O1
	$(BIN)/python -m cmake --build $(SANITIZED) --target _native -j2
	LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" ASAN_OPTIONS=detect_leaks=0 \
		UBSAN_OPTIONS=print_stacktrace=1 PYTHONPATH=tests/sanitize STERNA_SANITIZED="$(abspath $(SANITIZED))" \
		$(BIN)/pytest tests/unit/executor/native --ignore tests/unit/executor/native/test_digest.py

# Stamped when it is whole: an interrupted one is made anew.
$(STAMP_VENV):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Sterna needs Python 3.11 or newer; name one with PYTHON=/path/to/python3" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@

$(STAMP_SERVE): $(BUILT_FROM) $(STAMP_VENV)
	$(BIN)/pip install --disable-pip-version-check -e .
	@touch $@

# With what emulates AMX, so that its products are tested on any processor.
$(STAMP_DEV): $(BUILT_FROM) $(STAMP_VENV)
	$(BIN)/pip install --disable-pip-version-check -C cmake.define.STERNA_EMULATE_AMX=ON -e '.[torch,dev]'
	@touch $(STAMP_SERVE) $@

clean:
	rm -rf $(VENV) build .mypy_cache .ruff_cache .pytest_cache .hypothesis
