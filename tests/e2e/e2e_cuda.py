# SPDX-License-Identifier: Apache-2.0
"""CUDA for tests in Python: the driver's own calls, and tensors as PyTorch has them."""
import ctypes
import os

from e2e_rig import BACKEND, BIN, np

SOFT_DRIVER = os.path.join(os.path.dirname(BIN), "lib", "libkvq-emu.so")
DRIVER = os.environ.get("KVQ_GPU_DRIVER") or (SOFT_DRIVER if BACKEND == "emu" else "libcuda.so.1")


class Cuda:
    """As much of CUDA as tests need, from a driver's library, in a context on the first GPU."""

    def __init__(self, path):
        self.lib = ctypes.CDLL(path)
        self.context = ctypes.c_void_p()
        self("cuInit", 0)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(self.context), 0)
        self("cuCtxSetCurrent", self.context)

    def __call__(self, name, *arguments):
        result = getattr(self.lib, name)(*arguments)
        if result:
            raise AssertionError(f"{name}: {result}")

    def alloc(self, nbytes):
        at = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(at), ctypes.c_size_t(nbytes))
        return at.value

    def stream(self):
        stream = ctypes.c_void_p()
        self("cuStreamCreate", ctypes.byref(stream), 1)
        return stream.value

    def put(self, at, array, stream=None):
        self("cuMemcpyHtoDAsync_v2", ctypes.c_uint64(at), ctypes.c_void_p(array.ctypes.data),
             ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream))

    def get(self, at, shape, stream=None):
        array = np.empty(shape, np.float32)
        self("cuMemcpyDtoHAsync_v2", ctypes.c_void_p(array.ctypes.data), ctypes.c_uint64(at),
             ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream))
        self("cuStreamSynchronize", ctypes.c_void_p(stream))
        return array

    def wait_for_ever(self, stream):
        """What is given to the stream from now on does not run."""
        at = self.alloc(8)
        self("cuMemsetD8Async", ctypes.c_uint64(at), 0, ctypes.c_size_t(8), None)
        self("cuStreamSynchronize", None)
        self("cuStreamWaitValue64_v2", ctypes.c_void_p(stream), ctypes.c_uint64(at),
             ctypes.c_uint64(1), 0)


class CudaTensor:
    """Contiguous floats at a device address, with the methods of PyTorch that are asked for."""
    dtype = "torch.float32"

    def __init__(self, at, *shape):
        self.at, self.shape = at, shape

    def data_ptr(self):
        return self.at

    def element_size(self):
        return 4

    def numel(self):
        return int(np.prod(self.shape))

    def stride(self):
        return tuple(int(np.prod(self.shape[i + 1:])) for i in range(len(self.shape)))

    def is_contiguous(self):
        return True
