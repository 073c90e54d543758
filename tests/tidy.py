#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""House rules that a script can see, checked over the tree.

    tests/tidy.py                  check the tree this file lies in
    tests/tidy.py --only lines     one rule
    tests/tidy.py --symbols BUILD  also check what the libraries of a build folder export
    tests/tidy.py --self-test      plant a violation of every rule and see each one caught

Prints one line a finding, `path:line: rule: what`, then `N passed, M failed` over the rules.
Standard library only.
"""
import argparse
import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile

MAX_FUNCTION, MAX_FILE, MAX_COLUMNS = 70, 800, 100
SKIPPED_FOLDERS = {".git", "build", "__pycache__", ".venv", ".ipynb_checkpoints", "corpus"}

# Folders are layers: what a file of the left folder may include besides its own folder.
ARROWS = {
    "proto": {"kernels"},
    "kernels": set(),
    "storage": {"proto", "kernels"},
    "client": {"proto", "kernels"},
    "daemon": {"proto", "kernels", "storage"},
    "tools": {"proto", "kernels", "storage", "client"},
    "tests": {"proto", "kernels", "storage", "client", "daemon", "tools"},
}

# Third-party headers and the places that may know them (a folder ends in a slash).
CONFINED = {
    r"zmq(_utils)?\.h": ("daemon/control/control.c", "daemon/control/keys.c",
                            "tools/kvqctl/transport.c", "tests/"),
    r"uv\.h": ("daemon/",),
    r"protobuf-c/.*": ("proto/",),
    r"ini\.h": ("daemon/", "storage/remote.c", "proto/key_file.c", "tests/"),
    r"curl/.*": ("storage/remote_internal.h", "tests/"),
    r"expat\.h": ("storage/remote_reply.c",),
    r"openssl/.*": ("storage/remote_parts.c",),
    r"cJSON\.h|cjson/cJSON\.h": ("proto/json.h", "tools/", "tests/"),
    r"microhttpd\.h": ("daemon/http/internal.h",),
    r"cblas\.h|cblas-openblas\.h|openblas.*\.h|lapacke?\.h": ("tools/kvq-run/", "tests/"),
    r"cmocka\.h": ("tests/",),
    r"sqlite3\.h": ("storage/", "tests/"),
    r"sodium.*\.h": ("daemon/", "proto/key_file.c"),
    r"(imm|x86|[a-z]mm)intrin\.h|cpuid\.h": ("kernels/", "proto/"),
    r"cuda.*\.h": ("kernels/cuda/",),
}

# Calls that nobody makes, and what to use instead.
BANNED = {
    "strcpy": "snprintf or memcpy with a known length",
    "strcat": "snprintf",
    "sprintf": "snprintf",
    "vsprintf": "vsnprintf",
    "gets": "fgets",
    "alloca": "a fixed array or the arena",
    "atoi": "strtol with its end and errno checked",
    "atol": "strtol with its end and errno checked",
    "atof": "strtod with its end and errno checked",
    "strtok": "strtok_r or strcspn",
    "system": "posix_spawn with an argument vector",
}

# Files of others that comments speak of.
FOREIGN_FILES = {"llama.cpp", "cuda.h"}

# Libraries hand codes and texts to their caller. They do not print and do not end the process.
QUIET_FOLDERS = ("proto/", "kernels/", "client/", "storage/", "daemon/")
LOUD = ("printf", "fprintf", "vprintf", "vfprintf", "dprintf", "puts", "fputs", "putchar", "perror",
        "err", "errx", "warn", "warnx", "exit", "_exit", "quick_exit")
LOUD_ALLOWED = {
    "daemon/main.c": "the program's edge: help, start-up errors and the exit status",
    "daemon/log/log.c": "writing the log is its purpose",
    "daemon/http/ask.c": "it writes answers into memory",
    "daemon/http/events.c": "it writes answers into memory",
    "daemon/http/http.c": "it writes answers into memory",
    "daemon/http/metrics.c": "it writes answers into memory",
    "client/ggml/daemon.c": "llama.cpp gives backends no place for a text",
    "storage/remote_index.c": "it writes into memory",
    "storage/remote_upload.c": "it writes into memory",
}

# Atomics live in proto/. Elsewhere each file gives its reason here.
ATOMICS_ALLOWED = {
    "kernels/pool.c": "the worker pool's hand-over of work, which knows no process and no proto/",
    **{f"tools/kvq-run/{name}": "the flag that a signal handler sets"
       for name in ("commands.h", "main.c", "generate.c", "perplexity.c")},
}

# Words that have no place in the tree, with the reason. They speak of how the project is made or
# of the machine it was made on, or promise something that is not done.
UNWANTED = (
    (r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b", "unfinished work; finish it or write an issue"),
    (r"\b[Aa]gents?\b|\bClau" r"de\b|\bChat" r"GPT\b|\bCop" r"ilot\b", "how the text was made"),
    (r"\b[Ii]ssue #?\d+\b", "number of a tracker that readers do not have"),
    (r"/wor" r"k/(main|shared|\.)|/tmp/k" r"vq/", "a path of one machine"),
    (r"\bshared/(design|style|methods|cpu|gpu|ipc|peers|prototypes)\b", "a path outside the tree"),
    (r"\b(deb\.debian\.org|py" r"pi\.org|pythonhosted\.org)\b", "the host of a package registry"),
)

C_ENDINGS = (".c", ".h", ".cpp", ".cu")
TEXT_ENDINGS = (*C_ENDINGS, ".py", ".sh", ".cmake", ".proto", ".map", ".md", ".in", ".toml", ".1",
                ".8", ".json", ".yml")
CODE_ENDINGS = (*C_ENDINGS, ".py", ".sh", ".cmake", ".proto")
DOUBLE_QUOTED = r'"(?:\\.|[^"\\\n])*"'
C_NOISE = re.compile(r"//[^\n]*|/\*.*?\*/|" + DOUBLE_QUOTED + r"|'(?:\\.|[^'\\\n])*'", re.S)
C_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|(" + DOUBLE_QUOTED + ")", re.S)


class Tree:
    """The files below a folder, read once, by path relative to it."""

    def __init__(self, root):
        self.root = root
        self.paths = []
        for folder, folders, names in os.walk(root):
            folders[:] = sorted(f for f in folders if f not in SKIPPED_FOLDERS)
            here = os.path.relpath(folder, root)
            self.paths += [os.path.normpath(os.path.join(here, n)) for n in sorted(names)]

    @functools.lru_cache(maxsize=None)
    def text(self, path):
        """The file as text; empty for what is not UTF-8."""
        try:
            with open(os.path.join(self.root, path), encoding="utf-8") as file:
                return file.read()
        except (UnicodeDecodeError, OSError):
            return ""

    @functools.lru_cache(maxsize=None)
    def code(self, path):
        """C source without comments and literals, its lines where they were."""
        return C_NOISE.sub(lambda m: "\n" * m[0].count("\n"), self.text(path))

    def is_script(self, path):
        return path.endswith((".py", ".sh")) or self.text(path).startswith("#!")

    def is_code(self, path):
        return (path.endswith(CODE_ENDINGS) or os.path.basename(path) == "CMakeLists.txt"
                or self.is_script(path))

    def is_shell(self, path):
        first = self.text(path).split("\n", 1)[0]
        return path.endswith(".sh") or (first.startswith("#!") and first.endswith("sh"))

    def having(self, *endings):
        return [p for p in self.paths if p.endswith(endings)]


def line_of(text, position):
    return text.count("\n", 0, position) + 1


def bodies(code):
    """Yields the first and last line of what stands between braces on lines of their own, at any
    depth: bodies of functions, member functions included, since other braces end a line."""
    begun = []  # indentation, line, whether it is a function's
    before = ""
    for number, line in enumerate(code.split("\n"), 1):
        opened, closed = re.match(r"( *)\{\s*$", line), re.match(r"( *)\}", line)
        if opened:
            begun.append((opened[1], number, not re.match(r"\s*(namespace|extern)\b", before)))
        elif closed and begun and begun[-1][0] == closed[1]:
            _, start, function = begun.pop()
            if function:
                yield start, number
        before = line if line.strip() else before


def check_functions(tree):
    """Functions are at most 70 lines, counted from brace to brace."""
    for path in tree.having(*C_ENDINGS):
        for start, end in bodies(tree.code(path)):
            if end - start + 1 > MAX_FUNCTION:
                yield path, start, f"function of {end - start + 1} lines, {MAX_FUNCTION} allowed"


def check_files(tree):
    """Files of code are at most 800 lines."""
    for path in filter(tree.is_code, tree.paths):
        count = tree.text(path).count("\n")
        if count > MAX_FILE:
            yield path, count, f"{count} lines, {MAX_FILE} allowed"


def check_lines(tree):
    """Lines of code are at most 100 columns, without tabs and trailing blanks."""
    for path in filter(tree.is_code, tree.paths):
        for number, line in enumerate(tree.text(path).split("\n"), 1):
            if len(line) > MAX_COLUMNS:
                yield path, number, f"{len(line)} columns, {MAX_COLUMNS} allowed"
            if line != line.rstrip():
                yield path, number, "trailing blanks"
            if "\t" in line and path.endswith((*C_ENDINGS, ".py", ".proto")):
                yield path, number, "a tab"


def check_prose(tree):
    """Prose in Markdown is at most 100 columns. Tables, code and headings may be wider, and so may
    what a program writes."""
    for path in tree.having(".md"):
        text = tree.text(path)
        if "; do not edit." in text[:400]:
            continue
        written = r"^ *```.*?^ *```|<!-- (\w+): begin -->.*?<!-- \1: end -->"
        text = re.sub(written, lambda m: "\n" * m[0].count("\n"), text, flags=re.M | re.S)
        for number, line in enumerate(text.split("\n"), 1):
            begun = re.match(r" {0,3}(?:[-*] |\d+\. )?(?![ |#])", line)
            if begun and " " in line[begun.end():MAX_COLUMNS + 1] and len(line) > MAX_COLUMNS:
                yield path, number, f"{len(line)} columns of prose, {MAX_COLUMNS} allowed"


def check_spdx(tree):
    """Code starts with its licence and then says what the file is for."""
    for path in filter(tree.is_code, tree.paths):
        lines = [x for x in tree.text(path).split("\n") if not x.startswith("#!")]
        mark = "//" if path.endswith((*C_ENDINGS, ".proto")) else "#"
        if is_installed(path):
            mark = "/*"  # it may be included by C of any age
        if not lines[0].startswith(mark + " SPDX-License-Identifier: Apache-2.0"):
            yield path, 1, "the first line is not the SPDX licence line"
        elif len(lines) < 2 or not lines[1].startswith((mark, '"""', "/*", " *")):
            yield path, 2, "no comment says what the file is for"


