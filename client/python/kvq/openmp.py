# SPDX-License-Identifier: Apache-2.0
"""The threads that PyTorch computes with on the CPU, for attention to run on them."""
from __future__ import annotations

import ctypes
import os
import sys
from typing import Optional, Tuple

MOST = 256  # that kvq_local_open takes


def torch_threads() -> Tuple[int, Optional[int]]:
    """How many threads PyTorch computes with, and the address of GOMP_parallel in its OpenMP
    runtime: None where PyTorch was built with another kind of threads."""
    torch = sys.modules.get("torch")
    if torch is None:
        raise ValueError("threads is \"torch\", but torch is not imported; import it first, or "
                         "give a number of threads")
    return min(torch.get_num_threads(), MOST), _gomp_parallel(torch)


def _gomp_parallel(torch):
    path = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    try:
        # It is loaded. A name is looked for in it and in the libraries that it was linked with, so
        # that this is the runtime which PyTorch itself uses, whatever others there are.
        library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_LAZY)
        return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value
    except (AttributeError, OSError):
        return None
