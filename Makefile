# Every target sets up what it needs: a fresh machine needs Python >= 3.11, make, and (for the C++ kernel) g++.
#   make demo     train DLRM and DCNv2 on MovieLens-1M, print the table, write a report with plots
#   make demo-serve  train encoders and a ranker, export them, serve them, ask the server
#   make demo-stream  drift, a teacher, students, a stream that is published, a server that follows it: two minutes
#   make demo-sequences  SASRec and HSTU on histories: the next film of each user, all films ranked, minutes
#   make test     the everyday suite        make test-slow  the long ones
#   make chaos    300 kill -9 of training runs, 1,000 faults of a disk and 1,000 leftovers over all verbs
#   make bench-retrieval  filtered vector search against faiss and ScaNN, about 10 minutes
#   make bench-towers  towers on an emulated data centre, about 15 minutes
#   make bench-collectives  orders of ranks on an emulated data centre, about 15 minutes
#   make bench-planning  plans against NeuroShard's, about 25 minutes
#   make bench-data  sessions stored, read and computed once, about 3 minutes
#   make test-bridges  the bridge to TorchRec, in the benchmarks' environment
#   make test-triton   the Triton kernels by Triton's interpreter on the CPU, and compiled for sm_90 (downloads 0.2 GB)
#   make test-bare     what trains, with torch 2.11, Triton 3.6, numpy, pyarrow and little else, in .venv-bare
#   make chaos-serve  50 kill -9 of a server's workers, 30 of one that merges changed items, 10,000 things that happen to servers
#   make chaos-stream  kill -9 of streams inside of windows, while they publish beside a reader, while a teacher is logged,
#                      and of two logs of a broker, with what else happens to one
#   make test-gpu      what needs a GPU, on a machine that may have torch and little else; skipped with a reason elsewhere
#   make bench-gpu     both: what needs a GPU and what is measured on one, part by part, in five minutes (GPU_OUT=folder)
#   make index    write docs/files.md, docs/cli.md and docs/experiments/list.md: every file, flag, experiment, a line each
#   make attack   damaged files, ranks that differ, die or stop, random configurations: one table, 15 minutes
#   make lint     style, layers and types   make bench      speed against TorchRec, plain torch and FuxiCTR
#   ACCELERATOR=cuda make setup             the CUDA builds of torch and FBGEMM instead of the CPU ones

ACCELERATOR ?= cpu
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= $(shell nproc 2>/dev/null || echo 1)
PIP := $(BIN)/pip install --quiet --quiet --disable-pip-version-check --no-deps

.PHONY: setup demo demo-serve demo-stream demo-sequences test test-slow test-bridges test-triton test-bare test-gpu bench-gpu lint bench bench-retrieval bench-towers bench-collectives bench-planning bench-data chaos chaos-serve chaos-stream attack docs index clean
.DELETE_ON_ERROR:

setup: $(VENV)/.ready

$(VENV)/.runtime-$(ACCELERATOR): requirements/$(ACCELERATOR).txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "expected: Python >= 3.11"; echo "found:    $$($(PYTHON) --version)"; echo "where:    make setup"; \
	    echo "ways out: 1. PYTHON=python3.11 make setup"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "setting up $(VENV) for $(ACCELERATOR) (about 1 to 3 minutes)"
	@$(PIP) -r requirements/$(ACCELERATOR).txt || \
	  { echo "expected: pip to find every pinned package of requirements/$(ACCELERATOR).txt"; echo "found:    the error above"; \
	    echo "where:    make setup"; \
	    echo "ways out: 1. if torch==…+cpu is missing: tell pip where PyTorch's CPU wheels are (PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS)"; \
	    echo "          2. ACCELERATOR=cuda make setup takes the CUDA builds"; exit 1; }
	@$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.ready: $(VENV)/.runtime-$(ACCELERATOR) requirements/dev.txt
	@$(PIP) -r requirements/dev.txt
	@touch $@

demo: $(VENV)/.runtime-$(ACCELERATOR)
	$(BIN)/ziggurat demo

demo-serve: $(VENV)/.runtime-$(ACCELERATOR)
	$(BIN)/ziggurat demo --serve

demo-stream: $(VENV)/.runtime-$(ACCELERATOR)
	$(BIN)/ziggurat demo --stream --out runs/demo-stream

demo-sequences: $(VENV)/.runtime-$(ACCELERATOR)
	$(BIN)/ziggurat demo --sequences

# Files of tests are shared among processes of one thread each (at most 8: ranks and training take memory); then those that
# stop, kill and outwait processes, one after the other.
ALONE := tests/attacks/test_ranks_attack.py tests/end_to_end/test_killed_ranks.py tests/end_to_end/test_stopped_ranks.py
TEST_PROCESSES ?= $(shell n=$$(env -u OMP_NUM_THREADS nproc 2>/dev/null || echo 1); echo $$((n < 8 ? n : 8)))

# Modules are compiled once, not by every process of the tests.
test test-slow: export PYTHONDONTWRITEBYTECODE :=

test: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder $(addprefix --ignore=,$(ALONE))
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(ALONE)

test-slow: setup
	$(BIN)/python -m pytest -m slow --timeout 3600

test-bridges:
	bash benchmarks/setup.sh
	.venv-bench/bin/python -m pytest tests/bridges

$(VENV)-triton/.ready: requirements/triton.txt
	@$(PIP) --upgrade --target $(@D) -r $<
	@touch $@

