# SPDX-License-Identifier: Apache-2.0
"""Rows of bench-peers.py over ONNX Runtime's GroupQueryAttention on its CPU provider: f32, f16,
int8, int8/tensor, int4, int4/tensor. The last four have scales for each channel or for the tensor,
and queries in float32. A call stores its token, too: the cache is given as past and as present, so
that the others stay where they are."""
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from peer import Peer, Row

KINDS = {"f32": (TensorProto.FLOAT, np.float32), "f16": (TensorProto.FLOAT16, np.float16),
         "int8": (TensorProto.INT8, np.int8), "int4": (TensorProto.UINT8, np.uint8)}
VERSION = 10  # of ONNX's own format
INPUTS = ("q", "k", "v", "past_k", "past_v", "last", "total")


def model(name, how, tokens):
    """One node."""
    cache, _ = KINDS[name]
    values = TensorProto.FLOAT16 if name == "f16" else TensorProto.FLOAT
    options = {"num_heads": tokens.q_heads, "kv_num_heads": tokens.kv_heads}
    kinds = dict(zip(INPUTS, (values,) * 3 + (cache,) * 2 + (TensorProto.INT32,) * 2))
    names = list(INPUTS)
    if name.startswith("int"):
        options |= {"kv_cache_bit_width": int(name[3:]), "k_quant_type": how, "v_quant_type": how}
        kinds |= {"k_scale": TensorProto.FLOAT, "v_scale": TensorProto.FLOAT}
        names += ["", "", "", "", "", "k_scale", "v_scale"]
    results = {"out": values, "present_k": cache, "present_v": cache}
    node = helper.make_node("GroupQueryAttention", names, list(results), domain="com.microsoft",
                            **options)
    graph = helper.make_graph(
        [node], "g", [helper.make_tensor_value_info(n, t, None) for n, t in kinds.items()],
        [helper.make_tensor_value_info(n, t, None) for n, t in results.items()])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21),
                                                   helper.make_opsetid("com.microsoft", 1)])
    made.ir_version = VERSION
    return made.SerializeToString()


def quantized(side, bits, how):
    """Codes of [kv_heads][tokens][head_dim] and their scales: symmetric, one for all tokens."""
    most = (1 << bits - 1) - 1
    axes = (1,) if how == "PER_CHANNEL" else (0, 1, 2)
    scale = (np.abs(side).max(axes, keepdims=True) / most).astype(np.float32)
    codes = np.clip(np.rint(side / scale), -most - 1, most).astype(np.int8)
    scale = scale[None] if how == "PER_CHANNEL" else scale.ravel()
    if bits == 8:
        return codes, scale
    codes = (codes + 8).astype(np.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4, scale


class Cache(Row):
    """K and V of each layer, and what a call is given."""
    layout = "each head's tokens in one piece"
    append = True

    def __init__(self, worker, name, tokens):
        row, (name, _, how) = name, name.partition("/")
        if name not in KINDS or how not in ("", "tensor") or (how and not name.startswith("int")):
            raise ValueError(f"{row!r} is no row; see --help")
        how = "PER_TENSOR" if how == "tensor" else "PER_CHANNEL"
        kind = KINDS[name][1]
        values = np.float16 if name == "f16" else np.float32
        sides, self.scales = tokens.by_heads(), {}
        if name.startswith("int"):
            pairs = [quantized(x, int(name[3:]), how) for x in sides]
            sides = [codes for codes, _ in pairs]
            self.scales = {n: self._value(s) for n, (_, s) in zip(("k_scale", "v_scale"), pairs)}
        sides = [x.astype(kind)[None] for x in sides]
        nbytes = sum(x.nbytes for x in sides)
        self.bits = 8 * nbytes / tokens.values
        self.layers = tokens.layers(worker.bytes, nbytes)
        self.cache = [tuple(self._value(x.copy()) for x in sides) for _ in range(self.layers)]
        self.given = {n: self._value(x.reshape(1, 1, -1).astype(values)) for n, x in
                      (("q", tokens.q), ("k", tokens.k[-1]), ("v", tokens.v[-1]))}
        self.given["last"] = self._value(np.array([tokens.tokens - 1], np.int32))
        self.given["total"] = self._value(np.array([tokens.tokens], np.int32))
        self.result = self._value(np.zeros((1, 1, tokens.q_heads * tokens.head_dim), values))
        self.model, self.sessions, self.session = model(name, how, tokens), {}, None

    @staticmethod
    def _value(array):
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)

    def _bound(self, session, k, v):
        bound = session.io_binding()
        for name, value in {**self.given, **self.scales, "past_k": k, "past_v": v}.items():
            bound.bind_ortvalue_input(name, value)
        for name, value in (("out", self.result), ("present_k", k), ("present_v", v)):
            bound.bind_ortvalue_output(name, value)
        return bound

    def threads(self, number):
        """See peer.py."""
        if number not in self.sessions:
            options = onnxruntime.SessionOptions()
            options.intra_op_num_threads, options.log_severity_level = number, 3
            options.add_session_config_entry("session.force_spinning_stop", "1")
            session = onnxruntime.InferenceSession(self.model, options,
                                                   providers=["CPUExecutionProvider"])
            self.sessions[number] = (session, [self._bound(session, *x) for x in self.cache])
        self.session = self.sessions[number]

    def walk(self):
        """See peer.py."""
        session, calls = self.session
        for bound in calls:
            session.run_with_iobinding(bound)

    def out(self):
        """See peer.py."""
        return self.result.numpy().astype(np.float32)

    def close(self):
        """See peer.py."""
        self.sessions, self.session, self.cache = None, None, None


class Ort(Peer):
    """Rows."""

    def __init__(self, threads):
        super().__init__(threads)
        self.what = f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}"

    def make(self, name, tokens):
        return Cache(self, name, tokens)


make = Ort
