# SPDX-License-Identifier: Apache-2.0
"""Buffers of kvq as PyTorch tensors, and requests that are prepared once."""
from ctypes import byref

import torch

import kvq
from kvq import _ffi

CODES = {torch.float16: kvq.F16, torch.bfloat16: kvq.BF16, torch.float32: kvq.F32}


class Area:
    """A buffer that is given out front to back, as tensors."""

    def __init__(self, client, nbytes):
        self._used = 0
        self.buffer = client.buffer(nbytes)
        try:
            self._bytes = self.buffer.torch(nbytes, torch.uint8)
        except BaseException:
            self.buffer.close()
            raise

    def take(self, shape, dtype):
        """The next tensor, and where it lies: struct kvq_tensor of [tokens][heads][dim]."""
        nbytes = dtype.itemsize
        for n in shape:
            nbytes *= n
        start = self._used
        self._used = start + (nbytes + 63 & ~63)
        with torch.inference_mode(False):
            made = self._bytes[start:start + nbytes].view(dtype).view(shape)
        if dtype not in CODES:
            return made, start
        strides = [n * dtype.itemsize for n in made.stride()]
        return made, self.buffer.strided(start, strides[0], strides[1], CODES[dtype])

    def close(self):
        self._bytes = None
        self.buffer.close()


class Desk:
    """What the tensors of a step travel in: K and V of `rows` tokens of `kept` layers, the others'
    in their place by turns; Q, the output and its LSE of one layer, of `asked` tokens at a time;
    and struct kvq_work for each layer."""

    def __init__(self, client, table, dtype, rows, kept, asked):
        self.rows, self.dtype, self.kept, self.asked = rows, dtype, kept, asked
        dim = table.head_dim
        kv, qo = (rows, table.kv_heads, dim), (asked, table.q_heads, dim)
        size = dim * dtype.itemsize
        need = 2 * kept * (size * table.kv_heads * rows + 64) \
            + 2 * (size * table.q_heads * asked + 64) + 4 * table.q_heads * asked + 4 * rows + 128
        self.area = Area(client, need)
        try:
            self._lay_out(table, kv, qo)
        except BaseException:  # the client would keep the buffer
            self.area.close()
            raise

    def _lay_out(self, table, kv, qo):
        rows, dtype, kept, asked = self.rows, self.dtype, self.kept, self.asked
        keys = [self.area.take(kv, dtype) for _ in range(kept)]
        values = [self.area.take(kv, dtype) for _ in range(kept)]
        (queries, q), (outputs, out) = (self.area.take(qo, dtype) for _ in range(2))
        self.keys, self.values = ([t for t, _ in some] for some in (keys, values))
        self.queries, self.out = queries, outputs
        log_sums, start = self.area.take((asked, table.q_heads, 4), torch.uint8)
        with torch.inference_mode(False):
            self.lse = log_sums.view(torch.float32).squeeze(2)
        lse = self.area.buffer.strided(start, 4 * table.q_heads, 4, kvq.F32)
        ids, self.ids_start = self.area.take((rows, 4), torch.uint8)
        with torch.inference_mode(False):
            self.ids = ids.view(torch.int32).squeeze(1)
        self.work = [_ffi.Work(layer=i, k=keys[i % kept][1], v=values[i % kept][1], q=q, out=out,
                               lse=lse) for i in range(table.layers)]
        self.pointers = [byref(work) for work in self.work]
        self._shape, self._views = None, None

    def shaped(self, batch, columns):
        """Of a step of all columns, each a token: K and V of the kept layers and Q as
        [batch][heads][columns][dim], the output and its LSE as [batch][columns].. Kept, since a
        token has as many of them as the last."""
        if self._shape != (batch, columns):
            with torch.inference_mode(False):
                keys, values, (queries,), (out,), (lse,) = (
                    [t[:batch * columns].view(batch, columns, *t.shape[1:]) for t in tensors]
                    for tensors in (self.keys, self.values, [self.queries], [self.out], [self.lse]))
                self._views = ([k.transpose(1, 2) for k in keys],
                               [v.transpose(1, 2) for v in values], queries.transpose(1, 2), out,
                               lse)
            self._shape = batch, columns
        return self._views

    def told(self):
        """struct kvq_ids of `ids`."""
        return _ffi.Ids(self.area.buffer.pointer, self.ids_start)

    def close(self):
        self.area.close()
