#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvq-bench, command by command, with little to do: nothing is timed.

    test_bench.py KVQ-BENCH
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

# Stands for dd: runs it without flags that not every file system has, and says what it moved.
DD = """#!{python}
import os, re, subprocess, sys
words = [w for w in sys.argv[1:] if w not in ("status=none", "iflag=direct", "oflag=direct")]
done = subprocess.run([{dd!r}, *words], stderr=subprocess.PIPE, text=True)
with open({log!r}, "a") as log:
    log.write(re.search(r"(\\d+) bytes", done.stderr).group(1) + "\\n")
sys.exit(done.returncode)
"""


def bench(*options, **environment):
    return subprocess.run([sys.argv[1], *options], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "LC_ALL": "C", **environment})


# Formats with each thing that a session keeps besides blocks, and with several of them.
FORMATS = ["f16", "kvq2", "oscar2", "oscar2-xh", "kivi-sink2", "ott2", "ott2-oscar",
           "innerq-base", "innerq-base:outliers=3", "innerq-base:outliers=3:sink=0",
           "innerq-hybrid:outliers=4:displaced=9", "kvq2:outliers=2", "quarot2-s32",
           "turboquant2.5", "vecinfer-2", "vecinfer-2:outliers=3"]
SMALL = ["--format", ",".join(FORMATS), "--threads", "1", "--reps", "1",
         "--kv-heads", "2", "--json"]
CACHE = ["--q-heads", "4", "--walk", "1"]


class Formats(unittest.TestCase):
    """Every format by every command, at lengths with and without packed tokens."""

    def rows(self, command, *options, statuses=(0,)):
        done = bench(command, *SMALL, *options, *([] if command == "pack" else CACHE))
        self.assertIn(done.returncode, statuses, done.stderr)
        rows = json.loads(done.stdout)
        self.assertEqual({row["format"] for row in rows}, set(FORMATS), done.stderr)
        return rows

    def test_attend(self):
        for options in (("--tokens", "31,600", "--head-dim", "64"),
                        ("--tokens", "300", "--head-dim", "80", "--queries", "3")):
            # So little may be read faster than memory's floor, which the command calls a failure.
            for row in self.rows("attend", *options, statuses=(0, 1)):
                most = 0.1 if row["path"] == "fast" else 1e-4
                self.assertLess(row["rel_err"], most, row)
                self.relations(row)

    def relations(self, row):
        """What stands beside what was timed is the quotient that it is called."""
        self.assertAlmostEqual(row["vs_f16"], row["f16_us"] / row["us"], 6)
        self.assertAlmostEqual(row["floor_share"], row["gb_per_s"] / row["floor_gb_per_s"], 6)
        if row["format"] == "f16":  # which packs nothing: all tokens take the same bytes
            read = row["bytes_per_token_head"] * row["tokens"] * row["kv_heads"]
            self.assertAlmostEqual(row["gb_per_s"], read / row["us"] / 1e3, 6)

    def test_shared(self):
        for row in self.rows("shared", "--tokens", "300", "--head-dim", "64", "--sessions", "3"):
            self.assertTrue(row["same_bits"], row)
            self.assertAlmostEqual(row["ratio"], row["apart_us"] / row["shared_us"], 6)

    def test_pack(self):
        self.rows("pack", "--head-dim", "64")

    def test_short_walk(self):
        """Of layers that are too small for the walk that was asked for: it says so."""
        small = ("--format", "f16", "--threads", "1", "--reps", "1", "--q-heads", "1",
                 "--kv-heads", "1", "--head-dim", "64", "--tokens", "64", "--json")
        self.assertIn("1024 layers make a walk of 16.0 MiB, not of 17",
                      bench("attend", *small, "--walk", "17").stderr)
        self.assertNotIn("make a walk", bench("attend", *small, "--walk", "16").stderr)

    def test_formats_unless_said(self):
        done = bench("attend", "--threads", "1", "--reps", "1", "--q-heads", "1", "--kv-heads", "1",
                     "--head-dim", "64", "--tokens", "64", "--walk", "1", "--path", "exact",
                     "--json")
        self.assertEqual([row["format"] for row in json.loads(done.stdout)],
                         ["f16", "kvq2", "oscar2", "oscar3", "oscar4"])

    def test_refused(self):
        for options, says in ((("attend", "--q-heads", "65", "--kv-heads", "1"), "at most 64 can"),
                              (("attend", "--q-heads", "7", "--kv-heads", "2"), "not a multiple"),
                              (("attend", "--format", "oscar2:kbits=9"), "--format has"),
                              (("shared", "--queries", "2"), "is for attend without --peer"),
                              (("pack", "--head-dim", "65"), "give 64, 128 or 256"),
                              (("pack", "--format", "f16,bf16"), "given fp16; leave bf16 out"),
                              (("attend", "--tokens", "0"), '--tokens is "0"'),
                              (("ring", "--idle", "1001"), '--idle is "1001"'),
                              ((), "give one command, attend, shared, pack, ring, step, hop, "
                                   "storage or quality; see"),
                              (("dance",), '"dance" is no command; give one command, attend, '),
                              (("--json", "hop"), "give hop first, and its options behind it")):
            done = bench(*options)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(says, done.stderr)

    def test_options_of_other_commands(self):
        """What a command does not use is refused, and says whose it is."""
        one = {"--format": "f16", "--tokens": "64", "--threads": "1", "--q-heads": "8",
               "--kv-heads": "8", "--head-dim": "128", "--path": "exact", "--isa": "c",
               "--reps": "1", "--walk": "1", "--sessions": "2", "--idle": "1", "--peer": "x",
               "--kvqd": "x"}
        lacks = {"attend": ("--sessions", "--idle", "--kvqd"),
                 "shared": ("--idle", "--peer", "--kvqd"),
                 "pack": ("--tokens", "--path", "--walk", "--sessions", "--idle", "--peer",
                          "--kvqd"),
                 "ring": set(one) - {"--sessions", "--idle", "--kvqd"},
                 "step": ("--threads", "--isa", "--walk", "--sessions", "--idle", "--peer")}
        for command, options in lacks.items():
            for option in options:
                done = bench(command, option, one[option])
                self.assertEqual(done.returncode, 2, (command, option))
                self.assertRegex(done.stderr, f"{option} is for [a-z, ]+, not for {command}; leave")
            takes = [x for option in one if option not in options and option != "--peer"
                     for x in (option, one[option])]
            wrong = ("--kv-heads", "3") if command == "attend" else ("--queries", "2")
            done = bench(command, *takes, *wrong)  # looked at behind what a command uses
            self.assertRegex(done.stderr, "not a multiple|--queries 2 is for attend")


