#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What tokens of small norm do to keys that share scales with them: OScaR's Table 2 on a capture.

    python -m kvq.eval MODEL --text TEXT --windows 2 --capture kv.capture
    tools/eval/outlier_tokens.py NAME=kv.capture ..

OScaR (section 3, Table 2, appendix H) says that keys quantized by channel lose more where a group
of tokens holds one whose norm is far below the others', and values quantized by token do not. Here
a token is an outlier in a head of a layer if its key's norm is below half of the median over its
sequence, or above twice that. Groups are 32 tokens, or 32 channels of a value; codes are rounded to
the nearest with a scale and a zero point in full precision, from the least and the largest value.

Prints Markdown. Needs NumPy, and head_dims that are powers of two.
"""
import argparse
import mmap
import struct
import sys

import numpy as np

GROUP = 32
BITS = (4, 3, 2)
STAGES = ("by channel", "rotated", "rotated, tokens scaled")
DTYPES = {1: np.dtype("<f2"), 3: np.dtype("<f4")}


def floats(data, at, count, dtype):
    """`count` numbers of a capture's dtype as float32, and where the next ones begin."""
    if dtype == 2:  # bf16: the upper half of a float32
        half = np.frombuffer(data, "<u2", count, at)
        return (half.astype(np.uint32) << 16).view(np.float32), at + 2 * count
    return (np.frombuffer(data, DTYPES[dtype], count, at).astype(np.float32),
            at + DTYPES[dtype].itemsize * count)


