# Installation, and the Debian package of it. Included by the top-level Makefile; everything runs there.

PREFIX ?= /usr/local
DESTDIR ?=
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
ARCHITECTURE = $(shell dpkg --print-architecture)

LIB := $(PREFIX)/lib/ggroupfs
# The only directory in which mount(8) looks for helpers.
MOUNT_HELPERS := /usr/sbin
# Directory in which zsh looks; on Debian, packages use another one.
ZSH := $(PREFIX)/share/zsh/$(if $(filter /usr,$(PREFIX)),vendor-completions,site-functions)
# Record of what `make install` did, with which `make uninstall` undoes it. A package needs none.
RECORD := $(LIB)/installed

STAGE := build/stage$(subst /,-,$(PREFIX))
UNITS := systemd/ggroupfs.service systemd/ggroupfs-metrics.service systemd/ggroupfs-policy@.service \
	systemd/run-ggroup.mount
PYTHON_SOURCES := $(shell find ggroupfs backend -name '*.py')

.PHONY: install uninstall deb stage

# Dependencies for the Python of the installed command, since some are compiled.
build/dependencies/.made: pyproject.toml | build
	rm -rf $(@D)
	mkdir -p $(@D)
	$(SYSTEM_PYTHON) -c \
	'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["dependencies"], sep="\n")' \
		>build/dependencies.txt
	$(PY) -m pip install -q --disable-pip-version-check --no-compile --no-warn-script-location \
		--target $(@D) -r build/dependencies.txt
	@# Commands of theirs, and headers and C sources that nothing compiles any more.
	rm -rf $(@D)/bin $(@D)/include $(@D)/share
	find $(@D) \( -name '*.pyx' -o -name '*.pxd' -o -name '*.pxi' -o -name '*.c' -o -name '*.h' \) -delete
	@# Tests and demonstrations of theirs.
	rm -rf $(@D)/*/_tests $(@D)/*/*/_tests $(@D)/trio/_tools $(@D)/textual/demo $(@D)/*.dist-info/direct_url.json
	find $(@D) -name '*.so' -exec strip --strip-unneeded {} +
	touch $@

# The compiled dependencies. This takes longer than everything else here and is done once for each prefix, which is part
# of the compiled files.
COMPILED := build/compiled$(subst /,-,$(PREFIX))
COMPILE := $(SYSTEM_PYTHON) -m compileall -q --invalidation-mode unchecked-hash

$(COMPILED)/.made: build/dependencies/.made
	rm -rf $(@D)
	cp -r $(<D) $(@D)
	rm $@
	$(COMPILE) -s $(@D) -p $(LIB) $(@D)
	touch $@

# The complete tree to install, below one directory.
stage: $(COMPILED)/.made cuda
	rm -rf $(STAGE)
	install -d $(STAGE)$(LIB) $(STAGE)/etc/ggroupfs/slices.d $(STAGE)/etc/ggroupfs/policies $(STAGE)$(MOUNT_HELPERS)
	cp -r $(COMPILED)/. $(STAGE)$(LIB)
	rm $(STAGE)$(LIB)/.made
	for file in $(PYTHON_SOURCES); do install -D -m 644 $$file $(STAGE)$(LIB)/$$file; done
	install -s -m 644 build/cuda/libggroup-cuda.so $(STAGE)$(LIB)/backend/cuda/libggroup-cuda.so
	@# Compiled now, and believed without a look at the source, so that nothing is ever written there.
	$(COMPILE) -s $(STAGE)$(LIB) -p $(LIB) $(STAGE)$(LIB)/ggroupfs $(STAGE)$(LIB)/backend
	install -d $(STAGE)$(PREFIX)/bin
	sed 's|@LIB@|$(LIB)|' packaging/ggroupfs.in >$(STAGE)$(PREFIX)/bin/ggroupfs
	chmod 755 $(STAGE)$(PREFIX)/bin/ggroupfs
	sed 's|@LIB@|$(LIB)|' packaging/ggroupfs-dra.in >$(STAGE)$(PREFIX)/bin/ggroupfs-dra
	chmod 755 $(STAGE)$(PREFIX)/bin/ggroupfs-dra
	ln -s -r $(STAGE)$(PREFIX)/bin/ggroupfs $(STAGE)$(MOUNT_HELPERS)/mount.fuse.ggroupfs
	install -d $(STAGE)$(PREFIX)/lib/systemd/system
	for unit in $(UNITS); do \
		sed 's|/usr/bin/|$(PREFIX)/bin/|' $$unit >$(STAGE)$(PREFIX)/lib/systemd/system/$${unit#systemd/}; done
	install -d $(STAGE)$(PREFIX)/lib/systemd/system-generators
	sed 's|@LIB@|$(LIB)|' packaging/generator.in >$(STAGE)$(PREFIX)/lib/systemd/system-generators/ggroupfs
	chmod 755 $(STAGE)$(PREFIX)/lib/systemd/system-generators/ggroupfs
	install -D -m 644 systemd/sysusers.conf $(STAGE)$(PREFIX)/lib/sysusers.d/ggroupfs.conf
	install -D -m 644 systemd/tmpfiles.conf $(STAGE)$(PREFIX)/lib/tmpfiles.d/ggroupfs.conf
	install -D -m 644 systemd/default $(STAGE)/etc/default/ggroupfs
	install -D -m 644 backend/cuda/library/ggroup_usermem.h $(STAGE)$(PREFIX)/include/ggroup_usermem.h
	for page in docs/man/*.[1-8]; do \
		install -D -m 644 $$page $(STAGE)$(PREFIX)/share/man/man$${page##*.}/$${page##*/}; done
	gzip -9n $(STAGE)$(PREFIX)/share/man/man*/*
	install -D -m 644 packaging/monitoring/rules.yml $(STAGE)$(PREFIX)/share/ggroupfs/monitoring/rules.yml
	install -D -m 644 packaging/monitoring/rules.test.yml $(STAGE)$(PREFIX)/share/ggroupfs/monitoring/rules.test.yml
	install -D -m 644 packaging/monitoring/dashboard.json $(STAGE)$(PREFIX)/share/ggroupfs/monitoring/dashboard.json
	install -D -m 644 completions/ggroupfs.bash $(STAGE)$(PREFIX)/share/bash-completion/completions/ggroupfs
	install -D -m 644 completions/_ggroupfs $(STAGE)$(ZSH)/_ggroupfs

install: stage
	packaging/tree.sh install $(STAGE) "$(DESTDIR)" $(RECORD)

uninstall:
	packaging/tree.sh uninstall "$(DESTDIR)" $(RECORD)

# The Debian package. It is built by hand instead of with debhelper: it contains just the staged files, so nothing has
# to be detected, and the build does not need a hundred packages.
DEB_VERSION ?= $(VERSION)
DEB = build/deb/ggroupfs_$(DEB_VERSION)_$(ARCHITECTURE).deb
DEB_ROOT := build/deb/root
DEB_DATE = $(shell date -R -d "@$$(git log -1 --format=%ct 2>/dev/null || date +%s)")
DEB_SCRIPTS := postinst prerm postrm

deb:
	$(call apt_install,$(APT_DEB))
	$(MAKE) -s stage PREFIX=/usr
	rm -rf build/deb
	mkdir -p build/deb/debian
	cp -r build/stage-usr $(DEB_ROOT)
	install -D -m 644 packaging/debian/copyright $(DEB_ROOT)/usr/share/doc/ggroupfs/copyright
	install -D -m 644 packaging/debian/lintian-overrides $(DEB_ROOT)/usr/share/lintian/overrides/ggroupfs
	install -d $(DEB_ROOT)/DEBIAN
	install -m 755 $(DEB_SCRIPTS:%=packaging/debian/%) $(DEB_ROOT)/DEBIAN
	install -m 644 packaging/debian/conffiles $(DEB_ROOT)/DEBIAN
	@# What the compiled parts are linked with: dpkg-shlibdeps wants a source package around it.
	printf 'Source: ggroupfs\n\nPackage: ggroupfs\nArchitecture: any\n' >build/deb/debian/control
	cd build/deb && dpkg-shlibdeps -O --ignore-missing-info \
		$$(find root -name '*.so' -printf '-e%p ') >depends 2>/dev/null
	sed -e 's/@VERSION@/$(DEB_VERSION)/' -e 's/@DATE@/$(DEB_DATE)/' packaging/debian/changelog.in \
		| gzip -9n >$(DEB_ROOT)/usr/share/doc/ggroupfs/changelog.gz
	cd $(DEB_ROOT) && find . -type f ! -path './DEBIAN/*' -printf '%P\0' \
		| LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums
	@# A field on several lines in the source is on one in the package, which has no folded ones (deb-control(5)).
	sed -e ':fold' -e '/^Depends:.*,$$/{N;s/,\n */, /;b fold' -e '}' \
		-e 's/@VERSION@/$(DEB_VERSION)/' -e 's/@ARCHITECTURE@/$(ARCHITECTURE)/' \
		-e "s/@SIZE@/$$(du -sk --exclude=DEBIAN $(DEB_ROOT) | cut -f 1)/" \
		-e "s/@DEPENDS@/$$(sed -n 's/^shlibs:Depends=//p' build/deb/depends)/" \
		-e "s/@PYTHON@/$$($(SYSTEM_PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')/" \
		-e "s/@NEXT_PYTHON@/$$($(SYSTEM_PYTHON) -c \
			'import sys; print("%d.%d" % (sys.version_info[0], sys.version_info[1] + 1))')/" \
		packaging/debian/control.in >$(DEB_ROOT)/DEBIAN/control
	dpkg-deb --root-owner-group -Zgzip --build $(DEB_ROOT) $(DEB)
	rm -r $(DEB_ROOT)
	$(MAKE) -s deb-container DEB_VERSION=$(DEB_VERSION)

