# Doorbell. `make help` lists the targets; every variable below can be given on the command line.

PYTHON   ?= python3
VENV     ?= .venv
TP       ?= 2
MODEL    ?= models/smollm2-135m
INPUT    ?= examples/prompts.jsonl
OUTPUT   ?= out.jsonl
# torch for a machine without a GPU. On a GPU machine, keep the torch that is there: make setup TORCH= VENV_FLAGS=--system-site-packages
TORCH    ?= torch==2.13.0
# Extra options for installing torch, e.g. an --index-url of CPU-only builds.
TORCH_FLAGS ?=
VENV_FLAGS  ?=

# Processes that run tests side by side.
WORKERS  ?= 2

BIN      := $(VENV)/bin
# torchrun would set OMP_NUM_THREADS to 1 itself, with a warning; Doorbell chooses its threads either way.
TORCHRUN  = OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(TP)
STAMP    := $(VENV)/.doorbell-installed
COMPILER := $(VENV)/.doorbell-compiler-installed
PLOTTER  := $(VENV)/.doorbell-plotter-installed
# The only number of ranks that is tested; empty for all. REDUCED=1 rehearses eight-gpus. PLOTS=: the page of results without plots.
RANKS    ?=
REDUCED  ?=
PLOTS    ?= 1
# Calls of a soak, and what it is started through: needed where ranks share a GPU.
CALLS    ?= 1000000
MPS      ?= sh launch/with_mps.sh
# The case of the engine's benches; SHARD_OF=8 measures one rank of 8 in one process, EAGER=1 does without graphs.
DTYPE    ?= bf16
BATCH    ?= 1
PROMPT   ?= 512
REQUESTS ?= 1024
SHARD_OF ?=
EAGER    ?=
# The longest prompt that takes a graph in bench-prefill; empty for the default, 0 for none.
GRAPH_TOKENS ?=
# How often a case is timed; empty for what the bench chooses.
REPEATS  ?=
LOAD_FORMAT ?= dummy
# $(call one-of,NAME,values): refuse other values of a variable, and say which there are.
one-of    = $(if $(filter-out $(2),$($(1))),$(error $(1)=$($(1)) is not possible; it may be one of: $(2)))
# $(call unused,NAMES): refuse variables that were given on the command line and would change nothing.
unused    = $(foreach name,$(1),$(if $(findstring command,$(origin $(name))),$(error $(name)= has no part in $@)))
# The GPU to compile for.
ARCH     ?= sm_90a

.DEFAULT_GOAL := help
.PHONY: help setup model demo test test-gpu test-ranks memcheck lint kernels bench bench-comm bench-signal bench-soak bench-attention \
	bench-products bench-prefill-products bench-decode bench-prefill bench-stages bench-throughput bench-drift bench-coldstart \
	bench-speculate bench-ways bench-cpu results eight-gpus clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

$(STAMP): setup.cfg
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else "Doorbell needs Python 3.10 to 3.12, not %d.%d; name one with PYTHON=" % v)'
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Python's venv module is missing; on Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV_FLAGS) $(VENV)
	$(if $(TORCH),$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH_FLAGS) $(TORCH))
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[demo,dev]'
	@touch $@

setup: $(STAMP)  ## Create .venv with everything the demo and the tests need

model: $(STAMP)  ## Obtain the default model, SmolLM2-135M-Instruct, into models/
	$(BIN)/python -m engine.default_model --output models/smollm2-135m

demo: model  ## Answer examples/prompts.jsonl on two processes and show the answers
	$(TORCHRUN) -m engine.generate --model $(MODEL) --input $(INPUT) --output $(OUTPUT) --overwrite --allow-failed-rows
	@$(BIN)/python -m engine.show $(OUTPUT)

test: model  ## Run every test that needs no GPU
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not alone"
	$(BIN)/python -m pytest -m alone

lint: $(STAMP)  ## Check the style
	$(BIN)/ruff check .

$(COMPILER): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[kernels]'
	@touch $@

kernels: $(COMPILER)  ## Compile every CUDA source ahead of time (ARCH=sm_90a); needs no GPU
	$(BIN)/python -m kernels.compile_all --arch $(ARCH)

test-gpu:  ## On a machine with a GPU: the kernels against their torch twins
	$(PYTHON) -m pytest -q tests/gpu

test-ranks:  ## On a machine with GPUs: collectives at 2, 4 and 8 ranks (more ranks than GPUs need MPS), or at RANKS= alone
	$(call one-of,RANKS,2 4 8)$(PYTHON) -m pytest -q tests/ranks $(if $(RANKS),-k "[$(RANKS)] or [$(RANKS)-")

memcheck:  ## On a machine with two GPUs: every collective under compute-sanitizer's memcheck
	PYTHON=$(PYTHON) sh tests/ranks/memcheck.sh

