#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a folder with kvqd, its libraries and its tests that runs on a machine without any of the
libraries that kvqd needs: tools/gpu-check.sh --pack.

    pack.py [--limit BYTES] BUILD FOLDER     from a build with -DKVQ_PORTABLE=ON -DKVQ_EMU=ON
    pack.py [--limit BYTES] --check FOLDER   is anything missing in it, found elsewhere, or too big?

--limit: how large the folder may be, 60,000,000 bytes unless told.

What every machine with a compiler has stays outside: the C library, libstdc++, libgcc_s. The
folder's README.md says which versions of them are needed.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT = 60_000_000
PROGRAMS = ["bin/kvqd", "bin/kvqctl", "bin/kvq-hop", "tests/test_gpu_driver",
            "tests/test_gpu_attend", "tests/test_gpu_long", "tests/test_gpu_replay",
            "tests/test_gpu_pack", "tests/test_soft_driver", "tests/test_soft_peers",
            "tests/example_cuda_engine"]
LIBRARIES = ["lib/libkvq.so.0", "lib/libkvq-emu.so", "lib/libkvq_gpu_images.so"]
SOURCES = ["client/python/kvq", "client/kvq.h", "client/kvq", "examples", "tests/e2e/e2e.py",
           "tests/e2e/e2e_*.py",
           "tools/gpu-check.sh", "tools/gpu/*.py"]
# The C and C++ run time of every system, and the driver, which is no library of ours to bring.
OUTSIDE = re.compile(r"(libc|libm|libdl|libpthread|librt|libresolv|libanl|ld-linux-x86-64|libgcc_s"
                     r"|libstdc\+\+|libcuda)\.so(\.\d+)?")


class Incomplete(Exception):
    """The folder cannot be made, or is not whole; the text says what is wrong."""


def output(*command):
    done = subprocess.run(command, capture_output=True, text=True, env={"PATH": os.environ["PATH"],
                                                                        "LC_ALL": "C"})
    if done.returncode:
        raise Incomplete(f"{' '.join(map(str, command))}: {done.stderr.strip()[-400:]}")
    return done.stdout


def needed(path):
    """Names of the libraries that a program or library asks for itself."""
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output("readelf", "-dW", str(path)))


def loaded(path):
    """Names of all libraries that it needs, and where the dynamic linker finds each, or None."""
    found = re.findall(r"^\s*(\S+) => (\S+|not found)(?: \(|$)", output("ldd", str(path)), re.M)
    return {name: None if at == "not found" else Path(at) for name, at in found}


def binaries(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()
                  and p.open("rb").read(4) == b"\x7fELF")


def versions(files):
    """The newest version of each kind of symbol (GLIBC, GLIBCXX, ..) that they ask of others."""
    newest = {}
    for path in files:
        asked = output("readelf", "-VW", str(path)).split("Version needs section")[1:]
        for kind, number in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)",
                                       "".join(asked)):
            newest[kind] = max(newest.get(kind, (0,)), tuple(map(int, number.split("."))))
    return {kind: ".".join(map(str, number)) for kind, number in sorted(newest.items())}


def package_of(path):
    """The Debian package that a library is from, with its version."""
    for name in (path, path.resolve(), *([Path("/usr") / path.relative_to("/")])):
        done = subprocess.run(["dpkg-query", "-S", str(name)], capture_output=True, text=True)
        if done.returncode == 0:
            package = done.stdout.split(": ")[0].split(",")[0]
            return output("dpkg-query", "-W", "-f", "${Package} ${Version}", package)
    return "no package"


def copy_binary(source, target):
    if not source.exists():
        raise Incomplete(f"{source} is not there: build it first (tools/gpu-check.sh --pack does)")
    target.parent.mkdir(parents=True, exist_ok=True)
    output("strip", "--strip-debug", "-o", str(target), str(source.resolve()))
    # CMake keeps room for another place with colons; an empty place means the current folder.
    target.write_bytes(re.sub(rb"(\$ORIGIN[^\0]*?)(:+)\0",
                              lambda m: m[1] + bytes(len(m[2]) + 1), target.read_bytes()))
    target.chmod(0o755)


