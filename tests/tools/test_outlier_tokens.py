#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/eval/outlier_tokens.py: what it reads of a capture, its rounding and rotation, and what it
tells of keys whose tokens of small norm were planted."""
import contextlib
import io
import os
import struct
import sys
import tempfile
import unittest
from unittest import mock

import numpy as np

TOOLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/eval")
sys.path.insert(0, TOOLS)
import outlier_tokens  # noqa: E402

HEADS, TOKENS, DIM = 2, 96, 64


def bfloat16(x):
    """The upper halves of floats."""
    return (x.astype("<f4").view("<u4") >> 16).astype("<u2")


def chunk(layer, dtype, position, k, v):
    """A chunk of K and V [heads, tokens, dim], without queries."""
    codes = {1: lambda x: x.astype("<f2"), 2: bfloat16, 3: lambda x: x.astype("<f4")}
    data = b"".join(codes[dtype](x).tobytes() for x in (k, v))
    head = struct.pack("<IHBBIIQQQB", 0x6B6E7563, layer, dtype, dtype, 0, k.shape[1], position,
                       len(data), 0, 0).ljust(64, b"\0")
    return head + data + bytes(-len(data) % 64)


def capture(rows, chunks):
    """A file: rows of (query heads, KV heads, dim of K, dim of V)."""
    body = b"".join(chunks)
    table = b"".join(struct.pack("<4H", *row) for row in rows)
    size = 320 + len(table) + -len(table) % 64 + len(body)
    head = struct.pack("<8sQIIQQ", b"KVQCAPT1", 0, len(rows), 0, len(chunks), size)
    return (head.ljust(320, b"\0") + table).ljust(size - len(body), b"\0") + body


def keys(seed):
    """Keys with one large channel, as models have, and three small tokens in each head."""
    x = np.random.default_rng(seed).standard_normal((HEADS, TOKENS, DIM)).astype(np.float32)
    x[..., 5] += 6
    x[:, [0, 3, 70]] /= 20
    return x


class TestOutlierTokens(unittest.TestCase):
    """The tool as a module and as a command."""

    def file(self, data):
        """A file with these bytes."""
        path = os.path.join(self.enterContext(tempfile.TemporaryDirectory()), "kv.capture")
        with open(path, "wb") as file:
            file.write(data)
        return path

    def run_tool(self, *arguments):
        """Exit status, what it printed, and its complaint."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), \
                mock.patch.object(sys, "argv", ["outlier_tokens.py", *arguments]):
            status = outlier_tokens.main()
        return status, out.getvalue(), err.getvalue()

    def test_read(self):
        """All dtypes, chunks that follow each other, a layer without a cache of its own."""
        k, v = keys(1), keys(2)
        row = (4, HEADS, DIM, DIM)
        path = self.file(capture([row, (0, 0, 0, 0), row], [
            chunk(0, 3, 0, k[:, :40], v[:, :40]), chunk(2, 1, 0, k[:, :40], v[:, :40]),
            chunk(0, 3, 40, k[:, 40:], v[:, 40:]), chunk(2, 2, 40, k[:, 40:], v[:, 40:])]))
        (k0, v0), (k2, v2) = outlier_tokens.read(path)
        np.testing.assert_array_equal(k0, k)
        np.testing.assert_array_equal(v0, v)
        np.testing.assert_allclose(k2[:, :40], k[:, :40], rtol=2 ** -10, atol=1e-6)
        np.testing.assert_allclose(v2[:, 40:], v[:, 40:], rtol=2 ** -7)

    def test_rounding(self):
        """Codes 0 to 3 of -1 to 5: steps of 2; numbers that are not asked do not stretch them."""
        x = np.array([-1.0, 0.2, 3.5, 5.0, 50.0])
        np.testing.assert_allclose(
            outlier_tokens.rounding_error(x, 2, np.array([1, 1, 1, 1, 0], bool)),
            [0, -0.8, 0.5, 0, 45])
        self.assertEqual(abs(outlier_tokens.rounding_error(np.full(4, 7.0), 3, True)).max(), 0)

    def test_hadamard(self):
        """Sylvester's order, normalized."""
        want = np.array([[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]) / 2
        np.testing.assert_allclose(outlier_tokens.hadamard(np.eye(4)), want)
        with self.assertRaisesRegex(ValueError, "head_dim of 96"):
            outlier_tokens.hadamard(np.ones((1, 96)))

    def test_planted(self):
        """Six outliers in four of six groups; who is hurt by them, and what mends it."""
        sums = outlier_tokens.Sums()
        sums.layer(keys(3), keys(4))
        self.assertEqual((sums.tokens, sums.outliers, sums.first, sums.groups, sums.hit, sums.high),
                         (2 * 96, 6, 4, 6, 4, 0))
        self.assertGreater(sums.of(sums.mse, 2, "K with"), sums.of(sums.mse, 2, "K without"))
        self.assertLess(sums.of(sums.mse, 2, "V with"), sums.of(sums.mse, 2, "V without"))
        own = [sums.of(sums.relative, 2, stage, "own") for stage in range(3)]
        self.assertGreater(own[1], 10 * own[2])
        self.assertGreater(own[0], 1)

    def test_all_small(self):
        """A group without other tokens, and a sequence that is shorter than one, are no trouble."""
        k, sums = keys(8), outlier_tokens.Sums()
        k[:, :32] /= 100
        with np.errstate(all="raise"):
            sums.layer(k, keys(9))
            sums.layer(k[:, :20], k[:, :20])
        self.assertEqual((sums.groups, sums.hit), (6, 4))
        self.assertTrue(np.isfinite(sums.of(sums.mse, 2, "K without")))

    def test_error_of_keys(self):
        """By channel, from other tokens' scales: the definition, number by number."""
        groups = keys(5)[:, :32].astype(np.float64)
        of_scale = np.ones(groups.shape[:2], bool)
        of_scale[:, 0] = False
        got = outlier_tokens.key_errors(groups, 3, 0, of_scale)
        want = np.zeros(groups.shape[:2])
        for head in range(HEADS):
            for c in range(DIM):
                column = groups[head, :, c]
                low, high = column[1:].min(), column[1:].max()
                codes = np.clip(np.rint((column - low) / ((high - low) / 7)), 0, 7)
                want[head] += (column - (low + codes * (high - low) / 7)) ** 2
        np.testing.assert_allclose(got, want)

    def test_command(self):
        """Two models in one table; what is no capture is refused."""
        one = self.file(capture([(4, HEADS, DIM, DIM)], [chunk(0, 3, 0, keys(6), keys(7))]))
        status, out, err = self.run_tool(f"One={one}", f"Two={one}")
        self.assertEqual((status, err), (0, ""))
        self.assertIn("| One | 3.12% | 67% | 66.7% | 0.00% |", out)
        self.assertIn("| Two: tokens of small norm |", out)
        with open(one, "rb") as file:
            cut = self.file(file.read()[:-64])
        status, out, err = self.run_tool(cut)
        self.assertEqual((status, out), (2, ""))
        self.assertIn("is not a capture that was closed", err)


if __name__ == "__main__":
    unittest.main()
