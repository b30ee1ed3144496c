# make lab    set up and open the course        make test   set up and run everything that is checked
# make course execute the chapters in place     make lint   ruff and mypy
# make book   the executed chapters as HTML pages that need no network, in site/
# make bench  measure the engine beside torch's    make slow   the tests of hosts, saves and faults in full

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# uv, where it is installed, takes about a quarter of pip's time; `make UV=` does without it.
UV ?= $(shell command -v uv 2>/dev/null)
# In a container one is often root, which Jupyter wants to be told.
JUPYTER_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)

# Every process compiles what it imports where bytecode is not kept: the package, its tests, and what uv installs.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: lab test slow course book bench lint clean

lab: $(READY)
	$(BIN)/jupyter lab notebooks/00_*.ipynb $(JUPYTER_FLAGS)

# What holds a time runs alone; the rest, tests and chapters, mostly waits and runs five at a time.
test: $(READY)
	$(BIN)/python -m pytest -q -p no:nbmake -n 5 --dist loadfile --no-loadscope-reorder -m "not slow and not alone" tests
	$(BIN)/python -m pytest -q -p no:nbmake -m "alone and not slow" tests
	$(BIN)/python -m pytest -q -n 5 --maxschedchunk 1 --nbmake --nbmake-timeout=300 notebooks

slow: $(READY)
	$(BIN)/python -m pytest -q -p no:nbmake -n 2 --dist loadfile -m slow --ignore tests/browser tests
	$(BIN)/python -m pytest -q -m slow tests/browser

course: $(READY)
	$(BIN)/python -m gpipe_lab.course.publish notebooks/*.ipynb
	$(BIN)/python -m gpipe_lab.course.pages

book: $(READY)
	$(BIN)/python -m gpipe_lab.course.book -o site

bench: $(READY)
	$(BIN)/python -m gpipe_lab.tools.bench --out data/runs/bench_cpu.csv
	$(BIN)/python -m gpipe_lab.tools.bench --picture data/runs/gpipe_p4_m8.png

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) site build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Done again only when what it installs from has changed.
$(READY): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(if $(UV),$(UV) pip install --quiet --python $(BIN)/python $$($(BIN)/python .ci/uv_options.py),\
	$(BIN)/python -m pip install --quiet --disable-pip-version-check) -r requirements.txt
	touch $(READY)
