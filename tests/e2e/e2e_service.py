# SPDX-License-Identifier: Apache-2.0
"""kvqd as a service: SIGHUP, the configuration while it runs, how it is ended, and what it tells
systemd."""
import grp
import json
import os
import pwd
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import unittest
import unittest.mock

from e2e_rig import BIN, BOUND, ROOT, Daemon, Tokens, everybodys_kvqctl, feed, kvq

UID = os.geteuid()


class Configured(unittest.TestCase):
    """Tests with daemons of their own, which read a file that the test writes."""

    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="kvq-e2e-")
        self.addCleanup(shutil.rmtree, self.folder)
        self.path = os.path.join(self.folder, "kvqd.conf")

    def write(self, text):
        with open(self.path, "w", encoding="utf-8") as file:
            file.write(text)

    def start(self, text, **options):
        """A daemon that has read this text."""
        self.write(text)
        daemon = Daemon(config=self.path, **options)
        self.addCleanup(daemon.stop)
        return daemon

    def hang_up(self, daemon, event="reloaded"):
        """SIGHUP; waits for what came of it, and returns the log's lines since."""
        before = len([x for x in daemon.lines if f"event={event} " in x])
        at = len(daemon.lines)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_log(f"event={event} ", before + 1)
        daemon.status()  # lines that belong to it have come
        return "\n".join(daemon.lines[at:])


class Ends(Configured):
    """kvqctl ends the daemon."""

    def begin(self, *words, daemon):
        """kvqctl, beside the test; dies with it."""
        process = subprocess.Popen([os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory,
                                    *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True)
        self.addCleanup(process.kill)
        return process

    def ended(self, process):
        out, complaint = process.communicate(timeout=BOUND)
        return process.returncode, out, complaint

    def test_drain(self):
        """Waits for a step that is open, and for sessions to be saved; then nothing is left."""
        daemon = self.start("", storage_dir=os.path.join(self.folder, "store"), drain_ms=600000)
        client = daemon.client()
        self.addCleanup(client.close)
        queue, tokens = client.queue(), Tokens(1, 20)
        session = client.session(tokens.rows, "f16", name="kept")
        feed(queue, [tokens], [session], [10])
        step = queue.step([session], 10)
        ctl = self.begin("drain", daemon=daemon)
        daemon.wait_log("event=draining")
        status, _, complaint = daemon.ctl("drain", "--wait", "1", check=False)
        self.assertEqual(status, 4)
        self.assertIn("steps have not ended yet", complaint)
        self.assertIsNone(ctl.poll())
        with self.assertRaises(kvq.Error):
            client.session(tokens.rows, "f16", name="new")
        for layer in range(tokens.layers):
            step.append(layer, tokens.k[layer, 10:], tokens.v[layer, 10:])
        step.end()
        status, out, complaint = self.ended(ctl)
        self.assertEqual(status, 0, complaint)
        self.assertIn("all steps have ended; 1 session saved", out)
        self.assertEqual(daemon.process.wait(0), 0)  # it has waited for that
        daemon.wait_log("event=end")

    def test_drain_that_is_not_whole(self):
        daemon = self.start("drain_ms = 1\n")
        client = daemon.client()
        self.addCleanup(client.close)
        client.queue().step([client.session(Tokens(1, 1).rows, "f16")], 1)
        status, out, _ = self.ended(self.begin("drain", "--json", daemon=daemon))
        self.assertEqual(status, 1)
        self.assertFalse(json.loads(out)["complete"])
        self.assertEqual(daemon.process.wait(BOUND), 0)

    def test_what_cannot_be_saved(self):
        daemon = self.start("disk_bytes = 1\n", storage_dir=os.path.join(self.folder, "store"))
        with daemon.client() as client:
            queue, tokens = client.queue(), Tokens(1, 10)
            feed(queue, [tokens], [client.session(tokens.rows, "f16", name="kept")], [10])
        status, out, _ = self.ended(self.begin("drain", "--json", daemon=daemon))
        told = json.loads(out)
        self.assertEqual((status, told["complete"], told["not_saved"]), (1, True, 1))

    def test_killed_meanwhile(self):
        daemon = self.start("drain_ms = 600000\n")
        client = daemon.client()
        self.addCleanup(client.close)
        client.queue().step([client.session(Tokens(1, 1).rows, "f16")], 1)
        ctl = self.begin("drain", daemon=daemon)
        daemon.wait_log("event=draining")
        daemon.ctl("shutdown")  # it is ending already
        got = daemon.ctl("shutdown", "--now")
        self.assertEqual(got["phase"], 0)
        self.assertEqual(daemon.process.wait(BOUND), 1)
        daemon.wait_log("event=quit")
        status, _, complaint = self.ended(ctl)
        self.assertEqual(status, 1)
        self.assertIn("ended before it was drained", complaint)

    def test_no_time_to_drain(self):
        """An idle daemon has nothing to cut off."""
        daemon = self.start("drain_ms = 0\n")
        self.assertTrue(daemon.ctl("drain")["complete"])

    def test_a_signal_after_it(self):
        """It is the first one, so the steps that are open may still end, and sessions are saved."""
        daemon = self.start("drain_ms = 600000\n")
        client = daemon.client()
        self.addCleanup(client.close)
        step = client.queue().step([client.session(Tokens(1, 1).rows, "f16")], 1)
        daemon.ctl("shutdown")
        daemon.process.terminate()
        daemon.wait_log("event=signal")
        self.assertIsNone(daemon.process.poll())
        step.abort()
        self.assertEqual(daemon.process.wait(BOUND), 0)

    def test_shutdown(self):
        daemon = self.start("")
        daemon.ctl("shutdown")
        self.assertEqual(daemon.process.wait(BOUND), 0)

    @unittest.skipUnless(UID == 0, "asks as another user: needs root")
    def test_for_administrators(self):
        daemon = self.start("", runtime_mode="0755")
        for words in (("drain",), ("shutdown",), ("shutdown", "--now")):
            done = subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory, *words],
                                  capture_output=True, text=True, timeout=BOUND, user=4321)
            self.assertEqual(done.returncode, 6, done.stderr)
        self.assertFalse(daemon.status()["draining"])


