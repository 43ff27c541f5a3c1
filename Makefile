# ggroupfs: make run, make test. Each sets up whatever it needs, and nothing twice.
#
#   make build        apt packages, a venv in .venv, the package
#   make run          mount on $(MOUNT), start tenants if there is no GPU, walk a tour; stays until Ctrl-C
#   make test         every test that needs no GPU and ends within minutes, and the checks
#   make test-kmod    ... of them those of the kernel module: in a virtual machine, with Debian's kernel
#   make test-kmod-mounts   the other tests of mounts there too, with the kernel's ledger; a quarter of an hour
#   make test-kmod-debug    the same on a kernel with KASAN, lockdep, kmemleak and fault injection, and a fuzzer;
#                     an hour
#   make cuda         libggroup-cuda.so, which has memory limits act on CUDA programs
#   make test-systemd   ... those of the package and its units: in a container, on a real systemd; three minutes
#   make test-containers ... those of containers: podman and Docker in one, images of Debian 11 and 12; three minutes
#   make test-slurm   ... those of the plugin for Slurm: slurmctld, slurmd and munge in one; two minutes
#   make test-slurm-accounts  ... with slurmdbd and MariaDB, too; longer, and no part of `make test`
#   make test-debian  both commands of the README and the package in a fresh Debian: DEBIAN=12 or 13,
#                     PARTS="run test deb"
#   make test-hostile ... those of hostile tenants, which do every pair of things at once; three minutes,
#                     FUZZ=N for longer
#   make test-versions ... of this tree with an older one, really: library, daemon, journals; OLD=revision,
#                     three minutes
#   make fuzz         the fuzzers for longer, FUZZ=50 times as long as in `make test`; what breaks is kept in
#                     tests/corpus
#   make test-gpu     the tests that need an NVIDIA GPU with its stock driver, nvcc and PyTorch; GPU=1 for that one
#                     alone
#   make install      into PREFIX (/usr/local), below DESTDIR; `make uninstall` takes away exactly that
#   make deb          a Debian package, in build/deb
#   make deb-lint     what Debian expects of the package and of that for containers; deb-slurm-lint: of Slurm's
#   make deb-slurm    the plugin for Slurm as a package of its own, in build/slurm
#   make kmod-install the kernel module, by dkms where it is there, with what loads it at boot (DESTDIR)
#   make bench        the measured comparison, what needs no GPU; two minutes, into build/bench.json
#   make bench-gpu    ... and what needs one: nvcc, no network; half an hour. ONLY="pareto levers" for some of it;
#                     ONLY=oversubscribed for turns of memory, a quarter of an hour more
#   make bench-papers the papers' pairs on real programs (PyTorch, transformers), cell by cell:
#                     tests/bench/papers/README.md; PAPERS="--scenario pairs --budget 540"; bench-papers-plan says what
#                     and how long, with the same PAPERS
#   make bench-check  what moved since the committed record; bench-keep puts build/bench.json there
#   make bench-papers-check, bench-papers-keep   the same of build/papers/papers.json, which bench-papers-merge makes
#                     of cells
#   make bench-render pages and plots from the committed records, and what README and docs/comparison.md say of them
#   make bench-files  what one file access costs, against a C server
#   make soak         what holds of a mount that a crowd uses for ten minutes; a quarter of an hour, two CPUs
#   make tables       what pages, manual and completions say of the settings, from backend/core/settings.py
#   make interfaces   the messages of the kubelet's interfaces, from ggroupfs/dra/interfaces/*.proto
#   make kubernetes   the manifests of the DRA driver, from its chart (packaging/kubernetes)
#   make screenshot   the picture of `ggroupfs top` in the README
#   make dashboard    the Grafana dashboard that is shipped, from ggroupfs/monitoring; dashboard-picture:
#                     docs/dashboard.svg
#
# On a host without network, PY=python3 takes a Python that has the requirements already.

MOUNT ?= /run/ggroup
VENV := .venv
PY ?= $(VENV)/bin/python
PYTEST := $(PY) -m pytest
SYSTEM_PYTHON := /usr/bin/python3

# Empty: tests start hundreds of daemons, each of which would compile all modules anew where the environment forbids to
# keep them.
export PYTHONDONTWRITEBYTECODE :=

APT := python3 python3-venv python3-dev gcc libc6-dev pkg-config libfuse3-dev fuse3
APT_TEST := shellcheck inotify-tools util-linux mandoc dbus-daemon zsh
APT_KMOD := perl linux-image-amd64 linux-headers-amd64 linux-source xz-utils sparse kmod qemu-system-x86 iproute2
APT_KMOD_DEBUG := flex bison bc libelf-dev libssl-dev
APT_DEB := dpkg-dev
APT_LINTIAN := lintian
APT_SOAK := stress-ng
APT_SYSTEMD := mmdebstrap util-linux libc6-dev