bench-comm:  ## On a machine with GPUs: all-reduce latency against NCCL, TP= ranks
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(TP) -m engine.bench.comm --record results/all_reduce.jsonl

bench-signal:  ## On a machine with two GPUs: put-with-signal latency, us a hop
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 2 -m engine.bench.signal --record results/put_signal.jsonl

bench-soak: TP := 8
bench-soak:  ## On a machine with GPUs: CALLS= checked all-reduces on TP= ranks (1000000 on 8), under MPS unless MPS= is empty
	$(MPS) $(PYTHON) -m torch.distributed.run --standalone --nproc-per-node $(TP) -m engine.bench.soak --calls $(CALLS) --record results/soak.jsonl

bench-attention:  ## On a machine with a GPU: decode attention beside torch's, and FlashInfer's where it is installed
	$(PYTHON) -m engine.bench.attention --record results/decode_attention.jsonl

bench-products:  ## On a machine with a GPU: the products of decode steps beside cuBLAS
	$(PYTHON) -m engine.bench.gemv --record results/product.jsonl

bench-prefill-products:  ## On a machine with a GPU: the products of prefill, in bf16 and by FP8 matrices in every way
	$(PYTHON) -m engine.bench.prefill_products --record results/prefill_product.jsonl

ENGINE_BENCHES := bench-decode bench-prefill bench-stages bench-throughput bench-drift bench-coldstart bench-speculate bench-ways
$(ENGINE_BENCHES): MODEL := qwen2.5-7b
$(ENGINE_BENCHES): TP := 1
$(ENGINE_BENCHES): MPS :=
bench-decode bench-stages: OUTPUT := 129
bench-throughput: BATCH := 256
bench-throughput: OUTPUT := 128
bench-drift: MODEL := qwen2.5-0.5b
bench-drift: TP := 2
bench-drift: BATCH := 32
bench-drift: PROMPT := 128
bench-drift: OUTPUT := 128
bench-drift: REQUESTS := 1000
bench-coldstart: BATCH := 32
bench-speculate: MODEL := qwen2.5-72b
bench-speculate: TP := 2
bench-speculate: OUTPUT := 257
bench-speculate: BATCH_OPTIONS = $(foreach batch,$(BATCH),--batch $(batch))
bench-ways: TP := 2
bench-ways: OUTPUT := 129
DRAFT    ?= qwen2.5-0.5b
# Of bench-speculate: RATE:DRAFTS, any number of them; empty for the bench's own.
TRIALS   ?=
# Of bench-speculate: requests for each row of a batch that is kept full; empty for a batch that is not filled up again.
REFILLS  ?=
# Of bench-ways: host_loop-eager, nccl-eager, one_shot-graph and so on, any number of them; empty for all.
WAYS     ?=
BATCH_OPTIONS  = --batch $(BATCH)
CHECK_CASE     = $(call one-of,DTYPE,bf16 fp8 fp32)$(call one-of,EAGER,1)$(call one-of,TP,1 2 3 4 5 6 7 8)
# $(call run-engine-bench,NAME): on TP ranks, with the options that all benches of the engine share.
run-engine-bench = $(CHECK_CASE)$(MPS) $(PYTHON) $(if $(filter 1,$(TP)),,-m torch.distributed.run --standalone --nproc-per-node $(TP)) \
	  -m engine.bench.$(1) --model $(MODEL) --dtype $(DTYPE) $(BATCH_OPTIONS) --prompt $(PROMPT) \
	  $(if $(SHARD_OF),--shard-of $(SHARD_OF)) $(if $(EAGER),--eager) --record results/$(1).jsonl
REPEATS_OPTION = $(if $(REPEATS),--repeats $(REPEATS))

bench-decode:  ## On a machine with GPUs: ms a token; MODEL= TP= DTYPE= BATCH= PROMPT= OUTPUT= SHARD_OF= EAGER=1, MPS= where ranks share a GPU
	$(call unused,WAYS DRAFT TRIALS REFILLS REQUESTS LOAD_FORMAT GRAPH_TOKENS)$(call run-engine-bench,decode) --output $(OUTPUT) $(REPEATS_OPTION)

bench-prefill:  ## On a machine with GPUs: ms to the first token; the variables of bench-decode but OUTPUT=, and GRAPH_TOKENS=
	$(call unused,WAYS DRAFT TRIALS REFILLS OUTPUT REQUESTS LOAD_FORMAT)$(call run-engine-bench,prefill) $(REPEATS_OPTION) \
	  $(if $(GRAPH_TOKENS),--graph-tokens $(GRAPH_TOKENS))

bench-stages:  ## On a machine with GPUs: where a decode step's and a prefill's time goes, by stages; the variables of bench-decode
	$(call unused,WAYS DRAFT TRIALS REFILLS REQUESTS LOAD_FORMAT GRAPH_TOKENS)$(call run-engine-bench,stages) --output $(OUTPUT) $(REPEATS_OPTION)

