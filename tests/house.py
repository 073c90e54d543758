#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether the daemon is built as daemon/ROOMS says, and how well: its measures in figures.

    tests/house.py [BUILD]           BUILD is a build folder (build/test)
    tests/house.py --graph [BUILD]   what each room of the daemon calls of the others
    tests/house.py --includes        the rule of includes alone: needs no build

Rules: includes and symbols point down the list of rooms; a header that is not named there stays in
its room; no symbol is defined twice. Each measure has a limit, which a change may only better:
where one is better than its limit by more than a little, the limit is to be lowered.
"""
import argparse
import collections
import json
import os
import re
import subprocess
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
LIBRARIES = ("proto", "kernels", "storage", "client", "daemon")
SHARED = ("daemon/core/core.h", "daemon/core/state.h")  # any room of the core may include them
# What is not yet as the rule says: (rule, file, header or symbol). This may only shrink.
EXCEPTIONS = set()
# name: (limit, whether less is better)
LIMITS = {
    "knot": (13, True),               # of the core: aim: none
    "core_fields": (36, True),        # what a room keeps counts as one
    "session_fields": (60, True),
    "asserts": (0.3, False),        # a function of daemon, storage and client
    "names_not_unique": (0.002, True),  # of the daemon's static functions, a share
    "command_files": (3, True),       # half of the commands are named in no more files than this
    "counter_files": (2, True),       # of half of the counters: the row, and the line that counts
}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def tracked(*endings):
    """Files of the repository with these endings."""
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, check=True).stdout.split("\n")
    return [p for p in listed if p.endswith(endings) and os.path.exists(os.path.join(ROOT, p))]


class Rooms:
    """daemon/ROOMS."""

    def __init__(self):
        lines = (line.split() for line in read("daemon/ROOMS").split("\n"))
        rows = [words for words in lines if words and words[0] != "#"]
        self.order = [os.path.normpath(os.path.join("daemon", words[0])) for words in rows]
        self.doors = {os.path.join(room, name) for room, words in zip(self.order, rows)
                      for name in words[1:]}

    def of(self, path):
        """The room of a file."""
        return os.path.dirname(path)

    def above(self, path, other):
        """Whether the room of `other` stands above that of `path`, or is none."""
        rooms = [self.of(p) for p in (path, other)]
        return rooms[1] not in self.order or self.order.index(rooms[1]) > self.order.index(rooms[0])


class Objects:
    """What the object files of the libraries define and use."""

    def __init__(self, build):
        with open(os.path.join(build, "compile_commands.json"), encoding="utf-8") as file:
            commands = json.load(file)
        self.defined = {library: {} for library in LIBRARIES}
        self.used, self.twice = {}, []
        for command in commands:
            source = os.path.relpath(command["file"], os.path.realpath(ROOT))
            found = re.search(r" -o (\S+\.o)", command["command"])
            if source.split("/")[0] not in LIBRARIES or not found or "_simde" in found[1] or (
                    "/ggml/" in source or source == "storage/remote_none.c"):
                continue
            self.add(source, os.path.join(command["directory"], found[1]))
        self.edges = collections.defaultdict(lambda: collections.defaultdict(set))
        for path, names in self.used.items():
            for name in names:
                there = self.home_of(path, name)
                if there != path:
                    self.edges[path][there].add(name)

    def add(self, source, path):
        """One object file."""
        if not os.path.exists(path):
            return
        listed = subprocess.run(["nm", path], text=True, stdout=subprocess.PIPE, check=True).stdout
        for line in listed.splitlines():
            kind, name = line.split()[-2:]
            if kind == "U":
                self.used.setdefault(source, set()).add(name)
            elif kind in "TDBR":
                self.twice += [(name, source, names[name]) for names in self.defined.values()
                               if names.get(name, source) != source]
                self.defined[source.split("/")[0]][name] = source

    def home_of(self, path, name):
        """Who defines what a file uses: somebody of its library, or else of another; or itself."""
        own = self.defined[path.split("/")[0]]
        others = (names[name] for names in self.defined.values() if name in names)
        return own[name] if name in own else next(others, path)

    def knots(self, folder):
        """Sets of a folder's files that call each other in circles, the largest first."""
        nodes = {p for p in self.used if p.startswith(folder)}
        reach = {}
        for node in nodes:
            seen, todo = set(), [node]
            while todo:
                for other in self.edges[todo.pop()]:
                    if other in nodes and other not in seen:
                        seen.add(other)
                        todo.append(other)
            reach[node] = seen
        knots = {frozenset(o for o in reach[n] if n in reach[o]) for n in nodes if n in reach[n]}
        return sorted(knots, key=len, reverse=True)


def includes(rooms, _objects):
    """Includes that point up the list, or at a header that belongs to its room."""
    for path in tracked(".c", ".h"):
        if not path.startswith("daemon/"):
            continue
        for header in re.findall(r'^#include "(daemon/[^"]+)"', read(path), re.M):
            inside = rooms.of(header) == rooms.of(path)
            shared = header in SHARED and path.startswith("daemon/core/") or path in SHARED
            if not inside and not shared and rooms.above(path, header):
                yield path, header, "lies above it"
            elif not inside and not shared and header not in rooms.doors:
                yield path, header, "belongs to its room alone"


