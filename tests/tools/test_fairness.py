#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""tools/fairness.py without a daemon: a neighbour that has failed is no neighbour, and ends it."""
import importlib.util
import io
import os
import sys
import threading
import types
import unittest
from unittest import mock

import numpy  # noqa: F401 (once in a process: program() forgets what it loads)

TOOL = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools", "fairness.py")


def program():
    """The tool as a module, over no library."""
    kvq, rig = types.ModuleType("kvq"), types.ModuleType("e2e_rig")
    kvq.Layer, rig.Daemon = lambda *numbers: numbers, None
    with mock.patch.dict(sys.modules, kvq=kvq, e2e_rig=rig), \
            mock.patch.object(sys, "path", list(sys.path)):
        spec = importlib.util.spec_from_file_location("fairness", TOOL)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


class Neighbours(unittest.TestCase):
    def setUp(self):
        self.tool = program()

    def answers(self, work):
        """What a neighbour with that work answers to `go`, and to `stop` after its first turn."""
        threads = []

        def turn():
            threads.append(threading.current_thread())
            turned.set()
            work()

        def words():
            yield "go\n"
            turned.wait()
            if work is not stepping:
                threads[0].join()
            yield "stop\n"
        turned = threading.Event()
        with mock.patch.dict(self.tool.KINDS, x=lambda directory: turn), \
                mock.patch.object(sys, "stdin", words()), \
                mock.patch.object(sys, "stderr", io.StringIO()) as said, \
                mock.patch.object(sys, "stdout", io.StringIO()) as out:
            self.tool.neighbour("x", "nowhere")
        return out.getvalue().split(), said.getvalue()

    def test_work_that_fails(self):
        def fail():
            raise ValueError("no such queue")
        told, said = self.answers(fail)
        self.assertEqual(told, ["ready", "ready", "failed"])
        self.assertIn("no such queue", said)
        self.assertEqual(self.answers(stepping)[0], ["ready", "ready", "ready"])

    def test_who_asks(self):
        """What is no `ready` ends the program."""
        for answer, ends in (("ready\n", False), ("failed\n", True), ("", True)):
            other = self.tool.Neighbour.__new__(self.tool.Neighbour)
            other.kind = "nops"
            other.process = mock.Mock(stdout=io.StringIO(answer))
            if ends:
                with self.assertRaisesRegex(SystemExit, "the neighbour nops has failed"):
                    other.say("go")
            else:
                other.say("go")

    def test_no_such_kind(self):
        with self.assertRaisesRegex(SystemExit, "nop is none of idle, .*, nops, forks"):
            self.tool.main("nop")


def stepping():
    """Work that goes well."""


if __name__ == "__main__":
    unittest.main()
