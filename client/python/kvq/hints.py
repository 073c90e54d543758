# SPDX-License-Identifier: Apache-2.0
"""What the package's type hints are made of.

Array      K, V, Q or an output: float16, float32, or uint16, which holds bfloat16 (or float16 where
           the call says so by dtype)
HostArray  an Array, or a tensor of PyTorch on the CPU of float16, bfloat16 or float32
Output     `out` as it was given, or a new Array: Any, since checkers cannot tell which
Floats     an array of float32
Entries    an array [sessions] of kvq.ENTRY
Counts     one integer for all sessions, or an array-like with one for each
Ids        an array-like of integers that fit 32 bits with sign
Shape      one size, or one for each dimension
Dtype      "f16", "bf16", "f32", kvq.F16, BF16 or F32, or what NumPy takes for a dtype
Span       (first token, number of tokens, digest of 32 bytes)
Threads    a number, or "torch"
"""
from typing import Any, Literal, Protocol, Sequence, SupportsIndex, Tuple, Union

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Output = Any
Floats = npt.NDArray[np.float32]
Entries = npt.NDArray[np.void]
Counts = npt.ArrayLike
Ids = npt.ArrayLike
Shape = Union[SupportsIndex, Sequence[SupportsIndex]]
Dtype = Union[npt.DTypeLike, int]
Span = Tuple[int, int, bytes]
Threads = Union[SupportsIndex, Literal["torch"]]


class AnyTensor(Protocol):
    """What tensors of PyTorch on all devices have."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...

    def numel(self) -> int: ...

    def stride(self) -> Sequence[int]: ...

    def is_contiguous(self) -> bool: ...


class CudaTensor(AnyTensor, Protocol):
    """A tensor of PyTorch in a GPU's memory, or anything with the same methods."""


class HostTensor(AnyTensor, Protocol):
    """A strided tensor of PyTorch on the CPU, without gradients."""

    @property
    def device(self) -> Any: ...


HostArray = Union[Array, HostTensor]
