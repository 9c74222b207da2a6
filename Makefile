# make demo        distils three small classifiers into one student: offline, in minutes
# make test        runs the test suite with two workers (WORKERS=8 for more cores)
# make check       runs ruff, mypy and the prose check, builds the documentation, builds and installs the wheel
# make test-notebook  runs the notebook of examples/ and compares the kinds of its outputs with the stored ones
# make test-ray    runs the Ray tests on a local cluster; installs the extra `ray`
# make test-s3     runs the object store tests on moto's S3 server, in a separate .venv
# make check-low   installs the lowest versions (constraints-low.txt) into .venv-low, runs the wheel and the tests there
# make audit       looks up known vulnerabilities of the tested versions, and compares the digests of their files
# make dist        builds the wheel and the list of its packages (CycloneDX) into dist/
# make fuzz        damages, attacks and uses small experiments at random, for about 20 minutes; FUZZ="--seconds 180" is shorter
# make check-disk  runs commands on small disks of 60 sizes (tmpfs, ext4) that become full; needs root, takes an hour
# make docs        builds the documentation into site/
# make notebook    runs the notebook of examples/ and stores it with its outputs
# make benchmark   runs all benchmarks and writes one table into benchmarks/RESULTS.md; QUICK=1 takes about 10 minutes,
#                  DATA=FOLDER adds those that need data sets
# make check-gpu   checks correctness and speed on this machine's GPU (needs torch, transformers and numpy)
# Every target but check-gpu creates a .venv in this folder with the versions of constraints.txt.

PYTHON ?= python3
WORKERS ?= 2
BIN := .venv/bin
INSTALLED := .venv/.installed
AUDIT := .venv-audit/.installed
# Without tests that fork a process with polars loaded: with the lowest versions such a fork can hang. The test of two
# processes runs without forks, by torchrun.
FORKED := tests/stages/test_fine_tuning.py::test_two_processes_train_as_one_and_leave_together
LOW_TESTS ?= tests/test_golden.py $(addprefix tests/stages/test_, $(addsuffix .py, models weighing statistics \
	targets_rules keyed_dropout teacher fine_tuning metrics generate_writing kernels))
LOW := .venv/low.txt
TORCH_FROM ?=
FUZZ ?=
QUICK ?=
DATA ?=
BENCHMARK ?=
DISKS ?=

.PHONY: demo test test-notebook test-ray test-s3 fuzz check-disk check check-low audit dist docs notebook benchmark check-gpu clean

demo: $(INSTALLED)
	$(BIN)/amalgam demo

# Bytecode is kept even where the environment forbids it: the processes that tests start load in half the time.
test: export PYTHONDONTWRITEBYTECODE =
test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist worksteal --durations 30 --ignore tests/test_notebook.py

test-notebook: $(INSTALLED)
	$(BIN)/python -m pytest tests/test_notebook.py

test-ray: $(INSTALLED)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[ray]'
	$(BIN)/python -m pytest tests/test_ray.py

# moto needs other versions of our dependencies.
test-s3: $(INSTALLED)
	test -d .venv-moto || $(PYTHON) -m venv .venv-moto
	.venv-moto/bin/python -m pip install --quiet 'moto[s3]>=5.2' 'flask>=3' 'flask-cors>=6'
	$(BIN)/python tests/on_moto.py .venv-moto/bin/python tests/test_object_store.py tests/pipeline/test_bucket.py tests/pipeline/test_packs.py

fuzz: $(INSTALLED)
	$(BIN)/python -m amalgam.tests.fuzz $(FUZZ)

# The mounts are gone with the process that made them.
check-disk: $(INSTALLED)
	unshare --mount $(BIN)/python -m amalgam.tests.full_disks $(DISKS)

check: $(INSTALLED) $(AUDIT)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/prose
	bash .ci/docs
	bash .ci/wheel

audit: $(INSTALLED) $(AUDIT)
	$(BIN)/python .ci/audit

dist: $(INSTALLED) $(AUDIT)
	DIST=$(CURDIR)/dist bash .ci/wheel

# The lowest torch has no CPU build on the package index: this takes torch from constraints.txt, unless
# TORCH_FROM="--index-url ADDRESS" names an index that has one.
check-low: $(INSTALLED) $(AUDIT)
	grep '^torch==' $(if $(TORCH_FROM),constraints-low.txt,constraints.txt) > $(LOW)
	grep -v '^torch==' constraints-low.txt >> $(LOW)
	bash .ci/wheel $(LOW) $(TORCH_FROM)
	$(PYTHON) -m venv --clear .venv-low
	.venv-low/bin/python -m pip install --quiet $(TORCH_FROM) "$$(grep '^torch==' $(LOW))"
	.venv-low/bin/python -m pip install --quiet --constraint $(LOW) --editable '.[dev]'
	PATH="$$PWD/.venv-low/bin:$$PATH" .venv-low/bin/python -m pytest --numprocesses $(WORKERS) \
		--override-ini filterwarnings=default --deselect $(FORKED) $(LOW_TESTS)
	ACCELERATE_USE_CPU=1 .venv-low/bin/torchrun --nproc_per_node 2 --module amalgam.tests.stages.test_fine_tuning \
		"$$(mktemp -d)"

docs: $(INSTALLED)
	bash .ci/docs site

notebook: $(INSTALLED)
	$(BIN)/python .ci/notebook

# torch first and by its exact version: a bare `torch` may bring gigabytes of GPU libraries.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), "amalgam needs Python 3.11 or newer"'
	@echo "creating .venv and installing the libraries (once, takes minutes)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
	touch $@

$(AUDIT):
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet 'pip-audit>=2.10' 'cyclonedx-bom>=7.3'
	touch $@

benchmark: $(INSTALLED)
	$(BIN)/python -m amalgam.benchmarks.table $(if $(QUICK),--quick) $(if $(DATA),--data $(DATA)) $(BENCHMARK)

# Uses no virtual environment: a GPU machine has its own torch, and often does not allow other installs.
check-gpu:
	PYTHONPATH=.dev $(PYTHON) -m amalgam.benchmarks.check_gpu

clean:
	rm -rf .venv .venv-audit .venv-low .venv-moto dist site amalgam-demo amalgam-demo-data-free
