# SPDX-License-Identifier: Apache-2.0
"""Who may do what: roles of users on the machine, and of keys from other machines."""
import json
import os
import signal
import socket
import subprocess
import threading
import time
import unittest

from e2e_rig import BIN, BOUND, Child, Tokens, die_with_parent, everybodys_kvqctl, feed
from e2e_service import Configured

OWN = f"uid-{os.geteuid()}"
STRANGER = 4321


@unittest.skipUnless(os.geteuid() == 0, "needs root to become other users")
class Users(Configured):
    """Roles by uid and gid."""

    def begin(self, text):
        daemon = self.start(text, runtime_mode="0755",
                            storage_dir=os.path.join(self.folder, "store"))
        os.chmod(daemon.directory, 0o755)
        client = daemon.client()
        self.addCleanup(client.close)
        queue, tokens = client.queue(), Tokens(1, 10)
        feed(queue, [tokens], [client.session(tokens.rows, "f16", name="mine")], [10])
        return daemon

    def ask(self, daemon, *words, groups=()):
        """kvqctl as the stranger: its exit status, and what it says."""
        done = subprocess.run(
            [everybodys_kvqctl(), "--runtime-dir", daemon.directory, *words], capture_output=True,
            text=True, timeout=BOUND, user=STRANGER, group=STRANGER, extra_groups=groups, cwd="/")
        return done.returncode, done.stdout + done.stderr

    def refuse(self, daemon, *words, role, needed, groups=()):
        status, told = self.ask(daemon, *words, groups=groups)
        self.assertEqual(status, 6, told)
        self.assertRegex(told, rf"^kvqctl: user {STRANGER} has {role}, and this(, with what is "
                         rf"another's,)? takes the role {needed}, which {needed}_uids and "
                         rf"{needed}_gids in kvqd's configuration give to users and groups "
                         r"\(E_PERMISSION\)\n$")

    def test_none(self):
        daemon = self.begin("")
        self.assertNotIn("mine", self.ask(daemon, "session", "list")[1])
        told = self.ask(daemon, "session", "show", "mine", "--namespace", OWN)[1]
        self.assertIn(f'may not use namespace "{OWN}"; use "uid-{STRANGER}"', told)
        for needed, commands in (
                ("read", (("config", "get"), ("events",))),
                ("operate", (("client", "kick", "1"), ("storage", "gc"))),
                ("admin", (("drain",), ("shutdown",), ("config", "reload"),
                           ("config", "reload", "--dry-run"), ("quota", "delete", OWN),
                           ("session", "import", "/x"), ("session", "import", "/x", "--dry-run"),
                           ("session", "export", "mine", "/x")))):
            for words in commands:
                self.refuse(daemon, *words, role="no role", needed=needed)

    def test_what_is_written(self):
        """Who has no role sees what is being done, and not to whose session."""
        daemon = self.begin("")
        seen = threading.Event()

        def save():
            while not seen.is_set():
                daemon.ctl("session", "save", "mine", "--again")
        saver = threading.Thread(target=save)
        saver.start()
        end, working = time.monotonic() + BOUND, ""
        while not working and time.monotonic() < end:
            working = json.loads(self.ask(daemon, "storage", "status", "--json")[1])["working"]
        seen.set()
        saver.join()
        self.assertEqual(working, "saving")

    def test_read(self):
        """Sees everything and changes nothing that is another's; what is its own it changes."""
        daemon = self.begin(f"read_uids = {STRANGER}\n")
        for words in (("session", "list"), ("session", "show", "mine", "--namespace", OWN)):
            self.assertIn("mine", self.ask(daemon, *words)[1])
        self.assertEqual(self.ask(daemon, "config", "get", "drain_ms")[0], 0)
        self.assertEqual(self.ask(daemon, "storage", "status")[0], 0)
        self.assertIn(OWN, self.ask(daemon, "quota", "list")[1])
        for words in (("session", "drop", "mine", "--namespace", OWN), ("client", "kick", "1"),
                      ("session", "save", "mine", "--namespace", OWN), ("storage", "gc")):
            self.refuse(daemon, *words, role="the role read", needed="operate")
        for words in (("drain",), ("quota", "set", OWN, "--sessions", "1"),
                      ("config", "set", "drain_ms", "1")):
            self.refuse(daemon, *words, role="the role read", needed="admin")
        daemon.wait_log(f"event=audit uid={STRANGER} .*role=read command=drop_session "
                        "status=E_PERMISSION")
        self.assertEqual(self.ask(daemon, "prefix", "drop", "--namespace", f"uid-{STRANGER}")[0], 0)

    def test_operate(self):
        daemon = self.begin("operate_gids = 5000\n")
        self.assertEqual(self.ask(daemon, "session", "save", "mine", "--namespace", OWN)[0], 6)
        for words in (("session", "save", "mine"), ("session", "pin", "mine")):
            status, told = self.ask(daemon, *words, "--namespace", OWN, groups=[5000])
            self.assertEqual(status, 0, told)
        self.assertEqual(self.ask(daemon, "storage", "compact", groups=[5000])[0], 0)
        self.refuse(daemon, "shutdown", role="the role operate", needed="admin", groups=[5000])
        self.refuse(daemon, "session", "export", "mine", "/tmp/x", "--namespace", OWN,
                    role="the role operate", needed="admin", groups=[5000])

    def test_live(self):
        """What the configuration takes away is away, also for connections that stand."""
        daemon = self.begin(f"admin_gids = 5000\nread_uids = {STRANGER}\n")
        standing = subprocess.Popen(
            [everybodys_kvqctl(), "--runtime-dir", daemon.directory, "events"], text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=die_with_parent,
            user=STRANGER, group=STRANGER, extra_groups=[], cwd="/")
        self.assertIn("following", standing.stderr.readline())
        status, told = self.ask(daemon, "config", "set", "read_uids", "", groups=[5000])
        self.assertEqual(status, 0, told)
        complaint = standing.communicate(timeout=BOUND)[1]
        self.assertEqual(standing.returncode, 6, complaint)
        self.assertIn("takes the role read", complaint)
        self.assertEqual(self.ask(daemon, "config", "get")[0], 6)
        self.assertEqual(self.ask(daemon, "config", "get", groups=[5000])[0], 0)

    def test_live_http(self):
        """The same by HTTP: a connection that stands shows what the user may see now."""
        daemon = self.begin(f"read_uids = {STRANGER}\n")
        paths = ("/sessions", "/events", "/quotas")
        http = Child("http_client", os.path.join(daemon.directory, "http.sock"), STRANGER, [5000],
                     paths * 4)

        def look(role):
            for path, secret in zip(paths, ('"mine"', '"mine"', f'"{OWN}"')):
                status, text = http.hear()
                self.assertEqual(status, 200 if role or path != "/events" else 403, path)
                self.assertEqual(secret in text, role, text)
                if path != paths[-1]:
                    http.tell()

        look(True)
        for turn, (text, role) in enumerate((("", False), ("operate_gids = 5000\n", True),
                                             ("admin_gids = 5001\n", False)), 1):
            self.write(text)
            daemon.process.send_signal(signal.SIGHUP)  # soon: idle connections end
            daemon.wait_log("event=reloaded ", turn)
            http.tell()
            look(role)
        http.tell()
        http.end()

    def test_engines(self):
        """Roles below admin are for people: an engine gets at nobody's K and V by them."""
        daemon = self.begin(f"operate_uids = {STRANGER}\n")
        child = Child("stranger", daemon.directory, STRANGER, OWN, "mine")
        results = child.hear()
        child.end()
        for attempt in ("other", "existing", "reading"):
            self.assertEqual(results[attempt][0], "E_PERMISSION")


