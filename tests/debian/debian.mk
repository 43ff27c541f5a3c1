# Tests both commands of the README, and the package, in a fresh Debian. Included by the top Makefile; runs there.

DEBIAN ?= 12
PARTS ?= run test deb
SUITE_12 := bookworm
SUITE_13 := trixie
APT_DEBIAN := mmdebstrap util-linux git

.PHONY: test-debian

test-debian:
	@[ "$$(id -u)" = 0 ] || { echo "make test-debian: a system is made as root" >&2; exit 1; }
	@[ -n "$(SUITE_$(DEBIAN))" ] || { echo "make test-debian: DEBIAN is 12 or 13" >&2; exit 1; }
	$(call apt_install,$(APT_DEBIAN))
	tests/debian/fresh.sh $(SUITE_$(DEBIAN)) $(PARTS)
