#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What watching the daemon costs attention: its p99 with and without, in alternating pairs.

  tools/bench-watch.py [PAIRS [SECONDS [all]]]     10 pairs of windows of 2 seconds each

A client attends over a session of 4,096 tokens as fast as it can. In every second window another
process reads /metrics once a second; with `all` it also asks every two seconds what the page asks
that shows sessions, and `kvqctl top` and `kvqctl events` run. KVQ_BIN_DIR and KVQ_LIBRARY say which
build, as for tests/e2e/python.py. Figures are of the moment: read the ratios of pairs, not the
microseconds. On few cores they count what those programs themselves take of them.
"""
import http.client
import multiprocessing
import os
import socket
import subprocess
import sys
import time

import numpy as np

if "--help" in sys.argv[1:]:
    print(__doc__)
    sys.exit(0)
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [os.path.join(ROOT, "tests", "e2e"), os.path.join(ROOT, "client", "python")]
from e2e_rig import BIN, Daemon, Tokens  # noqa: E402

TOKENS = 4096


class Local(http.client.HTTPConnection):
    """By the Unix socket."""

    def __init__(self, path):
        super().__init__("localhost")
        self.path = path

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(self.path)


PAGE = ("/status", "/clients", "/sessions", "/prefixes", "/quotas", "/events")


def scrape(path, on, count, page):
    """Reads the metrics once a second while it is asked to, and what the page asks for."""
    connection = Local(path)
    while True:
        on.wait()
        asked = ["/metrics", *(PAGE if page and count.value % 2 == 0 else ())]
        for what in asked:
            connection.request("GET", what)
            connection.getresponse().read()
        count.value += 1
        time.sleep(1)


class Watchers:
    """Programs that look at the daemon, for as long as a `with` lasts."""

    def __init__(self, daemon, commands):
        self.lines = [[os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory, *words]
                      for words in commands]

    def __enter__(self):
        self.running = [subprocess.Popen(line, stdout=subprocess.DEVNULL,
                                         stdin=subprocess.DEVNULL) for line in self.lines]

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()


def window(queue, session, tokens, seconds):
    """How long calls of attention took, in microseconds: the median and the 99th percentile."""
    took, until = [], time.perf_counter() + seconds
    while (began := time.perf_counter()) < until:
        queue.attend([session], 0, tokens.q[0, :1])
        took.append((time.perf_counter() - began) * 1e6)
    return np.percentile(took, [50, 99])


def main():
    pairs = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    seconds = float(sys.argv[2]) if len(sys.argv) > 2 else 2
    everything = sys.argv[3:] == ["all"]
    daemon = Daemon(attention="fast")
    watchers = Watchers(daemon, (("top", "--interval", "1"), ("events",)) if everything else ())
    on, count = multiprocessing.Event(), multiprocessing.Value("i", 0)
    scraper = multiprocessing.Process(
        target=scrape, args=(os.path.join(daemon.directory, "http.sock"), on, count, everything),
        daemon=True)
    scraper.start()
    tokens = Tokens(1, TOKENS)
    client = daemon.client()
    queue = client.queue()
    session = client.session(tokens.rows, "kvq2")
    for _ in range(TOKENS // 512):
        tokens.feed(queue, session, 512, attend=False)
    window(queue, session, tokens, seconds)  # warms up
    ratios = []
    for pair in range(pairs):
        found = {}
        for scraped in ((False, True), (True, False))[pair % 2]:
            if not scraped:
                found[False] = window(queue, session, tokens, seconds)
                continue
            with watchers:
                on.set()
                found[True] = window(queue, session, tokens, seconds)
                on.clear()
        ratios.append(found[True] / found[False])
        print(f"p50 {found[False][0]:7.1f} us, watched {found[True][0]:7.1f} us, ratio "
              f"{ratios[-1][0]:.3f}; p99 {found[False][1]:7.1f} us, watched {found[True][1]:7.1f} "
              f"us, ratio {ratios[-1][1]:.3f}")
    middle, low, high = (np.percentile(ratios, p, axis=0) for p in (50, 25, 75))
    print(f"{count.value} scrapes; median ratio (quartiles) of p50 {middle[0]:.3f} ({low[0]:.3f} "
          f"to {high[0]:.3f}), of p99 {middle[1]:.3f} ({low[1]:.3f} to {high[1]:.3f})")
    scraper.kill()
    client.close()
    daemon.stop()


if __name__ == "__main__":
    main()
