#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which calls of a GPU's driver come back while a stream of the context waits, and whether other
threads' work goes on meanwhile. A client that stands still makes kvqd's stream wait like that.

    waits.py DRIVER [CALL..]    prints {call: {"comes_back": .., "others_go_on": ..}}; DRIVER is the
                                path of the driver's library, such as libcuda.so.1

A stream is let go half a second after another thread has begun to give work to a second one; what
has come back by then has not waited for it.
"""
import json
import mmap
import sys
import threading
from ctypes import addressof, byref, c_char, c_size_t, c_uint64, c_ubyte, c_void_p
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import sandbox  # noqa: E402

BYTES, SECONDS, AT_LEAST = 1 << 20, 0.5, 0


class Host:
    """Memory of this process."""

    def __init__(self):
        self.map = mmap.mmap(-1, BYTES)
        self.at = addressof(c_char.from_buffer(self.map))


class Calls:
    """The calls that are tried: each method makes what its call needs and gives the call itself."""

    def __init__(self, driver, path):
        self.driver, self.path = driver, path
        self.kept = []  # what the driver knows by its address
        self.exporters = []  # other processes

    def take(self, name, *arguments, kind=c_uint64):
        made = kind()
        self.driver(name, byref(made), *arguments)
        return made

    def register(self):
        self.kept.append(Host())
        return c_void_p(self.kept[-1].at)

    def exported(self):
        self.exporters.append(sandbox.Exporter(self.path, BYTES))
        return self.exporters[-1].handle

    def close(self):
        for exporter in self.exporters:
            exporter.close()

    def reserved(self):
        what = sandbox.Allocation(sandbox.PINNED, sandbox.HANDLE_FD, sandbox.DEVICE, 0)
        unit = self.take("cuMemGetAllocationGranularity", byref(what), 0, kind=c_size_t)
        memory = self.take("cuMemCreate", unit, byref(what), c_uint64(0))
        at = self.take("cuMemAddressReserve", unit, c_size_t(0), c_uint64(0), c_uint64(0))
        return at, unit, memory

    def cuMemAlloc_v2(self):
        return byref(c_uint64()), c_size_t(BYTES)

    def cuMemFree_v2(self):
        return (self.take("cuMemAlloc_v2", c_size_t(BYTES)),)

    def cuMemHostAlloc(self):
        return byref(c_void_p()), c_size_t(BYTES), 0

    def cuMemFreeHost(self):
        return (self.take("cuMemHostAlloc", c_size_t(BYTES), 0, kind=c_void_p),)

    def cuMemHostRegister_v2(self):
        return self.register(), c_size_t(BYTES), 0

    def cuMemHostUnregister(self):
        at = self.register()
        self.driver("cuMemHostRegister_v2", at, c_size_t(BYTES), 0)
        return (at,)

    def cuMemMap(self):
        at, unit, memory = self.reserved()
        return at, unit, c_size_t(0), memory, c_uint64(0)

    def cuMemUnmap(self):
        at, unit, memory = self.reserved()
        self.driver("cuMemMap", at, unit, c_size_t(0), memory, c_uint64(0))
        return at, unit

    def cuIpcOpenMemHandle_v2(self):
        return byref(c_uint64()), self.exported(), 1

    def cuIpcCloseMemHandle(self):
        return (self.take("cuIpcOpenMemHandle_v2", self.exported(), 1),)

    def cuStreamCreate(self):
        return byref(c_void_p()), 1

    def cuStreamDestroy_v2(self):
        return (self.take("cuStreamCreate", 1, kind=c_void_p),)

    def cuEventDestroy_v2(self):
        return (self.take("cuEventCreate", 2, kind=c_void_p),)


NAMES = tuple(name for name in vars(Calls) if name.startswith("cu"))


def in_thread(driver, name, arguments):
    """The call on a thread of its own, and an event that says that it has come back."""
    done = threading.Event()
    context = c_void_p()
    driver("cuCtxGetCurrent", byref(context))

    def call():
        driver("cuCtxSetCurrent", context)
        driver(name, *arguments)
        done.set()
    thread = threading.Thread(target=call)
    thread.start()
    return thread, done


def tried(calls, name):
    """Beside a stream that waits for a word: the call on one thread, a fill on another."""
    driver = calls.driver
    word_at = calls.take("cuMemHostAlloc", c_size_t(4096), 0, kind=c_void_p)
    word = c_uint64.from_address(word_at.value)
    at, stuck, other = (calls.take("cuMemAlloc_v2", c_size_t(BYTES)),
                        *(calls.take("cuStreamCreate", 1, kind=c_void_p) for _ in range(2)))
    arguments = getattr(calls, name)()
    word.value = 0
    driver("cuCtxSynchronize")
    driver("cuStreamWaitValue64_v2", stuck, c_uint64(word_at.value), c_uint64(1), AT_LEAST)
    driver("cuMemsetD8Async", at, c_ubyte(1), c_size_t(BYTES), stuck)
    caller, came_back = in_thread(driver, name, arguments)
    came_back.wait(SECONDS)
    worker, went_on = in_thread(driver, "cuMemsetD8Async", (at, c_ubyte(2), c_size_t(16), other))
    went_on.wait(SECONDS)
    found = {"comes_back": came_back.is_set(), "others_go_on": went_on.is_set()}
    word.value = 1
    caller.join()
    worker.join()
    driver("cuCtxSynchronize")
    return found


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if len(sys.argv) > 1 else 2
    names, found = sys.argv[2:] or NAMES, {}
    for name in names:
        if name not in NAMES:
            print(f"waits.py: {name} is none of {', '.join(NAMES)}", file=sys.stderr)
            return 2
    calls = Calls(sandbox.Driver(sys.argv[1]), sys.argv[1])
    try:
        for name in names:
            found[name] = tried(calls, name)
    finally:
        calls.close()
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
