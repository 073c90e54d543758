# SPDX-License-Identifier: Apache-2.0
"""What the package's type hints are made of.

Array      K, V, Q or an output: float16, float32, or uint16, which holds bfloat16 (or float16 where
           the call says so by dtype)
Floats     an array of float32
Entries    an array [sessions] of kvq.ENTRY
Counts     one integer for all sessions, or an array-like with one for each
Ids        an array-like of integers that fit 32 bits with sign
Shape      one size, or one for each dimension
Dtype      "f16", "bf16", "f32", kvq.F16, BF16 or F32, or what NumPy takes for a dtype
Span       (first token, number of tokens, digest of 32 bytes)
"""
from typing import Any, Protocol, Sequence, SupportsIndex, Tuple, Union

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Entries = npt.NDArray[np.void]
Counts = npt.ArrayLike
Ids = npt.ArrayLike
Shape = Union[SupportsIndex, Sequence[SupportsIndex]]
Dtype = Union[npt.DTypeLike, int]
Span = Tuple[int, int, bytes]


class CudaTensor(Protocol):
    """A tensor of PyTorch in a GPU's memory, or anything with the same methods."""

    @property
    def shape(self) -> Sequence[int]: ...

    @property
    def dtype(self) -> Any: ...

    def data_ptr(self) -> int: ...

    def element_size(self) -> int: ...

    def numel(self) -> int: ...

    def stride(self) -> Sequence[int]: ...

    def is_contiguous(self) -> bool: ...
