# Targets for the interposer for CUDA programs. Included by the Makefile at the top, and run from there.

# cuda.h of CUDA 13, the machine's own or from NVIDIA's package. A program may run on any driver that has the entry
# points that it asks for.
CUDA_PACKAGE := nvidia-cuda-runtime==13.0.96
CUDA_HEADER := build/cuda/include/cuda.h
ifneq ($(shell grep -s 'define CUDA_VERSION 13' /usr/local/cuda/include/cuda.h),)
CUDA_INCLUDE ?= /usr/local/cuda/include
else
CUDA_INCLUDE ?= $(CURDIR)/build/cuda/include
endif
export CUDA_INCLUDE

$(CUDA_HEADER): | build
	mkdir -p $(@D)
	$(PY) -m pip download -q --disable-pip-version-check --no-deps --dest build/cuda/wheel $(CUDA_PACKAGE)
	$(PY) -m zipfile -e build/cuda/wheel/nvidia_cuda_runtime-*.whl build/cuda/wheel
	mv build/cuda/wheel/nvidia/cu13/include/* $(@D)
	rm -r build/cuda/wheel

.PHONY: cuda
cuda: $(if $(filter $(CURDIR)/%,$(CUDA_INCLUDE)),$(CUDA_HEADER))
	$(MAKE) -s -C backend/cuda/library OUT=$(CURDIR)/build/cuda

# The programs of tests/t6_cuda, with each sanitizer: no test should wait for a compiler on a busy machine.
.PHONY: cuda-tests
cuda-tests: cuda
	for sanitize in "" thread address,undefined; do for directory in t6_cuda t6_cuda/unit; do \
		$(MAKE) -s -j2 -C tests/$$directory SANITIZE=$$sanitize || exit; done; done
