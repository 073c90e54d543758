# SPDX-License-Identifier: Apache-2.0
"""HTTP: what monitors see, who may see what, and that nobody can hold the daemon up by it."""
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
import unittest

import e2e_storage
import kvq
import numpy as np

from e2e_rig import BOUND, ROOT, Daemon, Test, Tokens


class Local(http.client.HTTPConnection):
    """By the Unix socket, which knows its users."""

    def __init__(self, daemon):
        super().__init__("localhost", timeout=BOUND)
        self.path = os.path.join(daemon.directory, "http.sock")

    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(BOUND)
        self.sock.connect(self.path)


def get(connection, path, method="GET", **headers):
    """Status, content type and body."""
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.getheader("Content-Type"), reply.read().decode()


def free_port():
    """A port that nobody has just now."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def samples(text):
    """Values by name with labels."""
    return {name: float(value) for name, value in
            (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))}


def metrics_of(daemon):
    """All samples of a daemon, asked by its Unix socket."""
    local = Local(daemon)
    text = get(local, "/metrics")[2]
    local.close()
    return samples(text)


def names_of_samples(text):
    """What samples are called, those included of which there are none yet."""
    ends = {"histogram": ("_bucket", "_sum", "_count"), "summary": ("_sum", "_count")}
    return {name + end for name, kind in re.findall(r"^# TYPE (\S+) (\S+)", text, re.M)
            for end in ends.get(kind, ("",))}


def names_of_labels(text):
    return set(re.findall(r'[{,](\w+)="', text))


class Watched(Test):
    """A daemon for each test, with HTTP."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = None  # each test has its own

    tearDownClass = setUpClass

    def setUp(self):
        self.port = free_port()
        self.daemon = Daemon(http_address=f"127.0.0.1:{self.port}")
        super().setUp()
        self.local = Local(self.daemon)
        self.remote = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND)

    def tearDown(self):
        self.local.close()
        self.remote.close()
        self.client.close()
        self.daemon.stop()

    def token(self):
        with open(os.path.join(self.daemon.directory, "admin", "http-token"),
                  encoding="ascii") as file:
            return {"Authorization": "Bearer " + file.read()}


