# SPDX-License-Identifier: Apache-2.0
"""The page in a browser, looked at by axe-core, which finds what keeps people out: KVQ_AXE names
its axe.min.js (https://github.com/dequelabs/axe-core, or in the Python package
axe-playwright-python)."""
import html
import http.client
import http.server
import json
import os
import re
import shutil
import subprocess
import tempfile
import threading
import unittest

from e2e_http import Watched
from e2e_rig import BOUND, Tokens

SCRIPT = """<script src="/axe.js"></script><script>
addEventListener("load", () => setTimeout(async () => {
  const found = await axe.run(document, { resultTypes: ["violations"] });
  const pre = document.createElement("pre");
  pre.id = "axe";
  pre.textContent = JSON.stringify({ passes: found.passes.length,
    violations: found.violations.map((v) => [v.impact, v.id, v.nodes.map((n) => n.html)]) });
  document.body.append(pre);
}, 3500));
</script>"""


def serve(daemon_port, script, axe=b""):
    """The daemon's pages by another port, with a script in the first."""

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            kind, body, status = "text/javascript", axe, 200
            if self.path != "/axe.js":
                connection = http.client.HTTPConnection("127.0.0.1", daemon_port, timeout=BOUND)
                secret = self.headers.get("Authorization")
                connection.request("GET", self.path, headers={"Authorization": secret or ""})
                reply = connection.getresponse()
                kind, body, status = reply.getheader("Content-Type"), reply.read(), reply.status
                connection.close()
            if self.path == "/":
                body = body.replace(b"</head>", script.encode() + b"</head>")
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages)
    server.daemon_threads = False  # server_close() waits for them, and their descriptors are closed
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Axe(Watched):
    @unittest.skipUnless(os.environ.get("KVQ_AXE") and shutil.which("chromium"),
                         "KVQ_AXE names no axe.min.js, or there is no chromium")
    def test_axe(self):
        """Light and dark, wide and as narrow as a phone: axe finds nothing."""
        tokens = Tokens(1, 200)
        session = self.client.session(tokens.rows, "oscar2", name="chat")
        tokens.feed(self.queue, session, 200)
        secret = self.token()["Authorization"].split()[1]
        with open(os.environ["KVQ_AXE"], "rb") as file:
            server = serve(self.port, SCRIPT, file.read())
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        for flags in (["--window-size=1280,1400"], ["--window-size=390,1400"],
                      ["--window-size=1280,1400", "--blink-settings=preferredColorScheme=0"]):
            with tempfile.TemporaryDirectory() as profile:
                done = subprocess.run(
                    ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu", *flags,
                     f"--user-data-dir={profile}", "--virtual-time-budget=12000", "--dump-dom",
                     f"http://127.0.0.1:{server.server_port}/#token={secret}"],
                    capture_output=True, text=True, check=False, timeout=BOUND)
            told = re.search(r'<pre id="axe">(.*?)</pre>', done.stdout, re.S)
            self.assertTrue(told, done.stderr[-2000:])
            found = json.loads(html.unescape(told.group(1)))
            self.assertGreater(found["passes"], 30)
            self.assertEqual(found["violations"], [])