class Machine(Configured):
    """What the options give away, against what there is."""

    def test_too_much(self):
        """Refused at the start with the value, the limit, and what to do."""
        for option in ("pool_bytes", "buffer_bytes"):
            with self.assertRaises(AssertionError) as caught:
                Daemon(backend="cpu", **{option: "64tb"})
            words = rf"{option}: 67108864 MiB are more than the \d+ MiB .*; lower {option}, or"
            self.assertRegex(str(caught.exception), words)

    def test_refused_before_the_next_start(self):
        """What a start refuses, --print-config and a reload refuse with the same words; the status
        is that of a wrong configuration, for which systemd does not try again. Without the key the
        configuration is shown all the same."""
        daemon = self.start("")
        missing = os.path.join(daemon.directory, "no-key")
        remote = f"remote_endpoint = https://there\nstorage_dir = {daemon.directory}/store\n"
        for line, words in (
                ("pool_bytes = 64tb", r"pool_bytes: 67108864 MiB are more than"),
                ("http_address = 0.0.0.0:9647", r'http_address: "0.0.0.0:9647" has to be a loop'),
                (f"control_address = here:1\ncontrol_key_file = {missing}",
                 r'control_address: "here:1" has to be a numeric address'),
                (f"control_address = 127.0.0.1:0\ncontrol_key_file = {missing}",
                 rf"control_key_file: cannot read {missing}: No such file"),
                (f"storage_bytes = 5mb\nstorage_dir = {missing}",
                 r"storage_bytes: 5242880 bytes are too few; .* 16mb"),
                ("runtime_mode = 0770", "runtime_mode = 0770 lets others write to"),
                ("runtime_group = no-such-group", 'runtime_group:? "no-such-group" is no group'),
                (remote + "remote_bucket = x", 'remote store: bucket "x" has not 3 to 63'),
                (remote + "remote_bucket = b/../c", 'remote store: bucket "b/../c" has not 3'),
                (remote.replace("//", "//h/") + "remote_bucket = bucket",
                 'remote store: endpoint "https://h/there" is not http'),
                (remote + f"remote_bucket = bucket\nremote_ca_file = {missing}",
                 "remote_ca_file.* cannot (be )?read"),
                (remote + f"remote_bucket = bucket\nremote_keys_file = {missing}",
                 f"remote_keys_file: {missing}: cannot open the file of keys")):
            late = "_file" in words or "_group" in words  # a start that comes again may find it
            self.write(line + "\n")
            if "pool" not in line and "http_address" not in line:  # this daemon has them by flags
                self.assertRegex(self.hang_up(daemon, "reload_failed"),
                                 words.replace('"', r'\\"'))
            for more in ((), ("--print-config",)):
                done = subprocess.run(
                    [os.path.join(BIN, "kvqd"), "--runtime-dir", daemon.directory + "/two",
                     "--config", self.path, *more], text=True, capture_output=True, timeout=BOUND,
                    check=False, stdin=subprocess.DEVNULL)
                self.assertEqual(done.returncode, 1 if late and not more else 2)
                self.assertRegex(done.stderr, re.sub("(control|remote)_key.?_file: ", "", words))
                self.assertEqual("pool_bytes =" in done.stdout, late and more != ())

    def test_promised_twice(self):
        """Pool and buffers that fit one by one, and not together."""
        mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
        daemon = self.start("", pool_bytes=f"{mib // 8 * 4}mb", buffer_bytes=f"{mib // 8 * 5}mb",
                            backend="cpu")
        daemon.wait_log("event=memory_tight .*together more than")
        _, out, _ = daemon.ctl("doctor", check=False)
        self.assertIn("lower pool_bytes or buffer_bytes", out)

    def test_zero_is_never_too_much(self):
        """kvqd chooses then, also where one client may have more than there is."""
        self.start("client_bytes = 1tb\nbuffer_bytes = 0\n")

    def test_too_much_while_it_runs(self):
        daemon = self.start("buffer_bytes = 100mb\n")
        status, _, complaint = daemon.ctl("config", "set", "buffer_bytes", "64tb", check=False)
        self.assertEqual(status, 1)
        self.assertIn("buffer_bytes: 67108864 MiB are more than", complaint)
        self.write("buffer_bytes = 64tb\n")
        self.assertIn("buffer_bytes: 67108864 MiB", self.hang_up(daemon, "reload_failed"))
        self.assertEqual(
            daemon.ctl("config", "get", "buffer_bytes")["options"][0]["value"], "100mb")

    def test_more_than_is_free(self):
        """All that this process may have is never free: the log says so, and kvqd serves."""
        daemon = self.start("")
        self.assertFalse([x for x in daemon.lines if "event=memory_tight" in x])
        _, out, _ = daemon.ctl("doctor", check=False)
        most = int(re.search(r"of (\d+) MiB that the (?:machine|control group) allows", out)[1])
        daemon = self.start("", pool_bytes=f"{most // 4 * 4}mb", backend="cpu")
        line = daemon.wait_log("event=memory_tight")
        self.assertRegex(line, rf"pool_bytes allows {most // 4 * 4} MiB, and \d+ MiB are free")


