#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The shell scripts in tools/, and what they start, over programs that only note how they were
called: what their --help does, and how test.sh builds, counts and stops. Nothing is built or
installed."""
import importlib.util
import io
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", ".."))
# Stands for programs that would change something.
NOTED = """#!/bin/sh
echo "$(basename "$0") $*" >>"$NOTES"
exit "${NOTED_STATUS:-0}"
"""
WORK = ("apt-get", "cmake", "cpack", "ctest", "git", "ninja", "pip", "sudo")


class Scripts(unittest.TestCase):
    """A copy of the scripts in a folder of its own."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvq-scripts-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.tools = os.path.join(self.folder, "tools")
        os.mkdir(self.tools)
        os.mkdir(os.path.join(self.folder, "bin"))
        for name in os.listdir(os.path.join(ROOT, "tools")):
            if name.endswith(".sh"):
                shutil.copy(os.path.join(ROOT, "tools", name), self.tools)
        for name in WORK:
            self.program(name, NOTED)

    def program(self, name, text):
        path = os.path.join(self.folder, "bin", name)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(path, 0o755)

    def run_script(self, *command, cwd=None, **environment):
        return subprocess.run(
            command, cwd=cwd or self.folder, capture_output=True, text=True, timeout=60,
            env={**os.environ, "PATH": os.path.join(self.folder, "bin") + ":" + os.environ["PATH"],
                 "NOTES": os.path.join(self.folder, "notes"), **environment})

    def notes(self):
        """What was called since the last time."""
        path = os.path.join(self.folder, "notes")
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
        os.unlink(path)
        return lines

    def parts(self, text, **environment):
        """Runs text among the functions of test-parts.sh, in a clone that was built before."""
        os.makedirs(os.path.join(self.folder, "build", "log"), exist_ok=True)
        os.makedirs(os.path.join(self.folder, "build", "test"), exist_ok=True)
        return self.run_script("bash", "-uc", """
            full=0 jobs=1 passed=0 failed=0 skipped=0 failures=() part=one
            . tools/test-parts.sh
            . tools/test-engines.sh
            """ + text, **environment)


class Help(Scripts):
    def test_help(self):
        """From every folder that one may stand in, and it does nothing else."""
        for name in ("compat", "deb", "deps", "loop", "test", "wheel"):
            for cwd, path in ((self.folder, f"tools/{name}.sh"), (self.tools, f"./{name}.sh"),
                              ("/", os.path.join(self.tools, f"{name}.sh"))):
                done = self.run_script(path, "--help", cwd=cwd, NOTED_STATUS="1")
                self.assertEqual((done.returncode, done.stderr), (0, ""), path)
                self.assertIn(f"tools/{name}.sh", done.stdout)
        self.assertEqual(self.notes(), [])


    def test_no_value(self):
        """Bad usage is status 2."""
        for option in ("--only", "--jobs", "--seeds", "--engines", "--fuzz-seconds", "--nonsense"):
            done = self.run_script("tools/test.sh", "--full", option)
            self.assertEqual(done.returncode, 2, option)
            self.assertIn(option, done.stderr)


class Builds(Scripts):
    def test_once(self):
        """What stands in build/test is brought up to date, once, and then the parts go on."""
        done = self.parts("""
            build_test && echo first; part=two; build_test && echo second
            echo "$passed passed, $failed failed"
            """)
        self.assertEqual(done.stdout, "first\nsecond\n1 passed, 0 failed\n", done.stderr)
        builds = [x for x in self.notes() if x.startswith("cmake --build build/test")]
        self.assertEqual(len(builds), 1)

    def test_failed(self):
        """No part goes on with old programs; each is a failure."""
        done = self.parts("""
            for part in tests planted kernels attacks e2e python docs lint engines; do
                part_$part
            done
            echo "$passed passed, $failed failed"
            """, NOTED_STATUS="1")
        self.assertTrue(done.stdout.endswith("\n0 passed, 9 failed\n"), done.stdout)
        self.assertEqual([x.split()[:2] for x in self.notes() if "cmake" in x],
                         [["cmake", "--preset"]])

    def test_generator(self):
        """Ninja, and what has made a folder goes on with it."""
        self.parts("build test; touch build/test/CMakeCache.txt; build test; build asan")
        made = [x.split() for x in self.notes() if x.startswith("cmake --preset")]
        self.assertEqual([x[2] for x in made], ["test", "test", "asan"])
        self.assertEqual(["Ninja" in x for x in made], [True, False, True])

    def test_sanitizers(self):
        """Under --full with all vector kernels, else with clang's warnings about them."""
        self.parts("for full in 1 0; do part_asan; part_tsan; done")
        notes = self.notes()
        for preset, n in (("asan", 1), ("tsan", 1)):
            made = [x for x in notes if x.startswith(f"cmake --preset {preset} ")]
            self.assertEqual(sum("-DKVQ_VECTOR=ON" in x for x in made), n, notes)
        built = [x for x in notes if x.startswith("cmake --build build/asan -j")]
        self.assertEqual(["kvq_wide_kernels" in x for x in built], [False, True])