TRITON_TESTS := tests/ops/test_triton_parameters.py tests/ops/test_gated_norm.py tests/ops/interactions/test_fm_norm.py tests/ops/interactions/test_triton.py tests/ops/interactions/test_triton_every_launch.py tests/ops/attention/test_triton.py \
  tests/ops/attention/test_triton_assembly.py tests/ops/graph/test_triton.py \
  tests/ops/test_scan_triton.py tests/ops/lookup/test_triton.py tests/ops/lookup/test_triton_assembly.py tests/ops/lookup/test_triton_every_width.py tests/ops/test_triton_every_kind.py \
  tests/ops/machine/test_launches.py tests/parallel/exchange/test_packing.py tests/end_to_end/test_every_specialisation.py

# 5 CPU minutes, without set-up, on two cores of an AMD EPYC (Zen 5).
test-triton: setup $(VENV)-triton/.ready
	OMP_NUM_THREADS=1 PYTHONPATH=$(VENV)-triton $(BIN)/python -m pytest -m "slow or not slow" -n $(TEST_PROCESSES) --dist loadfile $(TRITON_TESTS)

$(VENV)-bare/.ready: requirements/bare.txt
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --quiet --disable-pip-version-check -r $<
	@touch $@

# What trains encoded data: everyday tests of operations, models, tables, exchange and training, then Triton's kernels.
# BARE_NEEDS_MORE are those of them that import polars, rich, matplotlib or scikit-learn: tests/end_to_end/test_lists_of_tests.py
# holds this list, and those of Triton's and of GPUs, to what the files of tests import and ask for.
BARE_TESTS := tests/gpu tests/ops tests/models tests/embeddings tests/parallel/exchange tests/training
BARE_NEEDS_MORE := tests/models/test_device_of_model.py tests/models/test_guide_own_model.py tests/training/metrics/test_full_ranking.py \
  tests/ops/test_written_decimals.py tests/training/metrics/test_metrics.py tests/training/report/test_progress.py tests/training/report/test_report.py \
  tests/training/report/test_windows.py \
  tests/training/test_balanced_ranks.py tests/training/test_label_weights.py tests/training/test_search_space.py tests/training/records/test_log.py tests/training/test_self_distillation.py \
  tests/training/test_early_stop.py tests/training/test_repeats.py

# What tests/gpu/test_virtual_ranks.py shows on a GPU, with tensors on the CPU: every placement, tower and wire.
VIRTUAL_RANKS := tests/testing/test_rank_threads.py

# 8 CPU minutes, without set-up, on an AMD EPYC (Zen 5): 3 the first line, 5 the second.
test-bare: $(VENV)-bare/.ready
	OMP_NUM_THREADS=1 $(VENV)-bare/bin/python -m pytest -rs $(addprefix --ignore=,$(BARE_NEEDS_MORE)) $(BARE_TESTS)
	OMP_NUM_THREADS=1 $(VENV)-bare/bin/python -m pytest -rs -m "slow or not slow" tests/gpu/test_bare_machine.py $(VIRTUAL_RANKS) $(TRITON_TESTS)

# No set-up: a GPU machine may have its own torch, and nothing can be installed there.
GPU_PYTHON ?= $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
GPU_TESTS := tests/gpu tests/ops tests/parallel/exchange/test_packing.py tests/training/checkpoint/test_checkpoint_rng.py \
  tests/training/checkpoint/test_checkpoint_store.py tests/training/test_step_graph.py

test-gpu:
	$(GPU_PYTHON) -m pytest -m gpu -rs $(addprefix --ignore=,$(BARE_NEEDS_MORE)) $(GPU_TESTS)

# Tests and benchmarks on a GPU that is there for minutes: each part a process with its own limit, five minutes in all.
GPU_OUT ?= build/gpu
bench-gpu:
	$(GPU_PYTHON) -m benchmarks.gpu.session $(GPU_OUT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/pyright

bench: setup
	bash benchmarks/setup.sh
	$(BIN)/ziggurat bench all

bench-retrieval: setup
	bash benchmarks/setup.sh
	$(BIN)/ziggurat bench retrieval --json build/retrieval.json

bench-towers: setup
	bash benchmarks/setup.sh
	$(BIN)/ziggurat bench towers

bench-collectives: setup
	$(BIN)/ziggurat bench collectives --json build/collectives.json

bench-data: setup
	$(BIN)/ziggurat bench data

bench-planning: setup
	$(BIN)/ziggurat bench planning

chaos: setup
	$(BIN)/python -m pytest -m chaos --timeout 7200 -s tests/end_to_end/test_chaos.py
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attacks.faults --count 1000 --seconds 7200
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.attacks.leftovers --count 1000 --seconds 7200

chaos-serve: setup
	$(BIN)/python -m pytest -m chaos --timeout 14400 -s tests/serving/server/processes tests/serving/server/changed_items/test_merge.py

chaos-stream: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow --timeout 14400 -s tests/runs/stream/test_killed_streams.py \
	  tests/runs/stream/test_killed_publishing.py tests/runs/stream/test_live_scores.py tests/runs/teachers/test_killed_logging.py \
	  tests/runs/stream/test_labels_of_a_broker.py

index: setup
	$(BIN)/python docs/make_index.py

attack: setup
	OMP_NUM_THREADS=1 timeout --signal INT 900 $(BIN)/python -m tests.attacks --seconds 720

docs: setup
	@$(PIP) -r requirements/docs.txt
	$(BIN)/python docs/make_index.py
	$(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf $(VENV) $(VENV)-bench $(VENV)-triton $(VENV)-bare build dist site runs *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
