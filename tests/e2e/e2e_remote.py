# SPDX-License-Identifier: Apache-2.0
"""Sessions that move between daemons by a remote store: rclone's S3 server, on loopback, behind a
gate that can be closed in the middle of a transfer."""
import functools
import glob
import json
import os
import random
import re
import shutil
import socket
import stat
import subprocess
import tempfile
import threading
import time
import unittest

from e2e_http import wait_times
from e2e_roles import make_key
from e2e_rig import (BIN, BOUND, ROOT, Daemon, Tokens, die_with_parent, everybodys_kvqctl, feed,
                     kvq, long_emulated, read_all)

KEY, SECRET = "AKIDEXAMPLE", "wJalrXUtnFEMI-secret-never-shown"
PART = 64 << 10
FULL = os.environ.get("KVQ_FULL") == "1"


def find_rclone():
    path = os.environ.get("KVQ_RCLONE") or os.path.join(ROOT, "build", "s3", "rclone", "bin",
                                                        "rclone-linux-amd64")
    return path if os.access(path, os.X_OK) else None


def is_built():
    """Whether this kvqd was built with remote stores."""
    try:
        with open(os.path.join(BIN, "kvqd"), "rb") as file:
            return b"libcurl.so" in file.read()
    except OSError:
        return False


class Gate:
    """Passes bytes on to a server, up to a limit for each way, until it is opened again."""

    def __init__(self, port):
        self.there = ("127.0.0.1", port)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.news = threading.Condition()
        self.left = {"up": None, "down": None}  # bytes; None: no end
        self.held = 0  # connections that stand before the gate
        threading.Thread(target=self._accept, daemon=True).start()

    def close_after(self, **left):
        """close_after(up=1000): so many more bytes pass to the server, then nothing does."""
        with self.news:
            self.left.update(left)

    def open(self):
        with self.news:
            self.left = {"up": None, "down": None}
            self.news.notify_all()

    def wait_held(self, count=1):
        """Until so many stand before the gate."""
        with self.news:
            if not self.news.wait_for(lambda: self.held >= count, BOUND):
                raise AssertionError("nothing came to the gate")

    def end(self):
        self.open()
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()

    def _accept(self):
        while True:
            try:
                near = self.listener.accept()[0]
            except OSError:
                return
            far = socket.create_connection(self.there)
            for s in (near, far):
                s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for way, a, b in (("up", near, far), ("down", far, near)):
                threading.Thread(target=self._pass, args=(way, a, b), daemon=True).start()

    def _share(self, way, wanted):
        """How many of the bytes may pass; waits until some may."""
        with self.news:
            if self.left[way] == 0:
                self.held += 1
                self.news.notify_all()
                self.news.wait_for(lambda: self.left[way] != 0)
                self.held -= 1
            if self.left[way] is None:
                return wanted
            share = min(wanted, self.left[way])
            self.left[way] -= share
            return share

    def _pass(self, way, a, b):
        try:
            while True:
                data = a.recv(1 << 16)
                if not data:
                    break
                while data:
                    n = self._share(way, len(data))
                    b.sendall(data[:n])
                    data = data[n:]
        except OSError:
            pass
        for s in (a, b):
            try:
                s.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            s.close()


