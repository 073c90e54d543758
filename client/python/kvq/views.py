# SPDX-License-Identifier: Apache-2.0
"""NumPy arrays over the memory of PyTorch's tensors on the CPU.

PyTorch is not imported: a tensor says itself where it lies. bfloat16, which NumPy lacks, is seen
as uint16.
"""
from __future__ import annotations

from typing import Any, Dict, Optional, Tuple

import numpy as np

_SEEN_AS: Dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16),
    "float32": np.dtype(np.float32)}
_byte_bounds: Any = (np.lib.array_utils.byte_bounds if hasattr(np.lib, "array_utils") else
                     getattr(np, "byte_bounds"))  # until NumPy 2
_ASKED = ("data_ptr", "element_size", "shape", "stride", "dtype", "device")


def is_tensor(value: object) -> bool:
    """Whether it is a tensor of PyTorch's, on whatever device, or has a tensor's methods."""
    return not isinstance(value, np.ndarray) and hasattr(value, "data_ptr")


def on_host(tensor: Any) -> bool:
    """Whether a tensor lies in memory that this process can read. What has no device does not."""
    return getattr(getattr(tensor, "device", None), "type", None) == "cpu" \
        and str(getattr(tensor, "layout", "torch.strided")) == "torch.strided"


def dtype_of(tensor: Any) -> str:
    """The name of its dtype, e.g. "bfloat16"."""
    return str(tensor.dtype).replace("torch.", "")


def bounds(tensor: Any) -> Tuple[int, int]:
    """Address of a tensor's first byte, and of the one behind its last."""
    start, last = tensor.data_ptr(), -1
    if 0 not in tensor.shape:
        last = sum([(n - 1) * s for n, s in zip(tensor.shape, tensor.stride())])
    return start, start + (last + 1) * tensor.element_size()


def host_bounds(value: object) -> Optional[Tuple[int, int]]:
    """The same of an array, or of a tensor on the CPU; None for what is neither."""
    if isinstance(value, np.ndarray):
        if value.flags.c_contiguous:
            start = value.ctypes.data
            return start, start + value.nbytes
        start, end = _byte_bounds(value)
        return start, end
    return bounds(value) if is_tensor(value) and on_host(value) else None


def view(name: str, tensor: Any) -> np.ndarray[Any, Any]:
    """An array over a tensor's memory, with its strides; keeps the tensor. TypeError or ValueError
    if there can be none."""
    if not on_host(tensor) or not all([hasattr(tensor, m) for m in _ASKED]):
        device = getattr(tensor, "device", "another device than the CPU")
        layout = str(getattr(tensor, "layout", "torch.strided"))
        how = "" if layout == "torch.strided" else f" with the layout {layout}"
        hint = "; CUDA tensors go through on_stream" if getattr(device, "type", "cuda") == "cuda" \
            else ""
        raise TypeError(f"{name} is {type(tensor).__name__} on {device}{how}; expected a NumPy "
                        f"array, or a strided tensor on the CPU{hint}")
    kind = _SEEN_AS.get(dtype_of(tensor))
    if kind is None:
        raise TypeError(f"{name} has dtype {tensor.dtype}; expected a tensor of "
                        f"{', '.join(_SEEN_AS)}")
    if getattr(tensor, "requires_grad", False):
        raise ValueError(f"{name} requires gradients, which the daemon does not give: pass "
                         f"{name}.detach()")
    if hasattr(tensor, "is_neg") and tensor.is_neg():
        raise ValueError(f"{name} is a view that negates what it reads: pass {name}.resolve_neg()")
    shape, size = tuple(tensor.shape), tensor.element_size()
    if 0 in shape:
        return np.empty(shape, kind)
    if not tensor.data_ptr():
        raise ValueError(f"{name} is {type(tensor).__name__} without memory of its own")
    return np.asarray(_Memory(tensor, {
        "version": 3, "shape": shape, "typestr": kind.str, "data": (tensor.data_ptr(), False),
        "strides": tuple([n * size for n in tensor.stride()])}))


class _Memory:
    """What NumPy asks for the array, and holds for as long as there are views of it."""
    __slots__ = ("_tensor", "__array_interface__")

    def __init__(self, tensor: Any, interface: dict[str, Any]) -> None:
        self._tensor = tensor
        self.__array_interface__ = interface
