# Tests the Slurm plugin on a real Slurm, in a container (tests/container). Included by the top Makefile; runs there.

SLURM_TEST := build/slurm-test
# slurmd and slurmctld run on the same host.
SLURM_PACKAGES := $(GUEST_PACKAGES) munge slurm-client slurmctld slurmd
SLURM_ACCOUNTS := build/slurm-accounts

.PHONY: test-slurm slurm-share slurm-guest test-slurm-accounts

# The two rules name everything that goes into an archive, so it is made again when one of these changes.
$(SLURM_ACCOUNTS)/root.tar: SLURM_PACKAGES += slurmdbd mariadb-server
$(SLURM_TEST)/root.tar $(SLURM_ACCOUNTS)/root.tar: tests/t8_slurm/slurm.mk tests/container/root.sh \
		tests/container/agent.py tests/container/agent.service
	$(call apt_install,$(APT_SYSTEMD))
	mkdir -p $(@D)
	nice tests/container/root.sh $(SUITE) "$(SLURM_PACKAGES)" $@

slurm-share: $(SLURM_TEST)/root.tar deb deb-slurm-lint
	rm -rf $(SLURM_TEST)/share
	mkdir -p $(SLURM_TEST)/share
	cp $(DEB) $(SLURM_TEST)/share/ggroupfs.deb
	cp $(SLURM_DEB) $(SLURM_TEST)/share/ggroupfs-slurm.deb
	cc -static -O1 -std=gnu11 -Wall -Wextra -Werror -o $(SLURM_TEST)/share/holder tests/t8_systemd/holder.c
	cc -O1 -std=gnu11 -D_GNU_SOURCE -Wall -Wextra -Werror -shared -fPIC -o $(SLURM_TEST)/share/v2only.so \
		tests/t8_slurm/v2only.c

test-slurm: slurm-share
	$(MAKE) slurm-guest

slurm-guest: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make test-slurm: a container is made as root" >&2; exit 1; }
	GGROUP_SLURM=$(CURDIR)/$(SLURM_TEST) $(PYTEST) --timeout 600 --durations 5 tests/t8_slurm \
		--ignore tests/t8_slurm/t8_accounts.py

# Not part of `make test`, as installing a database takes as long as all the rest. Tests the figures in sacct.
test-slurm-accounts: build-test slurm-share $(SLURM_ACCOUNTS)/root.tar
	@[ "$$(id -u)" = 0 ] || { echo "make test-slurm-accounts: a container is made as root" >&2; exit 1; }
	rm -rf $(SLURM_ACCOUNTS)/share
	cp -r $(SLURM_TEST)/share $(SLURM_ACCOUNTS)
	GGROUP_SLURM=$(CURDIR)/$(SLURM_ACCOUNTS) $(PYTEST) -s --timeout 600 tests/t8_slurm/t8_accounts.py
