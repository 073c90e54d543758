#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Whether documentation and programs say the same.

    tests/docs.py BUILD

Runs the programs of a build folder with --help and compares with manual pages, the configuration
file that is installed, and the tables of docs/. Prints `N passed, M failed`.
"""
import json
import os
import re
import subprocess
import sys

import tidy

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
PAGES = {"kvqctl": "kvqctl.1", "kvqd": "kvqd.8", "kvq-run": "kvq-run.1", "kvq-bench": "kvq-bench.1",
         "kvq-codebook": "kvq-codebook.1"}
SOURCE_PAGES = r"docs/(rooms|decisions)/|docs/(architecture|glossary|walk)\.md|CONTRIBUTING\.md"
# Where the version stands besides CMakeLists.txt.
VERSIONS = {
    "CHANGELOG.md": r"(?m)\A(?:(?!## ).*\n)*## ([\d.]+)",
    "client/kvq/error.h": None,
    "client/python/pyproject.toml": r'(?m)^version = "(.*)"',
    "docs/engines.md": r"kvq-([\d.]+)-py3",
    "docs/eval.md": r"kvq-([\d.]+)-py3",
    "packaging/deb/libkvq0/shlibs": r"libkvq0 \(>= ([\d.]+)\)",
    "packaging/deb/libkvq0/symbols": r"libkvq0 \(>= ([\d.]+)\)",
    **{f"docs/man/{page}": r'"kvq ([\d.]+)"' for page in PAGES.values()}}
# What has a version of its own, where that stands, and which pages name it.
FORMATS = {"protocol": ("proto/shm.h", "KVQ_PROTOCOL_MAX"),
           "layout of packed blocks": ("kernels/layout.h", "KVQ_LAYOUT_ID"),
           "catalog of the store": ("storage/catalog.h", "KVQ_CATALOG_VERSION"),
           "records": ("storage/segment.h", "KVQ_RECORD_VERSION"),
           "what is saved of a session": ("daemon/store/saved_wire.h", "KVQ__SAVED_NEWEST")}
FORMAT_LISTS = {
    "docs/upgrading.md": "".join(rf"\| {name}[^|]*\| (\d+) \|.*\n" for name in FORMATS),
    "docs/protocol.md": r"This is protocol (\d+), block layout (\d+)\.",
    "CHANGELOG.md": r"Protocol (\d+), block layout (\d+), catalog of the store (\d+), "
                    r"records (\d+), saved sessions (\d+)\."}
WITH_ENGINE = ("tools/bench-transformers-layer.py",)  # imports PyTorch before all else
FOREIGN = ("uv.h", "zmq.h")  # headers of others
WRITTEN = ("docs/quality/small-model.md",)  # by a tool of the sources
COMMANDS = {
    "kvq-run": ["generate", "perplexity", "logits"],
    "kvq-bench": ["attend", "pack", "ring"],
}


def read(*parts):
    with open(os.path.join(ROOT, *parts), encoding="utf-8") as file:
        return file.read()


def options_in(text):
    """Long options, however a manual page escapes them."""
    return set(re.findall(r"(?<![\w-])--([a-z][a-z0-9-]+)", text.replace("\\-", "-")))


def help_of(build, program):
    """What the program prints for --help, and for --help of each of its commands."""
    path = os.path.join(build, "bin", program)
    texts = []
    for words in [[], *([c] for c in COMMANDS.get(program, []))]:
        done = subprocess.run([path, *words, "--help"], capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise ValueError(f"{program} {' '.join(words)} --help ended with {done.returncode}")
        texts.append(done.stdout)
    return "\n".join(texts)


def version_of_cmake():
    return re.search(r"project\(kvq VERSION ([\d.]+)", read("CMakeLists.txt")).group(1)


def check_versions():
    """Every place that names the version names the one of CMakeLists.txt."""
    version = version_of_cmake()
    for path, pattern in VERSIONS.items():
        text = read(path)
        found = re.findall(pattern, text) if pattern else \
            [".".join(re.findall(r"define KVQ_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)", text))]
        if set(found) != {version}:
            yield f"{path} names version {', '.join(found) or 'none'}; CMakeLists.txt is {version}"


def check_packages():
    """Debian's packages take libkvq0 of this minor version alone."""
    major, minor, _ = map(int, version_of_cmake().split("."))
    for path in ("packaging/deb/libkvq0/shlibs", "packaging/deb/libkvq0/symbols"):
        before = re.findall(r"libkvq0 \(<< ([\d.]+)~\)", read(path))
        if before != [f"{major}.{minor + 1}"]:
            yield f"{path} allows libkvq0 before {before}; it is {major}.{minor + 1}"