def symbols(rooms, objects):
    """Calls that point up the list."""
    for path, others in sorted(objects.edges.items()):
        for other, names in sorted(others.items()):
            if path.startswith("daemon/") and other.startswith("daemon/") and (
                    rooms.of(path) != rooms.of(other) and rooms.above(path, other)):
                for name in sorted(names):
                    yield path, name, f"is of {other}, above it"


def twice(_rooms, objects):
    """Names that two sources define."""
    for name, path, other in sorted(objects.twice):
        yield path, name, f"is defined in {other} as well"


def bodies(path):
    """Names and bodies of a C file's functions."""
    for found in re.finditer(r"^(\w[^\n;{}()]*?[\s*])(\w+)\(([^;{}]*)\)\n\{\n(.*?)^\}", read(path),
                             re.M | re.S):
        yield found[2], "static" in found[1], found[4]


def structure(path, name):
    """The fields of a structure; a structure within it is one."""
    text = re.sub(r"//.*", "", read(path))
    text = text[text.index(f"struct {name} {{") + len(name) + 9:]
    text = text[:text.index("\n};")]
    while "{" in text:
        text = re.sub(r"\{[^{}]*\}", "", text)
    return sum(1 + re.sub(r"\([^()]*\)", "", part).count(",")
               for part in text.split(";") if part.strip())


def commands(sources):
    """Of each command, how many files name it."""
    text = read("proto/kvq.proto")
    text = text[text.index("oneof command"):]
    found = {}
    for kind, name in re.findall(r"^\s+(\w+) (\w+) = \d+;", text[:text.index("}")], re.M):
        pattern = rf"\b(Kvq__)?{kind}\b|COMMAND_{name.upper()}\b|\bkvq__{name}__"
        found[name] = touched(sources, pattern, kind, f"COMMAND_{name.upper()}", f"kvq__{name}__")
    return found


def touched(sources, pattern, *words):
    """How many files have it. What has it has one of the words, which are found much faster."""
    return sum(any(word in text for word in words) and bool(re.search(pattern, text))
               for text in sources)


def measures(objects):
    """Figures by name."""
    found = {"knot": len((objects.knots("daemon/core/") or [()])[0]),
             "core_fields": structure("daemon/core/state.h", "kvq__core"),
             "session_fields": structure("daemon/core/session/session.h", "kvq__session")}
    functions = asserts = 0
    statics = collections.Counter()
    for path in tracked(".c"):
        if path.split("/")[0] in ("daemon", "storage", "client"):
            for name, static, body in bodies(path):
                functions += 1
                asserts += len(re.findall(r"\bassert\(", body))
                if path.startswith("daemon/") and static:
                    statics[name] += 1
    found["asserts"] = round(asserts / functions, 3)
    found["names_not_unique"] = round(
        sum(n for n in statics.values() if n > 1) / sum(statics.values()), 3)
    sources = [read(p) for p in tracked(".c", ".h", ".proto", ".py") if not p.startswith("tests/")]
    every = sorted(commands(sources).values())
    found["command_files"] = every[len(every) // 2]
    rows = re.findall(r"^    X\((\w+),", read("daemon/core/base/counters.h"), re.M)
    every = sorted(touched(sources, rf"\bX\({name},|(\.|->){name}(\+\+| [-+]?= )", name)
                   for name in rows)
    assert len(rows) > 20 and every[0] > 0
    found["counter_files"] = every[len(every) // 2]
    return found


def graph(rooms, objects):
    """Prints what a room calls of others, and how many names."""
    for room in reversed(rooms.order):
        calls = collections.Counter()
        for path, others in objects.edges.items():
            for other, names in others.items():
                if rooms.of(path) == room != rooms.of(other):
                    calls[rooms.of(other)] += len(names)
        print(f"{room}:", ", ".join(f"{other} {n}" for other, n in calls.most_common()))


def main():
    """Exit status: 0, or 1 if a rule or a limit is broken."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", nargs="?", default="build/test")
    parser.add_argument("--graph", action="store_true")
    parser.add_argument("--includes", action="store_true")
    given = parser.parse_args()
    rooms = Rooms()
    if given.includes:
        bad = [f"{path}: includes: {what} {why}" for path, what, why in includes(rooms, None)]
        print(*bad, sep="\n", end="\n" if bad else "")
        return 1 if bad else 0
    objects = Objects(given.build)
    if given.graph:
        graph(rooms, objects)
        return 0
    failed = passed = 0
    for rule in (includes, symbols, twice):
        name, bad, used = rule.__name__, [], set()
        for path, what, why in rule(rooms, objects):
            if (name, path, what) in EXCEPTIONS:
                used.add((name, path, what))
            else:
                bad.append(f"{path}: {name}: {what} {why}")
        bad += [f"{path}: {name}: {what} is no exception any more: take it from the list"
                for n, path, what in sorted(set(EXCEPTIONS) - used) if n == name]
        print(*bad, sep="\n", end="\n" if bad else "")
        failed, passed = failed + bool(bad), passed + (not bad)
    for name, value in measures(objects).items():
        limit, less = LIMITS[name]
        good = value <= limit if less else value >= limit
        print(f"{name}: {value} (limit {limit})")
        failed, passed = failed + (not good), passed + good
    print(f"house: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