@long_emulated
@unittest.skipUnless(is_built(), "kvqd was built without remote stores")
@unittest.skipUnless(find_rclone(), "there is no rclone to test with; tools/deps.sh s3 gets it")
class Remote(unittest.TestCase):
    """A remote store, and daemons that have it."""

    @classmethod
    def setUpClass(cls):
        os.environ["no_proxy"] = "127.0.0.1"
        cls.bucket = tempfile.mkdtemp(prefix="kvq-s3-")
        os.mkdir(os.path.join(cls.bucket, "sessions"))
        cls.server = subprocess.Popen(
            [find_rclone(), "serve", "s3", "--config", "", "--auth-key", f"{KEY},{SECRET}",
             "--addr", "127.0.0.1:0", cls.bucket], stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL, text=True, preexec_fn=die_with_parent)
        port = None
        for line in cls.server.stderr:
            port = re.search(r"http://127\.0\.0\.1:(\d+)/", line)
            if port:
                break
        if not port:
            raise AssertionError("rclone did not start")
        cls.port = int(port.group(1))
        threading.Thread(target=cls.server.stderr.read, daemon=True).start()

    @classmethod
    def tearDownClass(cls):
        cls.server.kill()
        cls.server.wait()
        cls.server.stderr.close()
        shutil.rmtree(cls.bucket)

    def setUp(self):
        self.gate = Gate(self.port)
        self.folder = tempfile.mkdtemp(prefix="kvq-remote-")
        self.keys = os.path.join(self.folder, "keys")
        self.write_keys(SECRET)
        self.daemons = []

    def tearDown(self):
        for daemon in self.daemons:
            self.assertNotIn(SECRET, "\n".join(daemon.lines))
            daemon.stop()
        self.gate.end()
        shutil.rmtree(self.folder)

    def write_keys(self, secret, mode=0o600):
        with open(self.keys, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), mode)
            file.write(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {secret}\n")

    def options(self, name, **more):
        return {"storage_dir": os.path.join(self.folder, name), "remote_bucket": "sessions",
                "remote_endpoint": f"http://127.0.0.1:{self.gate.port}",
                "remote_prefix": self.id().rsplit(".", 1)[1], "remote_keys_file": self.keys,
                "remote_part_bytes": PART, "remote_connections": 1, **more}

    def start(self, name, **more):
        daemon = Daemon(**self.options(name, **more))
        self.daemons.append(daemon)
        return daemon

    def kill(self, daemon):
        daemon.kill()
        daemon.process.stderr.close()
        shutil.rmtree(daemon.directory)
        self.daemons.remove(daemon)

    def begin(self, daemon, *words):
        """A kvqctl that follows a transfer."""
        return subprocess.Popen([os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory,
                                 "--json", *words], stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, preexec_fn=die_with_parent)

    def broken(self, daemon, *words):
        """Begins a transfer, which comes to the closed gate; ends kvqctl and kills the daemon."""
        ctl = self.begin(daemon, *words)
        self.gate.wait_held()
        transfer, = daemon.ctl("remote", "status")["transfers"]
        self.assertFalse(transfer["finished"])
        self.assertIn(transfer["phase"], ("sending", "receiving"))
        self.assertGreaterEqual(transfer["moved_bytes"], 2 * PART)
        self.assertLess(transfer["moved_bytes"], transfer["bytes"])
        ctl.kill()
        ctl.communicate()
        self.kill(daemon)
        self.gate.open()

    def refused(self, daemon, status, *words, text=""):
        code, _, complaint = daemon.ctl(*words, check=False)
        self.assertEqual(code, status, complaint)
        self.assertIn(text, complaint)


class Keys(Remote):
    """From other machines."""

    def begin_with_keys(self, *names):
        """A daemon to which they may come."""
        path = os.path.join(self.folder, "config")
        server = make_key(os.path.join(self.folder, "server"))
        with open(path, "w", encoding="ascii") as file:
            file.write(f"control_key_file = {self.folder}/server\n")
            for name in names:
                public = make_key(os.path.join(self.folder, name), server)
                file.write(f"[key {name}]\npublic = {public}\nrole = operate\n")
        one = self.start("one", config=path, control_address="127.0.0.1:0",
                         remote_stall_seconds=600)
        line = one.wait_log("event=control_address ")
        self.address = line.split("address=")[1].split()[0]
        return one

    def begin_by(self, key, *words):
        """A kvqctl with that key."""
        process = subprocess.Popen([os.path.join(BIN, "kvqctl"), "--connect", self.address, "--key",
                                    os.path.join(self.folder, key), "--json", *words],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                                   preexec_fn=die_with_parent)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def test_lists(self):
        """One key's questions to the remote store do not count as another's."""
        self.begin_with_keys("ann", "ben")
        self.gate.close_after(up=0)
        lists = [self.begin_by("ann", "remote", "list") for _ in range(2)]
        self.gate.wait_held(2)
        lists.append(self.begin_by("ben", "remote", "list"))
        until, complaint = time.monotonic() + BOUND, ""
        while "3 requests to the remote store are under way, 2 of them yours" not in complaint:
            self.assertLess(time.monotonic(), until, complaint)
            self.assertIsNone(lists[-1].poll())
            complaint = self.begin_by("ann", "remote", "list").communicate(timeout=BOUND)[1]
            self.assertIn("(E_LIMIT)", complaint)
        self.gate.open()
        for process in lists:
            complaint = process.communicate(timeout=BOUND)[1]
            self.assertEqual(process.returncode, 0, complaint)

    def test_turns(self):
        """Whose pushes are under way already comes after whose are not."""
        def phases():
            found = one.ctl("remote", "status")["transfers"]
            return {x["name"]: x["phase"] for x in found if not x["finished"]}

        def push(key, name):
            """Until it is under way, or waits."""
            self.begin_by(key, "session", "push", name, "--namespace", f"uid-{os.geteuid()}")
            until = time.monotonic() + BOUND
            while phases().get(name) not in ("queued", "sending"):
                self.assertLess(time.monotonic(), until)

        one, tokens = self.begin_with_keys("ann", "ben"), Tokens(1, 10)
        with one.client() as client, client.queue() as queue:
            for name in ("first", "second", "third", "bens"):
                tokens.feed(queue, client.session(tokens.rows, "f16", name=name), 10, attend=False)
        self.gate.close_after(up=0)
        for name in ("first", "second"):
            push("ann", name)
        self.gate.wait_held(2)
        push("ann", "third")
        push("ben", "bens")
        both = {"third": "queued", "bens": "queued"}
        self.assertEqual(phases(), {"first": "sending", "second": "sending", **both})
        one.ctl("remote", "cancel", "1")
        until = time.monotonic() + BOUND
        while (now := phases()) != {"second": "sending", "third": "queued", "bens": "sending"}:
            self.assertNotEqual(now["third"], "sending")
            self.assertLess(time.monotonic(), until)


class Transfers(Remote):
    def test_from_machine_to_machine(self):
        """Both daemons are killed in the middle; what was transferred is not transferred again, and
        the session goes on at the other as it does at the first, to the bit."""
        tokens = Tokens(1, 1400)
        one = self.start("one")
        with one.client() as client, client.queue() as queue:
            session = client.session(tokens.rows, "ott2", name="it")
            tokens.feed(queue, session, 1200, attend=False)
            session.save()
        self.gate.close_after(up=5 * PART)
        self.broken(one, "session", "push", "it")
        one = self.start("one")
        pushed = one.ctl("session", "push", "it")
        self.assertEqual(pushed["phase"], "done")
        self.assertGreater(pushed["bytes"], 6 * PART)
        self.assertLessEqual(pushed["sent_bytes"], pushed["bytes"] - 3 * PART)
        self.assertEqual(os.listdir(os.path.join(self.folder, "one", "remote")), [])
        one.wait_log('event=session_pushed .*session="it"')
        wait_times(one, {"push": 1})

        two = self.start("two")
        self.gate.close_after(down=5 * PART)
        self.broken(two, "session", "pull", "it")
        two = self.start("two")
        pulled = two.ctl("session", "pull", "it")
        self.assertEqual(pulled["bytes"], pushed["bytes"])
        self.assertLessEqual(pulled["sent_bytes"], pulled["bytes"] - 3 * PART)
        self.assertEqual(os.listdir(os.path.join(self.folder, "two", "remote")), [])
        two.wait_log('event=session_pulled .*session="it"')
        wait_times(two, {"pull": 1})
        answers = []
        for daemon in (one, two):
            with daemon.client() as client, client.queue() as queue:
                session = client.session(tokens.rows, "ott2", name="it")
                self.assertEqual(session.tokens, 1200)
                seen = read_all(queue, session, 2)
                for n in (1, 130):
                    for out, lse in tokens.feed(queue, session, n):
                        seen += out.tobytes() + lse.tobytes()
                answers.append(seen)
        self.assertTrue(answers[0] == answers[1])

    def test_commands(self):
        tokens = Tokens(2, 600)
        one, two = self.start("one"), self.start("two")
        client = one.client()
        queue = client.queue()
        shards = [client.session(tokens.rows, "oscar2", name="a/b ü", shard=i, shards=2)
                  for i in range(2)]
        feed(queue, [tokens, tokens], shards, [300, 300], attend=False)
        one.ctl("session", "push", "a/b ü")  # saves it first
        self.assertEqual(one.ctl("storage", "list")[0]["tokens"], 300)
        self.assertEqual(one.ctl("session", "push", "a/b ü")["sent_bytes"], 0)  # nothing is new
        there, = two.ctl("remote", "list")
        self.assertEqual((there["namespace"], there["name"]), ("uid-%d" % os.getuid(), "a/b ü"))
        self.assertEqual(there["bytes"], one.ctl("remote", "status")["transfers"][0]["bytes"])
        self.refused(two, 5, "session", "pull", "b", text="remote list")
        self.refused(one, 5, "session", "push", "b", text="neither in memory nor saved")
        two.ctl("session", "pull", "a/b ü")
        self.refused(two, 1, "session", "pull", "a/b ü", text="E_EXISTS")
        two.ctl("session", "pull", "a/b ü", "--as", "other")
        # Newer, and in place of the one that is saved; but not of one in memory.
        feed(queue, [tokens, tokens], shards, [50, 50], attend=False)
        one.ctl("session", "push", "a/b ü")
        two.ctl("session", "pull", "a/b ü", "--replace")
        with two.client() as there:
            for i in range(2):
                session = there.session(tokens.rows, "oscar2", name="a/b ü", shard=i, shards=2)
                self.assertEqual(session.tokens, 350)
            self.refused(two, 1, "session", "pull", "a/b ü", "--replace", text="is in memory")
            self.assertEqual(there.session(name="other", shard=1, shards=2).tokens, 300)
        two.ctl("remote", "remove", "a/b ü")
        self.refused(one, 5, "remote", "remove", "a/b ü")
        self.assertEqual(one.ctl("remote", "list"), [])
        self.assertEqual(os.listdir(os.path.join(self.bucket, "sessions")), [])
        client.close()

    def test_damage_there(self):
        """A push sees how long what is there is; one that is told to sends all of it."""
        tokens = Tokens(2, 300)
        one, two = self.start("one"), self.start("two")
        with one.client() as client:
            feed(client.queue(), [tokens], [client.session(tokens.rows, "oscar2", name="it")],
                 [300], attend=False)
            one.ctl("session", "push", "it")
            pack, = glob.glob(os.path.join(self.bucket, "sessions", "**", "data", "*"),
                              recursive=True)
            with open(pack, "r+b") as file:
                byte = file.read(1)[0] ^ 1
                file.seek(0)
                file.write(bytes([byte]))
            self.refused(two, 1, "session", "pull", "it", text="push NAME --again")
            self.assertEqual(one.ctl("session", "push", "it")["sent_bytes"], 0)
            pushed = one.ctl("session", "push", "it", "--again")
            self.assertEqual(pushed["sent_bytes"], pushed["bytes"])
            two.ctl("session", "pull", "it")
            two.ctl("remote", "remove", "it")

    def test_pushes_that_wait(self):
        """Pushes whose sessions cannot be saved, as long as their client likes, keep nobody else
        from the remote store. They give up in time, so a slow machine has several tries."""
        def saving(daemon):
            transfers = daemon.ctl("remote", "status")["transfers"]
            return sum(x["phase"] == "saving" for x in transfers)
        tokens = Tokens(5, 200)
        one = self.start("one")
        beside, names = False, ("uneven1", "uneven2")
        with one.client() as client, client.queue() as queue:
            late = []
            for name in names:
                shards = [client.session(tokens.rows, "f16", name=name, shard=i, shards=2,
                                         max_rollback=64) for i in range(2)]
                feed(queue, [tokens, tokens], shards, [100, 100], attend=False)
                queue.truncate(shards[:1], 90)
                late += shards[1:]
            session = client.session(tokens.rows, "f16", name="it")
            for _ in range(5):
                pushes = [self.begin(one, "session", "push", name) for name in names]
                end = time.monotonic() + BOUND
                while saving(one) < 2 and all(x.poll() is None for x in pushes):
                    self.assertLess(time.monotonic(), end)
                tokens.feed(queue, session, 1, attend=False)
                one.ctl("session", "push", "it")
                beside = saving(one) == 2
                for push in pushes:
                    _, complaint = push.communicate(timeout=BOUND)
                    self.assertIn("shards stand at different counts", complaint)
                if beside:
                    break
            queue.truncate(late, 90)
        self.assertTrue(beside, "others waited for them")

    def test_opens_beside_a_pull(self):
        """Who opens a session while a pull replaces it has the old one, and the pull is refused; or
        the new one. Never is the old one in memory and the new one on disk."""
        tokens = Tokens(3, 200)
        one, two = self.start("one"), self.start("two")
        with one.client() as client, client.queue() as queue:
            for name, n in (("short", 100), ("long", 200)):
                session = client.session(tokens.rows, "f16", name=name, on_detach="drop")
                tokens.feed(queue, session, n, attend=False)
                one.ctl("session", "push", name)
        two.ctl("session", "pull", "long", "--as", "it")
        chance, rounds = random.Random(1), 300 if FULL else 12
        with two.client() as client:
            for i in range(rounds):
                name, n = (("short", 100), ("long", 200))[i % 2]
                pull = self.begin(two, "session", "pull", name, "--as", "it", "--replace")
                if i < rounds - 1:
                    threading.Event().wait(chance.uniform(0, 0.03))
                else:  # on a machine that is slow enough all others may have been refused
                    pull.wait(BOUND)
                session = client.session(name="it")
                _, complaint = pull.communicate(timeout=BOUND)
                if pull.returncode:
                    self.assertIn("is in memory", complaint)
                else:
                    self.assertEqual(session.tokens, n)
                session.close()  # and is out of memory
        self.assertEqual(pull.returncode, 0)


class Trouble(Remote):
    def saved(self, daemon, name="it", n=300):
        tokens = Tokens(4, n)
        with daemon.client() as client, client.queue() as queue:
            session = client.session(tokens.rows, "oscar2", name=name)
            tokens.feed(queue, session, n, attend=False)
            session.save()

    def test_wrong_keys_and_no_bucket(self):
        """Clear words, and the daemon goes on; keys are read again for every transfer."""
        one = self.start("one")
        self.saved(one)
        self.write_keys("of-somebody-else")
        self.refused(one, 1, "session", "push", "it", text="check the secret key")
        self.refused(one, 1, "remote", "list", text="check the secret key")
        one.wait_log("event=remote_failed .*push: ")
        self.write_keys(SECRET, mode=0o644)
        self.refused(one, 1, "session", "push", "it", text="chmod 600")
        self.write_keys(SECRET)
        one.ctl("session", "push", "it")
        two = self.start("two", remote_bucket="no-such-bucket")
        self.refused(two, 1, "session", "pull", "it", text="make the bucket")
        self.assertEqual(two.ctl("remote", "status")["transfers"][0]["phase"], "failed")

    def test_a_store_that_does_not_answer(self):
        """A transfer is cancelled, or ends with the daemon; one of a session at a time."""
        one = self.start("one")
        self.saved(one)
        self.gate.close_after(up=0)
        ctl = self.begin(one, "session", "push", "it")
        self.gate.wait_held()
        self.refused(one, 1, "session", "push", "it", text="E_BUSY")
        one.ctl("remote", "cancel", "1")
        out, complaint = ctl.communicate(timeout=BOUND)
        self.assertEqual(ctl.returncode, 1)
        self.assertEqual(json.loads(out)["status"], kvq.Code.E_CANCELLED)
        self.assertIn("is kept", complaint)
        waits = self.gate.held  # the connection that was given up
        for words in (("session", "push", "it"), ("remote", "list"), ("remote", "list")):
            ctl = self.begin(one, *words)
            waits += 1
            self.gate.wait_held(waits)
            ctl.kill()
            ctl.communicate()
        self.refused(one, 1, "remote", "list", text="E_LIMIT")
        one.stop()
        self.daemons.remove(one)
        one.wait_log("event=remote_failed .*shutting down")

    @unittest.skipUnless(FULL, "writes 100 MB; KVQ_FULL=1 runs it")
    def test_full_disk(self):
        """A pull that finds no room makes some; where there is none what it has fetched stays."""
        one = self.start("one")
        tokens = Tokens(6, 3000)
        with one.client() as client, client.queue() as queue:
            session = client.session(tokens.rows, "f16", name="it")
            tokens.feed(queue, session, 3000, attend=False)
        size = one.ctl("session", "push", "it")["bytes"]
        two = self.start("two", storage_bytes=f"{(18 << 20) + size}b")
        for _ in range(8):
            two.ctl("session", "pull", "it", "--replace")
        three = self.start("three", storage_bytes="16mb")
        three.ctl("session", "pull", "it")
        for _ in range(2):
            self.refused(three, 1, "session", "pull", "it", "--as", "other", text="E_NO_SPACE")
        transfers = three.ctl("remote", "status")["transfers"]
        self.assertEqual([t["sent_bytes"] for t in transfers], [size, size, 0])
        self.assertEqual(three.ctl("storage", "list")[0]["tokens"], 3000)

    def test_leftovers(self):
        """Pushes that fail leave their files for the next try, but never more than a few."""
        one = self.start("one")
        self.write_keys("of-somebody-else")
        tokens = Tokens(5, 4)
        most = 0
        with one.client() as client, client.queue() as queue:
            for i in range(18):
                session = client.session(tokens.rows, "f16", name=f"it-{i}")
                tokens.feed(queue, session, 4, attend=False)
                self.refused(one, 1, "session", "push", f"it-{i}", text="secret key")
                most = max(most, len(os.listdir(os.path.join(self.folder, "one", "remote"))))
        self.assertGreaterEqual(most, 8)
        self.assertLessEqual(most, 16)

    def test_failures_that_leave_nothing(self):
        """Pushes of what is nowhere leave no files, so nobody waits until these are swept."""
        one, tokens = self.start("one", remote_stall_seconds=600), Tokens(6, 4)
        with one.client() as client, client.queue() as queue:
            for name in ("slow", "next"):
                tokens.feed(queue, client.session(tokens.rows, "f16", name=name), 4, attend=False)
        self.gate.close_after(up=0)
        slow = self.begin(one, "session", "push", "slow")
        self.gate.wait_held()
        for i in range(9):
            self.refused(one, 5, "session", "push", f"nowhere-{i}", text="neither in memory nor")
        following = self.begin(one, "session", "push", "next")
        self.gate.wait_held(2)  # it talks beside the one that is held
        self.gate.open()
        for process in (slow, following):
            process.communicate(timeout=BOUND)
            self.assertEqual(process.returncode, 0)

    def test_no_remote_store_any_more(self):
        """What transfers have left goes with the remote store."""
        folder = os.path.join(self.folder, "one", "remote")
        os.makedirs(folder, mode=0o700)
        for name in ("push-1-2.kvq", "pull-3.kvq.part", "mine.kvq"):
            with open(os.path.join(folder, name), "wb") as file:
                file.write(b"x" * 10000)
        with Daemon(storage_dir=os.path.dirname(folder)) as daemon:
            daemon.wait_log("event=leftovers_removed ")
            self.assertEqual(os.listdir(folder), ["mine.kvq"])

    def test_configuration(self):
        """What is wrong is said at the start; keys are never shown."""
        self.write_keys(SECRET, mode=0o644)
        cases = (({}, "chmod 600", 1), ({"remote_bucket": "x"}, "bucket", 2),
                 ({"remote_endpoint": "nowhere"}, "endpoint", 2),
                 ({"remote_ca_file": "/nowhere"}, "remote_ca_file", 1))
        for options, words, status in cases:
            daemon = Daemon(ready=False, **self.options("one", **options))
            self.assertEqual(daemon.process.wait(BOUND), status)
            daemon.reader.join(BOUND)
            daemon.process.stderr.close()
            shutil.rmtree(daemon.directory)
            self.assertIn(words, daemon.lines[-1])
            self.assertNotIn(SECRET, "\n".join(daemon.lines))
            self.write_keys(SECRET)
        os.environ.update(AWS_ACCESS_KEY_ID=KEY, AWS_SECRET_ACCESS_KEY=SECRET)
        try:
            one = self.start("one", remote_keys_file="")
        finally:
            del os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"]
        self.assertEqual(one.ctl("remote", "list"), [])
        with Daemon(storage_dir=os.path.join(self.folder, "none")) as none:
            for words in (("session", "push", "it"), ("remote", "status")):
                self.refused(none, 1, *words, text="E_UNSUPPORTED")

    def as_other(self, daemon, *words):
        """kvqctl of another user."""
        return subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory, "--json",
                               *words], capture_output=True, text=True, timeout=BOUND, cwd="/",
                              user=65534, group=65534, extra_groups=[])

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_across_namespaces(self):
        """A pull from one namespace into another hands somebody the K and V of others: it takes the
        role admin. Within a namespace operate does."""
        one = self.start("one", runtime_mode="0755", operate_uids="65534")
        self.saved(one)
        one.ctl("session", "push", "it")
        os.chmod(one.directory, 0o755)
        within = ("session", "pull", "it", "--as", "again", "--namespace", "uid-0")
        done = self.as_other(one, *within)
        self.assertEqual(done.returncode, 0, done.stderr)
        across = ("session", "pull", "it", "--from", "uid-0", "--as", "mine")
        for words in (across, (*across, "--namespace", "uid-65534")):
            done = self.as_other(one, *words)
            self.assertEqual(done.returncode, 6, done.stderr)
            self.assertRegex(done.stderr, "has the role operate, and this, with what is another's, "
                             "takes the role admin")
        one.wait_log("event=audit uid=65534 .*role=operate command=pull_session "
                     "status=E_PERMISSION", 2)
        names = {(x["namespace"], x["name"]) for x in one.ctl("storage", "list")}
        self.assertEqual(names, {("uid-0", "it"), ("uid-0", "again")})
        one.ctl("config", "set", "admin_uids", "65534")
        done = self.as_other(one, *across)
        self.assertEqual(done.returncode, 0, done.stderr)
        done = self.as_other(one, "storage", "list", "--namespace", "uid-65534")
        self.assertEqual([x["name"] for x in json.loads(done.stdout)], ["mine"])

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_others(self):
        """Users reach their own namespaces there, and no others'."""
        one = self.start("one", runtime_mode="0755")
        self.saved(one)
        one.ctl("session", "push", "it")
        os.chmod(one.directory, 0o755)
        ctl = functools.partial(self.as_other, one)
        for words in (("session", "push", "it"), ("session", "pull", "it", "--as", "mine"),
                      ("remote", "remove", "it"), ("remote", "list")):
            self.assertEqual(ctl(*words, "--namespace", "uid-0").returncode, 6, words)
        self.assertEqual(ctl("session", "pull", "it", "--from", "uid-0").returncode, 6)
        self.assertEqual(ctl("session", "pull", "it", "--from", "uid-65534",
                             "--namespace", "uid-0").returncode, 6)
        self.assertEqual(ctl("session", "pull", "it").returncode, 5)  # none of its own
        self.assertEqual(json.loads(ctl("remote", "list").stdout), [])
        self.assertEqual(ctl("remote", "cancel", "1").returncode, 5)
        seen = json.loads(ctl("remote", "status").stdout)["transfers"]
        self.assertEqual([t["name"] for t in seen], ["it"])  # its own pull alone
        self.assertEqual(seen[0]["namespace"], "uid-65534")
        self.assertEqual(stat.S_IMODE(os.stat(os.path.join(self.folder, "one", "remote")).st_mode),
                         0o700)