class Plain:
    """A connection to the control socket that sends what kvqctl would not (ZMTP 3.0)."""

    def __init__(self, daemon):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(BOUND)
        self.socket.connect(os.path.join(daemon.directory, "control.sock"))
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48))
        self.read(64)
        ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
        self.socket.sendall(bytes((4, len(ready))) + ready)
        self.frame()

    def read(self, n):
        got = b""
        while len(got) < n:
            more = self.socket.recv(n - len(got))
            if not more:
                raise ConnectionError("the daemon ended the connection")
            got += more
        return got

    def frame(self):
        flags, n = self.read(2)
        if flags & 2:  # a long one
            n = int.from_bytes(bytes((n,)) + self.read(7), "big")
        return self.read(n)

    def ask(self, field, command):
        """The reply's bytes to a request of version 1; both below 128 bytes."""
        tag = field << 3 | 2
        body = b"\x08\x07\x10\x01" + bytes((tag & 127 | 128, tag >> 7, len(command))) + command
        self.socket.sendall(bytes((0, len(body))) + body)
        return self.frame()


class Choices(Configured):
    def test_handles(self):
        """A command that names its session by a handle, as attached clients do, is refused; also
        where the handle would be an address."""
        plain = Plain(daemon := self.start("", storage_dir=os.path.join(self.folder, "store")))
        self.addCleanup(plain.socket.close)
        for field in (18, 19, 40, 42, 43, 44, 50):
            for number in (b"\x01", b"\xff" * 9 + b"\x01"):
                told = plain.ask(field, b"\x08" + number)
                self.assertIn(b"name the session instead", told, field)
        self.assertIsNone(daemon.process.poll())

    def test_bad_texts(self):
        """A request whose envelope can be read is answered by its number, whatever its text is."""
        plain = Plain(self.start(""))
        self.addCleanup(plain.socket.close)
        for name in (b"a\nb", b"\xff"):
            ref = b"\x12" + bytes((len(name),)) + name
            told = plain.ask(19, b"\x12" + bytes((len(ref),)) + ref)
            self.assertEqual(told[:2], b"\x08\x07")  # the id that was asked with
            self.assertIn(b"SessionRef.name holds control characters or is not UTF-8", told)

    def test_for_clients(self):
        """What only an attached client can have is refused before anything is done for it: a saved
        session stays on disk."""
        daemon = self.start("", storage_dir=os.path.join(self.folder, "store"))
        with daemon.client() as client, client.queue() as queue:
            tokens = Tokens(1, 10)
            session = client.session(tokens.rows, "f16", name="it")
            feed(queue, [tokens], [session], [10])
            session.park()
        plain = Plain(daemon)
        self.addCleanup(plain.socket.close)
        name = b"\x12\x02it"
        for field, command in ((16, name), (60, b"\x0a" + bytes((len(name),)) + name),
                               (17, b"\x08\x01"), (61, b"\x08\x01")):
            told = plain.ask(field, command)
            self.assertIn(b"belongs to the attach socket", told, field)
        self.assertEqual(daemon.ctl("session", "show", "it")["tier"], "disk")