def is_installed(path):
    """Whether it is a header of libkvq's users, who may have any C and C++, and none of ours."""
    return path == "client/kvq.h" or path.startswith("client/kvq/")


def beside(path, header):
    """What an installed header includes: the others, by where they lie from its own folder."""
    return os.path.normpath(os.path.join(os.path.dirname(path), header))


def includes_of(tree, path):
    """Yields line, `<` or `"`, and the header, for each include outside comments."""
    text = C_COMMENT.sub(lambda m: m[1] or "\n" * m[0].count("\n"), tree.text(path))
    for match in re.finditer(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', text, re.M):
        yield line_of(text, match.start(2)), match[1], match[2]


def check_arrows(tree):
    """Includes are rooted at the repository and follow the layers."""
    for path in tree.having(*C_ENDINGS):
        own = path.split("/")[0]
        for line, mark, header in includes_of(tree, path):
            if mark == "<":
                continue
            if is_installed(path):
                if not is_installed(beside(path, header)):
                    yield path, line, f'an installed header includes "{header}"'
            elif header.endswith(".pb-c.h") and own == "proto":
                continue
            elif "/" not in header:
                yield path, line, f'"{header}" is not rooted at the repository'
            elif header.split("/")[0] != own and header.split("/")[0] not in ARROWS.get(own, ()):
                yield path, line, f'{own}/ may not include "{header}"'
            elif header.endswith("/internal.h") and own != "tests":
                if not path.startswith(os.path.dirname(header) + "/"):
                    yield path, line, f'"{header}" never leaves its folder'


def check_thirdparty(tree):
    """A third-party header is known in one place."""
    for path in tree.having(*C_ENDINGS):
        for line, _, header in includes_of(tree, path):
            for pattern, places in CONFINED.items():
                if not re.fullmatch(pattern, header):
                    continue
                if not any(path == p or (p.endswith("/") and path.startswith(p)) for p in places):
                    yield path, line, f"{header} belongs to {', '.join(places)}"


def calls(tree, path, names):
    """Yields line and name of each call of one of the names."""
    pattern = r"(?<![\w.>])(" + "|".join(map(re.escape, names)) + r")\s*\("
    text = tree.code(path)
    for match in re.finditer(pattern, text):
        yield line_of(text, match.start()), match[1]


def check_banned(tree):
    """Calls that overflow, misparse or start a shell."""
    for path in tree.having(*C_ENDINGS):
        for line, name in calls(tree, path, BANNED):
            yield path, line, f"{name}: use {BANNED[name]}"


def check_quiet(tree):
    """Libraries and the daemon's core neither print nor exit."""
    for path in tree.having(*C_ENDINGS):
        if path.startswith(QUIET_FOLDERS) and path not in LOUD_ALLOWED:
            for line, name in calls(tree, path, LOUD):
                yield path, line, f"{name}: hand a code and a text to the caller"


def check_atomics(tree):
    """Atomics live in proto/ and where a reason is given."""
    for path in tree.having(*C_ENDINGS):
        if path.startswith("proto/") or path in ATOMICS_ALLOWED:
            continue
        text = tree.text(path)
        code = tree.code(path)
        for found in re.finditer(r"#\s*include\s*<stdatomic\.h>", text):
            yield path, line_of(text, found.start()), "stdatomic.h outside proto/"
        for found in re.finditer(r"\b(_Atomic|__atomic_\w+|__sync_\w+|atomic_\w+)\b", code):
            yield path, line_of(code, found.start()), f"{found[1]} outside proto/"


def check_isa(tree):
    """One file an instruction set, chosen at run time: no conditional on it."""
    for path in tree.having(*C_ENDINGS):
        text = tree.code(path)
        for found in re.finditer(r"^\s*#\s*(?:el)?if.*\b(__AVX\w*|__SSE\w*|__FMA__)", text, re.M):
            yield path, line_of(text, found.start(1)), f"conditional on {found[1]}"


def check_prefetch(tree):
    """What only prefetches is inlined by force: gcc 12 takes it for a function without effects, and
    drops the calls."""
    for path in tree.having(".c"):
        text = tree.code(path) if path.startswith("kernels/") else ""
        for found in re.finditer(r"^static (?:inline )?void (fetch\w*)\(", text, re.M):
            yield path, line_of(text, found.start()), f"{found[1]}: KVQ__INLINE, see simd.h"


def check_dead(tree):
    """Every source is listed in a CMakeLists.txt, every header included by somebody.

    tests/kits/plain/cmocka.h is included by its name alone, where cmocka is not installed, and
    tests/kernels/*/immintrin.h in the place of the compiler's; those of tests/client/ggml in
    the place of llama.cpp's."""
    by_name = ("client/kvq.h", "tests/kits/plain/cmocka.h", "tests/kernels/simde/immintrin.h",
               "tests/kernels/avxvnni/immintrin.h",
               "tests/client/ggml/ggml.h", "tests/client/ggml/ggml-backend-impl.h")
    lists = {p: tree.text(p) for p in tree.paths if os.path.basename(p) == "CMakeLists.txt"}
    every = tree.having(*C_ENDINGS)
    included = {beside(p, h) if is_installed(p) else h
                for p in every for _, _, h in includes_of(tree, p)}
    for path in tree.having(".c", ".cpp", ".cu"):
        names = {os.path.basename(path), path}
        for listing in lists:
            names.add(os.path.relpath(path, os.path.dirname(listing) or "."))
        pattern = r"(?<![\w.-])(" + "|".join(map(re.escape, names)) + r")(?![\w.-])"
        if path not in included and not any(re.search(pattern, t) for t in lists.values()):
            yield path, 1, "listed in no CMakeLists.txt"
    for path in tree.having(".h"):
        if path not in by_name and path not in included:
            yield path, 1, "included by nobody"


def check_words(tree):
    """No unfinished work, no talk of how or where the project was made."""
    for path in tree.paths:
        wanted = path.endswith(TEXT_ENDINGS) or tree.is_code(path)
        if not wanted or os.path.basename(path) in ("tidy.py", "LICENSE"):
            continue
        text = tree.text(path)
        for pattern, why in UNWANTED:
            for found in re.finditer(pattern, text):
                yield path, line_of(text, found.start()), f'"{found[0]}": {why}'


def names_of(tree):
    """Base names of files, and words with our prefix, that the tree has outside comments."""
    ours = r"\b(?:kvq|KVQ)_\w+"
    files, words, built = set(), set(), []
    for path in tree.paths:
        files.add(os.path.basename(path))
        text = tree.text(path)
        if path.endswith(C_ENDINGS):
            literals = "\n".join(m[1] for m in C_COMMENT.finditer(text) if m[1])
            words.update(re.findall(ours, tree.code(path)), re.findall(ours, literals))
        elif tree.is_code(path) or path.endswith((".map", ".in")):
            words.update(re.findall(ours, text))
            built += re.findall(r"\b[\w-]+\.(?:c|h|cpp|cu|py|sh)\b", text)
    return files.union(built, FOREIGN_FILES), words


def check_names(tree):
    """Files and names of ours that a comment speaks of are there.

    A name may stand for the names that begin with it (KVQ_OPEN for KVQ_OPEN_READ_ONLY), and may be
    made by a macro (kvq_gpu_attend_d128 by kvq_gpu_attend_##NAME)."""
    files, words = names_of(tree)
    begins = {w[:i] for w in words for i, letter in enumerate(w) if letter == "_"}
    pasted = tuple(p for c in tree.having(*C_ENDINGS)
                   for p in re.findall(r"\b(kvq_\w+_)##", tree.code(c))) or ("\0",)
    a_file = r"(?<![\w*<.])[\w-]+\.(?:cpp|cu|py|sh|c|h)\b(?![\w(.])"
    for path in tree.having(*C_ENDINGS):
        text = tree.text(path)
        for comment in (m for m in C_COMMENT.finditer(text) if not m[1]):
            for found in re.finditer(a_file + r"|\b(?:kvq|KVQ)_\w+", comment[0]):
                name = found[0].rstrip("_")
                if not (name in files or name in words or name in begins
                        or name.startswith(pasted)):
                    yield (path, line_of(text, comment.start() + found.start()),
                           f"{name} is not in the tree")


def pkg_config_flags():
    modules = ["libuv", "libzmq", "libprotobuf-c", "inih", "libcjson", "libxxhash", "openblas",
               "libsodium"]
    flags = set()
    for module in modules:
        done = subprocess.run(["pkg-config", "--cflags", module], capture_output=True, text=True)
        flags.update(done.stdout.split())
    return sorted(flags)


def compile_alone(tree, path, language, extra):
    """The first line of the compiler's complaint about a header compiled alone, or None."""
    name, standard = ("cc", "-std=c17") if language == "c" else ("c++", "-std=c++17")
    command = [name, "-x", language, standard, "-Wall", "-Wextra", "-Werror", "-fsyntax-only",
               "-D_GNU_SOURCE", "-I", tree.root, *extra, "-"]
    done = subprocess.run(command, input=f'#include "{path}"\n', cwd=tree.root,
                          capture_output=True, text=True)
    if done.returncode == 0:
        return None
    errors = [x for x in done.stderr.split("\n") if "error" in x] or [done.stderr]
    return f"does not compile alone as {standard[5:]}: {errors[0].strip()}"


def check_headers(tree):
    """Every header compiles alone; the installed ones in C++ too."""
    headers = [p for p in tree.having(".h") if p.split("/")[0] in ARROWS]
    with tempfile.TemporaryDirectory() as generated:
        for proto in tree.having(".proto"):
            out = os.path.join(generated, os.path.dirname(proto))
            os.makedirs(out, exist_ok=True)
            subprocess.run(["protoc-c", f"--c_out={out}", f"-I{os.path.dirname(proto) or '.'}",
                            os.path.basename(proto)], cwd=tree.root, capture_output=True)
        extra = ["-I", generated, "-I", os.path.join(generated, "proto"), *pkg_config_flags()]
        for path in headers:
            if path.endswith("_tmpl.h") or "/emu/" in path or "/cuda/" in path:
                continue
            languages = ("c", "c++") if is_installed(path) else ("c",)
            if re.search(r"^#include <(vector|string|random|map)>", tree.text(path), re.M):
                languages = ("c++",)
            if path.startswith("kernels/") and "immintrin.h" in tree.text(path):
                extra_isa = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni",
                             "-mavx512vbmi", "-mf16c"]
            else:
                extra_isa = []
            for language in languages:
                complaint = compile_alone(tree, path, language, extra + extra_isa)
                if complaint:
                    yield path, 1, complaint


