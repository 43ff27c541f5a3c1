# The plugin of Slurm, and the Debian package of it. Included by the top-level Makefile; everything runs there.

SLURM := build/slurm
# Slurm's headers: those of the machine, or those of its Debian, unpacked. A plugin is for one version of Slurm, such as
# 22.05, and other versions refuse it.
ifneq ($(wildcard /usr/include/slurm/spank.h),)
SLURM_INCLUDE ?= /usr/include
else
SLURM_INCLUDE ?= $(CURDIR)/$(SLURM)/headers/usr/include
endif
SLURM_SOURCES := $(wildcard packaging/slurm/*.c)
SLURM_FLAGS := -std=gnu11 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror -fPIC -fvisibility=hidden

$(SLURM)/headers/usr/include/slurm/spank.h:
	rm -rf $(SLURM)/headers
	mkdir -p $(SLURM)/headers
	cd $(SLURM)/headers && { apt-get download -q libslurm-dev || { \
		apt-get update -q && apt-get download -q libslurm-dev; }; } \
		&& dpkg-deb -x libslurm-dev_*.deb .

# Symbols of Slurm are in the program that loads the plugin, such as sbatch, and are bound on the first call. -z
# nodelete is not needed: the plugin has no threads and no handlers.
$(SLURM)/ggroup.so: $(SLURM_SOURCES) $(wildcard packaging/slurm/*.h) packaging/slurm/options.def \
		packaging/slurm/slurm.mk \
		$(if $(filter $(CURDIR)/%,$(SLURM_INCLUDE)),$(SLURM)/headers/usr/include/slurm/spank.h)
	mkdir -p $(@D)
	cc $(SLURM_FLAGS) -isystem $(SLURM_INCLUDE) -shared -Wl,-z,lazy -o $@.new $(SLURM_SOURCES)
	mv $@.new $@

.PHONY: slurm deb-slurm
slurm: $(SLURM)/ggroup.so

MULTIARCH = $(shell dpkg-architecture -q DEB_HOST_MULTIARCH 2>/dev/null || gcc -print-multiarch)
SLURM_DEB = $(SLURM)/ggroupfs-slurm_$(DEB_VERSION)_$(ARCHITECTURE).deb
SLURM_ROOT := $(SLURM)/root
# The version, such as 22.05, and the next one, from the high bytes of a number.
SLURM_VERSION = $(shell sed -n 's/^.define SLURM_VERSION_NUMBER *//p' $(SLURM_INCLUDE)/slurm/slurm_version.h \
	| $(SYSTEM_PYTHON) -c \
	'n = int(input(), 0); print("%d.%02d %d.%02d" % (n >> 16, n >> 8 & 255, n >> 16, (n >> 8 & 255) + 1))')

deb-slurm: slurm
	$(call apt_install,$(APT_DEB))
	rm -rf $(SLURM_ROOT)
	install -D -s -m 644 $(SLURM)/ggroup.so $(SLURM_ROOT)/usr/lib/$(MULTIARCH)/slurm-wlm/ggroup.so
	install -D -m 644 packaging/slurm/copyright $(SLURM_ROOT)/usr/share/doc/ggroupfs-slurm/copyright
	install -D -m 644 docs/slurm.md $(SLURM_ROOT)/usr/share/doc/ggroupfs-slurm/slurm.md
	sed -e 's/^ggroupfs /ggroupfs-slurm /' -e 's/@VERSION@/$(DEB_VERSION)/' -e 's/@DATE@/$(DEB_DATE)/' \
		packaging/debian/changelog.in | gzip -9n >$(SLURM_ROOT)/usr/share/doc/ggroupfs-slurm/changelog.gz
	gzip -9n $(SLURM_ROOT)/usr/share/doc/ggroupfs-slurm/slurm.md
	install -d $(SLURM_ROOT)/DEBIAN $(SLURM)/debian
	@# As for the other package. What Slurm itself has is in no library that the plugin names.
	printf 'Source: ggroupfs-slurm\n\nPackage: ggroupfs-slurm\nArchitecture: any\n' >$(SLURM)/debian/control
	cd $(SLURM) && dpkg-shlibdeps -O --ignore-missing-info -eroot/usr/lib/$(MULTIARCH)/slurm-wlm/ggroup.so \
		>depends 2>/dev/null
	cd $(SLURM_ROOT) && find . -type f ! -path './DEBIAN/*' -printf '%P\0' \
		| LC_ALL=C sort -z | xargs -0 md5sum >DEBIAN/md5sums
	sed -e 's/@VERSION@/$(DEB_VERSION)/' -e 's/@ARCHITECTURE@/$(ARCHITECTURE)/' \
		-e "s/@SIZE@/$$(du -sk --exclude=DEBIAN $(SLURM_ROOT) | cut -f 1)/" \
		-e "s/@DEPENDS@/$$(sed -n 's/^shlibs:Depends=//p' $(SLURM)/depends)/" \
		-e 's/@SLURM@/$(word 1,$(SLURM_VERSION))/' -e 's/@NEXT_SLURM@/$(word 2,$(SLURM_VERSION))/' \
		packaging/slurm/control.in >$(SLURM_ROOT)/DEBIAN/control
	dpkg-deb --root-owner-group -Zgzip --build $(SLURM_ROOT) $(SLURM_DEB)
	rm -r $(SLURM_ROOT)

.PHONY: deb-slurm-lint
deb-slurm-lint: deb-slurm
	$(call apt_install,$(APT_LINTIAN))
	lintian --fail-on error $(SLURM_DEB)