def check_formats():
    """Pages name the versions that the code has; of the changelog's the newest."""
    now = [re.search(rf"{name} = (\d+)", read(path))[1] for path, name in FORMATS.values()]
    for path, pattern in FORMAT_LISTS.items():
        found = re.search(pattern, read(path))
        if not found or list(found.groups()) != now[:len(found.groups())]:
            yield f"{path} has {found and found.groups()}; {', '.join(FORMATS)} are {now}"


def check_page(build, program):
    """A manual page names the options that --help names, and no others."""
    shown = options_in(help_of(build, program)) - {"help", "version"}
    page = options_in(read("docs", "man", PAGES[program])) - {"help", "version"}
    if shown - page:
        yield f"docs/man/{PAGES[program]} lacks --{', --'.join(sorted(shown - page))}"
    if page - shown:
        yield f"{program} --help lacks --{', --'.join(sorted(page - shown))}"


def complaints_about(path):
    """What groff and mandoc, where they are installed, say against a manual page."""
    for command in (["groff", "-man", "-Tutf8", "-ww", path],
                    ["mandoc", "-Tlint", "-Werror", path]):
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        except FileNotFoundError:
            continue
        if done.stderr or command[0] == "mandoc" and done.returncode:
            yield f"{os.path.basename(path)}: {(done.stderr or done.stdout).splitlines()[0]}"


def check_exits(build):
    """kvqctl(1) has a paragraph for each exit status of --help, and no other."""
    shown = re.search(r"^Exit status:\n((?:  \d  .*\n)+)", help_of(build, "kvqctl"), re.M)
    shown = set(re.findall(r"^  (\d)  ", shown[1], re.M)) if shown else set()
    section = read("docs", "man", "kvqctl.1").partition(".SH EXIT STATUS\n")[2].partition(".SH")[0]
    page = set(re.findall(r"^\.B (\d)$", section, re.M))
    if not shown or shown != page:
        yield f"kvqctl.1 has exit statuses {sorted(page)}, kvqctl --help {sorted(shown)}"


def check_page_renders(program):
    """groff and mandoc, where they are installed, have nothing to complain about."""
    yield from complaints_about(os.path.join(ROOT, "docs", "man", PAGES[program]))


def public_headers():
    """kvq.h and the headers that it includes, as one text."""
    folder = os.path.join(ROOT, "client", "kvq")
    return read("client", "kvq.h") + "".join(
        read("client", "kvq", name) for name in sorted(os.listdir(folder)))


def check_library_pages(build):
    """Each public function has a manual page, which says of it what its header says."""
    folder = os.path.join(build, "man3")
    topics = {f"kvq_{name[:-2]}": read("client", "kvq", name)
              for name in os.listdir(os.path.join(ROOT, "client", "kvq"))}
    functions = set(re.findall(r"\b(kvq_\w+);", read("client", "kvq.map")))
    if set(os.listdir(folder)) != {f"{name}.3" for name in {"kvq", *topics, *functions}}:
        yield "man3/ has other pages than there are headers and functions"
    for name, header in {**topics, "kvq": read("client", "kvq.h").split("#ifndef")[0]}.items():
        page = read(folder, f"{name}.3")
        for line in re.findall(r"^(?:/\*| \*) (\S.*?)(?: \*/)?$", header, re.M)[1:]:
            if line.replace("\\", "\\\\") not in page and not line.startswith(("kvq", "----")):
                yield f"{name}.3 lacks a line of its header: {line}"
        for function in re.findall(r"^KVQ_API .*?\b(kvq_\w+)\(", header, re.M):
            there = read(folder, f"{function}.3")
            if function != name and there != f".so man3/{name}.3\n":
                yield f"{function}.3 does not lead to {name}.3"
            if not re.search(rf"^\.SS .*\b{function}\(\)", page, re.M):
                yield f"{name}.3 does not describe {function}"
        yield from complaints_about(os.path.join(folder, f"{name}.3"))


def check_statuses():
    """Every code of proto/status.h stands in an installed header."""
    codes = re.findall(r"X\((E_\w+), (-\d+)", read("proto", "status.h"))
    header = public_headers()
    if len(codes) < 10:
        yield "no codes found in proto/status.h; has its shape changed?"
    for name, value in codes:
        if not re.search(rf"KVQ_{name} = {value}\b", header):
            yield f"client/kvq/error.h lacks KVQ_{name} = {value}"


