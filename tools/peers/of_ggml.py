# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over ggml's CPU backend, as llama.cpp builds its graphs:
TYPE[/fa][@heads].

With /fa attention is one ggml_flash_attn_ext, and K and V have the type. Without, it is two
products and a softmax, and V is f16 and transposed: llama.cpp has no other then. A token's heads
lie in one piece, as in llama.cpp, or with @heads each head's tokens do. All layers are one
graph."""
import importlib.util
import os
from importlib.metadata import version

import numpy as np

import ggml
from ggml import TYPES, address
from peer import Peer, Row

TENSORS = 10       # of a layer, at most
SLACK = 1 << 16    # bytes that a library keeps besides
MASK_ROWS = 64     # that older versions want, however many queries there are


class Cache(Row):
    """K and V of each layer, and the graph over them."""

    def __init__(self, library, walk, name, tokens):
        kind, _, layout = name.partition("@")
        self.kind, _, path = kind.partition("/")
        self.lib, self.tokens, self.flash, self.heads = library, tokens, path == "fa", bool(layout)
        if path not in ("", "fa") or layout not in ("", "heads") or self.kind not in TYPES:
            raise ValueError(f"{name!r} is no row; see --help")
        self.layout = ("each head's tokens in one piece" if layout else
                       "each token's heads in one piece") + ("" if self.flash else ", V transposed")
        sides = [self._convert(tokens.k, False), self._convert(tokens.v, not self.flash)]
        nbytes = sum(x.nbytes for x in sides)
        self.bits = 8 * nbytes / tokens.values
        self.layers = tokens.layers(walk, nbytes)
        self.cache = [tuple(self._copy(x) for x in sides) for _ in range(self.layers)]
        self.held, self.context, self.allocator = [], None, None
        self._build()

    @staticmethod
    def _copy(array):
        made = ggml.aligned(array.nbytes)
        made[:] = array.ravel()
        return made

    def _convert(self, side, transposed):
        if transposed:
            return self.lib.convert(side.transpose(1, 2, 0), "f16")
        return self.lib.convert(side.transpose(1, 0, 2) if self.heads else side, self.kind)

    def _place(self, kind, shape, array):
        """A tensor over memory of ours; shape is innermost first."""
        lib = self.lib
        made = lib.new_tensor_4d(self.context, TYPES[kind], *shape, *(1,) * (4 - len(shape)))
        buffer = lib.backend_cpu_buffer_from_ptr(address(array), array.nbytes)
        lib.backend_tensor_alloc(buffer, made, address(array))
        self.held += [array, buffer]
        return made

    def _side(self, array):
        """K, or V for flash attention, as [head_dim, tokens, kv_heads]."""
        t = self.tokens
        if self.heads:
            return self._place(self.kind, (t.head_dim, t.tokens, t.kv_heads), array)
        made = self._place(self.kind, (t.head_dim, t.kv_heads, t.tokens), array)
        return self.lib.permute(self.context, made, 0, 2, 1, 3)

    def _layer(self, k, v, q, mask):
        lib, t, context = self.lib, self.tokens, self.context
        k = self._side(k)
        if self.flash:
            return lib.flash_attn_ext(context, q, k, self._side(v), mask, t.scale, 0, 0)
        weights = lib.soft_max_ext(context, lib.mul_mat(context, k, q), mask, t.scale, 0)
        v = self._place("f16", (t.tokens, t.head_dim, t.kv_heads), v)
        return lib.mul_mat(context, v, weights)

    def _build(self):
        lib, t, count = self.lib, self.tokens, TENSORS * self.layers
        self.context = lib.init(ggml.InitParams(
            count * lib.tensor_overhead() + lib.graph_overhead_custom(count, False) + SLACK, None,
            True))
        self.graph = lib.new_graph_custom(self.context, count, False)
        queries, mask = self._copy(t.q.view(np.uint8)), ggml.aligned(2 * MASK_ROWS * t.tokens)
        q = self._place("f32", (t.head_dim, 1, t.q_heads), queries)
        mask = self._place("f16", (t.tokens, MASK_ROWS), mask)
        self.result = None
        for k, v in self.cache:
            result = self._layer(k, v, q, mask)
            if not lib.backend_supports_op(lib.backend, result):
                raise RuntimeError(f"the library has no such attention over {self.kind}")
            self.result = self.result or result
            lib.build_forward_expand(self.graph, result)
        lib.set_output(self.result)
        self.allocator = lib.gallocr_new(lib.backend_get_default_buffer_type(lib.backend))
        if not lib.gallocr_alloc_graph(self.allocator, self.graph):
            raise RuntimeError("the library has no memory for the graph")

    def threads(self, number):
        """See peer.py."""
        self.lib.backend_cpu_set_n_threads(self.lib.backend, number)

    def walk(self):
        """See peer.py."""
        status = self.lib.backend_graph_compute(self.lib.backend, self.graph)
        if status:
            raise RuntimeError(f"ggml_backend_graph_compute returns {status}")

    def out(self):
        """See peer.py."""
        values = np.empty((self.tokens.q_heads, self.tokens.head_dim), np.float32)
        self.lib.backend_tensor_get(self.result, address(values), 0, values.nbytes)
        return values

    def close(self):
        """See peer.py."""
        self.lib.gallocr_free(self.allocator)
        self.lib.free(self.context)
        for thing in self.held:
            if isinstance(thing, int):
                self.lib.backend_buffer_free(thing)
        self.held, self.cache = [], None


class OfGgml(Peer):
    """Rows. The library is that of a package, or in the folder that the environment names."""
    package, distribution, variable = "llama_cpp", "llama-cpp-python", "KVQ_BENCH_GGML"

    def __init__(self, threads):
        super().__init__(threads)
        folder, where = os.environ.get(self.variable), "a library that was given"
        if not folder:
            found = importlib.util.find_spec(self.package)
            if not found:
                raise ModuleNotFoundError(f"No module named '{self.package}'")
            folder = os.path.join(os.path.dirname(found.origin), "lib")
            where = f"{self.distribution} {version(self.distribution)}"
        self.library = ggml.Ggml(folder)
        self.what = f"{where}, {self.library}"

    def make(self, name, tokens):
        return Cache(self.library, self.bytes, name, tokens)


make = OfGgml