def check_python(tree):
    """Python compiles."""
    for path in tree.having(".py"):
        try:
            compile(tree.text(path), path, "exec")
        except SyntaxError as error:
            yield path, error.lineno or 1, error.msg


def check_shell(tree):
    """Shell scripts parse."""
    for path in filter(tree.is_shell, tree.paths):
        done = subprocess.run(["bash", "-n", os.path.join(tree.root, path)],
                              capture_output=True, text=True)
        if done.returncode:
            yield path, 1, done.stderr.strip().split("\n")[0]


def check_modes(tree):
    """A file that names its interpreter can be run."""
    for path in tree.paths:
        if tree.text(path).startswith("#!") and not os.access(os.path.join(tree.root, path),
                                                              os.X_OK):
            yield path, 1, "names an interpreter, and is not executable: chmod +x, or leave it out"


def check_links(tree):
    """Relative links in the documentation lead to files."""
    for path in tree.having(".md"):
        text = re.sub(r"```.*?```", lambda m: "\n" * m[0].count("\n"), tree.text(path), flags=re.S)
        for found in re.finditer(r"\]\(([^)\s]+)\)", text):
            target = found[1].split("#")[0]
            if not target or re.match(r"[a-z]+:", target):
                continue
            base = os.path.join(tree.root, os.path.dirname(path))
            if not os.path.exists(os.path.join(base, target)):
                yield path, line_of(text, found.start()), f"link to {target}, which is not there"