def check_doc_names():
    """Names of the library that documents use exist in its headers."""
    header = public_headers()
    for document in ("README.md", "docs/writing-a-client.md", "docs/operations.md",
                     "docs/architecture.md"):
        names = re.findall(r"\b(kvq_[a-z]\w*|KVQ_[A-Z]\w*)\b", read(document))
        variables = {"KVQ_RUNTIME_DIR", "KVQ_CONNECT", "KVQ_KEY", "KVQ_CPU_MASK", "KVQ_FULL",
                     "KVQ_MODEL"}
        for name in sorted(set(names) - variables):
            if not re.search(rf"\b{name}\b", header):
                yield f"{document} speaks of {name}, which kvq.h does not have"


def tracked():
    """The files that git has, and those that it would take, by path."""
    done = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT,
                          capture_output=True, text=True)
    return [p for p in done.stdout.split("\n") if os.path.isfile(os.path.join(ROOT, p))]


def prose(path):
    """A page without its blocks of code and diagrams."""
    return re.sub(r"```.*?```", "", read(path), flags=re.S)


def check_source_names():
    """Names and files that pages about the code speak of exist."""
    paths = tracked()
    if "proto/kvq.proto" not in paths:
        return  # the sources are no clone
    sources = [p for p in paths if p.endswith((".c", ".h", ".cpp", ".cu", ".proto", ".py", ".txt"))]
    text = "\n".join(read(p) for p in sources)
    names = set(re.findall(r"\w+", text))
    files = {os.path.basename(p) for p in paths}
    for page in sorted(p for p in paths if re.match(SOURCE_PAGES, p)):
        drawn = re.findall(r"\bkvq_\w+", " ".join(re.findall(r"```.*?```", read(page), re.S)))
        for span in re.findall(r"`([^`\n]+)`", prose(page)) + drawn:
            known = re.findall(r"(?:kvq_|KVQ_|test_|e2e_|fuzz_|sim_)\w+", span)
            known += re.findall(r"^[a-z]\w*_\w+$", span)  # of one file, or a field
            for name in sorted(set(known) - names):
                if f"{name}.py" not in files and f"{name}.c" not in files and "*" not in span:
                    yield f"{page} speaks of {name}, which no source has"
            if not re.fullmatch(r"[\w./-]+\.(c|h|cu|cpp|py|sh|proto|txt|map|md)", span):
                continue
            if not any(f"/{p}".endswith(f"/{span}") for p in paths) and span not in FOREIGN:
                yield f"{page} speaks of {span}, which is not there"


def anchor_of(heading):
    """How GitHub names a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "").strip())
    return re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")


def check_anchors():
    """Links to a heading of a page lead to one."""
    pages = [p for p in tracked() if p.endswith(".md")]
    headings = {p: {anchor_of(h) for h in re.findall(r"^#+ (.*)$", prose(p), re.M)} for p in pages}
    for page in pages:
        for target in re.findall(r"\]\(([^)\s:]*#[^)\s]+)\)", prose(page)):
            path, _, anchor = target.partition("#")
            there = os.path.normpath(os.path.join(os.path.dirname(page), path)) if path else page
            if there in headings and anchor not in headings[there]:
                yield f"{page}: no heading #{anchor} in {there}"


def check_sections():
    """Sections of installed pages to which texts send people are there."""
    for path in tracked():
        if not path.startswith("packaging/"):
            continue
        for page, section in re.findall(r'(\w+\.md) in share/doc/kvqd, ([^"]+)"', read(path)):
            if not re.search(rf"^#+ {re.escape(section)}$", read("docs", page), re.M):
                yield f"{path}: docs/{page} has no section '{section}'"


def check_installed_pages():
    """What is installed sends people to pages that are installed."""
    pages = re.search(r"KVQ_PAGES ([^)]*)", read("cmake/install.cmake")).group(1).split()
    for path in tracked():
        if not re.match(r"(tools/kvq|kernels|daemon|docs/man|packaging).*\.([c1-8]|yml)$", path):
            continue
        text = re.sub(r"//.*", "", read(path))
        for page in re.findall(r"(\w+\.md) in\s+(?:\.IR )?share/doc/kvqd", text):
            if page not in pages:
                yield f"{path}: {page} is not among the pages that are installed"
        for page in re.findall(r'"[^"\n]*\b(docs/[\w/-]+\.md)', text):
            if page not in WRITTEN:
                yield f"{path}: {page} is where nobody has the sources; name PAGE in share/doc/kvqd"


def check_tools():
    """Programs of tools/ explain themselves without a library, an engine or a daemon."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("KVQ_")}
    for path in tracked():
        if re.fullmatch(r"tools/[\w-]+\.py", path) and path not in WITH_ENGINE:
            done = subprocess.run([sys.executable, os.path.join(ROOT, path), "--help"], env=env,
                                  stdin=subprocess.DEVNULL, capture_output=True, text=True,
                                  timeout=60)
            if done.returncode or "tools/" not in done.stdout and "usage" not in done.stdout:
                yield f"{path} --help ended with {done.returncode}: {done.stderr[-200:]}"


