# SPDX-License-Identifier: Apache-2.0
"""The page in a browser, with a script that stands between it and the daemon."""
import html
import json
import re
import shutil
import subprocess
import tempfile
import unittest

from e2e_axe import serve
from e2e_http import Watched
from e2e_rig import BOUND

# What the script has to tell, in the page as it is at the end.
TELL = """<script>
function tell(told) {
  const pre = document.getElementById("told") || document.createElement("pre");
  pre.id = "told";
  pre.textContent = JSON.stringify(told);
  document.body.append(pre);
}
const real = window.fetch;
"""

# Presses "Show" three times, and counts how many looks are under way at once.
THREE_TIMES = TELL + """
let open = 0;
const told = { most: 0, looks: 0 };
window.fetch = async (path, options) => {
  if (path !== "status" || !options.headers) return real(path, options);
  told.looks++;
  told.most = Math.max(told.most, ++open);
  try {
    return await real(path, options);
  } finally {
    open--;
    tell(told);
  }
};
const form = () => document.getElementById("sign-in");
const waiting = setInterval(() => {
  if (!form() || form().hidden) return;
  clearInterval(waiting);
  document.getElementById("token").value = "SECRET";
  for (let i = 0; i < 3; i++) form().requestSubmit();
}, 100);
</script>"""

# After the first look nothing is answered any more; counts what the page gives up.
SILENT = TELL + """
const told = { given_up: 0, never: 0 };
window.fetch = async (path, options) => {
  if (!document.getElementById("all") || document.getElementById("all").hidden)
    return real(path, options);
  return new Promise((_, refuse) => {
    told.never++;
    tell(told);
    if (options.signal) options.signal.addEventListener("abort", () => {
      told.given_up++;
      tell(told);
      refuse(options.signal.reason);
    });
  });
};
</script>"""

# The store is not answered for from the third look on.
NO_STORE = TELL + """
const told = { looks: 0, without: 0 };
window.fetch = async (path, options) => {
  if (path === "status" && options.headers) told.looks++;
  if (path !== "storage" || told.looks < 3) return real(path, options);
  told.without++;
  tell(told);
  return new Response("it is busy", { status: 503 });
};
</script>"""


@unittest.skipUnless(shutil.which("chromium"), "there is no chromium (apt install chromium)")
class Page(Watched):
    def show(self, script, fragment=""):
        """The page after 40 seconds of its own time, and what the script told."""
        server = serve(self.port, script)
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
                 f"--user-data-dir={profile}", "--virtual-time-budget=40000", "--dump-dom",
                 f"http://127.0.0.1:{server.server_port}/{fragment}"],
                capture_output=True, text=True, check=False, timeout=BOUND)
        told = re.search(r'<pre id="told">(.*?)</pre>', done.stdout, re.S)
        self.assertTrue(told, done.stderr[-2000:])
        return done.stdout, json.loads(html.unescape(told.group(1)))

    def secret(self):
        return self.token()["Authorization"].split()[1]

    def test_show_pressed_again(self):
        """There is one loop, however often it is begun."""
        page, told = self.show(THREE_TIMES.replace("SECRET", self.secret()))
        self.assertIn('<div id="all">', page)
        self.assertGreater(told["looks"], 2)
        self.assertEqual(told["most"], 1)

    def test_no_store(self):
        """What is known of the store is not needed for the rest, which goes on."""
        page, told = self.show(NO_STORE, f"#token={self.secret()}")
        self.assertGreater(told["without"], 1)
        self.assertIn('<div id="all">', page)
        self.assertRegex(page, r'role="status" class="">running<')
        self.assertRegex(page, r'<p id="saving" role="status" class="bad">the store cannot be '
                               r'looked at: storage: it is busy</p>')
        self.assertIn('<dl id="store" class="cards"></dl>', page)

    def test_silence(self):
        """A question is given up after a while and asked again, and the page says how old it is."""
        page, told = self.show(SILENT, f"#token={self.secret()}")
        self.assertIn('<div id="all">', page)
        self.assertGreater(told["given_up"], 0)
        self.assertGreater(told["never"], told["given_up"])  # others were asked since
        self.assertRegex(page, r'role="status" class="bad">no answer for \d+ s.*; the figures are '
                               'that old<')
