# make quickstart   sets up and runs the main job on a small data set of its own
# make test         sets up and runs the tests of training, in 8 minutes on 2 cores; skips the few that need a package of
#                   the extra test-all
# make test-rest    sets up and runs the others, and those that take long, with every such package
# make test-all     both
# make mutants      whether those tests notice faults that are put into the program, one at a time (tests/mutation/)
# make docs         builds the documentation: build/docs/site/index.html
# make lint         checks lint rules, formatting and types

# Where this is set, as in many container images, each process would compile all of torch again: 15 seconds and more.
export PYTHONDONTWRITEBYTECODE :=

PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart
# One process per GPU; two on a machine without.
NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NUM_PROCESSES := $(if $(filter 0,$(NUM_GPUS)),2,$(NUM_GPUS))
PYTEST = HF_HOME=$(CURDIR)/.venv/hf $(BIN)/python -m pytest $(shell sed -n 's/^flags = //p' tox.ini) --durations=30

.PHONY: quickstart test test-rest test-all mutants docs lint clean
.DELETE_ON_ERROR:

quickstart: .venv/installed-quickstart
	rm -rf $(RUN)
	$(BIN)/python examples/quickstart/make_data.py --output-dir $(RUN)
	$(BIN)/python examples/quickstart/make_tiny_model.py --messages-file $(RUN)/train.jsonl --output-dir $(RUN)/model --vocab-size 1024
	@printf '\nFrom here on, the commands you would run yourself.\n\n'
	OMP_NUM_THREADS=1 $(BIN)/mini-trainer train --nproc-per-node=$(NUM_PROCESSES) --config examples/recipes/quickstart.yaml --output-dir $(RUN)/run
	$(BIN)/mini-trainer evaluate --model $(RUN)/run --task $(RUN)/held_out.jsonl --metrics exact_match --output-dir $(RUN)/answers
	$(BIN)/mini-trainer plot-metrics $(RUN)/run --output $(RUN)/curves.html
	@printf '\nTo ask it yourself:\n%s\n' "$(BIN)/mini-trainer chat $(RUN)/run"

test: .venv/installed-test
	$(PYTEST)

# Without such a package its tests fail here.
test-rest: .venv/installed-test-all
	MINI_TRAINER_TEST_ALL=1 $(PYTEST) -m "(long or heavy) and not wide"

test-all: test test-rest

mutants: .venv/installed-test
	$(BIN)/python tests/mutation/run_mutants.py

docs: .venv/installed-zensical
	$(BIN)/python docs/site/build_site.py

lint: .venv/installed-test .venv/installed-ruff .venv/installed-pyrefly
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check

# One environment, which every command extends by what it needs; made anew for another Python.
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifneq ($(shell $(PYTHON) -c 'import sys; print(sys.version_info >= (3, 11))'),True)
$(error $(PYTHON) is $(if $(VERSION),Python $(VERSION),no Python), and mini_trainer needs 3.11 or newer: make PYTHON=python3.12)
endif
ifeq ($(shell grep -E '^version(_info)? = $(VERSION)\.' .venv/pyvenv.cfg 2>/dev/null),)
.PHONY: .venv/pyvenv.cfg
endif
.venv/pyvenv.cfg:
	$(PYTHON) -m venv --clear .venv

.venv/installed-ruff .venv/installed-pyrefly .venv/installed-zensical: .venv/installed-%: .venv/pyvenv.cfg constraints.txt
	./examples/quickstart/install.sh $*
	touch $@

.venv/installed-%: .venv/pyvenv.cfg pyproject.toml constraints.txt
	./examples/quickstart/install.sh -e '.[$*]'
	touch $@

clean:
	rm -rf .venv .tox runs build dist *.egg-info