class Told(Configured):
    """What a service manager is told: this test is one, with a socket of its own."""

    def manage(self, text="", name="notify", **options):
        """A daemon that tells this test; the options are its flags, and variables in capitals."""
        path = name if name.startswith("@") else os.path.join(self.folder, name)
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(self.socket.close)
        self.socket.settimeout(BOUND)
        self.socket.bind(path.replace("@", "\0", 1))
        variables = {k: str(v) for k, v in options.items() if k.isupper()}
        flags = {k: v for k, v in options.items() if not k.isupper()}
        with unittest.mock.patch.dict(os.environ, {"NOTIFY_SOCKET": path, **variables}):
            return self.start(text, **flags)

    def hear(self, pattern):
        """The next message that matches, whatever comes before."""
        while True:
            message = self.socket.recv(4096).decode()
            if found := re.fullmatch(pattern, message):
                return found

    def waiting(self):
        """What has been told already."""
        messages = []
        self.socket.setblocking(False)
        try:
            while True:
                messages.append(self.socket.recv(4096).decode())
        except BlockingIOError:
            return messages

    def test_ready_and_end(self):
        for name in ("notify", f"@kvq-e2e-{os.getpid()}"):
            with self.subTest(name=name):
                daemon = self.manage(name=name)
                self.assertEqual(self.socket.recv(4096), b"READY=1")
                daemon.process.terminate()
                self.hear("STOPPING=1")
                self.assertEqual(daemon.process.wait(BOUND), 0)
                self.assertFalse([x for x in self.waiting() if "READY" in x])

    def test_stopping_by_kvqctl(self):
        daemon = self.manage()
        daemon.ctl("shutdown")
        self.hear("STOPPING=1")
        self.assertEqual(daemon.process.wait(BOUND), 0)

    def test_time_to_save(self):
        """systemd waits for saves, however many."""
        daemon = self.manage(f"storage_dir = {self.folder}/store\n")
        tokens = Tokens(1, 20)
        with daemon.client() as client:
            session = client.session(tokens.rows, "f16", name="kept")
            feed(client.queue(), [tokens], [session], [10])
        daemon.process.terminate()
        self.hear("STOPPING=1")
        self.hear("EXTEND_TIMEOUT_USEC=35000000")  # drain_ms, and 30 s
        self.hear("EXTEND_TIMEOUT_USEC=300000000")
        self.assertEqual(daemon.process.wait(BOUND), 0)
        daemon.wait_log("event=all_saved")

    def test_no_time_for_nothing(self):
        """Where nothing is to be saved, nobody waits for it."""
        daemon = self.manage()
        daemon.process.terminate()
        self.assertEqual(daemon.process.wait(BOUND), 0)
        self.assertEqual([x for x in self.waiting() if "EXTEND" in x],
                         ["EXTEND_TIMEOUT_USEC=35000000"])

    def test_line(self):
        """It follows what the daemon has."""
        daemon = self.manage()
        memory = r"0\.0 of 0\.\d GiB of memory in use"
        self.hear(f"STATUS=0 sessions, 0 clients, {memory}")
        with daemon.client() as client:
            session = client.session(Tokens(1, 1).rows, "f16")
            self.hear(f"STATUS=1 session, 1 client, {memory}")
            session.close()
        self.hear(f"STATUS=0 sessions, 0 clients, {memory}")

    def test_reload(self):
        """Told with the time, which systemd compares with that of its signal; and as done also
        where nothing could be changed."""
        daemon = self.manage("drain_ms = 1\n")
        for text, event in (("drain_ms = 2\n", "reloaded"), ("drain_ms = x\n", "reload_failed")):
            self.write(text)
            before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
            self.hang_up(daemon, event)
            told = int(self.hear(r"RELOADING=1\nMONOTONIC_USEC=(\d+)")[1])
            self.assertGreaterEqual(told, before)
            self.assertLessEqual(told, time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000)
            self.hear("READY=1")

    def test_signs_of_life(self):
        """For as long as it lives, its end included; test_watchdog has a poller that hangs."""
        daemon = self.manage("drain_ms = 600000\n", WATCHDOG_USEC=20000)
        for _ in range(3):
            self.hear("WATCHDOG=1")
        with daemon.client() as client:
            step = client.queue().step([client.session(Tokens(1, 1).rows, "f16")], 1)
            daemon.process.terminate()
            self.hear("STOPPING=1")
            for _ in range(3):
                self.hear("WATCHDOG=1")
            step.abort()
            self.assertEqual(daemon.process.wait(BOUND), 0)

    def test_no_signs_for_others(self):
        daemon = self.manage(WATCHDOG_USEC=2000, WATCHDOG_PID=os.getpid())
        self.hear("STATUS=.*")
        self.hang_up(daemon)
        daemon.stop()
        self.assertNotIn("WATCHDOG=1", self.waiting())

    def test_part_of_another_process(self):
        """The socket is that process's."""
        read, write = os.pipe()
        self.addCleanup(os.close, read)
        daemon = self.manage(fds=[read], lifetime_fd=read)
        os.close(write)
        daemon.process.wait(BOUND)
        self.assertEqual(self.waiting(), [])

    def test_wrong_address(self):
        self.write("")
        for wrong in ("notify", "/", "/" + 108 * "x"):
            with unittest.mock.patch.dict(os.environ, {"NOTIFY_SOCKET": wrong}):
                daemon = Daemon(ready=False, config=self.path)
            self.assertEqual(daemon.process.wait(BOUND), 1)
            daemon.wait_log("NOTIFY_SOCKET is")
            daemon.stop()

    def test_nobody_listens(self):
        """The daemon serves all the same, and its log says so."""
        with unittest.mock.patch.dict(
                os.environ, {"NOTIFY_SOCKET": os.path.join(self.folder, "nothing")}):
            daemon = self.start("")
        daemon.wait_log('event=not_notified message="READY=1"')
        daemon.status()


