#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demonstration itself; tools/demo.sh builds what it needs and starts it.

    tools/demo.py BIN [--quick]

Starts a kvqd in a folder of its own, lets two engines generate at once, kills one, lets two share a
prompt, kills the daemon itself and goes on; and prints what is measured on the way. Every figure
comes from a program's own JSON; lines that are computed say so. Exit status 0, or 1 with what went
wrong.
"""
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODEL = os.environ.get("KVQ_MODEL", os.path.join(HERE, "model", "kvq-bytes"))
HELDOUT = os.path.join(HERE, "model", "heldout.txt")
FORMATS = ("f16", "bf16", "oscar4", "oscar3", "oscar2", "oscar2-xh", "kvq2", "innerq-hybrid",
           "ott2", "vecinfer-2@demo")
PROMPTS = {"f16": "The daemon reads its configuration from a file. ",
           "oscar2": "To install the package from source, first "}
# Tokens of one piece of text: 31 packed blocks and half a unit in the window, its average state.
CONTEXT = 31 * 128 + 64
LIMIT = 120  # seconds for any single program


class Trouble(Exception):
    """The demonstration cannot go on; its text says why."""


def title(text):
    print(f"\n== {text}\n", flush=True)


class Demo:
    def __init__(self, binaries, quick):
        self.binaries = os.path.abspath(binaries)
        self.pieces = 2 if quick else 3
        self.folder = tempfile.mkdtemp(prefix="kvq-demo-")
        self.runtime = os.path.join(self.folder, "run")
        self.books = os.path.join(self.folder, "codebooks")
        self.store = os.path.join(self.folder, "sessions")
        os.mkdir(self.books)
        self.log = os.path.join(self.folder, "kvqd.log")
        self.processes = []
        self.daemon = None

    def program(self, name):
        return os.path.join(self.binaries, name)

    def start(self, name, output, *arguments, **more):
        process = subprocess.Popen([self.program(name), *map(str, arguments)], stdout=output,
                                   stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, **more)
        self.processes.append(process)
        return process

    def ask(self, name, *arguments, warns=None):
        """Runs a program to its end; its output, or Trouble with its complaint. With `warns`, an
        exit status, that complaint is only shown."""
        done = subprocess.run([self.program(name), *map(str, arguments)], capture_output=True,
                              text=True, timeout=LIMIT, stdin=subprocess.DEVNULL, check=False)
        if done.returncode and done.returncode == warns:
            print(done.stderr.strip())
        elif done.returncode:
            raise Trouble(f"{name} {' '.join(map(str, arguments))} ended with {done.returncode}:\n"
                          f"{done.stderr.strip()}")
        return done.stdout

    def ctl(self, *arguments):
        return self.ask("kvqctl", "--runtime-dir", self.runtime, *arguments)

    def status(self):
        return json.loads(self.ctl("status", "--json"))

    def log_tail(self):
        with open(self.log, encoding="utf-8", errors="replace") as file:
            return file.read()[-2000:]

    def start_daemon(self):
        reader, writer = os.pipe()
        with open(self.log, "ab") as log:
            self.daemon = self.start("kvqd", log, "--runtime-dir", self.runtime, "--pool-bytes",
                                     "512mb", "--codebook-dir", self.books, "--storage-dir",
                                     self.store, "--ready-fd", writer, pass_fds=[writer])
        os.close(writer)
        ready, _, _ = select.select([reader], [], [], 30)
        if not ready or not os.read(reader, 64):
            raise Trouble("kvqd did not start:\n" + self.log_tail())
        os.close(reader)

    def start_engine(self, fmt):
        path = os.path.join(self.folder, f"{fmt}.txt")
        with open(path, "wb") as output:
            engine = self.start("kvq-run", output, "generate", "--model", MODEL, "--runtime-dir",
                                self.runtime, "--format", fmt, "--prompt", PROMPTS[fmt],
                                "--tokens", 4000, "--quiet")
        return engine, path

    def until(self, what, condition):
        """Looks again and again until the daemon's answers fulfil the condition."""
        end = time.monotonic() + 60
        while True:
            if self.daemon.poll() is not None:
                raise Trouble(f"kvqd ended with {self.daemon.returncode}:\n{self.log_tail()}")
            if condition():
                return
            if time.monotonic() > end:
                raise Trouble(f"after 60 seconds still not: {what}")
            time.sleep(0.1)

    def sessions(self):
        return json.loads(self.ctl("session", "list", "--json"))

    def two_engines(self):
        title("Two engines, one daemon")
        first, first_text = self.start_engine("f16")
        second, second_text = self.start_engine("oscar2")
        self.until("both engines have 600 tokens in their caches", lambda: (
            len(self.sessions()) == 2 and min(s["tokens"] for s in self.sessions()) >= 600))
        print("$ kvqctl status\n" + self.ctl("status"))
        print("$ kvqctl session list\n" + self.ctl("session", "list"))
        self.show_text("f16", first_text)
        self.show_text("oscar2", second_text)

        title("kill -9 of the second engine")
        before = self.status()["pool_used_bytes"]
        second.kill()
        second.wait()
        self.until("the dead engine's session is gone", lambda: self.status()["sessions"] == 1)
        after = self.status()["pool_used_bytes"]
        print(f"in use before {before:,} bytes, after {after:,}: its memory is back, and the first "
              "engine goes on")
        tokens = self.sessions()[0]["tokens"]
        self.until("the first engine goes on", lambda: self.sessions()[0]["tokens"] > tokens)
        print(f"(it had {tokens} tokens then, and has {self.sessions()[0]['tokens']} now)")
        first.send_signal(signal.SIGINT)
        first.wait(LIMIT)

    def one_prefix(self):
        """A second engine begins with the prompt that the first has left, and says the same. So
        does a third, after the daemon was killed, with what was saved of the first one's."""
        title("Two engines, one prompt of 3,000 tokens")
        prompt = os.path.join(self.folder, "prompt.txt")
        with open(HELDOUT, "rb") as source, open(prompt, "wb") as out:
            out.write(source.read(3000))
        ask = ("kvq-run", "generate", "--model", MODEL, "--runtime-dir", self.runtime,
               "--prompt-file", prompt, "--tokens", 64, "--temperature", 0, "--prefix", "--json")
        runs = [json.loads(self.ask(*ask, "--session", "prompt", "--keep")),
                json.loads(self.ask(*ask))]
        status = self.ctl("prefix", "status")
        self.ctl("session", "save", "prompt")
        self.kill_daemon()
        runs.append(json.loads(self.ask(*ask)))
        for name, run in zip(("first", "second", "third"), runs):
            if name == "third":
                print("(saved; the daemon killed with -9, and started again)")
            print(f"{name:>6} engine: {run['prefix_tokens']:,} of {run['prompt_tokens']:,} prompt "
                  f"tokens were there in {run['open_seconds']:.3f} s, prefill of the others took "
                  f"{run['prefill_seconds']:.2f} s")
        same = all(run["ids"] == runs[0]["ids"] for run in runs)
        print(f"their texts are {'the same' if same else 'DIFFERENT'}")
        print("\n$ kvqctl prefix status     (before)\n" + status)
        self.ctl("session", "drop", "prompt")
        if not same or runs[1]["prefix_tokens"] == 0 or runs[2]["prefix_tokens"] == 0:
            raise Trouble("the others were to begin with the first one's prefix")

    def kill_daemon(self):
        """kill -9; then another one starts on what was saved."""
        self.daemon.kill()
        self.daemon.wait()
        self.start_daemon()

    def turn(self, session, prompt):
        return json.loads(self.ask("kvq-run", "generate", "--model", MODEL, "--runtime-dir",
                                   self.runtime, "--session", session, "--keep", "--prompt",
                                   prompt, "--tokens", 120, "--temperature", 0, "--json"))

    def restart(self):
        """A chat is saved, the daemon killed and started again; the chat goes on where it was."""
        title("kill -9 of the daemon")
        with open(HELDOUT, encoding="utf-8") as file:
            turns = file.read(1500), " After that, "
        unbroken = [self.turn("unbroken", prompt) for prompt in turns][1]
        self.turn("chat", turns[0])
        print("$ kvqctl session save chat\n" + self.ctl("session", "save", "chat"))
        self.kill_daemon()
        print("(killed, and started again)\n\n$ kvqctl storage list\n" +
              self.ctl("storage", "list"))
        resumed = self.turn("chat", turns[1])
        same = unbroken["ids"] == resumed["ids"]
        print(f"chat goes on with {resumed['tokens_found']:,} tokens:{turns[1]}"
              f"{bytes(resumed['ids']).decode(errors='replace')!r}\nThe text is "
              f"{'the same as' if same else 'ANOTHER than'} that of a chat that nothing broke.")
        self.ctl("session", "drop", "chat")
        if not same or resumed["tokens_found"] == 0:
            raise Trouble("the chat was to go on as if nothing had been")

    def show_text(self, fmt, path):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()[:240].replace("\n", " ")
        print(f"{fmt:>6} | {PROMPTS[fmt]}{text} ...")

    def make_codebook(self):
        """For vecinfer-2, of keys and values over text that the table is not about."""
        start = time.monotonic()
        text, capture = (os.path.join(self.folder, name) for name in ("text", "capture"))
        with open(HELDOUT, "rb") as source, open(text, "wb") as other:
            source.seek(200000)
            other.write(source.read(2 * CONTEXT))
        self.ask("kvq-run", "perplexity", "--model", MODEL, "--runtime-dir", self.runtime, "--json",
                 "--quiet", "--format", "f16", "--text", text, "--context", CONTEXT, "--capture",
                 capture)
        self.ask("kvq-codebook", "make", "--capture", capture, "--format", "vecinfer-2", "--out",
                 os.path.join(self.books, "demo.kvqbook"), "--quiet")
        print(f"vecinfer-2@demo: a codebook of {2 * CONTEXT:,} other bytes of that text, made in "
              f"{time.monotonic() - start:.0f} s.\n")

    def table(self):
        with open(os.path.join(MODEL, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
        heads = config["num_hidden_layers"] * config["num_key_value_heads"]
        title(f"Formats on the shipped model, {self.pieces * CONTEXT:,} bytes of held-out text")
        print("KV bytes a token: K and V of all layers; packed blocks alone, and with windows and\n"
              f"everything else at {CONTEXT:,} tokens. KL and same top are against f16. The error\n"
              "of the difference in log-likelihood is its standard error. Speed: one engine at a\n"
              "time, generating.\n")
        self.make_codebook()
        print(f"{'format':<15} {'path':<5} {'bits per':>8} {'KV bytes a token':>17} "
              f"{'perplex-':>9} {'KL mean':>8} {'KL 99%':>8} {'same':>7} "
              f"{'log-likelihood':>19} {'tokens':>7}")
        print(f"{'':<15} {'':<5} {'value':>8} {'packed':>8} {'all':>8} {'ity':>9} {'':>8} {'':>8} "
              f"{'top':>7} {'difference':>19} {'per s':>7}")
        common = ("--model", MODEL, "--runtime-dir", self.runtime, "--json", "--quiet")
        for fmt in FORMATS:
            quality = json.loads(self.ask("kvq-run", "perplexity", *common, "--format", fmt,
                                          "--against", "f16", "--text", HELDOUT, "--bytes",
                                          self.pieces * CONTEXT, "--context", CONTEXT))
            speed = json.loads(self.ask("kvq-run", "generate", *common, "--format", fmt,
                                        "--prompt", PROMPTS["f16"], "--tokens", 400,
                                        "--temperature", 0))
            difference = (f"{quality['log_likelihood_difference']:+.5f} +-"
                          f"{quality['log_likelihood_difference_stderr']:.5f}")
            print(f"{fmt:<15} {quality['attention']:<5} {quality['bits_per_value']:>8.3f} "
                  f"{quality['bytes_per_token_head'] * heads:>8.0f} "
                  f"{quality['bytes_per_token_head_total'] * heads:>8.0f} "
                  f"{quality['perplexity']:>9.4f} {quality['kl_mean']:>8.5f} "
                  f"{quality['kl_99']:>8.5f} {100 * quality['same_top']:>6.2f}% "
                  f"{difference:>19} {speed['tokens_per_s']:>7.1f}", flush=True)

    def real_shape(self):
        title("One layer of Llama-3.1-8B's shape: 32 query heads, 8 KV heads, head_dim 128")
        threads = len(os.sched_getaffinity(0))
        # Where other work disturbs the measuring of memory, it complains of its rows, and has them.
        rows = json.loads(self.ask("kvq-bench", "attend", "--format", "f16,oscar2", "--tokens",
                                   32768, "--threads", threads, "--q-heads", 32, "--kv-heads", 8,
                                   "--head-dim", 128, "--json", warns=1))
        if not rows:
            raise Trouble("kvq-bench attend has timed nothing")
        layers, heads, tokens, sessions = 32, 8, 32768, 8
        for row in rows:
            packed = row["bytes_per_token_head"] * heads * layers * tokens * sessions
            print(f"{row['format']:<7} {row['path']:<6} {row['us']:6.0f} us per layer, {tokens:,} "
                  f"tokens, {row['threads']} threads, {row['isa']}; {row['vs_f16']:.2f} times as "
                  f"fast as f16\n{'':<14} {sessions} such sessions of {layers} layers: "
                  f"{packed / 2**30:.1f} GiB packed (computed)")

    def stop_daemon(self):
        left = self.status()
        self.daemon.terminate()
        if self.daemon.wait(30):
            raise Trouble(f"kvqd ended with {self.daemon.returncode}")
        title("The end")
        counters = left["counters"]
        print(f"kvqd served {counters['steps']:,} steps and {counters['attends']:,} attentions, "
              f"held {left['pool_used_bytes']:,} bytes when the last engine had gone, "
              "and has ended.")

    def close(self):
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def show(self):
        self.start_daemon()
        self.two_engines()
        self.one_prefix()
        self.restart()
        self.table()
        self.stop_daemon()
        self.real_shape()


def main():
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 0 if sys.argv[1:] == ["--help"] else 2
    demo = Demo(sys.argv[1], "--quick" in sys.argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    started = time.monotonic()
    try:
        demo.show()
        print(f"\nThis took {time.monotonic() - started:.0f} seconds.")
        return 0
    except (Trouble, OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    finally:
        demo.close()


if __name__ == "__main__":
    sys.exit(main())
