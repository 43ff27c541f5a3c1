# Tests the package on a real systemd, in a container (tests/container). Included by the top Makefile; runs there.

SYSTEMD := build/systemd
# The packages in the container: those that ours depends on, and those that a system needs. fuse3 brings its library,
# whose package has another name in each release. The kernel is this machine's.
GUEST_PACKAGES := systemd-sysv dbus udev kmod procps python3 fuse3
# This machine's release, because the package is built for its Python.
SUITE := $(shell . /etc/os-release && echo $$VERSION_CODENAME)

.PHONY: test-systemd systemd-share systemd-guest

# This rule names everything that goes into the archive, so it is made again when one of these changes.
$(SYSTEMD)/root.tar: tests/t8_systemd/systemd.mk tests/container/root.sh \
		tests/container/agent.py tests/container/agent.service
	$(call apt_install,$(APT_SYSTEMD))
	mkdir -p $(@D)
	rm -f $(@D)/root.ext4
	nice tests/container/root.sh $(SUITE) "$(GUEST_PACKAGES)" $@

# The files that the guest gets: the package in two versions, and compiled programs.
systemd-share: $(SYSTEMD)/root.tar deb-lint
	rm -rf $(SYSTEMD)/share
	mkdir -p $(SYSTEMD)/share
	cp $(DEB) $(SYSTEMD)/share/ggroupfs.deb
	tests/t8_systemd/again.sh $(SYSTEMD)/share/ggroupfs.deb $(SYSTEMD)/share/ggroupfs-next.deb $(DEB_VERSION)+next
	cc -static -O1 -std=gnu11 -Wall -Wextra -Werror -o $(SYSTEMD)/share/holder tests/t8_systemd/holder.c

test-systemd: systemd-share
	$(MAKE) systemd-guest

systemd-guest: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make test-systemd: a container is made as root" >&2; exit 1; }
	GGROUP_GUEST=$(CURDIR)/$(SYSTEMD) $(PYTEST) --timeout 1800 --durations 5 tests/t8_systemd
