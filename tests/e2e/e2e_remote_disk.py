# SPDX-License-Identifier: Apache-2.0
"""A small disk that what transfers have left takes up: it goes where somebody else needs the
room."""
import os
import shutil
import socket
import subprocess
import tempfile
import unittest

from e2e_remote import KEY, SECRET, Remote, is_built
from e2e_rig import BIN, BOUND, Daemon, Tokens, die_with_parent, kvq, long_emulated


@unittest.skipUnless(is_built(), "this kvqd has no remote stores")
@unittest.skipUnless(os.geteuid() == 0, "needs root for a mount namespace")
class FullDisk(unittest.TestCase):
    """A small disk that something a transfer has left takes up most of; nobody answers there."""
    DISK, LEFT, TOKENS = 32 << 20, 20 << 20, 9000

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvq-remote-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.store = os.path.join(self.folder, "store")
        self.left = os.path.join(self.store, "remote", "pull-it.kvq.part")
        self.tokens = Tokens(31, self.TOKENS)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.addCleanup(self.listener.close)

    def start(self, disk="true", **more):
        keys = os.path.join(self.folder, "keys")
        with open(keys, "w", encoding="ascii") as file:
            os.fchmod(file.fileno(), 0o600)
            file.write(f"[default]\naws_access_key_id = {KEY}\naws_secret_access_key = {SECRET}\n")
        os.mkdir(self.store, mode=0o700)
        script = (f"{disk} && mkdir -m 700 {self.store}/remote && "
                  f"head -c {self.LEFT} /dev/zero > {self.left} && exec \"$0\" \"$@\"")
        daemon = Daemon(within=("unshare", "--mount", "sh", "-c", script), storage_dir=self.store,
                        remote_bucket="sessions", remote_keys_file=keys, remote_stall_seconds=600,
                        remote_endpoint="http://127.0.0.1:%d" % self.listener.getsockname()[1],
                        **more)
        self.addCleanup(daemon.stop)
        return daemon

    def small_disk(self, **more):
        return self.start(f"mount -t tmpfs -o mode=700,size={self.DISK} none {self.store}", **more)

    def fill(self, client, name):
        session = client.session(self.tokens.rows, "f16", name=name)
        with client.queue() as queue:
            self.tokens.feed(queue, session, self.TOKENS, attend=False)
        return session

    @long_emulated
    def test_save(self):
        """What the transfer has left goes before a save is refused."""
        daemon = self.small_disk()
        with daemon.client() as client:
            self.fill(client, "it").save()
            self.assertGreater(daemon.ctl("storage", "status")["live_bytes"],
                               self.DISK - self.LEFT)
            daemon.wait_log(f"event=leftovers_removed .*bytes={self.LEFT}")
            with self.assertRaises(kvq.Error) as caught:
                self.fill(client, "more").save()
            self.assertEqual(caught.exception.code, kvq.Code.E_NO_SPACE)

    def files(self, daemon):
        """In the folder, as the daemon sees it."""
        return os.listdir(f"/proc/{daemon.process.pid}/root{self.store}/remote")

    @long_emulated
    def test_beside_a_transfer(self):
        """Nothing goes while a transfer uses the folder; afterwards what it has left goes, too."""
        daemon = self.small_disk()
        with daemon.client() as client, client.queue() as queue:
            session = client.session(self.tokens.rows, "f16", name="small")
            self.tokens.feed(queue, session, 10, attend=False)
            push = subprocess.Popen([os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory,
                                     "session", "push", "small"], stdout=subprocess.DEVNULL,
                                    stderr=subprocess.DEVNULL, preexec_fn=die_with_parent)
            self.addCleanup(push.wait)
            self.addCleanup(push.kill)
            connection = self.listener.accept()[0]
            self.addCleanup(connection.close)
            files = self.files(daemon)
            self.assertEqual(len(files), 2, files)
            session = self.fill(client, "it")
            with self.assertRaises(kvq.Error) as caught:
                session.save()
            self.assertEqual(caught.exception.code, kvq.Code.E_NO_SPACE)
            self.assertEqual(sorted(self.files(daemon)), sorted(files))
            transfer, = daemon.ctl("remote", "status")["transfers"]
            daemon.ctl("remote", "cancel", str(transfer["id"]))
            self.assertNotEqual(push.wait(BOUND), 0)
            session.save()
            self.assertEqual(self.files(daemon), [])

    @long_emulated
    def test_drain(self):
        """Nor are sessions lost at the daemon's end."""
        daemon = self.small_disk()
        with daemon.client() as client:
            self.fill(client, "it")
        daemon.stop()
        self.assertTrue([x for x in daemon.lines if "event=all_saved" in x], daemon.lines)
        self.assertFalse([x for x in daemon.lines if "event=not_saved" in x])

    def large(self):
        """From now on a session that the disk has room for but for what was left, and of which most
        is written before the disk is full."""
        self.DISK, self.TOKENS = 64 << 20, 22500
        self.tokens = Tokens(33, self.TOKENS, q_heads=2)

    @long_emulated
    def test_most_was_written(self):
        """What is needed is all of the session, not what of it was not tried yet."""
        self.large()
        daemon = self.small_disk()
        with daemon.client() as client:
            self.fill(client, "it").save()
            live = daemon.ctl("storage", "status")["live_bytes"]
            self.assertGreater(live, self.DISK - self.LEFT)
            self.assertLess(live + (16 << 20), 2 * (self.DISK - self.LEFT))
            daemon.wait_log(f"event=leftovers_removed .*bytes={self.LEFT}")

    @long_emulated
    def test_drain_most_was_written(self):
        """Nor is a session lost of which most was written."""
        self.large()
        self.test_drain()

    @long_emulated
    def test_cap(self):
        """It stays where the disk has room, and it is storage_bytes that a save has met."""
        daemon = self.start(storage_bytes="16mb")
        with daemon.client() as client:
            with self.assertRaises(kvq.Error) as caught:
                self.fill(client, "it").save()
        self.assertEqual(caught.exception.code, kvq.Code.E_NO_SPACE)
        self.assertEqual(os.path.getsize(self.left), self.LEFT)