class Monitors(Watched):
    def test_metrics(self):
        """Prometheus' own checker has nothing to say, the figures are what happened, and no session
        is named."""
        tokens = Tokens(1, 300)
        session = self.client.session(tokens.rows, "f16", name="a-secret-of-its-user")
        before = samples(get(self.remote, "/metrics")[2])
        tokens.feed(self.queue, session, 300)
        status, kind, text = get(self.remote, "/metrics")
        self.assertEqual((status, kind), (200, "text/plain; version=0.0.4; charset=utf-8"))
        self.assertNotIn("secret", text)
        bounds = set(re.findall('le="([^"]*)"', text)) - {"+Inf"}
        self.assertEqual(bounds, {repr(float(x)) for x in bounds})  # in the fewest digits
        self.assertIn("1e-06", bounds)
        self.assertFalse({"job", "instance"} & names_of_labels(text))  # Prometheus sets these
        after = samples(text)
        calls = 'kvqd_request_seconds_count{op="append_attend"}'
        self.assertEqual(after[calls] - before[calls], tokens.layers)
        self.assertEqual(after['kvqd_request_seconds_bucket{op="append_attend",le="+Inf"}'],
                         after[calls])
        self.assertGreater(after['kvqd_request_seconds_sum{op="append_attend"}'], 0)
        self.assertEqual(after["kvqd_appended_tokens_total"], 300)
        self.assertEqual(after["kvqd_tokens"], 300)
        self.assertEqual(after["kvqd_sessions"], 1)
        self.assertEqual(after["kvqd_steps_total"], 1)
        space = self.daemon.ctl("session", "list")[0]["namespace"]
        tiers = [after[f'kvqd_namespace_bytes{{namespace="{space}",tier="{tier}"}}']
                 for tier in ("host", "device")]
        self.assertGreater(sum(tiers), 0)
        if shutil.which("promtool"):
            done = subprocess.run(["promtool", "check", "metrics"], input=text, text=True,
                                  capture_output=True, check=False)
            self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_refusals(self):
        """Each refused request counts once, under its status and at its door."""
        tokens = Tokens(1, 300)
        sessions = [self.client.session(tokens.rows, "f16") for _ in range(3)]
        before = samples(get(self.remote, "/metrics")[2])
        sessions[1].tokens = sessions[2].tokens = 7
        entries = kvq.make_entries(sessions, append=0)
        ticket = self.queue.call("step_begin", entries)
        self.queue.call("step_end", kvq.make_entries(sessions[:1]), step=ticket.step)
        self.fails(kvq.Code.E_NO_STEP, self.queue.call, "step_end", entries[:0], step=999)
        self.fails(kvq.Code.E_NO_SESSION, self.client.session, name="no", must_exist=True)
        self.daemon.ctl("session", "drop", "no", check=False)
        self.daemon.ctl("client", "kick", "12345", check=False)
        after = samples(get(self.remote, "/metrics")[2])
        rises = {name: after[name] - before[name] for name in after
                 if name.startswith("kvqd_refusals_total") and after[name] != before[name]}
        self.assertEqual(rises, {
            'kvqd_refusals_total{door="ring",status="E_POSITION"}': 1,
            'kvqd_refusals_total{door="ring",status="E_NO_STEP"}': 1,
            'kvqd_refusals_total{door="attach",status="E_NO_SESSION"}': 1,
            'kvqd_refusals_total{door="control",status="E_NO_SESSION"}': 1,
            # kvqctl looks for names that begin so in a store, too, which is not there
            'kvqd_refusals_total{door="control",status="E_UNSUPPORTED"}': 1,
            'kvqd_refusals_total{door="control",status="E_NO_CLIENT"}': 1})
        ring = [after[name] for name in after if 'refusals_total{door="ring"' in name]
        self.assertEqual(sum(ring), after["kvqd_refused_requests_total"])

    def test_every_counter(self):
        """All that the daemon counts is there, in base units."""
        counters = self.daemon.ctl("status")["counters"]
        families = re.findall(r"^# TYPE kvqd_(\S+)", get(self.remote, "/metrics")[2], re.M)
        for name in counters:
            name = re.sub("_[nm]s$", "_seconds", name)
            self.assertTrue({name, name + "_total"} & set(families), name)
        self.assertEqual(len(families), len(set(families)))

    def test_open_metrics(self):
        """The same families for those who ask for OpenMetrics, to the end mark."""
        _, kind, text = get(self.remote, "/metrics", Accept="application/openmetrics-text")
        self.assertEqual(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8")
        self.assertTrue(text.endswith("# EOF\n"))
        self.assertEqual(set(samples(text)), set(samples(get(self.remote, "/metrics")[2])))
        types = dict(re.findall(r"^# TYPE (\S+) (\S+)", text, re.M))
        self.assertEqual(types["kvqd_steps"], "counter")
        self.assertEqual(types["kvqd_build"], "info")

    def test_alerts(self):
        """Each metric of the alerts is there."""
        self.client.session(Tokens(1, 1).rows, "f16")
        there = names_of_samples(get(self.remote, "/metrics")[2])
        there |= {re.sub("_(bucket|sum|count)$", "", name) for name in there}  # texts name these
        with open(os.path.join(ROOT, "packaging", "prometheus", "kvqd.rules.yml"),
                  encoding="utf-8") as file:
            named = set(re.findall(r"kvqd_[a-z]\w+", file.read()))
        self.assertGreater(len(named), 10)
        self.assertLessEqual(named, there)

    def test_dashboard(self):
        """Each metric of the dashboard is there, and Prometheus reads each expression."""
        there = names_of_samples(get(self.remote, "/metrics")[2])
        with open(os.path.join(ROOT, "docs", "operations.md"), encoding="utf-8") as file:
            rows = re.findall(r"^\| `kvqd_[^|]*\|([^|]*)\|", file.read(), re.M)
        labels = {"instance", "le"} | set(re.findall(r"`(\w+)`", " ".join(rows)))
        with open(os.path.join(ROOT, "packaging", "prometheus", "kvqd.dashboard.json"),
                  encoding="utf-8") as file:
            panels = json.load(file)["panels"]
        self.assertEqual(len({panel["id"] for panel in panels}), len(panels))
        exprs = [target["expr"] for panel in panels for target in panel.get("targets", ())]
        self.assertGreater(len(exprs), 30)
        for expr in exprs:
            self.assertLessEqual(set(re.findall(r"kvqd_\w+", expr)), there)
            for group in re.findall(r"by \(([^)]*)\)", expr):
                self.assertLessEqual(set(group.split(", ")), labels)
        if shutil.which("promtool"):
            rules = [{"record": f"panel:{i}", "expr": expr.replace("$__rate_interval", "5m")}
                     for i, expr in enumerate(exprs)]
            with tempfile.NamedTemporaryFile("w", suffix=".yml", encoding="utf-8") as file:
                json.dump({"groups": [{"name": "panels", "rules": rules}]}, file)  # YAML, too
                file.flush()
                done = subprocess.run(["promtool", "check", "rules", file.name], text=True,
                                      capture_output=True, check=False)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_page_files(self):
        """They come from here alone."""
        for path, kind in (("/", "html"), ("/kvq.css", "css"), ("/kvq.js", "javascript")):
            status, told, text = get(self.remote, path)
            self.assertEqual((status, told), (200, f"text/{kind}; charset=utf-8"))
            links = re.findall(r"https?://[^\s\"'`]+", text)
            self.assertLessEqual(set(links), {"http://www.w3.org/2000/svg"})  # a name, not a link
        self.assertIn("/metrics", get(self.remote, "/help")[2])

    def test_page_in_a_browser(self):
        """It shows sessions, whatever they are called, to who has the token."""
        chromium = shutil.which("chromium")
        if not chromium:
            self.skipTest("there is no chromium (apt install chromium)")
        tokens = Tokens(1, 200)
        session = self.client.session(tokens.rows, "f16", name="<img src=x onerror=alert(1)>")
        tokens.feed(self.queue, session, 200)
        secret = self.token()["Authorization"].split()[1]
        for fragment, there, not_there in ((f"#token={secret}", "&lt;img src=x", "<img"),
                                           ("", "needs the daemon's token", "&lt;img")):
            with tempfile.TemporaryDirectory() as profile:
                done = subprocess.run(
                    [chromium, "--headless=new", "--no-sandbox", "--disable-gpu",
                     f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom",
                     f"http://127.0.0.1:{self.port}/{fragment}"], capture_output=True, text=True,
                    check=False, timeout=BOUND)
            self.assertIn(there, done.stdout, done.stderr[-2000:])
            self.assertNotIn(not_there, done.stdout)

    def test_health(self):
        self.assertEqual(get(self.remote, "/health")[0], 200)
        for path in ("/health", "/health/live", "/health/ready"):
            status, kind, text = get(self.local, path)
            self.assertEqual((status, kind), (200, "application/json"))
            self.assertEqual(json.loads(text), {"live": True, "ready": True, "draining": False})
        version = json.loads(get(self.remote, "/version")[2])
        self.assertEqual(version["version"], self.daemon.status()["version"])
        self.assertEqual(version["pid"], self.daemon.process.pid)

    def test_lists(self):
        """What kvqctl shows, also where it takes many pages."""
        rows = Tokens(1, 1).rows
        names = {f"{i:0100}" for i in range(700)}
        for name in names:
            self.client.session(rows, "f16", name=name).close()
        listed = json.loads(get(self.local, "/sessions")[2])
        self.assertEqual({s["name"] for s in listed}, names)
        self.assertEqual(len(listed), len(names))
        self.assertEqual(set(listed[0]), set(self.daemon.ctl("session", "list")[0]))
        self.assertEqual(json.loads(get(self.local, "/status")[2])["sessions"], 700)
        self.assertEqual(len(json.loads(get(self.local, "/clients")[2])), 1)
        self.assertEqual(len(json.loads(get(self.local, "/quotas")[2])), 1)
        json.loads(get(self.local, "/prefixes")[2])

    def test_who_sees_what(self):
        """By the loopback address only the token shows what names sessions."""
        self.client.session(Tokens(1, 1).rows, "f16", name="mine")
        for path in ("/status", "/sessions", "/clients", "/prefixes", "/quotas", "/events",
                     "/storage"):
            self.assertEqual(get(self.remote, path)[0], 401, path)
            for wrong in ("Bearer ", "Bearer " + "0" * 64, "Basic eDp5"):
                self.assertEqual(get(self.remote, path, Authorization=wrong)[0], 401, path)
            self.assertEqual(get(self.remote, path, **self.token())[0], 200, path)
            for scheme in ("bearer ", "BEARER "):  # RFC 9110, 11.1
                token = self.token()["Authorization"].replace("Bearer ", scheme)
                self.assertEqual(get(self.remote, path, Authorization=token)[0], 200, path)
            self.assertEqual(get(self.local, path)[0], 200, path)
        self.assertIn('"mine"', get(self.remote, "/sessions", **self.token())[2])

    def test_another_user(self):
        """The Unix socket shows a user's own sessions, and no events, which name everybody's."""
        if os.getuid() != 0:
            self.skipTest("only root can be another user")
        os.chmod(self.daemon.directory, 0o755)
        self.client.session(Tokens(1, 1).rows, "f16", name="mine")
        program = (
            "import os, socket, sys\n"
            "os.setgroups([]); os.setgid(61234); os.setuid(61234)\n"
            "s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1])\n"
            "s.sendall(f'GET {sys.argv[2]} HTTP/1.0\\r\\n\\r\\n'.encode())\n"
            "print(b''.join(iter(lambda: s.recv(65536), b'')).decode())\n")
        for path, status, there in (("/sessions", "200", "[]"), ("/events", "403", "read_uids")):
            done = subprocess.run(["python3", "-c", program, self.local.path, path],
                                  capture_output=True, text=True, check=True, timeout=BOUND)
            self.assertIn(f"HTTP/1.1 {status}", done.stdout)
            self.assertIn(there, done.stdout)
            self.assertNotIn("mine", done.stdout)

    def test_events(self):
        """Those that are kept, and those behind one."""
        self.client.session(Tokens(1, 1).rows, "f16", name="one")
        self.daemon.wait_log("event=session_opened .*one")
        all_of_them = json.loads(get(self.local, "/events")[2])
        last = all_of_them["last"]
        self.assertEqual([e["number"] for e in all_of_them["events"]], list(range(1, last + 1)))
        self.assertIn("one", [e["session"] for e in all_of_them["events"]])
        self.assertEqual(json.loads(get(self.local, f"/events?after={last}")[2]),
                         {"last": last, "events": []})
        self.client.session(Tokens(1, 1).rows, "f16", name="two")
        self.daemon.wait_log("event=session_opened .*two")
        news = json.loads(get(self.local, f"/events?after={last}")[2])
        self.assertEqual([e["session"] for e in news["events"]], ["two"])
        for wrong in ("x", "-1", "1x", "99999999999999999999999"):
            self.assertEqual(get(self.local, f"/events?after={wrong}")[0], 400)

    def test_nonsense(self):
        """Other methods, paths and sites are refused; the connection goes on."""
        self.assertEqual(get(self.remote, "/nothing")[0], 404)
        self.assertEqual(get(self.remote, "/health", method="DELETE")[0], 405)
        self.remote.request("POST", "/health", body=b"x" * 100000)
        reply = self.remote.getresponse()
        self.assertEqual(reply.status, 405)
        reply.read()
        self.assertEqual(get(self.remote, "/health", Host="evil.example")[0], 421)
        for host in ("localhost:1", "LOCALHOST", "LocalHost:1"):
            self.assertEqual(get(self.remote, "/health", Host=host)[0], 200, host)
        self.assertEqual(get(self.remote, "/health", method="HEAD")[0], 200)

    def test_many_connections(self):
        """Those of the loopback address leave the Unix socket its own, and shut nobody out there:
        the oldest of those goes that have not asked for anything yet."""
        many = [socket.create_connection(("127.0.0.1", self.port)) for _ in range(40)]
        for one in many:
            one.settimeout(BOUND)
        self.assertEqual(get(self.local, "/health")[0], 200)
        for one in many[8:]:
            one.sendall(b"GET /health HTTP/1.1\r\n")  # and no more
        for one in many[:8]:
            self.assertEqual(one.recv(1), b"")
        for _ in range(4):
            remote = http.client.HTTPConnection("127.0.0.1", self.port, timeout=BOUND)
            self.assertEqual(get(remote, "/metrics", Connection="close")[0], 200)
            remote.close()
        self.assertEqual(many[8].recv(1), b"")
        for one in many:
            one.close()

    def test_ends_with_questions_open(self):
        """The daemon ends, whatever is asked meanwhile."""
        many = []
        for _ in range(8):
            one = Local(self.daemon)
            one.request("GET", "/metrics")
            many.append(one)
        self.daemon.process.terminate()
        self.assertEqual(self.daemon.process.wait(BOUND), 0)
        self.assertFalse(os.path.exists(self.local.path))
        for one in many:
            one.close()


def affine2(x, axis):
    """What 2 bits with a scale and a minimum for 32 values along an axis make of them."""
    groups = np.moveaxis(x, axis, -1)
    groups = groups.reshape(*groups.shape[:-1], -1, 32)
    low = groups.min(-1, keepdims=True)
    step = (groups.max(-1, keepdims=True) - low) / 3
    return np.sqrt(np.square(groups - low - np.round((groups - low) / step) * step).sum()
                   / np.square(groups).sum())


class PackError(Test):
    """What packing loses, as the daemon measures it, beside NumPy's."""

    @classmethod
    def setUpClass(cls):
        cls.daemon = Daemon(pack_error_ms=1, backend="cpu")

    def errors(self):
        """Mean and number of what was measured, by format, layer and tensor."""
        local = Local(self.daemon)
        text = get(local, "/metrics")[2]
        local.close()
        found = {}
        for end, *key, value in re.findall(
                r'kvqd_pack_error_(\w+)\{format="(.*)",layer="(\d+)",of="(.)"\} (\S+)', text):
            found.setdefault(tuple(key), {})[end] = float(value)
        return {key: (x["sum"] / x["count"], x["count"]) for key, x in found.items()}

    def measure(self, tokens, format, units, whole):
        """Feeds sessions until so many units of each layer were compared."""
        until = time.monotonic() + BOUND
        places = [[self.client.array((128,) + tokens.k.shape[2:]) for _ in range(tokens.layers)]
                  for _ in range(2)]
        keys = {(format, str(layer), x) for layer in range(tokens.layers) for x in "kv"}
        while time.monotonic() < until:
            with self.client.session(tokens.rows, format) as session:
                for _ in range(tokens.n // 128):
                    if whole:
                        for place, x in zip(places, (tokens.k, tokens.v)):
                            for layer in range(tokens.layers):
                                place[layer][:] = x[layer, session.tokens:session.tokens + 128]
                        self.queue.step_whole([session], 128, *places)
                    else:
                        tokens.feed(self.queue, session, 128, attend=False)
                for layer in range(tokens.layers):  # what the background has left
                    self.queue.attend([session], layer, tokens.q[layer, :1])
            found = self.errors()
            if all(found.get(key, (0, 0))[1] >= units for key in keys):
                return {key[1:]: found[key][0] for key in keys}
        raise AssertionError(f"not measured: {found}")

    def test_figures(self):
        """Little is lost in 8 bits; in 2 bits so much as the formula says, layer by layer."""
        tokens = Tokens(5, 2048)
        tokens.k = np.random.default_rng(1).standard_normal(tokens.k.shape, np.float32)
        tokens.k[1, ::16] *= 8  # outliers, of one layer alone
        with self.client.session(tokens.rows, "f16") as session:  # which is not packed
            tokens.feed(self.queue, session, 2048, attend=False)
        for error in self.measure(tokens, "int8", 4, False).values():
            self.assertTrue(0 < error < 0.02, error)
        self.assertNotIn("f16", {key[0] for key in self.errors()})
        found = self.measure(tokens, "kivi2", 30, False)
        for layer in range(2):
            self.assertAlmostEqual(found[str(layer), "k"], affine2(tokens.k[layer], 0), delta=0.02)
            self.assertAlmostEqual(found[str(layer), "v"], affine2(tokens.v[layer], 2), delta=0.02)
        self.assertGreater(abs(found["1", "k"] - found["0", "k"]), 0.05)

    def test_whole_steps(self):
        """Also what a request packs itself; formats with extras, too."""
        tokens = Tokens(6, 2048)
        for format in ("oscar2", "kivi-sink2", "innerq-hybrid"):
            for error in self.measure(tokens, format, 4, True).values():
                self.assertTrue(0.1 < error < 0.7, (format, error))

    def test_off(self):
        """With pack_error_ms = 0 nothing is compared any more, at once."""
        tokens = Tokens(7, 1024)
        self.measure(tokens, "kivi4", 1, False)
        self.daemon.ctl("config", "set", "pack_error_ms", "0")
        before = self.errors()
        with self.client.session(tokens.rows, "kivi4") as session:
            for _ in range(8):
                tokens.feed(self.queue, session, 128)
        self.assertEqual(self.errors(), before)
        self.daemon.ctl("config", "set", "pack_error_ms", "1")


def store_times(daemon):
    """How many of each job the store has done, by its histogram; each took some time."""
    local = Local(daemon)
    figures = samples(get(local, "/metrics")[2])
    local.close()
    done = {}
    for name, count in figures.items():
        found = re.fullmatch(r'kvqd_store_seconds_count\{task="(\w+)"\}', name)
        if found and count:
            assert figures[name.replace("_count", "_sum")] > 0, name
            done[found[1]] = count
    return done


def wait_times(daemon, expected):
    """A job ends a little later than what it was for is there."""
    until = time.monotonic() + BOUND
    while store_times(daemon) != expected and time.monotonic() < until:
        pass
    unittest.TestCase().assertEqual(store_times(daemon), expected)


class Stores(e2e_storage.Stored):
    def test_times(self):
        """What the store has done, and nothing else."""
        tokens = Tokens(1, 500)
        session = self.client.session(tokens.rows, "oscar2", name="it")
        self.assertEqual(store_times(self.daemon), {})
        tokens.feed(self.queue, session, 400, attend=False)
        session.save()
        wait_times(self.daemon, {"save": 1})
        session.save()  # there is nothing to be saved
        self.assertEqual(store_times(self.daemon), {"save": 1})
        session.park()
        session.prefetch()
        wait_times(self.daemon, {"save": 1, "fetch": 1})
        self.again()
        self.client.session(tokens.rows, "oscar2", name="it")
        wait_times(self.daemon, {"restore": 1})


    def figures(self):
        return metrics_of(self.daemon)

    def wait_figures(self, **expected):
        """Until gauges have these values: the store is looked at every other second."""
        until = time.monotonic() + BOUND
        found = None
        while found != expected and time.monotonic() < until:
            all_of_them = self.figures()
            found = {name: all_of_them.get("kvqd_" + name) for name in expected}
        self.assertEqual(found, expected)

    reason = "other"

    def failures(self):
        """How many jobs have failed, by task; each task has a sample from the start."""
        found = {re.search('task="([a-z]+)",reason="([a-z]+)"', name).groups(): value
                 for name, value in self.figures().items() if "store_failures_total" in name}
        self.assertEqual(set(found), {
            (task, reason) for task in ("save", "restore", "fetch", "prefix", "push", "pull")
            for reason in ("quota", "other")})
        self.assertFalse([key for key, value in found.items() if value and key[1] != self.reason])
        return {task: value for (task, _), value in found.items() if value}

    def doctor(self, check):
        """Levels and texts of the daemon's findings about something."""
        findings = json.loads(self.daemon.ctl("doctor", check=False)[1])
        return [(f["level"], f["text"]) for f in findings if f["check"] == check]

    def test_on_disk(self):
        """What the store has and may have, as `kvqctl storage status` says; what is not saved."""
        self.again(storage_bytes="64mb")
        tokens = Tokens(1, 200)
        session = self.client.session(tokens.rows, "f16", name="it")
        self.client.session(tokens.rows, "f16")  # nobody could save that one
        tokens.feed(self.queue, session, 200, attend=False)
        self.wait_figures(unsaved_now=1, storage_sessions=0)
        session.save()
        status = self.daemon.ctl("storage", "status")
        self.wait_figures(unsaved_now=0, storage_sessions=1, storage_read_only=0,
                          storage_used_bytes=status["physical_bytes"],
                          storage_limit_bytes=64 << 20, remote_configured=0)
        self.assertGreater(self.figures()["kvqd_storage_free_bytes"], 0)
        room = self.figures()["kvqd_storage_room_bytes"]
        self.assertTrue(0 < room < (64 << 20) - status["physical_bytes"], room)
        self.assertEqual(self.failures(), {})
        self.assertIn("saved sessions: 1, which take ", self.doctor("storage")[0][1])

    def test_failures(self):
        """A save that a namespace's limit refuses counts, also where nobody has asked for it; one
        of a session that is not there does not."""
        self.reason = "quota"
        tokens = Tokens(1, 300)
        session = self.client.session(tokens.rows, "f16", name="it", on_detach="save")
        tokens.feed(self.queue, session, 300, attend=False)
        self.daemon.ctl("session", "save", "nobody", check=False)
        self.assertEqual(self.failures(), {})
        self.assertEqual(self.doctor("saving"), [])
        space = self.daemon.ctl("session", "list")[0]["namespace"]
        self.daemon.ctl("quota", "set", space, "--disk-bytes", "10kb")
        self.fails(kvq.Code.E_QUOTA, session.save)
        self.assertEqual(self.failures(), {"save": 1})
        session.close()  # now the daemon tries
        until = time.monotonic() + BOUND
        while self.failures()["save"] < 2 and time.monotonic() < until:
            pass
        self.assertGreater(self.failures()["save"], 1)
        self.assertEqual(self.figures()["kvqd_unsaved_now"], 1)
        (level, text), = self.doctor("saving")
        self.assertEqual(level, 2)
        self.assertIn("E_QUOTA", text)
        self.assertNotIn('"it"', text)
        self.daemon.ctl("quota", "set", space, "--disk-bytes", "none")
        self.daemon.ctl("session", "save", "it")
        self.assertEqual(self.doctor("saving"), [])  # it goes well again

    @e2e_storage.long_emulated
    def test_full(self):
        """A full store: the failures, the room that is left, and what to do."""
        self.again(storage_bytes="16mb")
        tokens = Tokens(1, 13000)
        session = self.client.session(tokens.rows, "f16", name="large")
        tokens.feed(self.queue, session, 13000, attend=False)
        self.fails(kvq.Code.E_NO_SPACE, session.save)
        self.assertEqual(self.failures(), {"save": 1})
        self.assertIn("E_NO_SPACE", self.doctor("saving")[0][1])
        self.daemon.ctl("drain", check=False)  # tries once more
        self.daemon.stop()
        self.daemon = self.start()

    def test_read_only(self):
        """A store that cannot be written to says so before any save fails."""
        if os.geteuid() != 0:
            self.skipTest("only root can mount")
        self.client.close()
        self.daemon.stop()
        store = os.path.join(self.folder, "store")
        script = (f"mount --bind {store} {store} && mount -o remount,ro,bind {store} && "
                  "exec \"$0\" \"$@\"")
        self.daemon = self.start(within=("unshare", "--mount", "sh", "-c", script))
        self.client = self.daemon.client()
        self.wait_figures(storage_read_only=1, storage_room_bytes=0)
        (level, text), = self.doctor("storage")
        self.assertEqual(level, 2)
        self.assertIn("read-only: nothing is saved", text)


class StorePage(e2e_storage.Stored):
    """The store on the page, and the JSON that it is made of."""

    def start(self, **options):
        self.port = free_port()
        return super().start(http_address=f"127.0.0.1:{self.port}", **options)

    def storage(self):
        local = Local(self.daemon)
        text = get(local, "/storage")[2]
        local.close()
        return json.loads(text)

    def page(self):
        """The text of the page for who has the token, without its tags."""
        with open(os.path.join(self.daemon.directory, "admin", "http-token"),
                  encoding="ascii") as file:
            token = file.read()
        with tempfile.TemporaryDirectory() as profile:
            done = subprocess.run(
                ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
                 f"--user-data-dir={profile}", "--virtual-time-budget=5000", "--dump-dom",
                 f"http://127.0.0.1:{self.port}/#token={token}"], capture_output=True, text=True,
                check=False, timeout=BOUND)
        section = re.search('<section aria-labelledby="h-store">(.*?)</section>', done.stdout, re.S)
        self.assertTrue(section, done.stderr[-2000:])
        return re.sub(r"\s+", " ", re.sub("<[^>]*>", " ", section[1]))

    def test_store_on_the_page(self):
        """A save, and one that a limit refuses: JSON and page say so, and name no session."""
        keys = os.path.join(self.folder, "keys")
        with open(os.open(keys, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="ascii") as file:
            file.write("[default]\naws_access_key_id = AN-ID\naws_secret_access_key = A-KEY\n")
        self.again(remote_endpoint="http://127.0.0.1:9", remote_bucket="a-bucket",
                   remote_prefix="nodes", remote_keys_file=keys, storage_bytes="64mb")
        tokens = Tokens(1, 300)
        saved, other = (self.client.session(tokens.rows, "f16", name=name)
                        for name in ("secret-one", "secret-two"))
        for session in (saved, other):
            tokens.feed(self.queue, session, 300, attend=False)
        saved.save()
        found = self.storage()
        until = time.monotonic() + BOUND
        while found["store"]["sessions"] != 1 and time.monotonic() < until:
            found = self.storage()  # the disk is looked at every other second
        status = self.daemon.ctl("storage", "status")
        self.assertEqual({key: found["store"][key] for key in ("folder", "sessions", "read_only")},
                         {"folder": status["folder"], "sessions": 1, "read_only": False})
        self.assertEqual(found["store"]["limit_bytes"], 64 << 20)
        self.assertEqual(found["remote"], {"endpoint": "http://127.0.0.1:9", "bucket": "a-bucket",
                                           "prefix": "nodes"})
        self.assertEqual(found["jobs"]["save"], {"done": 1, "failed": 0, "fails": False})
        space = self.daemon.ctl("session", "list")[0]["namespace"]
        self.daemon.ctl("quota", "set", space, "--disk-bytes", "10kb")
        self.fails(kvq.Code.E_QUOTA, other.save)
        job = self.storage()["jobs"]["save"]
        self.assertEqual({key: job[key] for key in ("done", "failed", "fails", "status")},
                         {"done": 1, "failed": 1, "fails": True, "status": "E_QUOTA"})
        for secret in ("secret", "AN-ID", "A-KEY"):
            self.assertNotIn(secret, json.dumps(self.storage()))
        if shutil.which("chromium"):
            page = self.page()
            self.assertRegex(page, r"saves fail \(E_QUOTA, \d+ s ago\): 1 session is not saved; "
                                   "kvqctl doctor says what to do")
            self.assertRegex(page, "sessions on disk 1 not saved 1 ")
            self.assertRegex(page, r"of 64\.0 MiB")
            self.assertIn("Remote store: http://127.0.0.1:9, bucket a-bucket, prefix nodes", page)
            self.assertNotIn("secret", page)

    def test_without_a_store(self):
        """It says that nothing is saved, and why."""
        self.client.close()
        self.daemon.stop()
        self.port = free_port()
        self.daemon = Daemon(http_address=f"127.0.0.1:{self.port}")
        self.client = self.daemon.client()
        found = self.storage()
        self.assertEqual({"store", "remote"} & set(found), set())
        if shutil.which("chromium"):
            page = self.page()
            self.assertIn("no session is saved: storage_dir is not set", page)
            self.assertIn("There is no remote store", page)


class Addresses(unittest.TestCase):
    def test_taken(self):
        """A taken address keeps the daemon from starting only if it was asked for."""
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            taken = f"127.0.0.1:{other.getsockname()[1]}"
            with self.assertRaisesRegex(AssertionError, f"http_address {taken}: Address already"):
                Daemon(http_address=taken)

    def test_asked_by_its_address(self):
        port = free_port()
        daemon = Daemon(http_address=f"127.0.0.2:{port}")
        connection = http.client.HTTPConnection("127.0.0.2", port, timeout=BOUND)
        self.assertEqual(get(connection, "/health")[0], 200)
        for host in ("127.0.0.20", "127.0.0.2.evil.example", ""):
            self.assertEqual(get(connection, "/health", Host=host)[0], 421, host)
        connection.close()
        daemon.stop()

    def test_any_port(self):
        """Port 0 is one that nobody has; the log says which."""
        for host in ("127.0.0.1", "[::1]") if socket.has_ipv6 else ("127.0.0.1",):
            daemon = Daemon(http_address=f"{host}:0")
            line = daemon.wait_log("event=http address=")
            port = int(re.search(rf" address={re.escape(host)}:(\d+)$", line)[1])
            connection = http.client.HTTPConnection(host.strip("[]"), port, timeout=BOUND)
            self.assertEqual(get(connection, "/health")[0], 200)
            connection.close()
            daemon.stop()

    def test_off_the_machine(self):
        """Never."""
        for address in ("0.0.0.0:9647", "[::]:9647", "10.0.0.1:80", "9647", "localhost:9647",
                        "127.0.0.1:", "127.0.0.1:70000", "127.0.0.1:-1", "[::1:9"):
            with self.assertRaisesRegex(AssertionError, "has to be a loopback address"):
                Daemon(http_address=address)

    def test_off(self):
        daemon = Daemon(http="no")
        self.assertFalse(os.path.exists(os.path.join(daemon.directory, "http.sock")))
        daemon.stop()
