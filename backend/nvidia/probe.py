"""The child process of the self-test: runs short kernels on one GPU until told to stop; the GPU counts them.

    python -m backend.nvidia.probe FD KERNEL_US

FD is a file of one page, shared with the parent; CUDA_VISIBLE_DEVICES selects the GPU. The child needs only the CUDA
*driver* API, through ctypes: no compiler and no CUDA toolkit. It does not cooperate with ggroupfs, so a lever that
acts on it acts on any program.
"""

from __future__ import annotations

import ctypes
import mmap
import signal
import struct
import sys
import time

PAGE = 4096
FINISHED = 0
"""Offset of a u64: kernels completed, added by the GPU itself."""
LAUNCHED = 8
"""Offset of a u64: kernels launched."""
ERROR = 16
"""Offset of a u64: the CUresult that ended the child, 0 for none."""
STOP = 24
"""Offset of a u64: nonzero when the child has to end."""
COPY = 32
"""Offset of a u64: nonzero when the child has to copy memory, too."""
COPIED = 40
"""Offset of a u64: copies completed."""

COPY_BYTES = 1 << 20
"""Bytes of one copy from the GPU to the host: too many to be sent without a copy engine."""

IN_FLIGHT = 16

# Spins for `cycles` and then adds one to `counter`. Only cycles in which it ran are counted: a step of 4096 or more
# between two readings is time spent preempted. A red at system scope is visible to the CPU at once.
PTX = b"""
.version 6.3
.target sm_70
.address_size 64
.visible .entry spin(.param .u64 counter, .param .u64 cycles)
{
    .reg .u64 %rd<8>;
    .reg .pred %p<3>;
    ld.param.u64 %rd1, [counter];
    ld.param.u64 %rd2, [cycles];
    mov.u64 %rd3, 0;
    mov.u64 %rd4, %clock64;
again:
    mov.u64 %rd5, %clock64;
    sub.u64 %rd6, %rd5, %rd4;
    mov.u64 %rd4, %rd5;
    setp.lt.u64 %p1, %rd6, 4096;
    @%p1 add.u64 %rd3, %rd3, %rd6;
    setp.lt.u64 %p2, %rd3, %rd2;
    @%p2 bra again;
    red.relaxed.sys.global.add.u64 [%rd1], 1;
    ret;
}
"""

# cuda.h
CU_MEMHOSTREGISTER_DEVICEMAP = 2
CU_DEVICE_ATTRIBUTE_CLOCK_RATE = 13
CU_STREAM_NON_BLOCKING = 1
CU_EVENT_DISABLE_TIMING = 2
CUDA_ERROR_NOT_READY = 600
PR_SET_PDEATHSIG = 1  # linux/prctl.h


class CudaError(Exception):
    """A CUDA call failed; the argument is its CUresult."""


def _check(result: int) -> None:
    if result:
        raise CudaError(result)


class Copies:
    """Copies from the GPU to the host beside the kernels, one at a time."""

    def __init__(self, cuda: ctypes.CDLL) -> None:
        self._cuda = cuda
        self._gpu, self._host, self._stream, self._event = (ctypes.c_void_p() for _ in range(4))
        self._begun = self._done = 0
        _check(cuda.cuMemAlloc_v2(ctypes.byref(self._gpu), ctypes.c_size_t(COPY_BYTES)))
        _check(cuda.cuMemHostAlloc(ctypes.byref(self._host), ctypes.c_size_t(COPY_BYTES), 0))
        _check(cuda.cuStreamCreate(ctypes.byref(self._stream), CU_STREAM_NON_BLOCKING))
        _check(cuda.cuEventCreate(ctypes.byref(self._event), CU_EVENT_DISABLE_TIMING))

    def go_on(self) -> int:
        """Begin another copy if none is under way; return the number of completed copies."""
        if self._begun > self._done:
            result = self._cuda.cuEventQuery(self._event)
            if result == CUDA_ERROR_NOT_READY:
                return self._done
            _check(result)
            self._done += 1
        nbytes = ctypes.c_size_t(COPY_BYTES)
        _check(self._cuda.cuMemcpyDtoHAsync_v2(self._host, self._gpu, nbytes, self._stream))
        _check(self._cuda.cuEventRecord(self._event, self._stream))
        self._begun += 1
        return self._done


def _spin(page: mmap.mmap, kernel_us: int) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(page)))
    device, khz = ctypes.c_int(), ctypes.c_int()
    context, module, function, counter = (ctypes.c_void_p() for _ in range(4))
    _check(cuda.cuInit(0))
    _check(cuda.cuDeviceGet(ctypes.byref(device), 0))
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device))
    _check(cuda.cuCtxSetCurrent(context))
    _check(cuda.cuMemHostRegister_v2(address, ctypes.c_size_t(PAGE), CU_MEMHOSTREGISTER_DEVICEMAP))
    _check(cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(counter), address, 0))
    _check(cuda.cuModuleLoadData(ctypes.byref(module), PTX))
    _check(cuda.cuModuleGetFunction(ctypes.byref(function), module, b"spin"))
    _check(cuda.cuDeviceGetAttribute(ctypes.byref(khz), CU_DEVICE_ATTRIBUTE_CLOCK_RATE, device))
    cycles = ctypes.c_uint64(khz.value * kernel_us // 1000)
    arguments = (ctypes.c_void_p * 2)(ctypes.addressof(counter), ctypes.addressof(cycles))
    launched, copies = 0, None
    while not struct.unpack_from("<Q", page, STOP)[0]:
        if struct.unpack_from("<Q", page, COPY)[0]:
            copies = copies or Copies(cuda)
            struct.pack_into("<Q", page, COPIED, copies.go_on())
        if launched - struct.unpack_from("<Q", page, FINISHED)[0] >= IN_FLIGHT:
            time.sleep(kernel_us * 1e-6)
            continue
        _check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, arguments, None))
        launched += 1
        struct.pack_into("<Q", page, LAUNCHED, launched)
    _check(cuda.cuCtxSynchronize())


def main() -> int:
    """Run until told to stop. The child ends with its parent, however that ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    page = mmap.mmap(int(sys.argv[1]), PAGE)
    try:
        _spin(page, int(sys.argv[2]))
    except CudaError as error:
        struct.pack_into("<Q", page, ERROR, error.args[0])
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
