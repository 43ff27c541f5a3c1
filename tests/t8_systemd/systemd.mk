# The package on a real systemd, in a container (tests/container). Included by the Makefile at the top; all runs there.

SYSTEMD := build/systemd
# In the container: what the package depends on, and what a system takes. fuse3 has its library, which is another in each
# release. The kernel is that of this machine.
GUEST_PACKAGES := systemd-sysv dbus udev kmod procps python3 fuse3
# That of this machine: the package is for its Python.
SUITE := $(shell . /etc/os-release && echo $$VERSION_CODENAME)

.PHONY: test-systemd systemd-share systemd-guest

# All that goes into it is named here, so it is made again when one of these changes.
$(SYSTEMD)/root.tar: tests/t8_systemd/systemd.mk tests/container/root.sh tests/container/agent.py tests/container/agent.service
	$(call apt_install,$(APT_SYSTEMD))
	mkdir -p $(@D)
	rm -f $(@D)/root.ext4
	nice tests/container/root.sh $(SUITE) "$(GUEST_PACKAGES)" $@

# What is handed to the guest: the package in two versions, and programs that are compiled here.
systemd-share: $(SYSTEMD)/root.tar deb
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
