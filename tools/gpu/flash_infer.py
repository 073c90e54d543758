# SPDX-License-Identifier: Apache-2.0
"""FlashInfer's decode attention over pages of bf16 and of fp8 (e4m3), where it is installed. It
compiles its kernels when they are first called, which takes nvcc and minutes."""
import importlib

import numpy

PAGE = 16  # tokens
WORKSPACE = 128 << 20


def ways(lab, layers_for):
    """{name: function of a point}; nothing without FlashInfer."""
    try:
        module = importlib.import_module("flashinfer")
    except ImportError:
        return {}
    torch = lab.torch
    return {name: lambda point, dtype=dtype: measure(lab, module, point, dtype, layers_for)
            for name, dtype in (("FlashInfer bf16", torch.bfloat16),
                                ("FlashInfer fp8", torch.float8_e4m3fn))}


def measure(lab, module, point, dtype, layers_for):
    """A row; or that it was refused: its own errors are many, and are no errors of ours."""
    try:
        return time_pages(lab, module, point, dtype, layers_for)
    except Exception as error:  # pylint: disable=broad-except
        text = str(error).strip().splitlines()
        return {"refused": f"{type(error).__name__}: {text[0] if text else ''}"[:120]}


def plan(lab, module, point, dtype, pages):
    """Its wrapper for sessions whose pages lie one after the other."""
    torch = lab.torch

    def numbers(values):
        return torch.tensor(values, dtype=torch.int32, device=lab.device)
    wrapper = module.BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=lab.device), "NHD",
        use_tensor_cores=True)
    wrapper.plan(numbers([0, *numpy.cumsum(pages).tolist()]), numbers(list(range(sum(pages)))),
                 numbers([(n - 1) % PAGE + 1 for n in point["tokens"]]),
                 point.get("q_heads", 32), point.get("kv_heads", 8), point.get("head_dim", 128),
                 PAGE, pos_encoding_mode="NONE", q_data_type=lab.dtype, kv_data_type=dtype)
    return wrapper


def time_pages(lab, module, point, dtype, layers_for):
    kv_heads, dim = point.get("kv_heads", 8), point.get("head_dim", 128)
    pages = [-(-n // PAGE) for n in point["tokens"]]
    nbytes = 2 * sum(point["tokens"]) * kv_heads * dim * dtype.itemsize
    layers = layers_for(nbytes, lab.free_bytes())
    wrapper = plan(lab, module, point, dtype, pages)
    q = [lab.normal(len(pages), point.get("q_heads", 32), dim) for _ in range(layers)]
    caches = [lab.normal(sum(pages), 2, PAGE, kv_heads, dim).to(dtype) for _ in range(layers)]
    out = wrapper.run(q[0], caches[0])
    us = lab.time([lambda i=i: wrapper.run(q[i], caches[i]) for i in range(layers)])
    return {"us": min(us), "again": max(us), "bytes": nbytes, "layers": layers,
            "bits": 8 * dtype.itemsize, "off": off(lab, point, pages, q[0], caches[0], out)}


def off(lab, point, pages, q, cache, out):
    """The relative error of the last session, of attention over its own numbers."""
    from attend import exact, relative
    tokens = point["tokens"][-1]
    own = lab.numbers(cache[-pages[-1]:].float())  # [page][K or V][token][head][dim]
    k, v = (own[:, i].reshape(-1, *own.shape[3:])[:tokens].swapaxes(0, 1) for i in range(2))
    return relative(lab.numbers(out)[-1], exact(lab.numbers(q)[-1], k, v))
