#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What this machine lets processes do that kvqd and its clients need: descriptors, shared memory,
and what a GPU's driver shares between two processes. What is refused is told, with the reason.

    sandbox.py DRIVER      prints {name: reason}, reason null for what works; DRIVER is the path of
                           the driver's library, such as libcuda.so.1
"""
import ctypes
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
from ctypes import byref, c_char, c_int, c_size_t, c_uint64, c_void_p

SEALS, PATTERN, PEER_SECONDS = 1 | 2 | 4, 0x5a, 60  # F_SEAL_SEAL, _SHRINK, _GROW
HANDLE_FD, PINNED, DEVICE, READ_WRITE = 1, 1, 1, 3
IPC_EVENT = 2 | 4  # without times, for other processes
NAMES = ("pidfd", "memfd seals", "/dev/shm", "descriptors over sockets", "GPU driver",
         "memory by legacy IPC handle", "memory by file descriptor", "events of other processes",
         "words on streams")


class Refused(Exception):
    """A call of the driver that failed."""


class Driver:
    """The calls of a driver's library, by name, with a context on the first device."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        context, name = c_void_p(), ctypes.create_string_buffer(256)
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", byref(context), 0)
        self("cuCtxSetCurrent", context)
        self("cuDeviceGetName", name, 256, 0)
        self.name = name.value.decode()

    def __call__(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        if result:
            text = ctypes.c_char_p()
            self.lib.cuGetErrorString(result, byref(text))
            raise Refused(f"{name}: {result}, {(text.value or b'?').decode()}")

    def fill(self, at):
        self("cuMemsetD8Async", c_uint64(at), ctypes.c_ubyte(PATTERN), c_size_t(4096), None)
        self("cuStreamSynchronize", None)

    def check(self, at):
        byte = ctypes.create_string_buffer(1)
        self("cuMemcpyDtoHAsync_v2", byte, c_uint64(at), c_size_t(1), None)
        self("cuStreamSynchronize", None)
        if byte.raw[0] != PATTERN:
            raise Refused("the memory holds something else there")


class Allocation(ctypes.Structure):
    """CUmemAllocationProp."""
    _fields_ = [("type", c_int), ("handles", c_int), ("where", c_int), ("device", c_int),
                ("platform", c_void_p), ("rest", ctypes.c_uint8 * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc."""
    _fields_ = [("where", c_int), ("device", c_int), ("flags", c_int)]


class Handle(ctypes.Structure):
    """A handle for other processes: an event's, or memory's."""
    _fields_ = [("bytes", c_char * 64)]

    def text(self):
        return ctypes.string_at(byref(self), 64).hex()

    @staticmethod
    def of(text):
        return Handle.from_buffer_copy(bytes.fromhex(text))


def map_memory(driver, memory, nbytes):
    at, access = c_uint64(), Access(DEVICE, 0, READ_WRITE)
    driver("cuMemAddressReserve", byref(at), c_size_t(nbytes), c_size_t(0), c_uint64(0),
           c_uint64(0))
    driver("cuMemMap", at, c_size_t(nbytes), c_size_t(0), memory, c_uint64(0))
    driver("cuMemSetAccess", at, c_size_t(nbytes), byref(access), c_size_t(1))
    return at.value


# ---- The other process ----

def peer_legacy(driver, text):
    at = c_uint64()
    driver("cuIpcOpenMemHandle_v2", byref(at), Handle.of(text), 1)
    driver.check(at.value)


def peer_descriptor(driver, fd, nbytes):
    memory = c_uint64()
    driver("cuMemImportFromShareableHandle", byref(memory), c_void_p(int(fd)), HANDLE_FD)
    driver.check(map_memory(driver, memory, int(nbytes)))


def peer_exporter(driver, nbytes):
    """Tells the handle of memory that is there until its input ends."""
    at, handle = c_uint64(), Handle()
    driver("cuMemAlloc_v2", byref(at), c_size_t(int(nbytes)))
    driver("cuIpcGetMemHandle", byref(handle), at)
    print(handle.text(), flush=True)
    sys.stdin.read()


def peer_event(driver, text):
    event = c_void_p()
    driver("cuIpcOpenEventHandle", byref(event), Handle.of(text))
    driver("cuStreamWaitEvent", None, event, 0)
    driver("cuStreamSynchronize", None)


def ask_peer(path, what, *arguments, fds=()):
    """Has another process do it."""
    done = subprocess.run([sys.executable, __file__, path, what, *map(str, arguments)],
                          pass_fds=fds, capture_output=True, text=True, timeout=PEER_SECONDS)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        raise Refused("the other process: " + lines[-1])


class Exporter:
    """Another process with memory that it exports by a legacy handle, until it is closed."""

    def __init__(self, path, nbytes):
        self.process = subprocess.Popen([sys.executable, __file__, path, "exporter", str(nbytes)],
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        text = self.process.stdout.readline().strip()
        if not text:
            self.close()
            raise Refused("the other process exports no memory")
        self.handle = Handle.of(text)

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(PEER_SECONDS)


# ---- What is tried ----

def try_pidfd(_):
    if not hasattr(os, "pidfd_open"):
        raise Refused("this Python cannot ask")
    os.close(os.pidfd_open(os.getpid()))


def try_seals(_):
    fd = os.memfd_create("kvq-probe", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 4096)
        fcntl.fcntl(fd, 1033, SEALS)  # F_ADD_SEALS
        try:
            os.ftruncate(fd, 8192)
        except PermissionError:
            return
        raise Refused("a sealed file grew")
    finally:
        os.close(fd)


def try_dev_shm(_):
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.truncate(4096)


def try_descriptors(_):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs, tempfile.TemporaryFile() as file:
        socket.send_fds(ours, [b"x"], [file.fileno()])
        _, fds, _, _ = socket.recv_fds(theirs, 1, 1)
        if not fds:
            raise Refused("the descriptor did not arrive")
        os.close(fds[0])


def try_driver(driver):
    driver()


def try_legacy(driver):
    at, handle = c_uint64(), Handle()
    drv = driver()
    drv("cuMemAlloc_v2", byref(at), c_size_t(2 << 20))
    try:
        drv.fill(at.value)
        drv("cuIpcGetMemHandle", byref(handle), at)
        ask_peer(driver.path, "legacy", handle.text())
    finally:
        drv("cuMemFree_v2", at)


def try_fd(driver):
    memory, fd, unit = c_uint64(), c_int(-1), c_size_t()
    what = Allocation(PINNED, HANDLE_FD, DEVICE, 0)
    drv = driver()
    drv("cuMemGetAllocationGranularity", byref(unit), byref(what), 0)
    drv("cuMemCreate", byref(memory), unit, byref(what), c_uint64(0))
    drv.fill(map_memory(drv, memory, unit.value))
    drv("cuMemExportToShareableHandle", byref(fd), memory, HANDLE_FD, c_uint64(0))
    try:
        ask_peer(driver.path, "descriptor", fd.value, unit.value, fds=[fd.value])
    finally:
        os.close(fd.value)


def try_event(driver):
    event, handle = c_void_p(), Handle()
    drv = driver()
    drv("cuEventCreate", byref(event), IPC_EVENT)
    drv("cuEventRecord", event, None)
    drv("cuIpcGetEventHandle", byref(handle), event)
    ask_peer(driver.path, "event", handle.text())


def try_words(driver):
    at, stream = c_uint64(), c_void_p()
    drv = driver()
    drv("cuMemAlloc_v2", byref(at), c_size_t(4096))
    drv("cuStreamCreate", byref(stream), 1)
    drv("cuStreamWriteValue64_v2", stream, at, c_uint64(7), 0)
    drv("cuStreamWaitValue64_v2", stream, at, c_uint64(7), 0)  # 0: at least
    drv("cuStreamSynchronize", stream)


TRIES = (try_pidfd, try_seals, try_dev_shm, try_descriptors, try_driver, try_legacy, try_fd,
         try_event, try_words)


def reasons(path):
    """{name: None, or why it does not work}, and the device's name."""
    made = []

    def driver():
        if not made:
            made.append(Driver(path))
        return made[0]
    driver.path = path
    found = {}
    for name, attempt in zip(NAMES, TRIES):
        try:
            attempt(driver)
            found[name] = None
        except (OSError, Refused, AttributeError, subprocess.TimeoutExpired) as error:
            found[name] = str(error) or type(error).__name__
    return found, made[0].name if made else "no GPU"


def main():
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__)
        return 0 if len(sys.argv) > 1 else 2
    if len(sys.argv) == 2:
        found, name = reasons(sys.argv[1])
        print(json.dumps({"device": name, "reasons": found}))
        return 0
    try:
        globals()["peer_" + sys.argv[2]](Driver(sys.argv[1]), *sys.argv[3:])
    except (OSError, Refused) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
