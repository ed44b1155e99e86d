# make demo   environment, tiny policy, demo run; prints where the report is
# make test   environment, then the tests
# make lint   environment, then the linters and the documentation
# make docs   environment, then the documentation
#
# PYTHON=...  the Python 3.11 that makes the environment     ARGS=...  passed on to the run or to pytest

PYTHON ?= python3.11
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed
TORCH := torch==2.13.0+cpu
# Exits with 0 if the installed torch is a CPU build; read, not imported, because its dependencies come later.
IS_CPU_TORCH := import importlib.util as u, pathlib as p, runpy as r, sys; \
	sys.exit(r.run_path(str(p.Path(u.find_spec("torch").origin).with_name("version.py")))["cuda"] is not None)

DEMO_RECIPE := examples/configs/recipes/llm/grpo-tiny-qwen3-1n0g-automodel-eagle3.yaml
DEMO_POLICY := results/models/tiny-qwen3-64x4-spell
CONFIGS := $(wildcard examples/configs/*.yaml examples/configs/recipes/*/*.yaml)

# Nothing is looked up on a model hub, and no library phones home.
export HF_HUB_OFFLINE := 1
export HF_HUB_DISABLE_TELEMETRY := 1
export RAY_USAGE_STATS_ENABLED := 0
export VLLM_NO_USAGE_STATS := 1
export DO_NOT_TRACK := 1

.PHONY: demo test lint docs environment clean-environment

demo: environment
	$(PY) tools/make_tiny_policy.py --out $(DEMO_POLICY)
	$(PY) examples/run_grpo.py --config $(DEMO_RECIPE) $(ARGS)

# In-process vLLM engines leave process groups and sockets behind, and several Ray clusters starting at once on two cores
# run into Ray's time limits: engines get a process of their own, and clusters, too. The others run two files at a time.
ENGINE_TESTS := tests/unit/distributed tests/unit/models/generation
test: environment
	$(PY) -m pytest tests/unit $(ENGINE_TESTS:%=--ignore=%) -n 2 --dist loadfile $(ARGS)
	$(PY) -m pytest $(ENGINE_TESTS) -n 2 --dist loadgroup $(ARGS)
	$(PY) -m pytest tests/functional -n 2 --dist loadgroup $(ARGS)

lint: environment
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/lint-imports
	$(VENV)/bin/pyrefly check
	$(PY) tools/config_cli.py validate $(CONFIGS)
	$(PY) tools/config_cli.py minimize-check $(CONFIGS)
	$(MAKE) --no-print-directory docs

# The pages as a site under site/; a link or an anchor that leads nowhere fails.
docs: environment
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet

# A finished environment is used again until the pinned set or the package's metadata change.
# --no-deps: the list is complete; with dependencies pip would bring the CUDA builds along.
# torch comes first: of the plain version some indexes have a CUDA build, others a CPU build.
environment:
	@want="$$(cat requirements/cpu.txt pyproject.toml | sha256sum | cut -d' ' -f1) $$(pwd -P)"; \
	if [ "$$(cat $(STAMP) 2>/dev/null)" = "$$want" ]; then exit 0; fi; \
	set -e; \
	rm -f $(STAMP); \
	if [ ! -x $(PY) ]; then \
		command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.11 or set PYTHON=" >&2; exit 2; }; \
		$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' \
			|| { echo "make: $(PYTHON) is not Python 3.11; set PYTHON=/path/to/python3.11" >&2; exit 2; }; \
		echo "making $(VENV)"; \
		$(PYTHON) -m venv $(VENV); \
	fi; \
	echo "installing requirements/cpu.txt (about 3 GB, several minutes the first time)"; \
	$(PY) -m pip install --quiet --no-deps "$(TORCH)" 2>/dev/null \
		|| { $(PY) -m pip install --quiet --no-deps "$(TORCH:+cpu=)" && $(PY) -c '$(IS_CPU_TORCH)'; } \
		|| { echo "make: pip found no CPU build of torch $(patsubst torch==%+cpu,%,$(TORCH)) ($(TORCH)): install one into $(VENV) first," \
			"or set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels, then run make again" >&2; exit 2; }; \
	$(PY) -m pip install --quiet --no-deps -r requirements/cpu.txt; \
	$(PY) -m pip install --quiet --no-deps --no-build-isolation -e .; \
	echo "$$want" > $(STAMP)

clean-environment:
	rm -rf $(VENV)
