# make quickstart   sets up and runs the main job on a small data set of its own
# make test         sets up and runs the tests
# make docs         builds the documentation: build/docs/site/index.html

PYTHON ?= python3
BIN := .venv/bin
RUN := runs/quickstart
# One process per GPU; two on a machine without.
NUM_GPUS := $(shell nvidia-smi -L 2>/dev/null | grep -c '^GPU')
NUM_PROCESSES := $(if $(filter 0,$(NUM_GPUS)),2,$(NUM_GPUS))

.PHONY: quickstart test docs clean

quickstart: $(BIN)/installed
	rm -rf $(RUN)
	$(BIN)/python quickstart/make_data.py --output-dir $(RUN)
	$(BIN)/python quickstart/make_tiny_model.py --messages-file $(RUN)/train.jsonl --output-dir $(RUN)/model --vocab-size 1024
	@printf '\nFrom here on, the commands you would run yourself.\n\n'
	$(BIN)/python process_data.py --input-file $(RUN)/train.jsonl --output-file $(RUN)/train.arrow --model-name-or-path $(RUN)/model
	$(BIN)/python process_data.py --input-file $(RUN)/held_out.jsonl --output-file $(RUN)/held_out.arrow --model-name-or-path $(RUN)/model --preview 0
	OMP_NUM_THREADS=1 $(BIN)/torchrun --nproc-per-node=$(NUM_PROCESSES) train.py --config recipes/quickstart.yaml --output-dir $(RUN)/run
	$(BIN)/python evaluate_model.py --model $(RUN)/run/hf_format/samples_* --task $(RUN)/held_out.jsonl --metrics exact_match --output-dir $(RUN)/answers
	$(BIN)/python tools/plot_metrics.py $(RUN)/run --output $(RUN)/curves.html
	@printf '\nTo ask it yourself:\n%s\n' "$(BIN)/python generate.py --model $$(echo $(RUN)/run/hf_format/samples_*)"

# tox has an environment of its own: what it needs here is tox.
test: $(BIN)/tox
	$(BIN)/tox -e test

docs: $(BIN)/tox
	$(BIN)/tox -e docs

$(BIN)/tox: constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt tox
	touch $@

$(BIN)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .[dev]
	touch $@

clean:
	rm -rf .venv .tox runs build dist *.egg-info