def check_layers():
    """CONTRIBUTING.md says of each folder what tests/tidy.py lets it include."""
    told = dict(re.findall(r"^\| `(\w+)/` \| (.*) \|$", read("CONTRIBUTING.md"), re.M))
    for folder, arrows in tidy.ARROWS.items():
        want = "everything" if folder == "tests" else ", ".join(f"`{a}/`" for a in sorted(
            arrows, key=list(tidy.ARROWS).index)) or "itself"
        if told.get(folder) != want:
            yield f"CONTRIBUTING.md says {told.get(folder)} of {folder}/, tests/tidy.py {want}"


def print_config(build, *arguments):
    """The options that kvqd would run with, a line for each: the default ones of the service."""
    outside = {n: v for n, v in os.environ.items()
               if n != "XDG_RUNTIME_DIR" and not n.startswith("KVQD_")}
    done = subprocess.run([os.path.join(build, "bin", "kvqd"), "--print-config", *arguments],
                          capture_output=True, text=True, timeout=20, env=outside)
    return set(re.findall(r"^\w+ = .*$", done.stdout.split("\n[")[0], re.M))


def check_config(build):
    """Every option in the installed configuration file, its comment mark removed, is taken, and
    stands there with its default."""
    lines = read("packaging", "kvqd.conf").split("\n")
    text = "\n".join(re.sub(r"^# (?=\w+ =|\[)", "", line) for line in lines)
    path = os.path.join(build, "kvqd-uncommented.conf")
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
    known = options_in(help_of(build, "kvqd"))
    done = subprocess.run([os.path.join(build, "bin", "kvqd"), "--config", path, "--print-config"],
                          capture_output=True, text=True, timeout=20)
    if done.returncode:
        yield f"kvqd refuses packaging/kvqd.conf uncommented: {done.stderr.strip()}"
    default = print_config(build)
    for line in default - print_config(build, "--config", path):
        yield f"packaging/kvqd.conf gives another default than kvqd has: {line}"
    flags_only = {"config", "ready-fd", "lifetime-fd", "print-config", "foreground", "help",
                  "version"}
    inside = {name.replace("_", "-") for name in re.findall(r"^# (\w+) =", "\n".join(lines), re.M)}
    for name in sorted(known - flags_only - inside):
        yield f"packaging/kvqd.conf lacks {name.replace('-', '_')}"


def check_tables():
    """Pages have a row for each row of the tables of counters and of events, with its words."""
    for header, macro, page in (("counters.h", "COUNTER", "operations.md"),
                                ("event_kinds.h", "EVENT", "protocol.md")):
        text = read("daemon", "core", "base", header).replace("\\\n", " ")
        rows = re.findall(r'X\((?:[A-Z_]+, )?(\w+), \w+,\s*"([^"]+)"\)', text)
        told = dict(re.findall(r"^\| `(\w+)` \|(?: [^|]+ \|)?? ([^|]+) \|$", read("docs", page),
                               re.M))
        if not rows:
            yield f"{header} has no rows of KVQ__{macro}_TABLE"
        for name, what in rows:
            if told.get(name) != what:
                yield f"docs/{page} says {told.get(name)!r} of {name}, {header} {what!r}"
    kinds = set(re.findall(r"^    X\([A-Z_]+, (\w+), ",
                           read("daemon", "core", "base", "event_kinds.h"), re.M))
    table = re.search(r"kinds\[\] = \{(.*?)\}", read("tools", "kvqctl", "events.c"), re.S)
    for name in sorted(kinds ^ set(re.findall(r'"(\w+)"', table[1]))):
        yield f"kinds[] of tools/kvqctl/events.c and event_kinds.h do not agree about {name}"
    counters = set(re.findall(r"^    X\((\w+), ",
                              read("daemon", "core", "base", "counters.h"), re.M))
    for source in ("daemon_commands.c", "top.c"):
        asked = re.findall(r'kvq__ctl_counter\(s, "(\w+)"\)', read("tools", "kvqctl", source))
        yield from (f"{source} asks for {name}, which is no counter" for name in asked
                    if name not in counters)


