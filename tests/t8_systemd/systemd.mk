# The package on a real systemd, in a virtual machine. Included by the Makefile at the top; all runs there.

SYSTEMD := build/systemd
# In the guest: what the package depends on, and what a system takes. The kernel and its modules come from outside.
GUEST_PACKAGES := systemd-sysv dbus udev kmod procps python3 fuse3 libfuse3-3
# That of this machine: the package is for its Python.
SUITE := $(shell . /etc/os-release && echo $$VERSION_CODENAME)

.PHONY: test-systemd systemd-share systemd-guest

# All that goes into the disk is named here, so it is made again when one of these changes.
$(SYSTEMD)/root.ext4: tests/t8_systemd/systemd.mk tests/t8_systemd/disk.sh tests/vm/agent.py tests/vm/agent.service
	$(call apt_install,$(APT_KMOD) $(APT_SYSTEMD))
	mkdir -p $(@D)
	nice tests/t8_systemd/disk.sh $(SUITE) "$(GUEST_PACKAGES)" $(SYSTEMD)/root $@

# What is handed to the guest: the package in two versions, and programs that are compiled here.
systemd-share: $(SYSTEMD)/root.ext4 deb
	rm -rf $(SYSTEMD)/share
	mkdir -p $(SYSTEMD)/share
	cp $(DEB) $(SYSTEMD)/share/ggroupfs.deb
	tests/t8_systemd/again.sh $(SYSTEMD)/share/ggroupfs.deb $(SYSTEMD)/share/ggroupfs-next.deb $(DEB_VERSION)+next
	cc -static -O1 -std=gnu11 -Wall -Wextra -Werror -o $(SYSTEMD)/share/holder tests/t8_systemd/holder.c

test-systemd: systemd-share
	$(MAKE) systemd-guest

systemd-guest: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make test-systemd: a disk is made as root" >&2; exit 1; }
	GGROUP_GUEST=$(CURDIR)/$(SYSTEMD) $(PYTEST) --timeout 7200 --durations 5 tests/t8_systemd
