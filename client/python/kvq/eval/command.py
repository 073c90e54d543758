# SPDX-License-Identifier: Apache-2.0
"""The command line of `python -m kvq.eval`."""
from __future__ import annotations

import argparse
import hashlib
import os
import platform
import sys
from typing import Any, Dict, Iterable, List, Optional, Sequence

FORMATS = "16bit,oscar4,oscar3,oscar2,kivi4,kivi2,turboquant4,kvq2"
ABOUT = """\
Measures what kvq's formats do to a model: perplexity, KL divergence from the same model with the
engine's own cache, how often the likeliest token stays the same, whether facts are found again
(needles), how long greedy answers stay the same, the memory of the cache, and speed. Text goes
through the model with the tokens that stand in it (teacher-forced), and all attention to the past
is kvqd's; a daemon is started where KVQ_RUNTIME_DIR names none and none runs.

MODEL is a folder with a model in it, a GGUF file, or a name of the Hugging Face hub that was
downloaded before: nothing is downloaded here.

Measurements are kept as they are made, in OUT/results.jsonl: the same command goes on where a run
was ended. OUT/report.md, OUT/report.json and plots (*.svg) are written at the end.
"""
END = """\
Exit status: 0 done (peers whose packages are not installed are passed over), 1 something could not
be measured, 2 the command line is wrong."""


def _counting(least):
    def parse(text):
        try:
            n = int(text)
        except ValueError:
            n = least - 1
        if n < least:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
        return n
    return parse


def _bits_by_layer(p):
    p.add_argument("--allocate", default="", metavar="BITS,..",
                   help="also find, by measuring each layer by itself, which layers need more "
                        "bits: for each number a mix of --levels with so many bits a packed value "
                        "on the mean, which becomes a row and a [format] section in "
                        "OUT/format.conf")
    p.add_argument("--levels", default="oscar2,oscar3,oscar4", metavar="F,..",
                   help="formats of the mix (%(default)s)")
    p.add_argument("--allocate-windows", type=_counting(1), metavar="N",
                   help="pieces of the text that the mix is chosen on (as many as --windows)")
    p.add_argument("--allocate-skip", type=_counting(0), metavar="N",
                   help="tokens at the text's beginning that are passed over for them (up to the "
                        "end of --windows: a mix is measured on other text)")
    p.add_argument("--allocate-controls", action="store_true",
                   help="measure each mix's levels in other orders of layers as well: turned "
                        "round, and those with the most bits first or last")