# A separate package for container engines, which find its contents by themselves: a hook, and the devices that a unit
# makes.
CONTAINER_DEB = build/deb/ggroupfs-container_$(DEB_VERSION)_all.deb
CONTAINER_ROOT := build/deb/container
CONTAINER_SOURCES := packaging/container

.PHONY: deb-container
deb-container:
	rm -rf $(CONTAINER_ROOT)
	install -d $(CONTAINER_ROOT)/DEBIAN $(CONTAINER_ROOT)/usr/libexec/ggroupfs
	sed 's|@LIB@|/usr/lib/ggroupfs|' packaging/oci-hook.in >$(CONTAINER_ROOT)/usr/libexec/ggroupfs/oci-hook
	chmod 755 $(CONTAINER_ROOT)/usr/libexec/ggroupfs/oci-hook
	install -D -m 644 $(CONTAINER_SOURCES)/hook.json \
		$(CONTAINER_ROOT)/usr/share/containers/oci/hooks.d/ggroupfs.json
	install -D -m 644 systemd/ggroupfs-cdi.service $(CONTAINER_ROOT)/usr/lib/systemd/system/ggroupfs-cdi.service
	install -D -m 644 packaging/debian/copyright $(CONTAINER_ROOT)/usr/share/doc/ggroupfs-container/copyright
	install -D -m 644 $(CONTAINER_SOURCES)/lintian-overrides \
		$(CONTAINER_ROOT)/usr/share/lintian/overrides/ggroupfs-container
	install -m 755 $(DEB_SCRIPTS:%=$(CONTAINER_SOURCES)/%) $(CONTAINER_ROOT)/DEBIAN
	sed -e 's/^ggroupfs /ggroupfs-container /' -e 's/@VERSION@/$(DEB_VERSION)/' -e 's/@DATE@/$(DEB_DATE)/' \
		packaging/debian/changelog.in \
		| gzip -9n >$(CONTAINER_ROOT)/usr/share/doc/ggroupfs-container/changelog.gz
	cd $(CONTAINER_ROOT) && find . -type f ! -path './DEBIAN/*' -printf '%P\0' \
		| LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums
	sed 's/@VERSION@/$(DEB_VERSION)/' $(CONTAINER_SOURCES)/control.in >$(CONTAINER_ROOT)/DEBIAN/control
	dpkg-deb --root-owner-group -Zgzip --build $(CONTAINER_ROOT) $(CONTAINER_DEB)
	rm -r $(CONTAINER_ROOT)

# What Debian expects of packages. A check of its own: lintian needs more than a hundred packages, a build none of them.
.PHONY: deb-lint
deb-lint: deb
	$(call apt_install,$(APT_LINTIAN))
	lintian --fail-on error $(DEB) $(CONTAINER_DEB)
