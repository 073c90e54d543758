# SPDX-License-Identifier: Apache-2.0
"""Buffers in the memory of GPUs.

Tensors are PyTorch's, or anything with the same methods: data_ptr, element_size, numel, shape,
stride, dtype and is_contiguous. PyTorch itself is not needed here.
"""
from __future__ import annotations

import threading
from ctypes import byref, c_void_p
from typing import Optional, SupportsIndex

import kvq

from ._ffi import Tensor, lib
from .buffers import close_pointer, dtype_code
from .checks import integer, text
from .hints import CudaTensor, Dtype
from .shown import Shown, number_of
from .views import bounds


class DeviceBuffer(Shown):
    """Made by Client.buffer_on (address: its device pointer) or Client.import_tensor. nbytes: its
    size in bytes."""

    def __init__(self, client: kvq.Client, nbytes: SupportsIndex, gpu: Optional[str] = None,
                 tensor: Optional[CudaTensor] = None) -> None:
        self.client = client
        self.nbytes = nbytes = integer("nbytes", nbytes, 62)
        self.pointer = c_void_p()
        self._keep = tensor  # its memory must stay while the daemon has it
        self._closing = threading.Lock()
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError("a tensor to be imported must be contiguous")
        try:
            client._gate.run(self._open, gpu, tensor)
        except BaseException:
            if self.pointer:  # an interrupt: nobody has the buffer
                self.close()
            raise

    def _told(self):
        state = "open" if self.pointer else "closed"
        return f"of {number_of('byte', self.nbytes)} at {self.address:#x}: {state}"

    def _open(self, gpu, tensor):
        if tensor is None:
            self.client.control(lib.kvq_buffer_create_on, text("gpu", gpu), self.nbytes,
                                byref(self.pointer))
        else:
            self.client.control(lib.kvq_buffer_import, tensor.data_ptr(), self.nbytes,
                                byref(self.pointer))
        self.address = lib.kvq_buffer_device(self.pointer)
        self.client._device_buffers.append(self)

    def contains(self, tensor: CudaTensor) -> bool:
        """Whether all of a tensor, of any shape and dtype, lies in this buffer, which is open."""
        if not self.pointer:
            return False
        start, end = bounds(tensor)
        return self.address <= start and end <= self.address + self.nbytes

    def tensor(self, tensor: CudaTensor, dtype: Optional[Dtype] = None) -> Tensor:
        """Tensor for a [tokens][heads][dim] tensor (dim contiguous), or [tokens][heads] (lse), that
        lies in this buffer. It holds float16, bfloat16 or float32: dtype, else its own."""
        size, strides = tensor.element_size(), list(tensor.stride())
        if len(strides) not in (2, 3):
            raise ValueError(f"shape {tuple(tensor.shape)}: [tokens, heads, dim] is needed")
        if len(strides) == 3 and tensor.shape[2] > 1 and strides[2] != 1:
            raise ValueError("the last dimension of a tensor must be contiguous")
        name = dtype if dtype is not None else str(tensor.dtype).replace("torch.", "")
        if not self.contains(tensor):
            raise ValueError("the tensor does not lie in this buffer, or the buffer is closed")
        made = Tensor(self.pointer, tensor.data_ptr() - self.address, strides[0] * size,
                      strides[1] * size, dtype_code(name))
        made.owner = self
        return made

    def close(self) -> None:
        """Unregisters it; waits until no request in flight uses it and, if the daemon made it, for
        all work of this process in its CUDA context. BufferError while another thread is in a call
        with it."""
        if not self.pointer and self not in self.client._device_buffers:
            return
        if self.client._gate.is_left():
            self._forget()
            return
        self.client._gate.run(self._close)

    def _close(self):
        with self._closing:
            try:
                if self.pointer:  # else another thread was first
                    close_pointer(self)
            finally:
                if not self.pointer:
                    self._forget()
                    self.client._device_buffers.discard(self)  # until then close() goes on here

    def _forget(self):
        self.pointer = c_void_p()
        self._keep = None

    def __enter__(self) -> DeviceBuffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