class Audited(Configured):
    """Who has changed what, in the log."""

    def audited(self, daemon):
        """(user, command, status, request) of each change so far, for users and administrators."""
        form = (r'event=audit uid=(\d+) pid=\d+(?: role=\w+)? command=(\w+) status=(\w+) '
                r'request="(.*)"$')
        found = [re.search(form, line) for line in daemon.lines]
        return [(int(x[1]), x[2], x[3], x[4].replace(r'\"', '"')) for x in found if x]

    def test_changes(self):
        daemon = self.start("")
        with daemon.client() as client:
            client.session(Tokens(1, 1).rows, "f16", name="it").close()
        for words in (("status",), ("session", "list"), ("quota", "list"), ("client", "list"),
                      ("config", "get"), ("session", "show", "it"),
                      ("config", "reload", "--dry-run")):
            daemon.ctl(*words)
        self.assertEqual(daemon.ctl("session", "import", "/x", "--dry-run", check=False)[0], 1)
        self.assertEqual(self.audited(daemon), [])  # they have been answered, and are not told of
        daemon.ctl("session", "drop", "it")
        daemon.ctl("config", "set", "log_level", "debug")
        daemon.ctl("client", "kick", "99", check=False)
        daemon.wait_log("event=audit .* command=kick_client")
        told = self.audited(daemon)
        self.assertEqual([x[:3] for x in told], [
            (UID, "drop_session", "OK"), (UID, "set_config", "OK"),
            (UID, "kick_client", "E_NO_CLIENT")])
        self.assertEqual(json.loads(told[0][3])["ref"]["name"], "it")
        self.assertEqual(json.loads(told[1][3]), {"name": "log_level", "value": "debug"})

    def test_whatever_the_level(self):
        """Nobody hides a change behind log_level: no level leaves these lines out."""
        daemon = self.start("")
        for level in ("error", "info"):
            daemon.ctl("config", "set", "log_level", level)
        daemon.wait_log('event=audit .* request=.*"info')
        self.assertEqual([json.loads(x[3])["value"] for x in self.audited(daemon)],
                         ["error", "info"])
        told = [x for x in daemon.lines if "event=changed" in x]
        self.assertEqual([re.search('options="(.*)"', x)[1] for x in told],
                         ["log_level info to error", "log_level error to info"])

    def test_another_log(self):
        """The log that lines no longer go to says so."""
        daemon = self.start("")
        daemon.ctl("config", "set", "log_level", "error")
        daemon.ctl("config", "set", "log_file", os.path.join(self.folder, "other log"))
        daemon.wait_log(rf'event=log_moved to="{self.folder}/other log"')
        with open(os.path.join(self.folder, "other log"), encoding="utf-8") as file:
            self.assertIn("event=changed", file.read())

    @unittest.skipUnless(UID == 0, "asks as another user: needs root")
    def test_refused(self):
        """What somebody may not do is told of as well."""
        daemon = self.start("", runtime_mode="0755")
        subprocess.run([everybodys_kvqctl(), "--runtime-dir", daemon.directory, "config", "set",
                        "log_level", "debug"], capture_output=True, timeout=BOUND, user=4321)
        daemon.wait_log("event=audit uid=4321 .* command=set_config status=E_PERMISSION")

    def test_drain_once(self):
        """kvqctl asks again and again how far it is."""
        daemon = self.start("drain_ms = 600000\n")
        with daemon.client() as client:
            step = client.queue().step([client.session(Tokens(1, 1).rows, "f16")], 1)
            status, _, _ = daemon.ctl("drain", "--wait", "200", check=False)
            self.assertEqual(status, 4)
            step.abort()
        self.assertEqual(daemon.process.wait(BOUND), 0)
        daemon.wait_log("event=end")
        self.assertEqual([x[1] for x in self.audited(daemon)], ["drain"])