bench-throughput:  ## On a machine with GPUs: REQUESTS= of mixed lengths at once, tok/s; the variables of bench-decode
	$(call unused,WAYS DRAFT TRIALS REFILLS REPEATS LOAD_FORMAT GRAPH_TOKENS)$(call run-engine-bench,throughput) --output $(OUTPUT) --requests $(REQUESTS)

bench-drift:  ## On a machine with GPUs: REQUESTS= prompts through a full batch, tok/s of each tenth, equal tokens on TP= ranks
	$(call unused,WAYS DRAFT TRIALS REFILLS REPEATS LOAD_FORMAT SHARD_OF GRAPH_TOKENS)$(call run-engine-bench,drift) --output $(OUTPUT) --requests $(REQUESTS)

bench-coldstart:  ## On a machine with GPUs: seconds from a process to its first token; MODEL= TP= DTYPE= BATCH= PROMPT= LOAD_FORMAT=auto MPS=
	$(call unused,WAYS DRAFT TRIALS REFILLS OUTPUT REQUESTS SHARD_OF EAGER GRAPH_TOKENS)$(CHECK_CASE)$(call one-of,LOAD_FORMAT,dummy auto)$(MPS) $(PYTHON) -m engine.bench.coldstart --model $(MODEL) --tp $(TP) --dtype $(DTYPE) \
	  --batch $(BATCH) --prompt $(PROMPT) --load-format $(LOAD_FORMAT) $(REPEATS_OPTION) --record results/coldstart.jsonl

bench-speculate:  ## On a machine with GPUs: decode with drafts that are right at a set rate; the variables of bench-decode, DRAFT=, TRIALS="0.8:5 0:adaptive", BATCH="1 8 64", REFILLS=4 for a batch that is kept full
	$(call unused,WAYS REQUESTS LOAD_FORMAT GRAPH_TOKENS EAGER)$(call run-engine-bench,speculate) --output $(OUTPUT) $(REPEATS_OPTION) \
	  --draft $(DRAFT) $(foreach trial,$(TRIALS),--trial $(trial)) $(if $(REFILLS),--refills $(REFILLS))

bench-ways:  ## On a machine with two GPUs: TTFT, TPOT and host waits of every way to reduce, with graphs and without; the variables of bench-decode but SHARD_OF= and EAGER=, and WAYS="nccl-eager lamport-graph"
	$(call unused,DRAFT TRIALS REFILLS REQUESTS LOAD_FORMAT GRAPH_TOKENS EAGER SHARD_OF)$(call one-of,TP,2 3 4 5 6 7 8)$(CHECK_CASE)$(MPS) \
	  $(PYTHON) -m engine.bench.ways --model $(MODEL) --tp $(TP) --dtype $(DTYPE) --batch $(BATCH) --prompt $(PROMPT) --output $(OUTPUT) $(REPEATS_OPTION) $(foreach way,$(WAYS),--way $(way)) --record results/ways.jsonl

bench-cpu: model  ## Decode and prefill against transformers on the default model, batch 1 and 8
	$(BIN)/python -m engine.bench.cpu --model $(MODEL) --record results/cpu.jsonl

$(PLOTTER): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[results]'
	@touch $@

# A machine with a GPU brings its own Python, with torch and perhaps with matplotlib.
HAS_GPU := $(wildcard /dev/nvidia0)
results: $(if $(HAS_GPU),,$(PLOTTER))  ## Make results/README.md and its plots from the records in results/; PLOTS= for the page alone
	$(if $(HAS_GPU),$(PYTHON),$(BIN)/python) -m results.render $(if $(PLOTS),,--no-plots)

eight-gpus:  ## On a machine with 4 or 8 GPUs: tests and benches of as many ranks, in ten minutes; REDUCED=1 to rehearse on fewer
	$(call one-of,REDUCED,1)$(call unused,REFILLS MODEL TP DTYPE BATCH PROMPT OUTPUT REQUESTS SHARD_OF EAGER REPEATS GRAPH_TOKENS CALLS MPS RANKS PLOTS)\
	  PYTHON=$(PYTHON) sh launch/eight_gpus.sh $(if $(REDUCED),--reduced)

bench: $(if $(HAS_GPU),,$(STAMP))  ## Every bench that this machine can run, with the plan first
	$(call unused,WAYS DRAFT TRIALS REFILLS MODEL TP DTYPE BATCH PROMPT OUTPUT REQUESTS SHARD_OF EAGER REPEATS LOAD_FORMAT GRAPH_TOKENS CALLS MPS)\
	  $(if $(HAS_GPU),$(PYTHON),$(BIN)/python) -m engine.bench.plan

clean:  ## Remove .venv, the model and caches
	rm -rf $(VENV) models .pytest_cache .hypothesis .ruff_cache build *.egg-info