class Counting(Scripts):
    def test_failures(self):
        """What fails counts, returns 1, and so ends a part that goes on with `|| return`."""
        done = self.parts("""
            check a 10 true && echo "a well"
            check_counted b 10 echo "3 passed, 0 failed, 1 skipped" && echo "b well"
            check c 10 false || echo "c fails"
            check_counted d 10 echo "2 passed, 4 failed" || echo "d fails"
            check_counted e 10 echo "0 passed, 0 failed" || echo "e fails"
            echo "$passed passed, $failed failed, $skipped skipped"
            """)
        self.assertEqual([x for x in done.stdout.splitlines() if x[0] != " "],
                         ["a well", "b well", "c fails", "d fails", "e fails",
                          "6 passed, 6 failed, 1 skipped"], done.stderr)

    def test_format(self):
        """Each file is a test, and the one that fails is told."""
        self.program("clang-format-14",
                     "#!/bin/sh\ncase \" $* \" in *\" bad.c \"*) exit 1 ;; esac\n")
        for bad, said in (("", "3 passed, 0 failed"), ("bad.c", "3 passed, 1 failed")):
            done = self.parts(f"""
                sources() {{ printf '%s\\n' a.c {bad} b.c c.c; }}
                part_format
                echo "$passed passed, $failed failed"
                """)
            self.assertEqual(done.stdout.splitlines()[-1], said, done.stderr)
            self.assertEqual([x.split()[1:3] for x in done.stdout.splitlines()[:-1]],
                             [["bad.c:", "clang-format-14"]] if bad else [])

    def test_summary(self):
        """The total is that of the parts, also of those that have passed before, which are
        marked."""
        for name, text in (("deps.sh", "kvq_install_packages() { :; }; kvq_install_s3() { :; }"),
                           ("test-parts.sh", "part_lint() { SECONDS=$((SECONDS + 300)); "
                                             "count_pass 5; }\n"
                                             "part_docs() { SECONDS=$((SECONDS + 100)); $fails; "
                                             "count_pass; }\n")):
            with open(os.path.join(self.tools, name), "a", encoding="utf-8") as file:
                file.write(text)
        os.mkdir(os.path.join(self.folder, "tests"))
        with open(os.path.join(self.folder, "tests", "CMakeLists.txt"), "w", encoding="utf-8"):
            pass
        told = []
        for fails in ("count_fail x", "true"):
            done = self.run_script("tools/test.sh", "--full", "--only", "lint", "--only", "docs",
                                   "--fuzz-seconds", "4", fails=fails, CI="")
            rows = [x.split() for x in done.stdout.split("\n\n")[-1].splitlines()]
            told.append({x[0]: x[1:] for x in rows})
        for rows in told:
            taken = [int(rows[name][3]) for name in ("packages", "lint", "docs", "all")]
            self.assertEqual(sum(taken[:3]), taken[3])
            self.assertIn(taken[3], range(400, 460))
        self.assertEqual([len(x["lint"]) for x in told], [5, 6])
        self.assertEqual(told[1]["lint"][5], "before")
        self.assertEqual(len(told[1]["docs"]), 5)

    def test_recorded(self):
        """Under a commit goes what that commit has."""
        os.mkdir(os.path.join(self.folder, "docs"))
        page = os.path.join(self.folder, "docs", "testing.md")
        marks = "<!-- full: begin -->\n", "<!-- full: end -->\n"
        record = """
            fuzz_seconds=1 seeds=1 total_passed=7 total_failed=0 total_skipped=0 total_seconds=1
            installed=0 summary=()
            record_full_result
            """
        for git, recorded in (("echo ' M proto/ring.h'", False), ("true", True)):
            self.program("git", f"#!/bin/sh\n{git}\n")
            with open(page, "w", encoding="utf-8") as file:
                file.write("".join(marks))
            done = self.parts(record)
            with open(page, encoding="utf-8") as file:
                self.assertEqual("7 passed" in file.read(), recorded, done.stderr)
            self.assertEqual("not recorded" in done.stdout, not recorded)


class Demo(Scripts):
    """The last act of demo.py, on a machine that is busy."""

    def act(self, text):
        """What it prints over a kvq-bench that is this script."""
        self.program("kvq-bench", "#!/bin/sh\n" + text)
        spec = importlib.util.spec_from_file_location(
            "demo", os.path.join(ROOT, "tools", "demo.py"))
        demo = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(demo)
        show = demo.Demo(os.path.join(self.folder, "bin"), True)
        self.addCleanup(shutil.rmtree, show.folder)
        with mock.patch.object(sys, "stdout", io.StringIO()) as out:
            try:
                show.real_shape()
            except demo.Trouble as trouble:
                return str(trouble)
        return out.getvalue()

    def test_warning(self):
        row = ('{"format": "f16", "path": "exact", "us": 5, "threads": 1, "isa": "c", '
               '"vs_f16": 1, "bytes_per_token_head": 512}')
        busy = "echo 'reads 106% of the floor' >&2; exit "
        told = self.act(f"echo '[{row}]'; {busy} 1\n")
        self.assertIn("reads 106% of the floor", told)
        self.assertIn("5 us per layer", told)
        self.assertIn("ended with 2:\nreads 106%", self.act(f"echo '[{row}]'; {busy} 2\n"))
        self.assertIn("has timed nothing", self.act(f"echo '[]'; {busy} 1\n"))


if __name__ == "__main__":
    unittest.main()