def check_symbols(build):
    """Libraries define no name without our prefix."""
    for name, flags in (("libkvq.so", ["-D"]), ("libkvq_proto.a", []), ("libkvq_kernels.a", []),
                        ("libkvq_gpu.a", [])):
        path = os.path.join(build, "lib", name)
        done = subprocess.run(["nm", *flags, "--defined-only", "--extern-only", path],
                              capture_output=True, text=True)
        if done.returncode:
            yield path, 1, done.stderr.strip() or "nm cannot read it"
        for line in done.stdout.split("\n"):
            fields = line.split()
            if len(fields) == 3 and not re.match(r"kvq_|KVQ_", fields[2]) and fields[1] not in "A":
                yield path, 1, f"defines {fields[2]}, which lacks the prefix kvq_"
            elif flags and len(fields) == 3 and re.match(r"kvq__", fields[2]):
                yield path, 1, f"exports {fields[2]}, an internal name"


EXPORTS, DEB_SYMBOLS = "client/kvq.map", "packaging/deb/libkvq0/symbols"


def check_exports(tree):
    """The Debian package's list of symbols names what the library exports, and nothing else: a
    program that uses a name left out would get no dependency on the release that brought it."""
    exported = set(re.findall(r"^    (kvq_\w+);$", tree.text(EXPORTS), re.M))
    listed = set(re.findall(r"^ (kvq_\w+)@", tree.text(DEB_SYMBOLS), re.M))
    for name in sorted(exported - listed):
        yield DEB_SYMBOLS, 1, f"lacks {name}, which {EXPORTS} exports"
    for name in sorted(listed - exported):
        yield DEB_SYMBOLS, 1, f"names {name}, which {EXPORTS} does not export"


