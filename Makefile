# Everything runs in .venv, which the first target makes from the pins in constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
QUICK := runs/quickstart/hopper
ONLINE := runs/quickstart/hopper-online
REPLAY := shipped:hopper-medium-replay
# Seeds that nothing was tuned on; what was played before is not played again.
PLANNERS := --planner rcbc@0.4 --planner m@1 --planner q@1 --episodes 10 --seed 7 --reuse
OTHER_MUJOCO := 3.9.0
OTHER_ENGINE := $(VENV)/engines/mujoco-$(OTHER_MUJOCO)
SERVICES := redis-server prometheus prometheus-node-exporter docker-compose
APT_INSTALL := RUNLEVEL=1 DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export NO_MKDOCS_2_WARNING := 1
export M3PC_OTHER_MUJOCO := $(CURDIR)/$(OTHER_ENGINE)

.PHONY: quickstart test test-long services bench lint docs format clean

quickstart: $(VENV)/.installed
	$(BIN)/m3pc data info $(REPLAY) --png runs/quickstart/returns.png
	if [ -d $(QUICK) ]; then $(BIN)/m3pc pretrain --resume $(QUICK); \
	else $(BIN)/m3pc pretrain --data $(REPLAY) --preset small --out $(QUICK) \
	  --set pretrain.updates=3000 --set critic.regression_updates=1500 --set critic.updates=2500; fi
	$(BIN)/m3pc evaluate $(QUICK) $(PLANNERS)
	if [ -d $(ONLINE) ]; then $(BIN)/m3pc resume $(ONLINE); \
	else $(BIN)/m3pc finetune $(QUICK) --data $(REPLAY) --out $(ONLINE) --planner q --steps 4000 \
	  --actors 1 --envs-per-actor 4 --set online.slack=0 --set replay.online_after=500 \
	  --set evaluation.every=2000 --set evaluation.episodes=4; fi
	$(BIN)/m3pc evaluate $(QUICK) $(PLANNERS) --finetuned $(ONLINE)

test: lint services $(OTHER_ENGINE)/.installed
	$(BIN)/pytest -n 2 -m "not long and not ray"
	$(BIN)/pytest -m "ray and not long"

test-long: $(VENV)/.developer services $(OTHER_ENGINE)/.installed
	$(BIN)/pytest -n 2 -m "long and not ray" --timeout 5400
	$(BIN)/pytest -m "long and ray" --timeout 5400

bench: $(VENV)/.installed
	$(BIN)/python -m benchmarks.sampling
	$(BIN)/python -m benchmarks.decision
	$(BIN)/python -m benchmarks.replay
	$(BIN)/python -m benchmarks.online
	$(BIN)/python -m benchmarks.faults

lint: $(VENV)/.developer
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.tools.words
	$(BIN)/mkdocs build --strict --quiet

docs: $(VENV)/.developer
	$(BIN)/mkdocs build --strict
	@echo "Open site/index.html, or: $(BIN)/mkdocs serve"

format: $(VENV)/.developer
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Real servers for the tests, which skip without them. RUNLEVEL=1: install them, start none.
services:
	@absent="$$(for each in $(SERVICES); do command -v $$each >/dev/null || echo $$each; done)"; \
	[ -z "$$absent" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
	  && { $(APT_INSTALL) $$absent || { apt-get update && $(APT_INSTALL) $$absent; }; }; } \
	  || echo "Not installed, and not to be had from here:" $$absent "- tests that need them skip."

# torch first and pinned: any looser request would bring gigabytes of CUDA to a machine without it.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@echo "Installing pinned packages into $(VENV): about two minutes, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $$(grep '^torch==' constraints.txt)
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.developer: $(VENV)/.installed
	$(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

# D4RL's physics are checked on both sides of mujoco 3.5, where contact margins changed.
$(OTHER_ENGINE)/.installed: | $(VENV)/.developer
	PIP_CONSTRAINT= $(BIN)/pip install --quiet --upgrade --no-deps --target $(@D) mujoco==$(OTHER_MUJOCO)
	touch $@

clean:
	rm -rf $(VENV) site .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