def read(path):
    """Of each layer of each sequence K and V [KV heads, tokens, head_dim], one after the other: a
    capture as docs/captures.md has it. Its check sums are not looked at."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        magic, _, layers, _, chunks, nbytes = struct.unpack_from("<8sQIIQQ", data)
        if magic != b"KVQCAPT1" or nbytes != len(data):
            raise ValueError(f"{path} is not a capture that was closed")
        rows = [struct.unpack_from("<4H", data, 320 + 8 * layer) for layer in range(layers)]
        at = 320 + 8 * layers + -(320 + 8 * layers) % 64
        found = {}
        for _ in range(chunks):
            _, layer, k_dtype, v_dtype, sequence, tokens, _, nbytes = struct.unpack_from(
                "<IHBBIIQQ", data, at)
            _, heads, k_dim, v_dim = rows[layer]
            k, v_at = floats(data, at + 64, heads * tokens * k_dim, k_dtype)
            v, _ = floats(data, v_at, heads * tokens * v_dim, v_dtype)
            found.setdefault((sequence, layer), []).append(
                (k.reshape(heads, tokens, k_dim), v.reshape(heads, tokens, v_dim)))
            at += 64 + nbytes + -nbytes % 64
    for pieces in found.values():
        yield tuple(np.concatenate(side, 1) for side in zip(*pieces))


def rounding_error(x, bits, of_scale):
    """x [.., n] less its codes' values, where n numbers share scale and zero point, which come from
    those at `of_scale`."""
    low = np.where(of_scale, x, np.inf).min(-1, keepdims=True)
    high = np.where(of_scale, x, -np.inf).max(-1, keepdims=True)
    top = 2 ** bits - 1
    scale = np.maximum((high - low) / top, 1e-30)
    return x - (low + scale * np.clip(np.rint((x - low) / scale), 0, top))


def hadamard(x):
    """Each row times the normalized Hadamard matrix (Sylvester's order)."""
    d = x.shape[-1]
    if d & (d - 1):
        raise ValueError(f"a head_dim of {d} is not a power of two")
    step = 1
    while step < d:
        pairs = x.reshape(*x.shape[:-1], d // (2 * step), 2, step)
        x = np.stack((pairs[..., 0, :] + pairs[..., 1, :],
                      pairs[..., 0, :] - pairs[..., 1, :]), -2).reshape(*x.shape)
        step *= 2
    return x / np.sqrt(d)


def key_errors(groups, bits, stage, of_scale):
    """Squared error of each token [.., GROUP] of groups of keys [.., GROUP, dim], whose scales come
    from the tokens at `of_scale` [.., GROUP]."""
    norms = np.sqrt((groups ** 2).sum(-1, keepdims=True)) if stage == 2 else 1.0
    x = groups if stage == 0 else hadamard(groups) / np.maximum(norms, 1e-30)
    error = rounding_error(np.swapaxes(x, -1, -2), bits, of_scale[..., None, :])
    return ((np.swapaxes(error, -1, -2) * norms) ** 2).sum(-1)


class Sums:
    """Over all heads of all layers of a model."""

    def __init__(self):
        self.groups = self.hit = self.tokens = self.outliers = self.first = 0
        self.high = 0
        self.mse = {}  # (bits, what): sums of errors and of how many numbers
        self.relative = {}  # (bits, stage, where): sums of heads' errors to squares, and of heads

    def add(self, into, key, errors, weights):
        """Sums up what two arrays of one shape hold."""
        a, b = into.get(key, (0.0, 0.0))
        into[key] = (a + float(errors.sum()), b + float(weights.sum()))

    def heads(self, key, errors, squares, where):
        """Errors to squares of the tokens `where`, for each head that has some: layers differ so
        much in size that sums over all would be those of one."""
        errors, squares = ((x * where).sum((1, 2)) for x in (errors, squares))
        some = squares > 0
        self.add(self.relative, key, errors[some] / squares[some], some[some])

    def layer(self, k, v):
        """A layer of a sequence: K and V [KV heads, tokens, dim]."""
        whole = k.shape[1] // GROUP * GROUP
        if whole == 0:
            return
        k, v = (x[:, :whole].astype(np.float64) for x in (k, v))
        squares = (k ** 2).sum(-1)
        middle = np.median(np.sqrt(squares), -1, keepdims=True)
        low, high = np.sqrt(squares) < middle / 2, np.sqrt(squares) > 2 * middle
        by_group = (len(k), -1, GROUP)
        low, squares = low.reshape(by_group), squares.reshape(by_group)
        hit = low.any(-1)
        self.groups += hit.size
        self.hit += int(hit.sum())
        self.tokens += low.size
        self.outliers += int(low.sum())
        self.first += int(low[:, 0].sum())
        self.high += int(high.sum())
        groups = k.reshape(*by_group, k.shape[-1])
        others = ~low[hit]
        places = {"own": low, "beside": hit[..., None] & ~low, "far": ~hit[..., None] & ~low,
                  "all": low | ~low}
        for bits in BITS:
            for stage in range(3):
                every = key_errors(groups, bits, stage, np.ones(low.shape, bool))
                for name, where in places.items():
                    self.heads((bits, stage, name), every, squares, where)
                if stage == 0:
                    some = others.any(-1)  # of a group all of whose tokens are small none is left
                    apart = key_errors(groups[hit][some], bits, stage, others[some])
                    dims = np.full(others.shape, float(k.shape[-1]))
                    self.add(self.mse, (bits, "K with"), every[hit], dims)
                    self.add(self.mse, (bits, "K without"), apart * others[some], dims * others)
            self.values(v, bits, low, hit)

    def values(self, v, bits, low, hit):
        """Values by token, over the same tokens."""
        rows = v.reshape(*v.shape[:2], v.shape[-1] // GROUP, GROUP)
        error = (rounding_error(rows, bits, np.ones(rows.shape, bool)) ** 2).sum((-1, -2))
        error = error.reshape(low.shape)[hit]
        dims = np.full(error.shape, float(v.shape[-1]))
        self.add(self.mse, (bits, "V with"), error, dims)
        self.add(self.mse, (bits, "V without"), error * ~low[hit], dims * ~low[hit])

    def of(self, into, *key):
        """A mean, or NaN over nothing."""
        errors, weights = into[key]
        return errors / weights if weights else float("nan")


def table(head, rows):
    """Prints Markdown."""
    print("| " + " | ".join(head) + " |")
    print("|" + "---|" * len(head))
    for row in rows:
        print("| " + " | ".join(row) + " |")
    print()


def tell(models):
    """The tables of all models: (name, Sums)."""
    table(("model", "tokens of small norm", "of these in the first group", "groups with one",
           "tokens of large norm"),
          [(name, f"{100 * s.outliers / s.tokens:.2f}%",
            f"{100 * s.first / s.outliers:.0f}%" if s.outliers else "-",
            f"{100 * s.hit / s.groups:.1f}%", f"{100 * s.high / s.tokens:.2f}%")
           for name, s in models])
    table(("mean squared error times 100", "bits", "K, with them", "without", "times",
           "V, with them", "without", "times"),
          [(name, str(bits), *(cell for side in "KV" for cell in times(
              100 * s.of(s.mse, bits, f"{side} with"), 100 * s.of(s.mse, bits, f"{side} without"))))
           for name, s in models for bits in BITS])
    table(("K, 2 bits: squared error to square, mean of heads", *STAGES),
          [(f"{name}: {what}", *(f"{s.of(s.relative, 2, stage, where):.3g}"
                                 for stage in range(3)))
           for name, s in models
           for where, what in (("own", "tokens of small norm"),
                               ("beside", "tokens in their groups"),
                               ("far", "tokens of other groups"), ("all", "all tokens"))])


def times(a, b):
    """Two numbers and their quotient."""
    return f"{a:.3g}", f"{b:.3g}", f"{a / b:.2f}"


def main():
    """Exit status: 0, or 2 if a file is no capture."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("captures", nargs="+", metavar="NAME=FILE")
    models = []
    for told in parser.parse_args().captures:
        name, _, path = told.rpartition("=")
        sums = Sums()
        try:
            for k, v in read(path):
                sums.layer(k, v)
        except (OSError, ValueError, struct.error) as error:
            print(f"outlier_tokens.py: {path}: {error}", file=sys.stderr)
            return 2
        models.append((name or path, sums))
    tell(models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