RULES = {
    "functions": check_functions, "files": check_files, "lines": check_lines,
    "prose": check_prose, "spdx": check_spdx, "arrows": check_arrows,
    "thirdparty": check_thirdparty, "banned": check_banned,
    "quiet": check_quiet, "atomics": check_atomics, "isa": check_isa, "prefetch": check_prefetch,
    "dead": check_dead, "words": check_words, "headers": check_headers, "python": check_python,
    "shell": check_shell, "modes": check_modes, "links": check_links, "names": check_names,
    "exports": check_exports,
}


def run_rules(root, only=None, build=None):
    """Prints the findings and returns the number of rules that passed and failed."""
    tree = Tree(root)
    passed = failed = 0
    checks = {n: functools.partial(f, tree) for n, f in RULES.items() if only in (None, n)}
    if build and only in (None, "symbols"):
        checks["symbols"] = functools.partial(check_symbols, build)
    for name, check in checks.items():
        findings = list(check())
        for path, line, what in findings:
            print(f"{path}:{line}: {name}: {what}")
        failed += bool(findings)
        passed += not findings
    return passed, failed


C_HEAD = "// SPDX-License-Identifier: Apache-2.0\n// Planted.\n"
KVQ_H_HEAD = "/* SPDX-License-Identifier: Apache-2.0\n * Planted. */\n"
PY_HEAD = "# SPDX-License-Identifier: Apache-2.0\n# Planted.\n"
CLEAN = {
    "CMakeLists.txt": PY_HEAD + "add_library(a proto/a.c planted.c)\n"
                      "add_library(b kernels/b.c kernels/cuda/a.cu)\n",
    "kernels/cuda/a.cu": C_HEAD + "namespace a\n{\nint kvq_c(void)\n{\n" + "    ;\n" * 68 + "}\n"
                         "} // namespace a\n",
    "proto/a.h": C_HEAD + "#include <stdint.h>\nint kvq_a(uint32_t value);\n",
    "proto/a.c": C_HEAD + '#include "proto/a.h"\n\n'
                 'int kvq_a(uint32_t value)\n{\n'
                 '    return value == 0; // printf(strcpy), see a.h and kvq_a\n}\n',
    "client/kvq.h": KVQ_H_HEAD + '#include "kvq/b.h"\n',
    "client/kvq/b.h": KVQ_H_HEAD + "#include <stdint.h>\nint kvq_b(uint32_t value);\n",
    EXPORTS: "KVQ_0 {\n  global:\n    kvq_b;\n};\n",
    DEB_SYMBOLS: "libkvq.so.0 libkvq0\n KVQ_0@KVQ_0 0\n kvq_b@KVQ_0 0\n",
    "tools/run.sh": "#!/bin/bash\n" + PY_HEAD + "echo fine\n",
    "README.md": "See [the source](proto/a.c) and [the web](https://example.org).\n\n"
                 "# Wide" + " heading" * 13 + "\n\n| a " + "cell " * 20 + "|\n\n    code"
                 + " of one line" * 9 + "\n\n```\n" + "code " * 21 + "\n```\n\n- [link](https://"
                 "example.org/" + "x" * 99 + ")\n",
    "docs/made.md": "Written by `a.py`; do not edit. " + "word " * 21 + "\n",
}

