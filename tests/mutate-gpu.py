#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plant errors into the GPU kernels and the emulator, and expect the tests to catch each one.

    tests/mutate-gpu.py BUILD                   all errors of tests/mutate_gpu_list.py
    tests/mutate-gpu.py BUILD --part 4 --seed 7 a quarter of them, drawn by the seed
    tests/mutate-gpu.py BUILD --only NAME       those whose name contains NAME
    tests/mutate-gpu.py --list                  name them
    --jobs N      errors at a time (default: the cores)
    --resume FILE note what was caught in FILE, and do not do it again there

BUILD is a build folder of this tree with the emulator and its tests. For each error the files it
touches are copied, changed, compiled with what depends on them, and linked with the rest of the
build; the sources and the build stay as they are. An error is caught if a test that should see it
fails, crashes or does not end. Prints `N passed, M failed`.
"""
import argparse
import concurrent.futures
import functools
import importlib.util
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
ARCHIVES = ("libkvq_gpu_device.a", "libkvq_cuda_emu.a", "libkvq_gpu.a", "libkvq_emu.a",
            "libkvq_kernels.a")
TEST_SECONDS, COMPILE_SECONDS, SKIPPED = 180, 300, 77


class Broken(Exception):
    """The list or the build is wrong; nothing about the tests."""


def load_list():
    path = os.path.join(ROOT, "tests", "mutate_gpu_list.py")
    spec = importlib.util.spec_from_file_location("mutate_gpu_list", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [m.name for m in module.MUTATIONS]
    if len(set(names)) != len(names):
        raise Broken("tests/mutate_gpu_list.py: two errors have the same name")
    return module.MUTATIONS


class Build:
    """The commands of a build folder, by source path relative to the tree."""

    def __init__(self, folder):
        self.folder = os.path.abspath(folder)
        try:
            with open(os.path.join(folder, "compile_commands.json"), encoding="utf-8") as file:
                entries = json.load(file)
        except OSError as error:
            raise Broken(f"{folder} is no build folder of CMake: {error}") from error
        # By object, since two programs may be compiled from the same source.
        self.commands, self.source = {}, {}
        for entry in entries:
            words = shlex.split(entry["command"])
            made = words[words.index("-o") + 1]
            self.commands[made] = (entry["directory"], words)
            self.source[made] = os.path.relpath(entry["file"], ROOT)

    @functools.lru_cache(maxsize=None)
    def read_by(self, output):
        """What compiling an object reads: by the notes the compiler left, or asked again."""
        directory, words = self.commands[output]
        try:
            with open(os.path.join(directory, output + ".d"), encoding="utf-8") as file:
                text = file.read()
        except OSError:  # ninja takes them in
            plain = [w for w in words if w not in ("-c", "-o", output)]
            status, text = run([*plain, "-MM"], directory, COMPILE_SECONDS)
            if status != 0:
                raise Broken(f"{output}: the compiler does not say what it reads:\n{text[-2000:]}")
        names = text.replace("\\\n", " ").split()[1:]
        return {os.path.normpath(os.path.join(directory, name)) for name in names}

    def depends(self, output, path):
        return os.path.join(ROOT, path) in self.read_by(output)

    def objects_of(self, test):
        """Objects of one test program: those that CMake compiled for it."""
        found = [output for output in self.commands if f"/{test}.dir/" in "/" + output]
        if not found:
            raise Broken(f"{self.folder} has no test {test}; build it with the emulator")
        return found

    def library_objects(self):
        return [output for output in self.commands if any(
            f"{name}.dir/" in output
            for name in ("kvq_cuda_emu", "kvq_emu", "kvq_gpu", "kvq_kernels"))]

    def path_of(self, output):
        return os.path.join(self.commands[output][0], output)


def run(command, cwd, seconds):
    """Exit status and output; None as the status if it did not end in time."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace",
                              timeout=seconds)
    except subprocess.TimeoutExpired:
        return None, f"did not end in {seconds} s"
    except OSError as error:
        raise Broken(f"{command[0]}: {error}; build all tests first") from error
    return done.returncode, done.stdout + done.stderr


def plant(mutation, overlay):
    """Writes the changed copies; returns the paths that changed."""
    for path, old, new in mutation.changes:
        target = os.path.join(overlay, path)
        origin = target if os.path.exists(target) else os.path.join(ROOT, path)
        try:
            with open(origin, encoding="utf-8") as file:
                text = file.read()
        except OSError as error:
            raise Broken(f"{mutation.name}: {error}") from error
        if text.count(old) != 1:
            raise Broken(f"{mutation.name}: {path} has {text.count(old)} times, not once: {old!r}")
        os.makedirs(os.path.dirname(target), exist_ok=True)
        with open(target, "w", encoding="utf-8") as file:
            file.write(text.replace(old, new))
    return {path for path, _, _ in mutation.changes}