@unittest.skipUnless(os.geteuid() == 0, "needs root for a mount namespace")
class PullFullDisk(Remote):
    """A pull to a small disk, most of which something another transfer has left takes up."""
    DISK, CATALOG, TOKENS = 32 << 20, 5 << 20, 6000

    def pull(self, room):
        """room(size): bytes that are free beside what was left."""
        one = self.start("one")
        tokens = Tokens(32, self.TOKENS)
        with one.client() as client, client.queue() as queue:
            session = client.session(tokens.rows, "f16", name="it")
            tokens.feed(queue, session, self.TOKENS, attend=False)
        size = one.ctl("session", "push", "it")["bytes"]
        self.assertLess(2 * size, self.DISK - self.CATALOG)  # there is room for it and its file
        store = os.path.join(self.folder, "two")
        left = (self.DISK - self.CATALOG - room(size)) // 4096 * 4096
        script = (f"mount -t tmpfs -o mode=700,size={self.DISK} none {store} && "
                  f"mkdir -m 700 {store}/remote && "
                  f"head -c {left} /dev/zero > {store}/remote/pull-other.kvq.part && "
                  "exec \"$0\" \"$@\"")
        os.mkdir(store, mode=0o700)
        two = self.start("two", within=("unshare", "--mount", "sh", "-c", script))
        two.ctl("session", "pull", "it")
        two.wait_log(f"event=leftovers_removed .*bytes={left}$")
        self.assertEqual(two.ctl("storage", "list")[0]["tokens"], self.TOKENS)
        transfer, = two.ctl("remote", "status")["transfers"]
        self.assertLessEqual(transfer["sent_bytes"], size)
        self.assertEqual(os.listdir(f"/proc/{two.process.pid}/root{store}/remote"), [])

    @long_emulated
    def test_import(self):
        """There is room for the file, and not for the session beside it."""
        self.pull(lambda size: size * 3 // 2)

    @long_emulated
    def test_fetch(self):
        """There is none for the file."""
        self.pull(lambda size: size // 2)