# Rule, path and text of a file that breaks it. The text replaces the clean one, if there is one.
PLANTED = (
    ("functions", "proto/planted.c", C_HEAD + "int kvq_f(void)\n{\n" + "    ;\n" * 70 + "}\n"),
    ("functions", "kernels/cuda/planted.cu",
     C_HEAD + "namespace a\n{\nvoid kvq_f()\n{\n" + "    ;\n" * 70 + "}\n}\n"),
    ("functions", "kernels/emu/planted.h",
     C_HEAD + "struct a {\n    int b()\n    {\n" + "        ;\n" * 70 + "    }\n};\n"),
    ("files", "proto/planted.c", C_HEAD + "//\n" * 800),
    ("files", "kernels/emu/planted.cpp", C_HEAD + "//\n" * 800),
    ("lines", "proto/planted.c", C_HEAD + "//" + "x" * 99 + "\n"),
    ("lines", "proto/planted.c", C_HEAD + "int x; \n"),
    ("lines", "proto/planted.c", C_HEAD + "\tint x;\n"),
    ("lines", "kernels/cuda/planted.cu", C_HEAD + "//" + "x" * 99 + "\n"),
    ("lines", "kernels/emu/planted.cpp", C_HEAD + "\tint x;\n"),
    ("prose", "docs/planted.md", "word " * 21 + "\n"),
    ("prose", "README.md", "- one\n- " + "word " * 20 + "\n"),
    ("prose", "docs/planted.md", "```\ncode\n```\n" + "word " * 21 + "\n"),
    ("spdx", "kernels/cuda/planted.cu", "int x;\n"),
    ("spdx", "kernels/emu/planted.cpp", "// SPDX-License-Identifier: Apache-2.0\nint x;\n"),
    ("spdx", "proto/planted.c", "int x;\n"),
    ("spdx", "proto/planted.c", "// SPDX-License-Identifier: Apache-2.0\nint x;\n"),
    ("spdx", "tools/planted.py", "#!/usr/bin/env python3\nprint()\n"),
    ("arrows", "kernels/planted.c", C_HEAD + '#include "proto/a.h"\n'),
    ("arrows", "proto/planted.c", C_HEAD + '#include "a.h"\n'),
    ("arrows", "kernels/cuda/planted.cu", C_HEAD + '#include "daemon/core/core.h"\n'),
    ("arrows", "kernels/emu/planted.cpp", C_HEAD + '#include "emu.h"\n'),
    ("arrows", "client/kvq.h", C_HEAD + '#include "proto/a.h"\n'),
    ("arrows", "client/kvq/b.h", KVQ_H_HEAD + '#include "../internal.h"\n'),
    ("arrows", "daemon/planted.c", C_HEAD + '#include "kernels/internal.h"\n'),
    ("arrows", "client/planted.c", C_HEAD + '#include "daemon/core/core.h"\n'),
    ("thirdparty", "daemon/planted.c", C_HEAD + "#include <zmq.h>\n"),
    ("thirdparty", "client/planted.c", C_HEAD + "#include <uv.h>\n"),
    ("thirdparty", "daemon/planted.c", C_HEAD + "#include <protobuf-c/protobuf-c.h>\n"),
    ("thirdparty", "daemon/planted.c", C_HEAD + "#include <immintrin.h>\n"),
    ("thirdparty", "kernels/emu/planted.cpp", C_HEAD + "#include <cuda_runtime.h>\n"),
    ("banned", "kernels/emu/planted.cpp", C_HEAD + "int f()\n{\n    sprintf(0);\n}\n"),
    ("quiet", "kernels/cuda/planted.cu", C_HEAD + "int f()\n{\n    printf(0);\n}\n"),
    ("atomics", "kernels/emu/planted.cpp", C_HEAD + "static int x = __atomic_load_n(y, 0);\n"),
    ("isa", "kernels/emu/planted.cpp", C_HEAD + "#if defined(__AVX2__)\n#endif\n"),
    ("words", "kernels/cuda/planted.cu", C_HEAD + "// FIX" "ME: later\n"),
    *(("banned", "tools/planted.c", C_HEAD + f"int f(void)\n{{\n    {name}(0);\n}}\n")
      for name in BANNED),
    *(("quiet", "client/planted.c", C_HEAD + f"int f(void)\n{{\n    {name}(0);\n}}\n")
      for name in LOUD),
    ("quiet", "daemon/planted.c", C_HEAD + "int f(void)\n{\n    exit(1);\n}\n"),
    ("atomics", "daemon/planted.c", C_HEAD + "#include <stdatomic.h>\n"),
    ("atomics", "client/planted.c", C_HEAD + "int f(int *x)\n{\n    __atomic_load_n(x, 0);\n}\n"),
    ("atomics", "kernels/planted.c", C_HEAD + "_Atomic int x;\n"),
    ("isa", "kernels/planted.c", C_HEAD + "#if defined(__AVX2__)\n#endif\n"),
    ("prefetch", "kernels/planted.c", C_HEAD + "static void fetch_row(const char *row)\n{\n}\n"),
    ("dead", "proto/unlisted.c", C_HEAD),
    ("dead", "proto/unused.h", C_HEAD),
    ("dead", "client/kvq/unused.h", KVQ_H_HEAD),
    ("words", "proto/planted.c", C_HEAD + "// TO" "DO: later\n"),
    ("words", "docs/planted.md", "Written by an ag" "ent.\n"),
    ("words", "docs/planted.md", "Closes iss" "ue 12.\n"),
    ("words", "docs/planted.md", "Lies in /wor" "k/main.\n"),
    ("words", "docs/planted.md", "As shared/" "design.md says.\n"),
    ("words", "docs/planted.md", "From deb." "debian.org.\n"),
    ("headers", "proto/a.h", C_HEAD + "int kvq_a(uint32_t value);\n"),
    ("headers", "client/kvq.h", KVQ_H_HEAD + "int kvq_b(int class);\n"),
    ("headers", "client/kvq/b.h", KVQ_H_HEAD + "int kvq_b(int class);\n"),
    ("spdx", "client/kvq/b.h", "// SPDX-License-Identifier: Apache-2.0\n// Planted.\n"),
    ("python", "tools/planted.py", PY_HEAD + "def f(:\n"),
    ("shell", "tools/planted.sh", PY_HEAD + "if true; then\n"),
    ("shell", "tools/planted", "#!/bin/bash\n" + PY_HEAD + "case\n"),
    ("modes", "tools/planted.py", "#!/usr/bin/env python3\n" + PY_HEAD),
    ("links", "docs/planted.md", "See [this](../nowhere.md).\n"),
    ("exports", DEB_SYMBOLS, "libkvq.so.0 libkvq0\n KVQ_0@KVQ_0 0\n"),
    ("exports", DEB_SYMBOLS, "libkvq.so.0 libkvq0\n kvq_b@KVQ_0 0\n kvq_c@KVQ_0 0\n"),
    ("names", "proto/planted.c", C_HEAD + "// As nowhere.c has it.\n"),
    ("names", "proto/planted.c", C_HEAD + "// As kvq_nothing has it.\n"),
    ("names", "kernels/cuda/planted.cu", C_HEAD + "/* See\n * KVQ__NOTHING. */\n"),
)


