# The kernel module: checked, built and tested. Included by the top Makefile; all runs there.

# The release's own kernel, which the package that stands for it depends on. Evaluated only when needed, as it comes
# with the packages.
depends_on = $(shell dpkg-query -W -f '$${Depends}' $(1) | grep -o '^$(patsubst %-amd64,%,$(1))-[^ ,]*')
STOCK = /boot/$(patsubst linux-image-%,vmlinuz-%,$(call depends_on,linux-image-amd64))
STOCK_HEADERS = /lib/modules/$(patsubst linux-headers-%,%,$(call depends_on,linux-headers-amd64))/build
KMOD_SOURCES := $(wildcard kmod/*.c kmod/*.h kmod/*.def kmod/uapi/*.h kmod/Kbuild)
SOURCES_OF_STOCK = $(call depends_on,linux-source)
SOURCE_TAR = /usr/src/$(SOURCES_OF_STOCK).tar.xz

VM := $(PY) -m tests.vm.run
# The hypothesis profile of CI: the same histories each time, since a virtual machine is too slow for random ones.
GUEST := --env CI=true --env GGROUP_LEDGER=kmod --env GGROUP_SLOW=10 \
	--env HYPOTHESIS_STORAGE_DIRECTORY=/tmp/hypothesis -- $(PYTEST) --timeout 900

build/kmod/.packages: $(VENV)/.built-test
	$(call apt_install,$(APT_KMOD))
	@mkdir -p $(@D)
	touch $@

build/kmod/stock/ggroup.ko: build/kmod/.packages $(KMOD_SOURCES)
	$(MAKE) -s -C kmod modules KDIR=$(STOCK_HEADERS) BUILD=$(abspath $(@D))

# The kernel's own style checker is only in its sources.
build/kmod/checkpatch/checkpatch.pl: build/kmod/.packages
	@mkdir -p $(@D)
	tar -xf $(SOURCE_TAR) -C $(@D) --strip-components=2 --occurrence=1 \
		$(addprefix $(SOURCES_OF_STOCK)/scripts/,checkpatch.pl spelling.txt const_structs.checkpatch)
	touch $@

# A row of settings.def becomes a part of a list, not a statement.
IS_A_ROW := MULTISTATEMENT_MACRO_USE_DO_WHILE,TRAILING_SEMICOLON,MACRO_ARG_PRECEDENCE,COMPLEX_MACRO
IS_A_ROW := $(IS_A_ROW),MACRO_WITH_FLOW_CONTROL,MACRO_ARG_UNUSED,MACRO_ARG_REUSE

# Any output for any file is an error.
check-kmod: build/kmod/checkpatch/checkpatch.pl
	perl $< --no-tree --strict --max-line-length=100 --no-summary --quiet --ignore $(IS_A_ROW) \
		-f $(filter-out %/Kbuild,$(KMOD_SOURCES:%.mod.c=))
	rm -rf build/kmod/check
	$(MAKE) -s -C kmod modules KDIR=$(STOCK_HEADERS) BUILD=$(CURDIR)/build/kmod/check W=1 C=2 2>&1 \
		| grep -v 'Skipping BTF generation' | { ! grep .; }

# Compiled on the host, since a compiler in the virtual machine is slow.
.PHONY: kmod-programs
kmod-programs:
	$(MAKE) -s -C tests/t5_module

.PHONY: kmod-ready
kmod-ready: check-kmod build/kmod/stock/ggroup.ko kmod-programs

# Two machines at a time, with one emulated processor each, since a shared machine is slower than it saves; except for
# the machine whose tests are of concurrent calls.
#
# KMOD_LONG take from ten minutes down to three and a half, the longest first; KMOD_SHORT less than a minute each.
KMOD_LONG := kmod-guest-books kmod-guest-hazards kmod-guest-deaths
KMOD_SHORT := kmod-guest-hostile kmod-guest-cost
KMOD_GUESTS := $(KMOD_LONG) $(KMOD_SHORT)

test-kmod: kmod-ready
	$(MAKE) -j2 --output-sync=target $(KMOD_GUESTS)

# The other tests of mounts. Not a part of `make test`: each program that they start takes 4 s to begin there, which
# adds up to a quarter of an hour, and what docs/semantics.md says in milliseconds is not for an emulated processor.
#
# Left out: three statements on shares and milliseconds, whose programs are too slow there to keep a GPU busy.
MOUNTS := $(GUEST) --timeout 1500 \
	--deselect tests/t4_mounts/t4_tenants.py::test_timeslices_share_the_engine \
	--deselect tests/t4_mounts/t4_tenants.py::test_freeze_stops_one_and_the_other_gains_all \
	--deselect \
	'tests/t4_mounts/t4_semantics.py::test_semantics[compute.timeslice/the-timeslice-is-one-for-all-tsgs]'

test-kmod-mounts: build/kmod/stock/ggroup.ko
	$(MAKE) -j2 --output-sync=target kmod-guest-mounts-1 kmod-guest-mounts-2

ON_STOCK = $(VM) --kernel $(STOCK) --module build/kmod/stock/ggroup.ko

.PHONY: kmod-guest-books kmod-guest-hazards kmod-guest-deaths kmod-guest-cost kmod-guest-hostile kmod-guest-mounts-1 \
	kmod-guest-mounts-2

kmod-guest-books:
	$(ON_STOCK) --seconds 2400 $(GUEST) tests/t5_module/t5_ledger_machine.py tests/t5_module/t5_restart.py

# Each operation of the comparison with cgroup2, without its histories, which take four minutes there.
kmod-guest-hazards:
	$(ON_STOCK) --seconds 2400 $(GUEST) --ignore tests/t5_module/t5_ledger_machine.py \
		--ignore tests/t5_module/t5_restart.py --ignore tests/t5_module/t5_faults.py \
		--ignore tests/t5_module/t5_bench.py --ignore tests/t5_module/t5_killed.py \
		--ignore tests/t5_module/t5_hostile.py tests/t5_module \
		--deselect tests/t4_mounts/t4_cgroup_differential.py::test_histories \
		tests/t4_mounts/t4_slices.py tests/t4_mounts/t4_cgroup_differential.py

# Two of the three histories, since each of them starts a daemon six times.
kmod-guest-deaths:
	$(ON_STOCK) --seconds 2400 $(GUEST) tests/t5_module/t5_killed.py \
		'tests/t4_mounts/t4_restart.py::test_killed_while_somebody_is_at_it[0]' \
		'tests/t4_mounts/t4_restart.py::test_killed_while_somebody_is_at_it[1]'

kmod-guest-cost:
	$(ON_STOCK) --seconds 300 --counted $(GUEST) tests/t5_module/t5_bench.py

GGROUP_HOSTILE_S ?= 20
kmod-guest-hostile:
	$(ON_STOCK) --cpus 2 --seconds 600 --env GGROUP_HOSTILE_S=$(GGROUP_HOSTILE_S) $(GUEST) \
		tests/t5_module/t5_hostile.py

kmod-guest-mounts-1:
	$(ON_STOCK) --seconds 1800 $(MOUNTS) tests/t4_mounts/t4_command.py tests/t4_mounts/t4_semantics.py

kmod-guest-mounts-2:
	$(ON_STOCK) --seconds 1800 $(MOUNTS) tests/t4_mounts/t4_tenant_socket.py tests/t4_mounts/t4_bad_luck.py \
		tests/t4_mounts/t4_mount_machine.py tests/t4_mounts/t4_tenants.py

# The debug kernel, which reports what is wrong. Built once for each version of its sources and configuration.
DEBUG := build/kmod/debug-kernel
DEBUG_IMAGE := $(DEBUG)/arch/x86/boot/bzImage

$(DEBUG_IMAGE): kmod/debug-kernel.config build/kmod/.packages
	$(call apt_install,$(APT_KMOD_DEBUG))
	rm -rf build/kmod/linux $(DEBUG)
	mkdir -p build/kmod/linux $(DEBUG)
	tar -xf $(SOURCE_TAR) -C build/kmod/linux --strip-components=1
	$(MAKE) -s -C build/kmod/linux O=$(abspath $(DEBUG)) tinyconfig
	cd $(DEBUG) && ../linux/scripts/kconfig/merge_config.sh -m -O . .config $(CURDIR)/$< >/dev/null
	$(MAKE) -s -C $(DEBUG) olddefconfig
	@# An option whose conditions are not met goes without a word, and with it what it would have found.
	! grep '^CONFIG_.*=y' $< | grep -vxFf $(DEBUG)/.config
	$(MAKE) -s -j$$(nproc) -C $(DEBUG) bzImage modules_prepare

build/kmod/debug/ggroup.ko: $(DEBUG_IMAGE) $(KMOD_SOURCES)
	KBUILD_MODPOST_WARN=1 $(MAKE) -s -C kmod modules KDIR=$(abspath $(DEBUG)) BUILD=$(abspath $(@D))

GGROUP_FUZZ_S ?= 600
ON_DEBUG = $(VM) --kernel $(DEBUG_IMAGE) --memory 4G --module build/kmod/debug/ggroup.ko \
	--env GGROUP_CYCLES=20

test-kmod-debug: build/kmod/debug/ggroup.ko kmod-programs
	$(MAKE) -j2 --output-sync=target kmod-debug-books kmod-debug-hazards
	$(ON_DEBUG) --cpus 2 --seconds 1500 --env GGROUP_FUZZ_S=$(GGROUP_FUZZ_S) $(GUEST) --timeout 1400 \
		tests/t5_module/t5_fuzz.py
	$(MAKE) kmod-debug-hostile

.PHONY: kmod-debug-books kmod-debug-hazards kmod-debug-hostile

# Ten minutes, or until every pair of calls has met: up to fifty on a busy machine.
kmod-debug-hostile: GGROUP_HOSTILE_S = 600
kmod-debug-hostile:
	$(ON_DEBUG) --cpus 2 --seconds 3600 --env GGROUP_HOSTILE_S=$(GGROUP_HOSTILE_S) $(GUEST) --timeout 3500 \
		tests/t5_module/t5_hostile.py

kmod-debug-books:
	$(ON_DEBUG) --seconds 2400 $(GUEST) --timeout 1200 tests/t5_module/t5_ledger_machine.py \
		tests/t5_module/t5_restart.py tests/t4_mounts/t4_slices.py

kmod-debug-hazards:
	$(ON_DEBUG) --seconds 2400 $(GUEST) --timeout 1200 --ignore tests/t5_module/t5_ledger_machine.py \
		--ignore tests/t5_module/t5_restart.py --ignore tests/t5_module/t5_bench.py \
		--ignore tests/t5_module/t5_fuzz.py --ignore tests/t5_module/t5_killed.py \
		--ignore tests/t5_module/t5_hostile.py tests/t5_module

KMOD_VERSION := $(shell sed -n 's/^PACKAGE_VERSION="\(.*\)"/\1/p' kmod/dkms.conf)

# With dkms the module is built for every kernel that is installed, without it for the running one.
kmod-install:
	install -D -m 644 kmod/60-ggroup.rules $(DESTDIR)/usr/lib/udev/rules.d/60-ggroup.rules
	install -D -m 644 kmod/ggroup.conf $(DESTDIR)/usr/lib/modules-load.d/ggroup.conf
	install -D -m 644 systemd/kmod.conf $(DESTDIR)/usr/lib/systemd/system/ggroupfs.service.d/kmod.conf
	install -d $(DESTDIR)/usr/src/ggroup-$(KMOD_VERSION)/uapi
	install -m 644 $(filter-out kmod/uapi/%,$(KMOD_SOURCES)) kmod/Makefile kmod/dkms.conf kmod/LICENSE \
		$(DESTDIR)/usr/src/ggroup-$(KMOD_VERSION)
	install -m 644 kmod/uapi/ggroup.h $(DESTDIR)/usr/src/ggroup-$(KMOD_VERSION)/uapi
ifeq ($(DESTDIR),)
	if command -v dkms >/dev/null; then dkms install --force ggroup/$(KMOD_VERSION); \
	else $(MAKE) -C kmod modules_install && depmod; fi
endif