def compile_changed(build, output, overlay, to):
    """Compiles an object again, with the overlay's files in front of the tree's."""
    directory, words = build.commands[output]
    source = build.source[output]
    changed = os.path.join(overlay, source)
    place = {output: to}
    if os.path.exists(changed):
        place[os.path.join(ROOT, source)] = changed
    words = [place.get(word, word) for word in words if word not in ("-Werror", "-g")]
    status, text = run([words[0], "-I", overlay, *words[1:]], directory, COMPILE_SECONDS)
    if status != 0:
        raise Broken(f"{source} does not compile with it:\n{text[-2000:]}")


def link(build, test, objects, output):
    archives = [os.path.join(build.folder, "lib", name) for name in ARCHIVES]
    archives = [path for path in archives if os.path.exists(path)]
    plain = ["-lcmocka"] if "plain" not in " ".join(build.commands[build.objects_of(test)[0]][1]) \
        else []
    status, text = run(["c++", *objects, *archives, *archives, *plain, "-ldl", "-lm", "-lpthread",
                        "-o", output], ROOT, COMPILE_SECONDS)
    if status != 0:
        raise Broken(f"{test} cannot be linked:\n{text[-2000:]}")


def try_one(build, mutation):
    """(caught, what happened)."""
    with tempfile.TemporaryDirectory(prefix="kvq-mutate-") as folder:
        overlay = os.path.join(folder, "tree")
        changed = plant(mutation, overlay)
        made = {}
        for test in mutation.tests:
            own, library = build.objects_of(test), build.library_objects()
            for output in [*own, *library]:
                if output in made or not any(build.depends(output, path) for path in changed):
                    continue
                made[output] = os.path.join(folder, f"{len(made)}.o")
                compile_changed(build, output, overlay, made[output])
            if not made:
                raise Broken(f"{mutation.name}: nothing in the build depends on {changed}")
            objects = [made.get(output, build.path_of(output)) for output in own]
            objects += [made[output] for output in library if output in made]
            program = os.path.join(folder, test)
            link(build, test, objects, program)
            status, text = run([program], folder, TEST_SECONDS)
            if status is None or status not in (0, SKIPPED):
                lines = [x for x in text.split("\n") if "ERROR" in x or "fail" in x.lower()]
                return True, f"{test}: {(lines or [text[-200:]])[0].strip()[:160]}"
    return False, f"{', '.join(mutation.tests)} passed all the same"


def check_base(build, mutations, jobs):
    """The tests pass without any error planted; else nothing that follows means anything."""
    tests = sorted({test for mutation in mutations for test in mutation.tests})
    for test in tests:
        build.objects_of(test)
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        results = pool.map(lambda t: run([os.path.join(build.folder, "tests", t)], ROOT,
                                         TEST_SECONDS), tests)
        for test, (status, text) in zip(tests, results):
            if status != 0:
                raise Broken(f"{test} fails without any error planted ({status}):\n{text[-2000:]}")


def chosen(mutations, options):
    mutations = [m for m in mutations if options.only in m.name]
    if options.part > 1:
        random.Random(options.seed).shuffle(mutations)
        mutations = mutations[:-(-len(mutations) // options.part)]
    return mutations


def read_noted(path):
    try:
        with open(path, encoding="utf-8") as file:
            return set(file.read().split())
    except OSError:
        return set()


def attempt(build, mutation, options):
    """True if the error was caught; prints what happened."""
    try:
        caught, what = try_one(build, mutation)
    except Broken as error:
        caught, what = False, str(error)
    print(f"{'caught' if caught else 'MISSED'}  {mutation.name}: {what}", flush=True)
    if caught and options.resume:
        with open(options.resume, "a", encoding="utf-8") as file:
            file.write(mutation.name + "\n")
    return caught


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build", nargs="?")
    parser.add_argument("--part", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    try:
        mutations = chosen(load_list(), options)
        if options.list:
            for mutation in mutations:
                print(f"{mutation.name:32} {', '.join(mutation.tests)}")
            return 0
        if not options.build or not mutations:
            parser.error("name a build folder" if mutations else "no error has that name")
        build = Build(options.build)
        noted = read_noted(options.resume) if options.resume else set()
        left = [m for m in mutations if m.name not in noted]
        if left:
            check_base(build, left, options.jobs)
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            caught = sum(pool.map(lambda m: attempt(build, m, options), left))
    except Broken as error:
        print(error)
        print("mutate-gpu: 0 passed, 1 failed")
        return 1
    passed = caught + len(mutations) - len(left)
    print(f"mutate-gpu: {passed} passed, {len(mutations) - passed} failed")
    return 0 if passed == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
