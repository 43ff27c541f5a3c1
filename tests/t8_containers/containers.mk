# Tests containers of podman on a real systemd, with both packages, in a container (tests/container). Included by the
# top Makefile, and run from there.

CONTAINERS := build/containers
# Since Debian 13 the docker command is in a package of its own.
ENGINE_PACKAGES := $(GUEST_PACKAGES) podman crun runc containerd docker.io $(if $(filter bookworm,$(SUITE)),,docker-cli)
# Name, suite and unpacked packages of each image. The older suites come first; the image with musl has no glibc.
IMAGES := old:bullseye:dash,coreutils,python3 new:bookworm:dash,coreutils,python3 musl:bullseye:musl,busybox-static

.PHONY: test-containers containers-share containers-guest

$(CONTAINERS)/root.tar: tests/t8_containers/containers.mk tests/t8_systemd/systemd.mk tests/container/root.sh \
		tests/container/agent.py tests/container/agent.service
	$(call apt_install,$(APT_SYSTEMD))
	mkdir -p $(@D)
	nice tests/container/root.sh $(SUITE) "$(ENGINE_PACKAGES)" $@

$(CONTAINERS)/images/.made: tests/t8_containers/containers.mk
	$(call apt_install,$(APT_SYSTEMD))
	rm -rf $(@D)
	mkdir -p $(@D)
	for image in $(IMAGES); do IFS=:; set -- $$image; unset IFS; \
		nice mmdebstrap --quiet --variant=extract --include=$$3 $$2 $(@D)/$$1.tar || exit; done
	touch $@

containers-share: $(CONTAINERS)/root.tar $(CONTAINERS)/images/.made deb
	rm -rf $(CONTAINERS)/share
	mkdir -p $(CONTAINERS)/share
	cp $(DEB) $(CONTAINERS)/share/ggroupfs.deb
	cp $(CONTAINER_DEB) $(CONTAINERS)/share/ggroupfs-container.deb
	ln $(CONTAINERS)/images/*.tar $(CONTAINERS)/share
	cp tests/t8_containers/many.py tests/t8_containers/calls.py $(CONTAINERS)/share
	$(MAKE) -s -C tests/t6_cuda OUT=$(CURDIR)/$(CONTAINERS) \
		CC="gcc -include $(CURDIR)/tests/t8_containers/old.h -DOLD_GLIBC" \
		$(CURDIR)/$(CONTAINERS)/fake/libcuda.so.1
	cp $(CONTAINERS)/fake/libcuda.so.1 $(CONTAINERS)/share

test-containers: containers-share
	$(MAKE) containers-guest

containers-guest: build-test
	@[ "$$(id -u)" = 0 ] || { echo "make test-containers: a container is made as root" >&2; exit 1; }
	GGROUP_CONTAINERS=$(CURDIR)/$(CONTAINERS) $(PYTEST) --timeout 1800 --durations 5 tests/t8_containers
