#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Plant errors into the GPU kernels and the emulator, and expect the tests to catch each one.

    tests/gpu/mutate-gpu.py BUILD                   all errors of tests/gpu/mutate_gpu_list.py
    tests/gpu/mutate-gpu.py BUILD --part 4 --seed 7 a quarter of them, drawn by the seed
    tests/gpu/mutate-gpu.py BUILD --only NAME       those whose name contains NAME
    tests/gpu/mutate-gpu.py --list                  name them
    --jobs N      errors at a time (default: the cores)
    --resume FILE note what was caught in FILE, and do not do it again there
    --learn       find out what sees each error soonest, and write tests/gpu/mutate_gpu_first.txt

BUILD is a build folder of this tree with the emulator and its tests. For each error the files it
touches are copied, changed, compiled with what depends on them, and linked with the rest of the
build; the sources and the build stay as they are. An error is caught if a test that should see it
fails, crashes or does not end.

tests/gpu/mutate_gpu_first.txt names for an error one source and one case of its test that see it:
with the error in that source alone, that case is run first. Only if it passes, everything is
compiled with the error, and the whole test decides. Prints `N passed, M failed`.
"""
import argparse
import collections
import concurrent.futures
import importlib.util
import json
import os
import random
import re
import resource
import shlex
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "../.."))
FIRST = os.path.join(ROOT, "tests", "gpu", "mutate_gpu_first.txt")
ARCHIVES = ("libgpu_kit.a", "libkvtest.a", "libkvq_gpu_device.a", "libkvq_cuda_emu.a",
            "libkvq_gpu.a", "libkvq_emu.a", "libkvq_kernels.a")
OBJECTS = {"test_gpu_classic": "kvq_cuda_classic_emu"}  # linked into a test, besides its own
TEST_SECONDS, COMPILE_SECONDS, SKIPPED = 180, 300, 77
Look = collections.namedtuple("Look", "source case")  # where an error is seen


class Broken(Exception):
    """The list or the build is wrong; nothing about the tests."""


def load_list():
    path = os.path.join(ROOT, "tests", "gpu", "mutate_gpu_list.py")
    spec = importlib.util.spec_from_file_location("mutate_gpu_list", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    names = [m.name for m in module.MUTATIONS]
    if len(set(names)) != len(names):
        raise Broken("tests/gpu/mutate_gpu_list.py: two errors have the same name")
    return module.MUTATIONS


def load_first():
    """{error: Look}; one that is missing or out of date costs time, nothing else."""
    with open(FIRST, encoding="utf-8") as file:
        rows = [line.split() for line in file if line.strip() and not line.startswith("#")]
    return {name: Look(source, case) for name, source, case in rows}


def save_first(first, mutations):
    with open(FIRST, "w", encoding="utf-8") as file:
        file.write("# Written by tests/gpu/mutate-gpu.py --learn: error, source, case of "
                   "its test.\n")
        for m in mutations:
            if m.name in first:
                file.write(" ".join((m.name, *first[m.name])) + "\n")


def cases_of(test):
    with open(os.path.join(ROOT, "tests", "gpu", test + ".cpp"), encoding="utf-8") as file:
        return re.findall(r"cmocka_unit_test\((\w+)\)", file.read())


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

        self.notes, self.lock = {}, threading.Lock()
        if os.path.exists(os.path.join(folder, "build.ninja")):
            self.read_ninja()

    def read_ninja(self):
        """Ninja takes the compiler's notes in, and tells them all at once."""
        status, text = run(["ninja", "-t", "deps"], self.folder, COMPILE_SECONDS)
        if status != 0:
            raise Broken(f"ninja -t deps: {text[-2000:]}")
        for block in text.split("\n\n"):
            lines = block.strip().split("\n")
            output = lines[0].split(": #deps")[0]
            self.notes[output] = {os.path.normpath(os.path.join(self.folder, line.strip()))
                                  for line in lines[1:]}

    def read_by(self, output):
        """What compiling an object reads, by the notes the compiler left."""
        with self.lock:
            if output not in self.notes:
                path = os.path.join(self.commands[output][0], output + ".d")
                try:
                    with open(path, encoding="utf-8") as file:
                        names = file.read().replace("\\\n", " ").split()[1:]
                except OSError as error:
                    raise Broken(f"{output} is not built: {error}") from error
                self.notes[output] = {os.path.normpath(os.path.join(self.commands[output][0], name))
                                      for name in names}
            return self.notes[output]

    def depends(self, output, path):
        return os.path.join(ROOT, path) in self.read_by(output)

    def objects_of(self, test):
        """Objects of one test program: those that CMake compiled for it."""
        targets = [f"/{target}.dir/" for target in (test, OBJECTS.get(test)) if target]
        found = [output for output in self.commands
                 if any(target in "/" + output for target in targets)]
        if not found:
            raise Broken(f"{self.folder} has no test {test}; build it with the emulator")
        return found

    def library_objects(self):
        return [output for output in self.commands if any(
            f"{name}.dir/" in output
            for name in ("kvq_cuda_emu", "kvq_emu", "kvq_gpu", "kvq_kernels"))]

    def path_of(self, output):
        return os.path.join(self.commands[output][0], output)