def parser() -> argparse.ArgumentParser:
    """The options."""
    p = argparse.ArgumentParser("python -m kvq.eval", description=ABOUT, epilog=END,
                                formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("model", metavar="MODEL", help="a folder, a file *.gguf, or a name of the hub")
    p.add_argument("--formats", default=FORMATS, metavar="F,..",
                   help="formats of kvq, each with /fast or /exact behind it if it is not to take "
                        "the path of --attention (%(default)s)")
    p.add_argument("--attention", choices=("exact", "fast"), default="exact",
                   help="kvq's path of attention (%(default)s)")
    p.add_argument("--controls", default="dropped,int2-token", metavar="C,..",
                   help="dropped: what oscar2 would pack is gone; int2-token: it is rounded to 2 "
                        "bits, with a scale for each token and head; '' for none (%(default)s)")
    p.add_argument("--peers", default="quanto4,quanto2,hqq4,hqq2", metavar="P,..",
                   help="quantized caches of transformers, by backend and bits, if their packages "
                        "are installed; '' for none (%(default)s)")
    p.add_argument("--text", metavar="FILE",
                   help="UTF-8 text that the model has not seen in training, if possible (kvq's "
                        "held-out text, or Python's language reference where that is not there)")
    p.add_argument("--windows", type=_counting(1), default=2, metavar="N",
                   help="pieces of the text, each from an empty cache (%(default)s)")
    p.add_argument("--context", type=_counting(16), default=4096, metavar="N",
                   help="tokens of a window (%(default)s)")
    p.add_argument("--step", type=_counting(1), default=128, metavar="N",
                   help="tokens of a forward (%(default)s)")
    p.add_argument("--skip", type=_counting(0), default=0, metavar="N",
                   help="tokens at the text's beginning that are passed over (%(default)s)")
    p.add_argument("--needles", type=_counting(0), default=8, metavar="N",
                   help="sentences to be found again, at each distance; 0: none (%(default)s)")
    p.add_argument("--distances", default="64,256,1024,3072", metavar="N,..",
                   help="of needles, in tokens (%(default)s)")
    p.add_argument("--answers", type=_counting(0), default=4, metavar="N",
                   help="pieces of the text that are gone on with greedily, to see how long a "
                        "cache says what the reference says, and how fast; 0: none (%(default)s)")
    p.add_argument("--answer-tokens", type=_counting(2), default=128, metavar="N",
                   help="of an answer (%(default)s)")
    p.add_argument("--prompt", type=_counting(16), default=1024, metavar="N",
                   help="tokens before an answer (%(default)s)")
    p.add_argument("--dtype", choices=("float32", "float16", "bfloat16"), default="float32",
                   help="of weights, and of the reference's cache (%(default)s)")
    p.add_argument("--reference", choices=("eager", "sdpa"), default="eager",
                   help="attention of the reference (%(default)s)")
    p.add_argument("--threads", type=_counting(1), default=1, metavar="N",
                   help="of PyTorch, and of kvq's attention in steps of up to 256 tokens; in "
                        "larger ones that is the daemon's (--daemon workers=N) (%(default)s)")
    p.add_argument("--together", type=_counting(1), default=6, metavar="N",
                   help="caches that run beside the reference at a time; each takes memory, and "
                        "the reference runs once for all of them (%(default)s)")
    _bits_by_layer(p)
    p.add_argument("--daemon", action="append", default=[], metavar="NAME=VALUE",
                   help="start a kvqd for this run with this option, as codebook_dir=FOLDER; may "
                        "be given several times")
    p.add_argument("--capture", metavar="FILE",
                   help="measure nothing: write K, V and Q of --windows to FILE, for kvq-codebook "
                        "and kvq-bench quality. With --skip, take other text than is measured")
    p.add_argument("--out", metavar="FOLDER",
                   help="where results go (kvq-eval-MODEL in this folder)")
    return p


class Run:
    """The parts of a run, one after the other. What they found ends in the rows."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import transformers
        import kvq
        from . import models, results, score
        torch.set_grad_enabled(False)
        torch.set_num_threads(options.threads)
        self.options, self.failures = options, score.Failures()
        where = kvq.private_daemon(**options.daemon) if options.daemon else None
        self.client = kvq.Client(where, name="kvq.eval")  # weights take long to read
        self.models = models.load(options.model, options.dtype, options.reference)
        self.out = options.out or "kvq-eval-" + self.models.name.removesuffix(".gguf")
        os.makedirs(self.out, exist_ok=True)
        self.versions = {"transformers": transformers.__version__, "torch": torch.__version__,
                         "kvq": kvq_version(self.client)}
        self.results = results.Results(
            os.path.join(self.out, "results.jsonl"),
            {"machine": machine(), "threads": options.threads, **self.versions})
        self.reference, self.sides = self.open_sides()

    def open_sides(self) -> Any:
        """The reference, and what is held against it, in the order of the table."""
        from .controls import CONTROLS
        from .peers import Peer
        from .sides import Format, Side
        o = self.options
        sides: List[Any] = [Format(self.models, name, path, self.client)
                            for name, path in o.formats]
        sides += [CONTROLS[name](self.models, name) for name in o.controls]
        sides += [Peer(self.models, name) for name in o.peers]
        return Side(self.models), sides

    def capture(self) -> None:
        """Writes the capture that was asked for."""
        from . import captures, texts
        o = self.options
        windows = texts.windows(self.models.tokenizer, texts.read(o.text)[0], o.windows, o.context,
                                o.skip)
        tokens = captures.write(self.models, windows, o.step, o.capture, self.client)
        print(f"{o.capture}: {tokens} tokens")

    def close(self) -> None:
        """Closes the results and the connection."""
        self.results.close()
        self.client.close()

    def measure(self) -> None:
        """Everything that was asked for and is not in the results yet."""
        from . import answers, needles, score, texts
        o, tokenizer = self.options, self.models.tokenizer
        text, self.text_name = texts.read(o.text)
        self.windows = texts.windows(tokenizer, text, o.windows, o.context, o.skip)
        self.names = [texts.name_of(ids) for ids in self.windows]
        self.bos = texts.told_beginning(tokenizer)
        self.items = needles.make(tokenizer, text, o.distances, o.needles)
        self.prompts = texts.windows(tokenizer, text, o.answers, o.prompt, o.skip)
        if o.allocate:
            self.allocate()
        score.run(self.results, self.reference, self.sides, self.windows, self.names, o.step,
                  o.together, self.failures)
        every = [self.reference, *self.sides]
        needles.run(self.results, every, self.items, o.step, self.failures)
        answers.run(self.results, every, self.prompts, o.answer_tokens, o.step, self.failures)

    def allocate(self) -> None:
        """Adds the mixes of --allocate, and their levels, to what is measured."""
        from . import texts
        from .allocate import Allocation
        from .sides import Format
        o, tokenizer = self.options, self.models.tokenizer
        count = o.allocate_windows or o.windows
        body = o.context - len(texts.beginning(tokenizer))
        skip = o.allocate_skip if o.allocate_skip is not None else o.skip + o.windows * body
        windows = texts.windows(tokenizer, texts.read(o.text)[0], count, o.context, skip)
        like = Format(self.models, o.levels[-1], o.attention, self.client)
        made = Allocation(self.models, self.reference, like, o.levels, o.allocate)
        made.measure(self.results, windows, [texts.name_of(ids) for ids in windows], o.step,
                     o.together)
        there = {side.key for side in self.sides}
        self.sides = [*made.mixes(self.out, o.allocate_controls),
                      *(side for side in made.uniform if side.key not in there), *self.sides]
        self.allocation = {
            "windows": count, "skip": skip, "sensitivity": made.sensitivity,
            "bits": made.bits,
            "same_text": skip < o.skip + o.windows * body and o.skip < skip + count * body}

    def found(self, keys: Iterable[str]) -> List[Dict[str, Any]]:
        """The lines of these keys; none where one of them is missing."""
        lines = [self.results.get(key) for key in keys]
        return [line for line in lines if line] if all(lines) else []

    def row(self, side: Any) -> Dict[str, Any]:
        """What the table says of a cache."""
        from . import answers, needles, report, score
        reference, step = self.reference, self.options.step
        row: Dict[str, Any] = {"name": side.name, "path": side.path, "kind": side.kind,
                               "dtype": self.models.dtype}
        if hasattr(side, "levels"):
            row.update(levels=side.levels)
        lines = self.found(score.score_key(reference, side, name, step) for name in self.names)
        taken = list(lines)
        if lines:
            row.update(report.score_of(lines))
            if not self.results.are_of_here(lines):
                del row["speed"]
        lines = self.found(needles.needle_key(reference, side, item, step) for item in self.items)
        taken += lines
        if lines:
            row["needles"] = needles.summary(lines)
        lines = self.found(answers.answer_key(reference, side, prompt, self.options.answer_tokens,
                                              step) for prompt in self.prompts)
        taken += lines
        if lines:
            row["answers"] = answers.summary(lines)
            if self.results.are_of_here(lines):
                row.setdefault("speed", {}).update(answers.speed(lines))
        versions = self.results.other_versions(taken)
        if versions:
            row["other_versions"] = versions
        if side.key in self.failures.why:
            row["failed"] = self.failures.why[side.key]
        return row

    def report(self) -> Dict[str, Any]:
        """The report, as report.py says."""
        o = self.options
        return {
            "model": self.models.name, "machine": machine(),
            "settings": {
                "dtype": self.models.dtype, "attention": self.models.attention, "step": o.step,
                "context": o.context, "windows": o.windows, "skip": o.skip, "threads": o.threads,
                "prompt": o.prompt, "distances": o.distances, "needles": o.needles,
                "text": self.text_name, "bos": self.bos, **self.versions},
            **({"allocation": self.allocation} if o.allocate else {}),
            "rows": [self.row(side) for side in [self.reference, *self.sides]]}

    def write(self) -> None:
        """report.json, report.md and the plots."""
        from . import plots, report
        made = self.report()
        made["plots"] = plots.write(made, self.out)
        for name, text in (("report.json", report.as_json(made)),
                           ("report.md", report.markdown(made))):
            with open(os.path.join(self.out, name), "w", encoding="utf-8") as file:
                file.write(text)


def machine() -> str:
    """This machine in a few words."""
    name = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            name = next((line.split(":", 1)[1].strip() for line in file
                         if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {os.cpu_count()} CPUs"


def kvq_version(client: Any) -> str:
    """Of the package; from a checkout, which has none, of the daemon, and which build of the
    library this is: a digest of its file."""
    try:
        from importlib.metadata import version
        return version("kvq")
    except ImportError:
        return f"{client.info()['version']} from a checkout, library {_build()}"


def _build():
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        found = (line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if "/libkvq.so" in line)
        path = next(found, "")
    try:
        with open(path, "rb") as file:
            return hashlib.sha256(file.read()).hexdigest()[:8]
    except OSError:  # another one has taken its place since
        return "of an unknown build"


def _list(text):
    return [name for name in text.split(",") if name]


def checked(p: argparse.ArgumentParser, arguments: Optional[Sequence[str]]) -> argparse.Namespace:
    """The options, or an exit with a sentence."""
    from .controls import CONTROLS
    from .peers import parse
    from .sides import parse_format
    options = p.parse_args(arguments)
    try:
        options.formats = [parse_format(text, options.attention)
                           for text in _list(options.formats)]
        options.controls, options.peers = _list(options.controls), _list(options.peers)
        for name in options.peers:
            parse(name)
    except ValueError as error:
        p.error(str(error))
    options.levels = _list(options.levels)
    try:
        budgets = list(dict.fromkeys(float(bits) for bits in _list(options.allocate)))
    except ValueError:
        budgets = [0.0]
    if not all(0 < bits <= 32 for bits in budgets):
        p.error(f"--allocate {options.allocate}: bits a packed value, as in 3.5 or 3.5,4")
    options.allocate = budgets
    if options.allocate and len(options.levels) < 2:
        p.error("--allocate needs at least two --levels")
    for told in options.daemon:
        if not all(told.partition("=")):
            p.error(f"--daemon {told}: an option of kvqd, as codebook_dir=FOLDER")
    options.daemon = {n.replace("-", "_"): v for n, _, v in (
        told.partition("=") for told in options.daemon)}
    if not all(n.isdigit() and int(n) for n in _list(options.distances)):
        p.error(f"--distances {options.distances}: tokens, as in 64,1024")
    options.distances = [int(n) for n in _list(options.distances)]
    for name in options.controls:
        if name not in CONTROLS:
            p.error(f"{name!r} is no control; known are {', '.join(CONTROLS)}")
    every = ["/".join(f) for f in options.formats] + options.controls + options.peers
    twice = [name for name in every if every.count(name) > 1]
    if twice:
        p.error(f"{twice[0]} is there twice")
    if options.text and not os.path.isfile(options.text):
        p.error(f"--text {options.text}: there is no such file")
    if options.step >= options.context:
        p.error(f"--step {options.step} has to be less than --context {options.context}")
    return options


def main(arguments: Optional[List[str]] = None) -> int:
    """Runs the command; returns its exit status."""
    p = parser()
    if (sys.argv[1:] if arguments is None else arguments) in (["-h"], ["--help"]):
        p.print_help()  # without PyTorch
        return 0
    try:
        import kvq.transformers
    except ImportError as error:
        print(f"kvq.eval: {error}", file=sys.stderr)
        return 1
    from .models import Failed
    options = checked(p, arguments)
    run = None
    try:
        run = Run(options)
        if options.capture:
            run.capture()
            return 0
        run.measure()
        run.write()
    except (Failed, ValueError, kvq.Error) as error:
        print(f"kvq.eval: {error}", file=sys.stderr)
        return 1
    finally:
        if run:
            run.close()
    print(os.path.join(run.out, "report.md"))
    return 1 if set(run.failures.why) - run.failures.absent else 0