class Reloads(Configured):
    def limits(self, daemon, ns):
        return daemon.ctl("quota", "get", ns)["limit"]

    def test_live_options(self):
        """What the file says anew is in effect, while a step goes on."""
        daemon = self.start("drain_ms = 5000\nmax_clients = 100\nlog_level = info\n")
        with daemon.client() as client:
            queue, tokens = client.queue(), Tokens(1, 20)
            session = client.session(tokens.rows, "f16")
            feed(queue, [tokens], [session], [10])
            self.write("drain_ms = 6001\nmax_clients = 1\nlog_level = warn\n")
            daemon.process.send_signal(signal.SIGHUP)
            feed(queue, [tokens], [session], [10])
            end = time.monotonic() + BOUND
            while True:  # no line tells, at this level
                try:
                    daemon.client().close()
                except kvq.Error as error:
                    self.assertIn("max_clients", error.text)
                    break
                self.assertLess(time.monotonic(), end)
            self.write("drain_ms = 6002\n")
            lines = self.hang_up(daemon)
            for words in ("drain_ms 6001 to 6002", "max_clients 1 to 256",
                          "log_level warn to info"):
                self.assertIn(words, lines)
            daemon.client().close()
        daemon.stop()
        daemon.wait_log("event=drain_begin limit_ms=6002")

    def test_flags_still_win(self):
        daemon = self.start("drain_ms = 1\n", drain_ms=4000)
        self.write("drain_ms = 2\n")
        self.assertNotIn("drain_ms", self.hang_up(daemon))
        daemon.stop()
        daemon.wait_log("event=drain_begin limit_ms=4000")

    def test_what_needs_a_restart(self):
        """One line names it with both values, and the daemon keeps what it has."""
        daemon = self.start("workers = 1\nspin_us = 10\n[format mine]\nbase = oscar2\n")
        self.write("workers = 2\nspin_us = 20\nstorage_dir = /tmp/x\n[format mine]\nbase = int8\n")
        lines = [x for x in self.hang_up(daemon).split("\n") if "event=needs_restart" in x]
        self.assertEqual(len(lines), 1)
        for words in ("workers 1 to 2", "storage_dir", "/tmp/x", "[format mine] there to another"):
            self.assertIn(words, lines[0])
        self.assertNotIn("spin_us", lines[0])
        self.assertEqual(daemon.status()["workers"], 1)
        with daemon.client() as client:
            self.assertTrue(client.session(Tokens(1, 1).rows, "mine"))

    def test_more_files(self):
        """conf.d is read with the file, at the start and again."""
        folder = os.path.join(self.folder, "conf.d")
        os.mkdir(folder)

        def put(name, text):
            with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
                file.write(text)

        put("50-site.conf", "drain_ms = 6000\nworkers = 1\n")
        daemon = self.start("drain_ms = 5000\nmax_clients = 100\n")
        option = daemon.ctl("config", "get", "drain_ms")["options"][0]
        self.assertEqual((option["value"], option["source"]), ("6000", "conf.d/50-site.conf"))
        option = daemon.ctl("config", "get", "max_clients")["options"][0]
        self.assertEqual(option["source"], "file")
        put("10-first.conf", "max_clients = 50\n")  # so 50-site.conf is not the first any more
        put("60-last.conf", "drain_ms = 7000\nworkers = 2\n")
        lines = self.hang_up(daemon)
        for words in ("more_files=3", "drain_ms 6000 to 7000", "max_clients 100 to 50",
                      "workers 1 to 2"):
            self.assertIn(words, lines)
        for name, source in (("drain_ms", "conf.d/60-last.conf"),
                             ("max_clients", "conf.d/10-first.conf"),
                             ("workers", "conf.d/50-site.conf")):  # until kvqd is started again
            option = daemon.ctl("config", "get", name)["options"][0]
            self.assertEqual(option["source"], source)
        put("60-last.conf", "\ndrain_ms = x\n")
        self.assertIn("conf.d/60-last.conf:2: drain_ms", self.hang_up(daemon, "reload_failed"))
        shutil.rmtree(folder)
        self.assertIn("drain_ms 7000 to 5000", self.hang_up(daemon))

    def test_an_error_changes_nothing(self):
        daemon = self.start("max_clients = 7\n[namespace a]\nuids = 1\nhost_bytes = 10mb\n")
        for wrong, words in (("max_clients = 8\nwrokers = 1\n", ":2: wrokers is not known"),
                             ("max_clients = many\n", "kvqd.conf:1: max_clients is"),
                             ("max_clients = 8\nlog_file = /nonexistent/kvqd.log\n",
                              "/nonexistent/kvqd.log"),
                             ("max_clients = 8\nremote_bucket = b\n", "remote_bucket")):
            self.write(wrong)
            lines = self.hang_up(daemon, "reload_failed")
            self.assertIn(words, lines)
            self.assertIn("nothing has changed", lines)
        os.unlink(self.path)
        self.assertIn("cannot read it", self.hang_up(daemon, "reload_failed"))
        self.write("max_clients = 9\n[namespace a]\nuids = 1\nhost_bytes = 10mb\n")
        lines = self.hang_up(daemon)
        self.assertIn('options="max_clients 7 to 9"', lines)

    def test_namespaces(self):
        """Limits and users of sections change, new sections come, and old ones wait for a restart.
        Limits that were set at run time stay."""
        daemon = self.start(f"host_bytes = 64mb\n[namespace a]\nuids = {UID + 1}\n"
                            "host_bytes = 10mb\nmax_sessions = 5\n[namespace gone]\nuids = 7\n")
        daemon.ctl("quota", "set", "a", "--sessions", "3")
        with daemon.client() as client:
            own = client.session(Tokens(1, 1).rows, "f16", name="x")
            self.write(f"host_bytes = 32mb\n[namespace a]\nuids = {UID}, 12\nhost_bytes = 20mb\n"
                       "max_sessions = 6\n[namespace b]\nuids = 8\nhost_bytes = 1mb\n")
            lines = self.hang_up(daemon)
            self.assertIn("[namespace a] host_bytes 10mb to 20mb", lines)
            self.assertIn("[namespace b] not there to there", lines)
            self.assertIn('needs_restart options="[namespace gone] there to not there"', lines)
            a, b = self.limits(daemon, "a"), self.limits(daemon, "b")
            self.assertEqual((a["host_bytes"], a["sessions"]), (20 << 20, 3))
            self.assertEqual(b["host_bytes"], 1 << 20)
            self.assertEqual(self.limits(daemon, f"uid-{UID}")["host_bytes"], 32 << 20)
            daemon.ctl("quota", "delete", "a")
            self.assertEqual(self.limits(daemon, "a")["sessions"], 6)
            self.assertTrue(daemon.ctl("quota", "get", "gone"))
            self.assertNotIn("[namespace a]", self.hang_up(daemon))  # nothing is new
            own.drop()

    def test_rotated_log(self):
        """The file is opened again by its name; no line is lost, and no descriptor is left."""
        log = os.path.join(self.folder, "kvqd.log")
        daemon = self.start(f"log_file = {log}\n")
        before = daemon.settled_fds()
        for number in range(3):
            os.rename(log, f"{log}.{number}")
            daemon.process.send_signal(signal.SIGHUP)
            self.wait_in(log, "event=reloaded ", daemon)
            with open(f"{log}.{number}", encoding="utf-8") as old:
                self.assertEqual(old.read().count("event=reloaded "), min(number, 1))
        os.rename(log, f"{log}.3")
        self.write(f"log_file = {log}\nnonsense = 1\n")  # whatever is wrong with the rest
        daemon.process.send_signal(signal.SIGHUP)
        self.wait_in(log, "event=reload_failed", daemon)
        self.assertEqual(daemon.settled_fds(), before)
        other = os.path.join(self.folder, "other.log")
        self.write(f"log_file = {other}\n")
        daemon.process.send_signal(signal.SIGHUP)
        self.wait_in(other, "event=changed options=.*log_file", daemon)
        self.write("")
        self.hang_up(daemon)  # to stderr

    @unittest.skipUnless(shutil.which("logrotate"), "no logrotate here")
    def test_logrotate(self):
        """The file that is installed, over a folder of this test's: old lines are in the old file,
        new ones in the new."""
        log, state = os.path.join(self.folder, "kvqd.log"), os.path.join(self.folder, "state")
        rules = os.path.join(self.folder, "rules")
        daemon = self.start(f"log_file = {log}\n")
        with open(os.path.join(ROOT, "packaging", "kvqd.logrotate"), encoding="utf-8") as file:
            text = file.read().replace("/var/log/kvqd/", self.folder + "/")
        own = f"su {pwd.getpwuid(UID).pw_name} {grp.getgrgid(os.getegid()).gr_name}"
        with open(rules, "w", encoding="utf-8") as file:
            file.write(text.replace("su kvqd kvqd", own))
        os.chmod(rules, 0o644)
        systemctl = os.path.join(self.folder, "systemctl")
        with open(systemctl, "w", encoding="utf-8") as file:  # kvqd is active, and can be reloaded
            file.write(f'#!/bin/sh\n[ "$1" != reload ] || kill -HUP {daemon.process.pid}\n')
        os.chmod(systemctl, 0o755)
        path = self.folder + os.pathsep + os.environ["PATH"]
        for turn in range(2):
            done = subprocess.run(["logrotate", "-f", "-s", state, rules], capture_output=True,
                                  text=True, timeout=BOUND, env={**os.environ, "PATH": path})
            self.assertEqual((done.returncode, done.stderr), (0, ""))
            self.wait_in(log, "event=reloaded ", daemon)
            with open(log + ".1", encoding="utf-8") as old:
                self.assertIn("event=reloaded " if turn else "event=ready ", old.read())
            with open(log, encoding="utf-8") as new:
                self.assertNotIn("event=ready ", new.read())
        self.assertTrue(os.path.exists(log + ".2.gz"))

    def wait_in(self, path, pattern, daemon):
        end = time.monotonic() + BOUND
        while time.monotonic() < end:
            daemon.status()
            if os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    if re.search(pattern, file.read()):
                        return
        raise AssertionError(f"{path} never said {pattern!r}")

    def test_config_get(self):
        """Every option with its value, its default, and where the value comes from."""
        whole = ", ".join(["4294967294"] * 64)
        daemon = self.start(f"keep_seconds = 7\nread_uids = {whole}\n", drain_ms=4000)
        got = daemon.ctl("config", "get")
        self.assertEqual(got["file"], self.path)
        options = {o["name"]: o for o in got["options"]}
        shown = subprocess.run([os.path.join(BIN, "kvqd"), "--print-config"], text=True,
                               capture_output=True, timeout=BOUND, check=True).stdout
        self.assertEqual(list(options), re.findall(r"^(\w+) =", shown, re.M))
        for name, value, initial, source, live in (
                ("keep_seconds", "7", "600", "file", True),
                ("drain_ms", "4000", "5000", "flag", True),
                ("spin_us", "1000", "1000", "default", True),
                ("pool_bytes", "256mb", "0", "flag", False)):
            self.assertEqual(options[name], {"name": name, "value": value, "initial": initial,
                                             "source": source, "live": live})
        self.assertEqual(daemon.ctl("config", "get", "keep-seconds")["options"],
                         [options["keep_seconds"]])
        option, = daemon.ctl("config", "get", "read_uids")["options"]
        self.assertEqual(option["value"], whole[:508] + " ..")  # it says that it is cut
        status, _, complaint = daemon.ctl("config", "get", "keep_second", check=False)
        self.assertEqual(status, 1)
        self.assertIn("the nearest is keep_seconds", complaint)

    def test_config_set(self):
        """A live option changes until the next reload; others are refused with a sentence."""
        daemon = self.start("max_clients = 7\n")
        got = daemon.ctl("config", "set", "max_clients", "1")
        self.assertEqual(got["changed"], [{"name": "max_clients", "before": "7", "after": "1"}])
        with daemon.client(), self.assertRaises(kvq.Error):
            daemon.client()
        option, = daemon.ctl("config", "get", "max_clients")["options"]
        self.assertEqual((option["value"], option["source"]), ("1", "command"))
        for name, value, words in (("workers", "2", "takes effect only when kvqd starts"),
                                   ("max_clients", "0", "allowed is 1 to 1024"),
                                   ("max_client", "3", "the nearest is max_clients"),
                                   ("log_file", "/nonexistent/log", "/nonexistent/log")):
            status, _, complaint = daemon.ctl("config", "set", name, value, check=False)
            self.assertEqual(status, 1)
            self.assertIn(words, complaint)
        self.assertEqual(daemon.ctl("config", "get", "max_clients")["options"], [option])
        got = daemon.ctl("config", "reload")
        self.assertEqual(got["changed"], [{"name": "max_clients", "before": "1", "after": "7"}])

    def test_config_reload(self):
        daemon = self.start("max_clients = 7\n")
        self.write("max_clients = 8\nworkers = 5\n[namespace a]\nuids = 3\n")
        got = daemon.ctl("config", "reload")
        self.assertEqual([c["name"] for c in got["changed"]], ["max_clients", "[namespace a]"])
        self.assertEqual([c["name"] for c in got["needs_restart"]], ["workers"])
        self.write("max_clients = 9\nworkers = x\n")
        status, _, complaint = daemon.ctl("config", "reload", check=False)
        self.assertEqual(status, 1)
        self.assertIn(f"{self.path}:2: workers is \"x\"", complaint)
        daemon.wait_log("event=reload_failed")
        option, = daemon.ctl("config", "get", "max_clients")["options"]
        self.assertEqual(option["value"], "8")

    def test_a_section_without_keys(self):
        """Whose uid is made a comment may use the namespace no more."""
        daemon = self.start("[namespace a]\nuids = 4321\n")
        self.write("[namespace a]\n; uids = 4321\n")
        got = daemon.ctl("config", "reload")
        self.assertEqual(got["changed"],
                         [{"name": "[namespace a] uids", "before": "4321", "after": ""}])
        self.assertEqual(got["needs_restart"], [])

    def test_events_of_a_namespace_that_is_gone(self):
        """A run has its namespaces as long as its events, also without the section."""
        daemon = self.start(f"[namespace a]\nuids = {UID}\n")
        with daemon.client() as client:
            client.session(Tokens(1, 1).rows, "f16", name="it", ns="a").close()
        self.write("")
        self.assertEqual(daemon.ctl("config", "reload")["needs_restart"],
                         [{"name": "[namespace a]", "before": "there", "after": "not there"}])
        status, out, complaint = daemon.ctl("events", "--no-follow", "--since", "1h", "--namespace",
                                            "a", check=False)
        self.assertEqual((status, complaint), (0, ""))
        self.assertEqual([json.loads(line)["kind"] for line in out.splitlines()],
                         ["session_opened", "session_closed"])
        status, _, complaint = daemon.ctl("events", "--no-follow", "--namespace", "b", check=False)
        self.assertEqual(status, 5)
        self.assertIn('there is no namespace "b"', complaint)

    def test_config_reload_dry_run(self):
        """What a reload would change or refuse, and nothing changes."""
        daemon = self.start("max_clients = 7\n")
        before = daemon.ctl("config", "get")
        log, fifo = os.path.join(self.folder, "log"), os.path.join(self.folder, "fifo")
        os.mkfifo(fifo)  # which nobody reads
        self.write(f"max_clients = 8\nworkers = 5\nlog_file = {log}\n[namespace a]\nuids = 3\n")
        lines = len(daemon.lines)
        got = daemon.ctl("config", "reload", "--dry-run")
        self.assertIs(got.pop("dry_run"), True)
        self.assertEqual([c["name"] for c in got["changed"]],
                         ["max_clients", "log_file", "[namespace a]"])
        self.assertEqual([c["name"] for c in got["needs_restart"]], ["workers"])
        done = subprocess.run([os.path.join(BIN, "kvqctl"), "--runtime-dir", daemon.directory,
                               "config", "reload", "--dry-run"], capture_output=True, text=True,
                              timeout=BOUND)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        self.assertRegex(done.stdout, "^would be in effect:\n  max_clients: 7 to 8\n")
        self.assertIn("would need a restart of kvqd, and be as it is until then:\n  workers: ",
                      done.stdout)
        self.assertTrue(done.stdout.endswith("\nthis was a dry run: nothing was done\n"))
        self.assertFalse(os.path.exists(log))
        self.assertEqual(daemon.ctl("config", "get"), before)
        daemon.ctl("quota", "delete", f"uid-{UID}")  # the next line of the log
        daemon.wait_log("event=audit .*delete_quota")
        self.assertIn("event=quota ", daemon.lines[lines], "a dry run is told of")
        for text, words in ((f"max_clients = 9\nworkers = x\n", f"{self.path}:2: workers is \"x\""),
                            ("log_file = /nonexistent/log\n", "cannot open the log file /nonexis"),
                            (f"log_file = {self.folder}\n", "Is a directory"),
                            (f"log_file = {fifo}\n", f"cannot open the log file {fifo}: No such")):
            self.write(text)
            status, _, complaint = daemon.ctl("config", "reload", "--dry-run", check=False)
            self.assertEqual(status, 1)
            self.assertIn(words, complaint)
            self.assertEqual(daemon.ctl("config", "reload", check=False)[2], complaint)
        self.assertEqual(daemon.ctl("config", "get"), before)

    def test_more_changes_than_a_reply_holds(self):
        daemon = self.start("".join(f"[namespace n{i}]\nuids = {i + 1}\n" for i in range(120)))
        self.write("".join(f"[namespace n{i}]\nuids = {i + 2}\ngids = 1\nhost_bytes = 1gb\n"
                           for i in range(120)))
        got = daemon.ctl("config", "reload")
        self.assertEqual(len(got["changed"]) + got["left_out"], 360)
        self.assertGreater(got["left_out"], 0)

    @unittest.skipUnless(UID == 0, "asks as another user: needs root")
    def test_config_is_for_administrators(self):
        daemon = self.start("", runtime_mode="0755")
        ctl = everybodys_kvqctl()
        for words in (("get",), ("set", "drain_ms", "1"), ("reload",)):
            done = subprocess.run([ctl, "--runtime-dir", daemon.directory, "config", *words],
                                  capture_output=True, text=True, timeout=BOUND, user=4321)
            self.assertEqual(done.returncode, 6, done.stderr)
        daemon.ctl("config", "set", "admin_uids", "4321")
        done = subprocess.run([ctl, "--runtime-dir", daemon.directory, "config", "get", "drain_ms"],
                              capture_output=True, text=True, timeout=BOUND, user=4321)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stdout, r"(?m)^drain_ms +5000 +5000 +default +live$")

    def test_many_signals(self):
        """However fast they come, the last file is read."""
        daemon = self.start("max_clients = 10\n")
        for number in range(20):
            self.write(f"max_clients = {20 + number}\n")
            daemon.process.send_signal(signal.SIGHUP)
        daemon.wait_log("max_clients .*to 39")
