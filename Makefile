# The two commands are `make demo` and `make test`. Both create .venv if it is missing, and need
# Python >= 3.11 and nothing else.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
# All processors compile the installed files, of which pip would use one. Templates for other versions
# of Python, which some packages contain, cannot be compiled.
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib src || true

.PHONY: demo test pytest long integrations transformers oldest coverage mutants lint docs release clean

demo: $(INSTALLED)
	@rm -rf runs/demo
	@$(BIN)/fineprune compare recipes/weak-labels.toml --out runs/demo --seeds 3 --jobs 2 --arms full,adaptive,fine-pruning,matched,shorter
	@$(BIN)/fineprune inspect runs/demo --out runs/demo/inspect.html

test: $(INSTALLED)
	$(MAKE) --no-print-directory -j 2 pytest lint

# Three processes, because tests of workers and servers often wait. Tests of a file share one Ray.
pytest: $(INSTALLED)
	$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

# Tests of the benchmarks, of runs that are killed again and again, and of a real Slurm.
long: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m long

# The tests of the frameworks, which `make test` skips unless they are installed. fastai comes without
# spaCy and torchvision: the tests need neither, and a torchvision of another build than torch breaks
# other frameworks.
integrations: $(INSTALLED)
	$(INSTALL) --editable '.[lightning,accelerate,trl]' 'jsonargparse[signatures]' peft pytorch-ignite monai mmengine skorch keras
	$(INSTALL) fastdownload fasttransform pandas
	$(INSTALL) --no-deps fastai
	$(COMPILE)
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/test_lightning.py tests/test_trainer.py tests/test_trl.py tests/test_accelerate.py tests/test_fsdp.py tests/test_adopt_pages.py

# The Trainer of one minor release: make transformers TRANSFORMERS=5.19
TRANSFORMERS ?= 5.19
transformers:
	test -x .venv-transformers/bin/python || $(PYTHON) -m venv .venv-transformers
	.venv-transformers/bin/python -m pip install --quiet torch 'transformers==$(TRANSFORMERS).*' --editable '.[test,transformers]'
	.venv-transformers/bin/python -m pytest -n 2 tests/test_trainer.py

# The library and the integrations with the oldest torch and NumPy that they support. These warn of
# what newer ones have removed, so warnings are no errors here.
OLDEST := .venv-oldest/bin/python
oldest:
	test -x $(OLDEST) || $(PYTHON) -m venv .venv-oldest
	$(OLDEST) -m pip install --quiet 'torch==2.6.*' 'numpy==1.26.*' --editable '.[test,lightning,accelerate,transformers]'
	$(OLDEST) -m pytest -n 2 --dist loadfile -o filterwarnings=default tests/test_pruner.py tests/test_sampler_contract.py tests/test_own_loop.py tests/test_indexed.py tests/test_replicas.py tests/test_streams.py tests/test_fast_path.py tests/test_lightning.py tests/test_trainer.py tests/test_accelerate.py tests/test_label_evidence.py tests/test_label_ranking.py tests/test_label_watch.py

# ARGS are further arguments of pytest, for example: make coverage ARGS="tests/test_pruner.py -n 0"
coverage: $(INSTALLED)
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --cov --cov-report=term --cov-report=html $(ARGS)

# Changes one line at a time of what owns an epoch, and lists the changes that no test notices.
mutants: $(INSTALLED)
	$(INSTALL) 'mutmut==3.8.1'
	$(BIN)/mutmut run --max-children 2
	$(BIN)/mutmut results

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo

# The variable turns off a notice about the successor of the theme.
docs: $(INSTALLED)
	$(INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --site-dir site

# TAG is the tag of a release, which must agree with the version: make release TAG=v0.1.0
release: $(INSTALLED)
	$(INSTALL) --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_release.py dist $(if $(TAG),--tag '$(TAG)')

clean:
	rm -rf $(VENV) .venv-oldest .venv-transformers runs site dist htmlcov .coverage .coverage.*

# torch comes first and alone: then only the pinned version is fetched, also without a GPU.
$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fineprune needs Python >= 3.11; give one: make PYTHON=python3.12 ...")'
	@echo 'Installing into $(VENV), which takes some minutes'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(INSTALL) torch
	@$(INSTALL) --editable '.[test]'
	@$(COMPILE)
	@touch $(INSTALLED)