def write(root, path, text):
    full = os.path.join(root, path)
    os.makedirs(os.path.dirname(full), exist_ok=True)
    with open(full, "w", encoding="utf-8") as file:
        file.write(text)


def self_test():
    """Returns how many plants were caught and missed; a clean tree is one more of them."""
    passed = failed = 0
    unplanted = set(RULES) - {rule for rule, _, _ in PLANTED}
    for rule in sorted(unplanted):
        print(f"self-test: no violation of {rule} is planted")
        failed += 1
    for rule, path, text in ((None, None, None), *PLANTED):
        root = tempfile.mkdtemp(prefix="tidy-")
        try:
            for name, clean in CLEAN.items():
                write(root, name, clean)
                if clean.startswith("#!"):
                    os.chmod(os.path.join(root, name), 0o755)
            if path:
                write(root, path, text)
            tree = Tree(root)
            rules = RULES if rule is None else [rule]
            found = [(p, what) for name in rules for p, _, what in RULES[name](tree)]
            good = found == [] if rule is None else any(p == path for p, _ in found)
            if not good:
                print(f"self-test: {rule or 'a clean tree'}: {path} gave {found}\n{text or ''}")
            passed += good
            failed += not good
        finally:
            shutil.rmtree(root)
    return passed, failed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=[*RULES, "symbols"], help="run one rule")
    parser.add_argument("--symbols", metavar="BUILD", help="check the libraries of a build folder")
    parser.add_argument("--self-test", action="store_true",
                        help="plant violations and see them caught")
    parser.add_argument("--root", default=os.path.join(os.path.dirname(__file__), ".."))
    options = parser.parse_args()
    if options.self_test:
        passed, failed = self_test()
    else:
        passed, failed = run_rules(os.path.abspath(options.root), options.only, options.symbols)
    print(f"tidy{' self-test' if options.self_test else ''}: {passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