SOURCES := ggroupfs backend tests
SHELL_SCRIPTS := .ci/run completions/ggroupfs.bash tests/vm/guest.sh tests/t7_nvidia/one_gpu.sh \
	packaging/tree.sh tests/container/root.sh tests/container/enter.sh tests/t8_systemd/again.sh \
	$(wildcard tests/debian/*.sh) \
	$(wildcard packaging/debian/*rm packaging/debian/*inst packaging/container/*rm packaging/container/*inst)

.PHONY: all build build-test run test check test-unit test-hostile test-machines test-gpu fuzz soak
.PHONY: bench-files tables screenshot dashboard clean
.PHONY: bench bench-gpu bench-keep bench-render bench-check
.PHONY: bench-papers bench-papers-plan bench-papers-merge bench-papers-keep bench-papers-check
.PHONY: check-kmod test-kmod test-kmod-mounts test-kmod-debug kmod-install

all: build

# A stamp per set of packages: dpkg is asked each time, apt only for what is missing.
define apt_install
	@missing=$$(for p in $(1); do dpkg-query -W -f '$${Status}' $$p 2>/dev/null \
		| grep -q 'ok installed' || echo $$p; done); \
	[ -z "$$missing" ] || { \
		command -v apt-get >/dev/null || { \
			echo "make: this is no Debian; please install:" $$missing >&2; exit 1; }; \
		[ "$$(id -u)" = 0 ] || { \
			echo "make: not root; please have installed: apt-get install" $$missing >&2; exit 1; }; \
		export DEBIAN_FRONTEND=noninteractive; \
		apt-get install -y -q --no-install-recommends $$missing || { \
			apt-get update -q && apt-get install -y -q --no-install-recommends $$missing; }; }
endef

ifeq ($(PY),$(VENV)/bin/python)
build: $(VENV)/.built
build-test: $(VENV)/.built-test

$(VENV)/.built: pyproject.toml
	$(call apt_install,$(APT))
	$(SYSTEM_PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install -q --disable-pip-version-check -e .
	touch $@

$(VENV)/.built-test: $(VENV)/.built $(VENV)/bin/promtool
	$(call apt_install,$(APT_TEST))
	$(VENV)/bin/pip install -q --disable-pip-version-check -e '.[test,plots,dra,kubernetes,engines]'
	touch $@

# What judges metrics: a package of its own since Debian 13, before that a part of one that would start a server. The
# latter has the server, too, of which only the picture of the dashboard is made.
$(VENV)/bin/promtool $(VENV)/bin/prometheus: $(VENV)/bin/%: $(VENV)/.built
	rm -rf $(VENV)/$*.deb && mkdir $(VENV)/$*.deb && cd $(VENV)/$*.deb && \
	for update in true "apt-get update -q"; do \
		$$update && for package in $* prometheus; do \
			apt-get download -q $$package 2>/dev/null && break 2; done; done; \
	dpkg-deb --fsys-tarfile *.deb | tar -xO ./usr/bin/$* >../bin/$*.new
	rm -r $(VENV)/$*.deb
	chmod +x $@.new
	mv $@.new $@
else
build build-test:
	@$(PY) -c 'import pyfuse3, trio, attrs, pynvml' || { \
		echo "make: $(PY) lacks the modules named above" >&2; exit 1; }
endif

run: build cuda
	@[ "$$(id -u)" = 0 ] || { echo "make run: only root may mount a tree that acts on every process" >&2; exit 1; }
	$(PY) -m ggroupfs demo --mount $(MOUNT)

test: check test-unit test-hostile test-machines

check: build-test
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/mypy
	shellcheck $(SHELL_SCRIPTS)
	mandoc -T lint -W warning docs/man/*.[58]
	$(PY) -m tests.style

# Twice as many as there are processors in CI: a worker waits for programs, clocks and mounts for half of its time.
WORKERS ?= 4

test-unit: build-test cuda-tests
	@[ "$$(id -u)" = 0 ] || { echo "make test: the mount tests need root" >&2; exit 1; }
	$(PYTEST) -n $(WORKERS) --dist loadfile --no-loadscope-reorder \
		tests --ignore tests/t7_nvidia --ignore tests/t5_module --ignore tests/t8_systemd \
		--ignore tests/t8_containers --ignore tests/t8_slurm --ignore tests/hostile

# By itself, since it takes every CPU. With FUZZ=N every pair N times, each time otherwise.
test-hostile: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make test-hostile: only root may mount" >&2; exit 1; }
	$(if $(filter command line environment,$(origin FUZZ)),GGROUP_FUZZ=$(FUZZ)) $(PYTEST) tests/hostile

# No part of `make test`: it needs the history of git. With ONLY=WORDS those whose names have these words.
OLD ?= 249ae3a
.PHONY: test-versions
test-versions: build-test cuda
	@[ "$$(id -u)" = 0 ] || { echo "make test-versions: only root may mount" >&2; exit 1; }
	CUDA_INCLUDE=$(CUDA_INCLUDE) $(PY) -m tests.versions.run --old $(OLD) $(if $(ONLY),--only "$(ONLY)")

include tests/vm/kmod.mk
include backend/cuda/library/cuda.mk
include packaging/package.mk
include packaging/slurm/slurm.mk
include tests/t8_systemd/systemd.mk
include tests/t8_containers/containers.mk
include tests/t8_slurm/slurm.mk
include tests/debian/debian.mk

# test-kmod, test-systemd, test-containers and test-slurm, two at a time, as what they need before: the longest first,
# so that both processors are at work to the end. All packages come first, since only one apt can run at a time.
test-machines: build-test
	$(call apt_install,$(APT_KMOD) $(APT_SYSTEMD) $(APT_DEB) $(APT_LINTIAN))
	$(MAKE) -j2 --output-sync=target containers-share slurm-share systemd-share kmod-ready
	$(MAKE) -j2 --output-sync=target $(KMOD_LONG) systemd-guest containers-guest slurm-guest $(KMOD_SHORT)

FUZZ ?= 50

# Other bytes each time. The kernel module's fuzzer is a part of test-kmod-debug.
fuzz: build-test
	GGROUP_FUZZ=$(FUZZ) $(PYTEST) --timeout 0 -k fresh $(wildcard tests/t[0-4]_*/t?_fuzz_*.py)

