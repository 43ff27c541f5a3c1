"""Runs in a container that has the library and a double of the driver: calls entry points as a program would.

    calls.py FOLDER     the folder of libcuda.so.1

Prints the version of glibc. The exit status is 1 if a call fails or is not the library's where it should be.
"""

import ctypes
import os
import sys

BYTES = 8 << 20
driver = ctypes.CDLL(os.path.join(sys.argv[1], "libcuda.so.1"))


def is_library(name: str) -> bool:
    """Whether an entry point that dlsym(3) returned is the library's wrapper."""
    address = ctypes.cast(getattr(driver, name), ctypes.c_void_p).value
    assert address is not None
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            begin, end = (int(word, 16) for word in line.split()[0].split("-"))
            if begin <= address < end:
                return line.rstrip().endswith("/libggroup-cuda.so")
    return False


def call(name: str, *arguments: object) -> None:
    result = getattr(driver, name)(*arguments)
    assert result == 0, f"{name}: {result}"


def main() -> None:
    context, device, address = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_uint64()
    written, read = ctypes.create_string_buffer(os.urandom(BYTES), BYTES), ctypes.create_string_buffer(BYTES)
    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    call("cuCtxSetCurrent", context)
    call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(BYTES))
    call("cuMemcpyHtoD_v2", address, written, ctypes.c_size_t(BYTES))
    call("cuMemcpyDtoH_v2", read, address, ctypes.c_size_t(BYTES))
    assert read.raw == written.raw
    call("cuMemFree_v2", address)
    assert is_library("cuMemAlloc_v2")
    assert not is_library("cuDeviceGet"), "it has no wrapper"
    print(os.confstr("CS_GNU_LIBC_VERSION"))


if __name__ == "__main__":
    main()
