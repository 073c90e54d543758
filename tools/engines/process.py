# SPDX-License-Identifier: Apache-2.0
"""A worker's process, asked by lines of JSON (worker.py)."""
import json
import subprocess


class Process:
    """Runs a command, and starts its worker; `error` says why there is none."""

    def __init__(self, command, environment, **start):
        self.process, self.what, self.error = None, None, None
        try:
            self.process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, env=environment)
        except OSError as error:
            self.error = str(error)
            return
        answer = self.ask(do="start", **start)
        self.what, self.error = answer.get("what"), answer.get("error")

    def ask(self, **request):
        """The answer; with "error" in it if there is none."""
        if self.error:
            return {"error": self.error}
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            return {"error": f"the process ended with status {self.process.wait()}"}
        return json.loads(line)

    def stop(self):
        """Ends it."""
        if not self.process:
            return
        try:
            self.process.stdin.close()
        except BrokenPipeError:
            pass
        self.process.wait()
