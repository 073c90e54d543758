# SPDX-License-Identifier: Apache-2.0
"""Limits of namespaces, set while the daemon runs: held to, kept over restarts, refused clearly."""
import json
import os
import subprocess
import time
import unittest

from e2e_rig import BACKEND, BIN, BOUND, Daemon, Tokens, everybodys_kvqctl, kvq
from e2e_storage import Stored

TIER = "host" if BACKEND == "cpu" else "device"  # where sessions are
OPTION = f"--{TIER}-bytes"
OWN = f"uid-{os.getuid()}"


class Quotas(Stored):
    def quota(self, *arguments):
        return self.daemon.ctl("quota", *arguments)

    def used(self, which=f"{TIER}_bytes", ns=OWN):
        return self.quota("get", ns)["used"][which]

    def file(self):
        return os.path.join(self.folder, "store", "quotas.ini")

    def refuses(self, status, *arguments):
        """What kvqctl says against it."""
        code, _, complaint = self.daemon.ctl("quota", *arguments, check=False)
        self.assertEqual(code, status, complaint)
        return complaint

    def test_memory(self):
        """A limit is held to the byte, may be lowered below what is used, and raised again."""
        tokens = Tokens(1, 4000)
        session = self.client.session(tokens.rows, "f16")
        tokens.feed(self.queue, session, 512, attend=False)
        used = self.used()
        self.assertEqual(used, self.daemon.status()["pool_used_bytes"])
        listed = self.quota("set", OWN, OPTION, str(used + 1000))
        self.assertEqual(listed["limit"][f"{TIER}_bytes"], used + 1000)
        self.fails(kvq.Code.E_QUOTA, self.queue.step, [session], 512, text="quota")
        line = self.daemon.wait_log("event=quota_reached")
        for what in (OWN, f"{used} of {used + 1000} bytes", "more were asked for"):
            self.assertIn(what, line)
        self.assertEqual(self.used(), used)
        shown = self.quota("get", OWN)
        self.assertEqual(shown["refused"][f"{TIER}_bytes"], 1)
        self.assertEqual(shown["last_refused"], f"{TIER}_bytes")
        self.assertGreater(shown["last_more"], 1000)
        # Below what is used: what is there stays and answers; nothing more is had.
        self.quota("set", OWN, OPTION, "1")
        self.assertEqual(session.refresh(), 512)
        self.fails(kvq.Code.E_QUOTA, self.queue.step, [session], 512)
        self.assertEqual(self.used(), used)
        self.quota("set", OWN, OPTION, "none")
        tokens.feed(self.queue, session, 512, attend=False)
        self.assertEqual(session.refresh(), 1024)
        self.assertGreater(self.used(), used)

    def test_lowered(self):
        """Sessions that nobody uses go, one after the other, until it is held to; and come back."""
        self.again(evict_idle_ms=1)
        tokens = Tokens(5, 2000)
        sessions = [self.client.session(tokens.rows, "f16", name=f"s{i}") for i in range(3)]
        for session in sessions:
            tokens.feed(self.queue, session, 512, attend=False)
        used = self.used()
        self.quota("set", OWN, OPTION, str(used // 2))
        end = time.monotonic() + BOUND
        while self.used() > used // 2 and time.monotonic() < end:
            pass
        self.assertLessEqual(self.used(), used // 2)
        self.assertEqual(self.used("sessions"), 3)
        self.quota("delete", OWN)
        for session in sessions:
            self.assertEqual(session.refresh(), 512)
            tokens.feed(self.queue, session, 1)

    def test_disk(self):
        """What is saved counts, also after a restart; a save above the limit is refused."""
        tokens = Tokens(3, 2000)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 512, attend=False)
        session.save()
        used = self.used("disk_bytes")
        self.assertGreater(used, 100000)
        self.assertEqual(self.daemon.status()["namespaces"][0]["used"]["disk_bytes"], used)
        self.quota("set", OWN, "--disk-bytes", str(used + 10))
        tokens.feed(self.queue, session, 512, attend=False)
        self.fails(kvq.Code.E_QUOTA, session.save, text=(OWN, str(used + 10), str(used), "raise"))
        self.daemon.wait_log("event=quota_reached")
        self.assertEqual(self.used("disk_bytes"), used)
        self.again()
        self.assertEqual(self.used("disk_bytes"), used)  # before anybody has used the namespace
        session = self.client.session(tokens.rows, "f16", name="it")
        self.assertEqual(session.tokens, 512)
        tokens.feed(self.queue, session, 512, attend=False)
        self.fails(kvq.Code.E_QUOTA, session.save)
        self.quota("set", OWN, "--disk-bytes", str(4 * used))
        session.save()
        self.assertGreater(self.used("disk_bytes"), used)
        session.drop()
        self.assertEqual(self.used("disk_bytes"), 0)

    def test_disk_default(self):
        """A namespace without a limit of its own on disk has the configuration's of the moment,
        whatever else was set for it, or deleted."""
        tokens = Tokens(3, 3000)
        session = self.client.session(tokens.rows, "f16", name="it")
        tokens.feed(self.queue, session, 512, attend=False)
        session.save()
        used = self.used("disk_bytes")
        self.quota("set", OWN, "--sessions", "7")
        self.daemon.ctl("config", "set", "disk_bytes", str(used + 10))
        self.assertEqual(self.quota("get", OWN)["limit"]["disk_bytes"], used + 10)
        tokens.feed(self.queue, session, 512, attend=False)
        self.fails(kvq.Code.E_QUOTA, session.save, text=(OWN, str(used + 10)))
        self.quota("set", OWN, "--disk-bytes", "none")
        self.daemon.ctl("config", "set", "disk_bytes", "11")
        session.save()  # what was set goes before the configuration
        tokens.feed(self.queue, session, 512, attend=False)
        self.quota("delete", OWN)
        self.fails(kvq.Code.E_QUOTA, session.save, text="may keep 11 bytes")
        self.daemon.ctl("config", "set", "disk_bytes", "0")
        session.save()

    def test_kept(self):
        """What was set is there after kill -9; what was deleted is not."""
        self.quota("set", OWN, OPTION, "5mb", "--sessions", "7")
        self.quota("set", "uid-4711", "--disk-bytes", "9gb")
        self.quota("set", "uid-4712", "--sessions", "1")
        self.quota("delete", "uid-4712")
        self.again()
        by_name = {q["namespace"]: q for q in self.quota("list")}
        self.assertEqual(by_name[OWN]["limit"][f"{TIER}_bytes"], 5 << 20)
        self.assertEqual(by_name[OWN]["limit"]["sessions"], 7)
        self.assertEqual(by_name["uid-4711"]["limit"]["disk_bytes"], 9 << 30)
        self.assertNotIn("uid-4712", by_name)
        tokens = Tokens(4, 12000)
        session = self.client.session(tokens.rows, "f16")
        self.fails(kvq.Code.E_QUOTA, self.queue.step, [session], 12000)
        # The configuration says something else by now: what was set goes before it, until deleted.
        path = os.path.join(self.folder, "new.conf")
        with open(path, "w", encoding="ascii") as file:
            file.write(f"max_sessions = 3\n[namespace team]\nuids = {os.getuid()}\n"
                       "disk_bytes = 1mb\n")
        self.again(config=path)
        self.assertEqual(self.quota("get", OWN)["limit"]["sessions"], 7)
        self.assertEqual(self.quota("get", OWN)["configured"]["sessions"], 3)
        self.assertEqual(self.quota("get", "team")["limit"]["disk_bytes"], 1 << 20)
        self.assertEqual(self.quota("delete", OWN)["limit"]["sessions"], 3)
        self.quota("set", "team", "--disk-bytes", "none")
        self.again()  # without the section: what was set for it is not lost
        self.daemon.wait_log("event=quota_unused .*team")
        self.quota("set", OWN, "--sessions", "9")
        self.again(config=path)
        self.assertEqual(self.quota("get", "team")["limit"]["disk_bytes"], 0)
        self.assertEqual(self.quota("get", "team")["which"], 4)

    def test_hostile_file(self):
        """What cannot be read back ends the start, with the place and what to do."""
        self.quota("set", OWN, "--sessions", "7")
        self.client.close()
        self.daemon.stop()
        for contents, says in ((b"[namespace a]\nhost_bytes = -3\n", "quotas.ini:2"),
                               (b"\0\0\0\0", "NUL"), (b"x" * 300000, "longer than"),
                               (b"[namespace a\n", "quotas.ini:1")):
            with open(self.file(), "wb") as file:
                file.write(contents)
            with self.assertRaises(AssertionError) as caught:
                self.start()
            self.assertIn(says, str(caught.exception))
            self.assertIn("remove the file", str(caught.exception))
            with open(self.file(), "rb") as file:
                self.assertEqual(file.read(), contents)  # it is left as it is
        os.remove(self.file())
        self.daemon = self.start()
        self.client = self.daemon.client()
        self.assertEqual(self.quota("get", OWN)["limit"]["sessions"], 65536)

    def test_not_written(self):
        """What cannot be kept is not set."""
        os.mkdir(self.file() + ".new")  # where it would be written first
        complaint = self.refuses(1, "set", OWN, "--sessions", "1")
        self.assertIn("no limit was changed", complaint)
        self.assertEqual(self.quota("get", OWN)["limit"]["sessions"], 65536)
        os.rmdir(self.file() + ".new")
        self.quota("set", OWN, "--sessions", "1")
        self.assertEqual(self.quota("get", OWN)["limit"]["sessions"], 1)

    def test_command_line(self):
        self.assertIn("--host-bytes SIZE", self.refuses(2, "set", OWN))
        for value in ("3x", "-1", "", "1.5gb", "99999999999999tb", "mb"):
            self.refuses(2, "set", OWN, "--host-bytes", value)
        self.refuses(2, "set", OWN, "--sessions", "1gb")
        self.refuses(2, "set")
        self.assertIn("1125899906842624",
                      self.refuses(1, "set", OWN, "--host-bytes", str((1 << 50) + 1)))
        self.assertIn('no namespace "nobody"',
                      self.refuses(5, "set", "nobody", "--sessions", "1"))
        self.refuses(5, "get", "nobody")
        self.assertEqual(self.quota("set", OWN, "--host-bytes", "3MB")["limit"]["host_bytes"],
                         3 << 20)

    def test_many_at_once(self):
        """Each is kept, whoever comes in between."""
        command = [os.path.join(BIN, "kvqctl"), "--runtime-dir", self.daemon.directory]
        running = [subprocess.Popen([*command, "quota", "set", f"uid-{4000 + i % 8}",
                                     ("--sessions", "--disk-bytes")[i // 8], str(i + 1)],
                                    stdout=subprocess.DEVNULL) for i in range(16)]
        for process in running:
            self.assertEqual(process.wait(BOUND), 0)
        self.again()
        for i in range(8):
            limit = self.quota("get", f"uid-{4000 + i}")["limit"]
            self.assertEqual((limit["sessions"], limit["disk_bytes"]), (i + 1, i + 9))

    def test_without_storage(self):
        with Daemon() as daemon:
            before = daemon.ctl("quota", "get", OWN)["limit"]
            status, printed, warning = daemon.ctl("quota", "set", OWN, "--sessions", "2",
                                                  check=False)
            self.assertEqual(status, 0)
            self.assertEqual(json.loads(printed)["limit"]["sessions"], 2)
            self.assertIn("until the daemon ends", warning)
            status, printed, warning = daemon.ctl("quota", "delete", OWN, check=False)
            self.assertEqual((status, warning), (0, ""))  # that holds for ever
            self.assertEqual(json.loads(printed)["limit"], before)

    @unittest.skipUnless(os.geteuid() == 0, "needs root to become another user")
    def test_permission(self):
        """Users see their own limits and set none."""
        self.quota("set", "uid-65534", "--sessions", "5")
        with Daemon(runtime_mode="0755") as daemon:
            os.chmod(daemon.directory, 0o755)
            daemon.ctl("quota", "set", "uid-65534", "--sessions", "5")

            def ctl(*arguments):
                return subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory,
                                       "--json", "quota", *arguments], capture_output=True,
                                      text=True, timeout=BOUND, cwd="/", user=65534, group=65534,
                                      extra_groups=[])

            listed = json.loads(ctl("list").stdout)
            self.assertEqual([q["namespace"] for q in listed], ["uid-65534"])
            self.assertEqual(json.loads(ctl("get", "uid-65534").stdout)["limit"]["sessions"], 5)
            self.assertEqual(ctl("get", OWN).returncode, 6)
            for command in (("set", "uid-65534", "--sessions", "9"), ("delete", "uid-65534")):
                refused = ctl(*command)
                self.assertEqual(refused.returncode, 6)
                self.assertIn("takes the role admin, which admin_uids", refused.stderr)
            self.assertEqual(json.loads(ctl("get", "uid-65534").stdout)["limit"]["sessions"], 5)