class Ring(unittest.TestCase):
    def test_beside_idle_clients(self):
        done = bench("ring", "--sessions", "1,3", "--idle", "5", "--json")
        self.assertEqual(done.returncode, 0, done.stderr)
        rows = json.loads(done.stdout)
        self.assertIn("one-core", {row["mode"] for row in rows})
        self.assertEqual({row["idle"] for row in rows}, {5})


class Storage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.at = folder.name

    def moved(self, size, block):
        """What the rows and each run of dd say that they moved."""
        log, dd = os.path.join(self.at, "log"), os.path.join(self.at, "dd")
        with open(dd, "w", encoding="utf-8") as file:
            file.write(DD.format(python=sys.executable, dd=shutil.which("dd"), log=log))
        os.chmod(dd, 0o700)
        done = bench("storage", "--dir", os.path.join(self.at, "work"), "--bytes", str(size),
                     "--block-bytes", str(block), "--reps", "1", "--json",
                     PATH=self.at + ":" + os.environ["PATH"])
        self.assertEqual(done.returncode, 0, done.stderr)
        with open(log, encoding="utf-8") as file:
            ran = [int(line) for line in file]
        os.unlink(log)
        rows = json.loads(done.stdout)
        for row in rows:
            share = row["gb_per_s"] / row["dd_gb_per_s"]
            for name in ("share_of_dd", "least_share", "most_share"):  # of one round
                self.assertAlmostEqual(row[name], share, 6, row)
        return [row["bytes"] for row in rows], ran

    def test_same_bytes(self):
        for size, block, want in ((8 << 20, 65536, 8 << 20), (5 << 20, 300000, 5100000),
                                  (3 << 20, 3 << 20, 3 << 20), (9 << 20, 1000001, 9000009)):
            with self.subTest(size=size, block=block):
                self.assertEqual(self.moved(size, block), ([want, want], [want, want]))

    def test_less_than_a_block(self):
        done = bench("storage", "--bytes", str(1 << 20), "--block-bytes", str(2 << 20))
        self.assertEqual(done.returncode, 2)
        self.assertIn("is less than a block of 2097152", done.stderr)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    unittest.main(argv=sys.argv[:1])