def established(here, there):
    """Whether a connection between two ports of the loopback stands at the end of `here`."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return any(row[1].endswith(f":{here:04X}") and row[2].endswith(f":{there:04X}") and
               row[3] == "01" for row in rows)


def standing(here):
    """How many connections of a port of the loopback stand at its end."""
    with open("/proc/net/tcp", encoding="ascii") as file:
        rows = [line.split() for line in file]
    return sum(row[1].endswith(f":{here:04X}") and row[3] in ("01", "08") for row in rows)


class Relay:
    """A port that passes one connection on, and keeps what the client has sent."""

    def __init__(self, port):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.target = port
        self.kept = []  # of each connection
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:  # closed
                return
            far = socket.create_connection(("127.0.0.1", self.target))
            self.kept.append(bytearray())
            threading.Thread(target=self._pump, args=(near, far, self.kept[-1]),
                             daemon=True).start()
            threading.Thread(target=self._pump, args=(far, near, bytearray()), daemon=True).start()

    @staticmethod
    def _pump(source, sink, kept):
        try:
            while more := source.recv(65536):
                kept += more
                sink.sendall(more)
            sink.shutdown(socket.SHUT_WR)
        except OSError:  # one of them has gone
            pass

    def close(self):
        self.listener.close()


def make_key(path, server=None):
    """Returns the public key."""
    words = [os.path.join(BIN, "kvqctl"), "key", "make", path, "--json"]
    if server:
        words += ["--server", server]
    done = subprocess.run(words, capture_output=True, text=True, timeout=BOUND)
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)["public"]


class Keys(Configured):
    """kvqctl from another machine: by TCP, with a key."""

    def make_key(self, name, server=None):
        return make_key(os.path.join(self.folder, name), server)

    def text(self, **roles):
        return (f"control_address = 127.0.0.1:0\ncontrol_key_file = {self.folder}/server\n" +
                "".join(f"[key {name}]\npublic = {self.public[name]}\nrole = {role}\n"
                        for name, role in roles.items()))

    def begin(self, **roles):
        """A daemon to which users of these names may come, each with a key in a file of its name;
        and a session."""
        self.server = self.make_key("server")
        self.public = {name: self.make_key(name, self.server) for name in roles}
        daemon = self.start(self.text(**roles), storage_dir=os.path.join(self.folder, "store"))
        line = daemon.wait_log("event=control_address ")
        self.port = int(line.split("address=127.0.0.1:")[1].split()[0])
        self.client = daemon.client()
        self.addCleanup(self.client.close)
        queue, tokens = self.client.queue(), Tokens(1, 10)
        feed(queue, [tokens], [self.client.session(tokens.rows, "f16", name="mine")], [10])
        return daemon

    def words(self, key, *words, port=None):
        return [os.path.join(BIN, "kvqctl"), "--connect", f"127.0.0.1:{port or self.port}", "--key",
                os.path.join(self.folder, key), *words]

    def ask(self, key, *words, port=None):
        done = subprocess.run(self.words(key, *words, port=port), capture_output=True, text=True,
                              timeout=BOUND)
        return done.returncode, done.stdout + done.stderr

    def watch(self, key, seconds):
        """A kvqctl whose connection stands: it asks again and again, and has its first answer."""
        process = subprocess.Popen(self.words(key, "status", "--watch", str(seconds)),
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   preexec_fn=die_with_parent)
        self.assertRegex(process.stdout.readline(), r"^\d{4}-\d\d-\d\d ")  # when
        self.assertIn("kvqd", process.stdout.readline())
        return process

    def record(self, key, *words):
        """What a kvqctl sends: a greeting of 64 bytes, HELLO in 202, and then what takes a key that
        the daemon knows."""
        relay = Relay(self.port)
        self.addCleanup(relay.close)
        status, told = self.ask(key, *words, port=relay.port)
        self.assertEqual(status, 0, told)
        recorded = bytes(max(relay.kept, key=len))
        self.assertEqual(recorded[64:72], b"\x04\xc8\x05HELLO")
        self.assertGreater(len(recorded), 400)
        return recorded

    def connect(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=BOUND)

    def test_roles(self):
        daemon = self.begin(reader="read", operator="operate", boss="admin")
        there = ("--namespace", OWN)
        for key in ("reader", "operator", "boss"):
            status, told = self.ask(key, "session", "list")
            self.assertEqual(status, 0, told)
            self.assertIn("mine", told)
            self.assertEqual(self.ask(key, "doctor")[0], 0)
            self.assertEqual(self.ask(key, "config", "get")[0], 0)
        for words, needed, able in ((("session", "pin", "mine", *there), "operate", "operator"),
                                    (("session", "save", "mine", *there), "operate", "operator"),
                                    (("quota", "set", OWN, "--sessions", "9"), "admin", "boss"),
                                    (("config", "set", "drain_ms", "7000"), "admin", "boss")):
            unable = {"operate": ["reader"], "admin": ["reader", "operator"]}[needed]
            for key in unable:
                status, told = self.ask(key, *words)
                self.assertEqual(status, 6, told)
                self.assertRegex(told, f'the key "{key}" has the role .* needs the role {needed}')
            status, told = self.ask(able, *words)
            self.assertEqual(status, 0, told)
            daemon.wait_log(f'event=audit key="{able}" address=127.0.0.1:[0-9]+ .* status=OK')
            daemon.wait_log(f'event=audit key="{unable[0]}" .* status=E_PERMISSION')
        status, told = self.ask("operator", "session", "unpin", "mine")
        self.assertEqual(status, 5, told)
        self.assertIn("has no namespace of its own", told)

    def test_events(self):
        self.begin(reader="read")
        status, told = self.ask("reader", "events", "--since", "1h", "--no-follow")
        self.assertEqual(status, 0, told)
        self.assertRegex(told, "session_opened .* mine ")

    def test_drain(self):
        """Also from far away kvqctl waits for the daemon's end."""
        daemon = self.begin(boss="admin")
        status, told = self.ask("boss", "drain")
        self.assertEqual(status, 0, told)
        self.assertIn("1 session saved", told)
        self.assertEqual(daemon.process.wait(BOUND), 0)

    def test_wrong_keys(self):
        """One that the daemon does not know, another daemon's, and none."""
        daemon = self.begin(reader="read")
        self.make_key("unknown", self.server)
        status, told = self.ask("unknown", "status")
        self.assertEqual(status, 6, told)
        self.assertIn("does not know the key", told)
        daemon.wait_log('event=control_refused key="[?]" address=127.0.0.1:[0-9]+ '
                        "status=E_PERMISSION .*no .key NAME. has public")
        other = self.make_key("other")
        self.make_key("misled", other)
        status, told = self.ask("misled", "status")
        self.assertEqual(status, 6, told)
        self.assertIn("names as server", told)
        status, told = self.ask("server", "status")
        self.assertEqual(status, 2, told)
        self.assertIn("does not say whose key", told)
        self.assertEqual(self.ask("reader", "status", port=1)[0], 3)

    def test_hidden_refusals(self):
        """Connections that are let in use up no line of one that is not."""
        daemon = self.begin(reader="read")
        self.make_key("unknown", self.server)
        for _ in range(12):
            self.assertEqual(self.ask("reader", "ping")[0], 0)
        self.assertEqual(self.ask("unknown", "ping")[0], 6)
        daemon.wait_log("event=control_refused .*no .key NAME. has public")

    def test_taken_away(self):
        """A key that the configuration no longer has, by a connection that stands."""
        daemon = self.begin(reader="read")
        process = self.watch("reader", 0.1)
        self.write(self.text())
        self.assertIn("[key reader]", self.hang_up(daemon, "changed") + "\n".join(daemon.lines))
        _, complaint = process.communicate(timeout=BOUND)
        self.assertEqual(process.returncode, 6, complaint)
        self.assertIn("does not have this key any more", complaint)
        self.assertEqual(self.ask("reader", "status")[0], 6)

    def test_changed(self):
        """A name that gets another key: the old one is out, and no more what the name may."""
        daemon = self.begin(ann="read")
        process = self.watch("ann", 0.1)
        self.public["ann"] = self.make_key("new", self.server)
        self.write(self.text(ann="admin"))
        self.hang_up(daemon, "changed")
        _, complaint = process.communicate(timeout=BOUND)
        self.assertEqual(process.returncode, 6, complaint)
        self.assertIn("does not have this key any more", complaint)
        self.assertEqual(self.ask("ann", "status")[0], 6)
        self.assertEqual(self.ask("new", "config", "set", "drain_ms", "100")[0], 0)

    def test_looks(self):
        """Looking for what is not there leaves nothing behind."""
        daemon = self.begin(reader="read")
        namespaces = len(daemon.ctl("quota", "list"))
        for words in (("session", "show", "x"), ("storage", "list")):
            self.ask("reader", *words, "--namespace", "uid-77")
        status, told = self.ask("reader", "quota", "get", "uid-78")
        self.assertEqual(status, 0, told)
        self.assertEqual(len(daemon.ctl("quota", "list")), namespaces)

    def test_replay(self):
        """What somebody has recorded of a connection, and sends again, does nothing."""
        daemon = self.begin(boss="admin")
        recorded = self.record("boss", "session", "drop", "mine", "--namespace", OWN)
        daemon.wait_log("event=audit .*command=drop_session status=OK")
        self.client.session(Tokens(1, 1).rows, "f16", name="mine").close()
        before = len([x for x in daemon.lines if "event=audit" in x])
        with self.connect() as again:
            again.sendall(recorded)
            while again.recv(65536):
                pass  # to the end: the daemon has closed it
        self.assertEqual(self.ask("boss", "session", "show", "mine", "--namespace", OWN)[0], 0)
        self.assertEqual(len([x for x in daemon.lines if "event=audit" in x]), before)

    def test_without_a_key(self):
        """ZMTP with another mechanism, and no ZMTP at all, end without an answer."""
        daemon = self.begin()
        null = (b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) +
                b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
                b"\x08Identity\x00\x00\x00\x00")
        for first in (null, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", os.urandom(4096)):
            with self.connect() as connection:
                connection.sendall(first)
                got = b""
                try:
                    while more := connection.recv(65536):
                        got += more
                except ConnectionResetError:  # closed with bytes of ours unread
                    pass
            self.assertNotIn(b"kvqd", got)
        self.assertEqual(daemon.ctl("status")["sessions"], 1)

    def test_flood(self):
        """Connections that say nothing keep neither this machine's users out, nor who shows a
        key."""
        daemon = self.begin(reader="read")
        process = self.watch("reader", 3600)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = daemon.wait_log("event=control_connected ")
        remote = int(line.split("address=127.0.0.1:")[1].split()[0])
        flood = []
        for _ in range(200):  # by then the one with a key has been quiet for longest
            flood.append(self.connect())
            flood[-1].sendall(b"\xff")
        self.assertEqual(daemon.ctl("status")["sessions"], 1)
        self.assertTrue(established(self.port, remote))
        for connection in flood:
            connection.close()
        status, told = self.ask("reader", "status")
        self.assertEqual(status, 0, told)

    def test_handshakes_that_never_end(self):
        """The daemon ends who began to speak and shows no key. Who has shown one stays."""
        daemon = self.begin(reader="read")
        process = self.watch("reader", 3600)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        line = daemon.wait_log("event=control_connected ")
        remote = int(line.split("address=127.0.0.1:")[1].split()[0])
        recorded = self.record("reader", "status")
        begun = []
        for n in (1, 63, 64, 100, 64 + 202):  # bytes of it
            begun.append(self.connect())
            begun[-1].sendall(recorded[:n])
        for connection in begun:
            with connection:
                got = b""
                while more := connection.recv(65536):
                    got += more
        self.assertIn(b"\x07WELCOME", got)  # to the last one, which is half through
        self.assertTrue(established(self.port, remote))

    def test_flood_of_handshakes(self):
        """Hundreds of connections that stop anywhere before a key, or have a wrong one, some of
        them with their end shut: who has a key is answered, and nothing is left of them."""
        daemon = self.begin(reader="read")
        self.make_key("unknown", self.server)
        recorded = self.record("reader", "status")
        wrong = recorded[:64 + 122] + bytes(80)  # HELLO whose box nobody can open
        before = daemon.settled_fds()
        silent, stages = [b""] * 40, [b"\xff", recorded[:64], recorded[:266], wrong, recorded]
        flood = []
        for i, words in enumerate(silent + stages * 30 + silent):
            flood.append(self.connect())
            try:
                flood[-1].sendall(words)
                if i // len(stages) % 3 == 2:
                    flood[-1].shutdown(socket.SHUT_WR)
            except OSError:  # it has been ended
                pass
        for key, expected in (("unknown", 6), ("reader", 0)):
            until = time.monotonic() + BOUND
            while "and no more are free" in (answer := self.ask(key, "status"))[1]:
                self.assertLess(time.monotonic(), until)  # others are ending yet
            self.assertEqual(answer[0], expected, answer[1])
        self.assertLessEqual(standing(self.port), 31)  # half of the places, at most
        self.assertEqual(daemon.ctl("status")["sessions"], 1)
        for connection in flood:
            connection.close()
        daemon.wait_fds(before)

    def test_starts(self):
        """What cannot be served ends the start, with a sentence."""
        self.make_key("server")
        loose = os.path.join(self.folder, "loose")
        self.make_key("loose")
        os.chmod(loose, 0o640)
        server = os.path.join(self.folder, "server")
        for text, said in (
                ("control_address = 127.0.0.1:0\n", "control_key_file: is empty"),
                (f"control_address = localhost\ncontrol_key_file = {server}\n", "numeric address"),
                (f"control_address = 1.1.1.1:1\ncontrol_key_file = {server}\n", "cannot listen"),
                (f"control_address = 127.0.0.1:0\ncontrol_key_file = {loose}\n", "chmod 600"),
                (f"control_address = 127.0.0.1:0\ncontrol_key_file = {self.folder}/none\n",
                 "cannot read")):
            self.write(text)
            done = subprocess.run(
                [os.path.join(BIN, "kvqd"), "--runtime-dir", os.path.join(self.folder, "run"),
                 "--config", self.path, "--pool-bytes", "64mb", "--http-address", ""],
                capture_output=True, text=True, timeout=BOUND)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(said, done.stderr)

    def test_paths_there(self):
        """A file of the daemon's machine has a whole path: this folder says nothing there."""
        self.port = 1  # it is refused before anybody is asked
        self.make_key("alice")
        for words in (("session", "export", "it", "file"), ("session", "import", "./file")):
            code, said = self.ask("alice", *words)
            self.assertEqual(code, 2, said)
            self.assertIn("its path begins with /, unlike", said)

    def test_files(self):
        """A key is not overwritten, and a file that is none is refused without its secret."""
        server = self.make_key("server")
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "key", "make",
                               os.path.join(self.folder, "server")], capture_output=True, text=True,
                              timeout=BOUND)
        self.assertEqual(done.returncode, 1)
        self.assertIn("not overwritten", done.stderr)
        path = os.path.join(self.folder, "server")
        shown = subprocess.run([os.path.join(BIN, "kvqctl"), "key", "show", path],
                               capture_output=True, text=True, timeout=BOUND)
        self.assertEqual(shown.stdout, server + "\n")
        with open(path, encoding="ascii") as file:
            good = file.read()
        secret = good.split("secret = ")[1].split("\n")[0]
        for bad in (good.replace("secret", "secrets"), good.replace(secret, secret[:-1]),
                    good.replace(secret, "0" * 64), good + good, good.replace("public", "#"),
                    "\0" + good, good + " " * 5000, ""):
            with open(path, "w", encoding="ascii") as file:
                file.write(bad)
            shown = subprocess.run([os.path.join(BIN, "kvqctl"), "key", "show", path],
                                   capture_output=True, text=True, timeout=BOUND)
            self.assertEqual(shown.returncode, 1, bad)
            self.assertNotIn(secret[:-1], shown.stdout + shown.stderr)