def run(command, cwd, seconds, environment=None):
    """Exit status and output; None as the status if it did not end in time."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, errors="replace",
                              timeout=seconds, env={**os.environ, **(environment or {})})
    except subprocess.TimeoutExpired:
        return None, f"did not end in {seconds} s"
    except OSError as error:
        raise Broken(f"{command[0]}: {error}; build all tests first") from error
    return done.returncode, done.stdout + done.stderr


def run_test(program, cwd, case="*"):
    """Ends at the first failure."""
    return run([program], cwd, TEST_SECONDS, {"KVQ_TEST_CASES": case, "CMOCKA_TEST_ABORT": "1"})


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


def compile_changed(build, output, overlay, to, level):
    """Compiles an object again, with the overlay's files in front of the tree's."""
    directory, words = build.commands[output]
    source = build.source[output]
    changed = os.path.join(overlay, source)
    place = {output: to}
    if os.path.exists(changed):
        place[os.path.join(ROOT, source)] = changed
    words = [place.get(word, word) for word in words
             if word not in ("-Werror", "-g") and not word.startswith("-O")]
    status, text = run([words[0], level, "-I", overlay, *words[1:]], directory, COMPILE_SECONDS)
    if status != 0:
        raise Broken(f"{source} does not compile with it:\n{text[-2000:]}")


def images(build):
    """The library of cubins, where they are in one (KVQ_PORTABLE), and where it is found."""
    folder = os.path.join(build.folder, "lib")
    there = os.path.exists(os.path.join(folder, "libkvq_gpu_images.so"))
    return [f"-L{folder}", "-lkvq_gpu_images", f"-Wl,-rpath,{folder}"] if there else []


def link(build, test, objects, output):
    archives = [os.path.join(build.folder, "lib", name) for name in ARCHIVES]
    archives = [path for path in archives if os.path.exists(path)]
    plain = ["-lcmocka"] if "plain" not in " ".join(build.commands[build.objects_of(test)[0]][1]) \
        else []
    status, text = run(["c++", *objects, *archives, *archives, *images(build), *plain, "-ldl",
                        "-lm", "-lpthread", "-o", output], ROOT, COMPILE_SECONDS)
    if status != 0:
        raise Broken(f"{test} cannot be linked:\n{text[-2000:]}")


class Planted:
    """One error: its changed files, and the programs made with it."""

    def __init__(self, build, mutation, folder):
        self.build, self.mutation, self.folder = build, mutation, folder
        self.overlay = os.path.join(folder, "tree")
        changed = plant(mutation, self.overlay)
        self.own = build.objects_of(mutation.test)
        own_sources = {build.source[output] for output in self.own}
        library = [output for output in build.library_objects()
                   if build.source[output] not in own_sources]
        self.concerned = [output for output in [*self.own, *library]
                          if any(build.depends(output, path) for path in changed)]
        if not self.concerned:
            raise Broken(f"{mutation.name}: nothing in the build depends on {changed}")

    def sources(self):
        return [self.build.source[output] for output in self.concerned]

    def program(self, source=None):
        """With the error everywhere, or in one source alone, which is compiled fast."""
        made = {}
        for output in self.concerned:
            if source in (None, self.build.source[output]):
                made[output] = os.path.join(self.folder, f"{len(made)}.o")
                compile_changed(self.build, output, self.overlay, made[output],
                                "-O0" if source else "-O1")
        objects = [made.get(output, self.build.path_of(output)) for output in self.own]
        objects += [made[output] for output in made if output not in self.own]
        program = os.path.join(self.folder, self.mutation.test)
        link(self.build, self.mutation.test, objects, program)
        return program

    def seen(self, program, case="*"):
        """What a test says that fails; empty if it passes."""
        status, text = run_test(program, self.folder, case)
        if status in (0, SKIPPED):
            return ""
        lines = [x for x in text.split("\n") if "ERROR" in x or "fail" in x.lower()]
        return f"{self.mutation.test}: {(lines or [text[-200:]])[0].strip()[:160]}"


class Base:
    """The tests without any error pass; else nothing that follows means anything."""

    def __init__(self, build):
        self.build, self.lock, self.locks, self.seconds = build, threading.Lock(), {}, {}

    def check(self, test, case="*"):
        """Seconds that the case takes. Every case is run once."""
        key = test, case
        with self.lock:
            lock = self.locks.setdefault(key, threading.Lock())
        with lock:
            if key not in self.seconds:
                start = time.monotonic()
                status, text = run_test(os.path.join(self.build.folder, "tests", test), ROOT, case)
                if status != 0:
                    raise Broken(f"{test} ({case}) fails without any error planted ({status}):\n"
                                 f"{text[-2000:]}")
                self.seconds[key] = time.monotonic() - start
            return self.seconds[key]


def try_one(build, base, mutation, look):
    """What the test says that catches it; empty if none does."""
    with tempfile.TemporaryDirectory(prefix="kvq-mutate-") as folder:
        planted = Planted(build, mutation, folder)
        if look and look.source in planted.sources() and look.case in cases_of(mutation.test):
            base.check(mutation.test, look.case)
            what = planted.seen(planted.program(look.source), look.case)
            if what:
                return what
        base.check(mutation.test)
        return planted.seen(planted.program())


def learn(build, base, mutation):
    """The Look that sees an error soonest, as far as trying short cases first tells; or None."""
    cases = sorted(cases_of(mutation.test), key=lambda case: base.check(mutation.test, case))
    with tempfile.TemporaryDirectory(prefix="kvq-mutate-") as folder:
        planted = Planted(build, mutation, folder)
        programs = {}
        for case in cases:
            for source in sorted(planted.sources(), key=lambda s: ("d64" not in s, s)):
                if source not in programs:
                    made = planted.program(source)
                    programs[source] = made + str(len(programs))
                    os.rename(made, programs[source])
                if planted.seen(programs[source], case):
                    return Look(source, case)
    return None


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


def attempt(build, base, mutation, look, options):
    """True if the error was caught; prints what happened."""
    try:
        what = try_one(build, base, mutation, look)
        caught = bool(what)
        what = what or f"{mutation.test} passed all the same"
    except Broken as error:
        caught, what = False, str(error)
    print(f"{'caught' if caught else 'MISSED'}  {mutation.name}: {what}", flush=True)
    if caught and options.resume:
        with open(options.resume, "a", encoding="utf-8") as file:
            file.write(mutation.name + "\n")
    return caught


def learn_all(build, mutations, every, options):
    """Renews the lines of some errors. Returns how many were seen."""
    first, base = load_first(), Base(build)

    def one(mutation):
        look, why = None, "is not seen"
        try:
            look = learn(build, base, mutation)
        except Broken as error:
            why = str(error)
        print(mutation.name, *(look or (why,)), flush=True)
        return look
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        found = dict(zip((m.name for m in mutations), pool.map(one, mutations)))
    first.update({name: look for name, look in found.items() if look})
    save_first(first, every)
    return sum(look is not None for look in found.values())


def plant_all(build, mutations, options):
    """Returns how many were caught."""
    noted = read_noted(options.resume) if options.resume else set()
    left = [m for m in mutations if m.name not in noted]
    first, base = load_first(), Base(build)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        caught = sum(pool.map(lambda m: attempt(build, base, m, first.get(m.name), options), left))
    return caught + len(mutations) - len(left)


def main():
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("build", nargs="?")
    parser.add_argument("--part", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--learn", action="store_true")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    try:
        every = load_list()
        mutations = chosen(every, options)
        if options.list:
            for mutation in mutations:
                print(f"{mutation.name:32} {mutation.test}")
            return 0
        if not options.build or not mutations:
            parser.error("name a build folder" if mutations else "no error has that name")
        build = Build(options.build)
        passed = (learn_all(build, mutations, every, options) if options.learn
                  else plant_all(build, mutations, options))
    except Broken as error:
        print(error)
        print("mutate-gpu: 0 passed, 1 failed")
        return 1
    print(f"mutate-gpu: {passed} passed, {len(mutations) - passed} failed")
    return 0 if passed == len(mutations) else 1


if __name__ == "__main__":
    sys.exit(main())
