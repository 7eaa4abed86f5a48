# Two commands: `make demo` and `make test`. Both install into .venv first. Outside the checkout only ~/.cache/sao is written (warm starts,
# converted models).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRA ?= cpu
# A machine with a folder of wheels (PIP_FIND_LINKS) serves the CPU build of torch from there; elsewhere uv picks it by backend.
ifdef PIP_FIND_LINKS
export UV_FIND_LINKS := $(PIP_FIND_LINKS)
BACKEND :=
else
BACKEND := $(if $(filter cpu,$(EXTRA)),--torch-backend=cpu,)
endif

# Without bytecode on disk every actor compiles vLLM's and torch's 6,000 modules anew, which doubles the time to the first step.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test conventions unit long lint clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt overrides.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "uv>=0.9"
	$(BIN)/uv pip install --quiet --python $(BIN)/python $(BACKEND) --override overrides.txt --constraint constraints.txt -e '.[$(EXTRA),dev]'
	$(BIN)/python -c 'import sao.inference.vllm_transfer, sao.learner.learner'  # writes their bytecode
	touch $@

demo: install
	$(BIN)/sao train experiment=demo

# Two at a time: a run waits for its actors to start for half of its seconds. The tests of a file share its runs, so they stay together. Unit tests go
# first and in processes of their own: some import numba, beside which vLLM's engines of the other tests do not start.
test: install
	$(BIN)/python -m pytest tests/unit envs -n 2 --dist loadfile --durations 10
	$(BIN)/python -m pytest tests/integration tests/system -n 2 --dist loadfile --durations 20
	$(MAKE) conventions

# Packages that do not live beside vLLM are tested by processes of their own interpreters.
conventions: install $(VENV)/verifiers/.installed $(VENV)/openenv/.installed
	$(BIN)/python -m pytest tests/conventions -m conventions --durations 5

$(VENV)/%/.installed: pyproject.toml | install
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python $(VENV)/$*
	$(BIN)/uv pip install --quiet --python $(VENV)/$*/bin/python $$($(BIN)/python -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['$*'])")
	touch $@

unit: install
	$(BIN)/python -m pytest tests/unit envs -n auto --dist worksteal -m "not integration and not long and not conventions"

long: install
	$(BIN)/python -m pytest -m long

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info