def copy_sources(folder):
    for pattern in SOURCES:
        for source in sorted(ROOT.glob(pattern)):
            target = folder / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(source, target)


def copy_libraries(folder):
    """The libraries that the programs need and that are not everywhere; {name: package}."""
    taken = {}
    for path in binaries(folder):
        for name, at in loaded(path).items():
            if OUTSIDE.fullmatch(name) or (folder / "lib" / name).exists():
                continue
            if at is None:
                raise Incomplete(f"{path.name} needs {name}, which this machine does not have")
            copy_binary(at, folder / "lib" / name)
            taken[name] = package_of(at)
    return taken


def size_of(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())


def check(folder, limit):
    """Raises Incomplete unless each binary finds each library it needs, in the folder or in the C
    and C++ run time."""
    files, wrong = binaries(folder), []
    for name in [*PROGRAMS, *LIBRARIES]:
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
    for path in files:
        for name in needed(path):
            if not OUTSIDE.fullmatch(name) and not (folder / "lib" / name).is_file():
                wrong.append(f"{path.relative_to(folder)} needs {name}, which is not in lib/")
        # Libraries find each other through the program that loads them: it has their place.
        own = path.parent.name != "lib" or path.name.startswith("libkvq")
        for name, at in loaded(path).items() if own else ():
            if not OUTSIDE.fullmatch(name) and at and folder not in at.resolve().parents:
                wrong.append(f"{path.relative_to(folder)} takes {name} from {at}: it was not built "
                             "with -DKVQ_PORTABLE=ON")
    if (size := size_of(folder)) > limit:
        wrong.append(f"it has {size:,} bytes, more than {limit:,}: pack for fewer GPUs "
                     "(KVQ_CUDA_ARCHITECTURES=90a tools/gpu-check.sh --pack)")
    if wrong:
        raise Incomplete(f"{folder} is not whole:\n  " + "\n  ".join(wrong))


def write_readme(folder, taken):
    files = binaries(folder)
    outside = sorted({n for p in files for n in needed(p) if OUTSIDE.fullmatch(n)})
    at_least = [f"- {kind}_{number}" for kind, number in versions(files).items()]
    lines = ["# kvqd, for a machine without its libraries", "",
             "Made by `tools/gpu-check.sh --pack`. On a machine with an NVIDIA GPU, from anywhere:",
             "", "    tools/gpu-check.sh --packed .", "",
             "It needs Python 3.9 with NumPy, and of the C and C++ run time "
             f"({', '.join(outside)}) at least:", "", *at_least, "",
             "`getconf GNU_LIBC_VERSION` says which C library a machine has.", "",
             "Libraries that are brought along:", "",
             *(f"- {name}: {package}" for name, package in sorted(taken.items()))]
    (folder / "README.md").write_text("\n".join(lines) + "\n")


def pack(build, folder, limit):
    if folder.exists():
        if not (folder / "bin" / "kvqd").exists() and any(folder.iterdir()):
            raise Incomplete(f"{folder} holds something else; name an empty folder")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    for name in [*PROGRAMS, *LIBRARIES]:
        copy_binary(build / name, folder / name)
    (folder / "lib" / "libkvq.so").symlink_to("libkvq.so.0")
    copy_sources(folder)
    write_readme(folder, copy_libraries(folder))
    check(folder, limit)
    print(f"{folder}: {len(binaries(folder))} programs and libraries, {size_of(folder):,} bytes; "
          "asks for " + ", ".join(f"{k}_{v}" for k, v in versions(binaries(folder)).items()))


def main():
    words, limit = sys.argv[1:], LIMIT
    if words[:1] == ["--limit"] and words[1:] and words[1].isdigit():
        words, limit = words[2:], int(words[1])
    if len(words) != 2:
        print(__doc__)
        return 2
    folder = Path(words[1]).resolve()
    try:
        if words[0] == "--check":
            check(folder, limit)
        else:
            pack(Path(words[0]).resolve(), folder, limit)
    except Incomplete as error:
        print(f"pack.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