test-gpu: build-test cuda
	@[ -e /dev/nvidiactl ] || { \
		echo "make test-gpu: no NVIDIA driver on this machine (/dev/nvidiactl)" >&2; exit 1; }
	$(GPU:%=tests/t7_nvidia/one_gpu.sh %) $(PYTEST) -s tests/t7_nvidia

# Each scenario has a budget of time; BUDGET (seconds) and REPETITIONS are for every one that is run. CELLS="percent=300
# graphs=1" are the cases that are wanted, of those of `oversubscribed`.
BENCH := $(PY) -m tests.bench
BENCH_OPTIONS = $(ONLY:%=--only %) $(CELLS:%=--cell %) $(BUDGET:%=--budget %) $(REPETITIONS:%=--repetitions %)

bench: build-test
	@[ "$$(id -u)" = 0 ] || { \
		echo "make bench: only root may mount a tree that acts on every process" >&2; exit 1; }
	$(BENCH) host $(BENCH_OPTIONS)

bench-gpu: build-test cuda
	@[ -e /dev/nvidiactl ] || { \
		echo "make bench-gpu: no NVIDIA driver on this machine (/dev/nvidiactl)" >&2; exit 1; }
	$(BENCH) gpu $(BENCH_OPTIONS)

bench-papers: build-test cuda
	@[ -e /dev/nvidiactl ] || { \
		echo "make bench-papers: no NVIDIA driver on this machine (/dev/nvidiactl)" >&2; exit 1; }
	$(PY) -m tests.bench.papers run $(PAPERS)

# Without a GPU, too: what is there of cells and records.
bench-papers-plan bench-papers-merge bench-papers-keep bench-papers-check: bench-papers-%: build-test
	$(PY) -m tests.bench.papers $* $(if $(filter plan,$*),$(PAPERS))

bench-keep bench-check: bench-%: build-test
	$(BENCH) $*

bench-render: build-test
	$(BENCH) render
	$(PY) -m tests.bench.papers render

bench-files: build-test
	$(PY) -m tests.bench.files

soak: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make soak: only root may mount" >&2; exit 1; }
	$(call apt_install,$(APT_SOAK))
	$(PY) -m tests.bench.soak --json build/soak.json

# The messages of the kubelet's interfaces, in Python.
.PHONY: interfaces
interfaces: build-test
	$(VENV)/bin/pip install -q --disable-pip-version-check -e '.[interfaces]'
	cd ggroupfs/dra/interfaces && ../../../$(PY) -m grpc_tools.protoc -I . --python_out=. --pyi_out=. *.proto

# What packaging/kubernetes/chart is with its own values.
.PHONY: kubernetes
kubernetes: build-test
	$(PY) packaging/kubernetes/render.py

# What the manual, the pages and the completions say of each setting, from backend/core/settings.py.
tables: build-test
	$(PY) -m docs.tables

screenshot: build-test
	$(PY) docs/screenshot.py

dashboard: build
	mkdir -p build
	$(PY) -m ggroupfs.monitoring.dashboard >build/dashboard.json
	mv build/dashboard.json packaging/monitoring/dashboard.json

# With a Prometheus of its own, for the time of the picture.
.PHONY: dashboard-picture
dashboard-picture: build-test $(VENV)/bin/prometheus
	@[ "$$(id -u)" = 0 ] || { echo "make dashboard-picture: only root may mount" >&2; exit 1; }
	$(PY) docs/dashboard.py

clean:
	rm -rf $(VENV) build ./*.egg-info
	$(MAKE) -C kmod -s clean 2>/dev/null || true
	find . -name __pycache__ -prune -exec rm -rf {} +