def check_sizing(build):
    """What docs/sizing.md shows of kvqctl size is what that says, table included."""
    def size(arguments):
        done = subprocess.run([os.path.join(build, "bin", "kvqctl"), *arguments.split()],
                              capture_output=True, text=True, timeout=20, check=True)
        return done.stdout
    page = read("docs", "sizing.md")
    shown = re.findall(r"^    \$ kvqctl (.*)\n((?:    .*\n)+)", page, re.M)
    table = re.findall(r"^\| ([\d,]+|tokens) \| (.*) \|$", page, re.M)
    if len(shown) < 2 or len(table) < 4:
        yield "docs/sizing.md has no examples, or no table; has its shape changed?"
    for arguments, output in shown:
        if size(arguments) != re.sub(r"^    ", "", output, flags=re.M):
            yield f"docs/sizing.md shows another output of kvqctl {arguments}"
    formats = re.findall(r"`([^`]+)`", table[0][1])
    for tokens, cells in table[1:]:
        for name, cell in zip(formats, cells.split(" | ")):
            answer = json.loads(size(f"size --json --layers 32 --kv-heads 8 --head-dim 128 "
                                     f"--format {name} --tokens {tokens.replace(',', '')}"))
            if f"{answer['total_bytes'] / 2 ** 20:,.0f}" != cell:
                yield f"docs/sizing.md says {cell} MiB of {tokens} tokens in {name}"


LITERAL = r'f?"((?:[^"\\\n]|\\.)*)"'


def texts_of_programs():
    """What programs and libraries can say: each literal, joined with those beside it."""
    texts = []
    for path in tracked():
        if re.match(r"(daemon|client|storage|kernels|proto|tools/kvqctl)/.*\.(c|h|py)$", path):
            for run in re.finditer(rf"{LITERAL}(?:(?:\s|\\\n|[A-Z]\w+)*{LITERAL})*", read(path)):
                parts = re.findall(LITERAL, run[0])
                texts.append("".join(parts).replace('\\"', '"'))
    return texts


def check_troubleshooting():
    """Texts that docs/troubleshooting.md quotes are those that programs say, in its first column;
    what `..` stands for is anything. Levels of events are warn or error."""
    rows = re.findall(r"^\| (`.*?) \|", read("docs", "troubleshooting.md"), re.M)
    quoted = [q for row in rows for q in re.findall(r"`([^`]+)`", row)]
    told = [q for q in quoted if not re.match(r"event=|complete=", q)]
    if len(told) < 40:
        yield f"docs/troubleshooting.md explains {len(told)} texts; has its shape changed?"
    texts = texts_of_programs()
    for quote in told:
        parts = ".*".join(re.escape(part) for part in quote.split(".."))
        if not any(re.search(parts, text) for text in texts):
            yield f"docs/troubleshooting.md quotes what no program says: {quote}"
    sources = "".join(read(p) for p in tracked() if re.match(r"daemon/.*\.[ch]$", p))
    for name in (q[6:] for q in quoted if q.startswith("event=")):
        if not re.search(rf'(WARN|ERROR),\s*"{name}"|, {name}, WARN,', sources):
            yield f"docs/troubleshooting.md speaks of event={name}, which is no warning"


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    build = sys.argv[1]
    checks = {f"{p}: manual page and --help": (check_page, build, p) for p in PAGES}
    checks.update({f"{p}: manual page renders": (check_page_renders, p) for p in PAGES})
    checks["manual pages of the library"] = (check_library_pages, build)
    checks["versions"] = (check_versions,)
    checks["versions of packages"] = (check_packages,)
    checks["versions of formats"] = (check_formats,)
    checks["status codes"] = (check_statuses,)
    checks["names in documents"] = (check_doc_names,)
    checks["names in pages about the code"] = (check_source_names,)
    checks["links to headings"] = (check_anchors,)
    checks["sections that alerts name"] = (check_sections,)
    checks["pages that are installed"] = (check_installed_pages,)
    checks["counters and events"] = (check_tables,)
    checks["folders and their layers"] = (check_layers,)
    checks["texts of errors"] = (check_troubleshooting,)
    checks["sizing"] = (check_sizing, build)
    checks["helps of tools"] = (check_tools,)
    checks["exit statuses"] = (check_exits, build)
    checks["configuration file"] = (check_config, build)
    passed = failed = 0
    for name, (check, *arguments) in checks.items():
        try:
            problems = list(check(*arguments))
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            problems = [str(error)]
        for problem in problems:
            print(f"{name}: {problem}")
        passed += not problems
        failed += bool(problems)
    print(f"docs: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
