# SPDX-License-Identifier: Apache-2.0
"""A daemon of this process's own, for programs that find none running.

The daemon ends when the process and all processes forked from it have ended, killed or not: they
hold the write end of a pipe, and the daemon watches the read end. All clients of the process share
the daemon.
"""
from __future__ import annotations

import atexit
import fcntl
import glob
import logging
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
import weakref
from contextlib import suppress
from typing import Any, Optional

from .errors import Code, Error

_BOUND = 60         # seconds until a daemon that starts is taken for one that hangs
_END = 5            # seconds that this process's end waits for the daemon's
_PREFIX = "kvq-private-"
_LONGEST = 60       # bytes of its directory's path; a socket's path has at most 107

_log = logging.getLogger("kvq")
_lock = threading.Lock()
_running = None
clients: weakref.WeakSet[Any] = weakref.WeakSet()  # of this process's daemon


def _begin_anew():
    """In a forked process: another thread of its parent may have had the lock."""
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_begin_anew)


def program(name: str) -> Optional[str]:
    """Path of kvqd or kvqctl: in $KVQ_BIN_DIR, else in this package, else on the PATH; or None."""
    asked = os.environ.get("KVQ_BIN_DIR")
    own = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin")
    folders = [asked] if asked else [own, *os.get_exec_path()]
    return shutil.which(name, path=os.pathsep.join(folders))


def _parent():
    """The folder that its directory is made in: the user's own, if its path is short enough."""
    for folder in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if folder and len(os.fsencode(folder)) < _LONGEST - 24 and os.access(folder, os.W_OK):
            return folder
    return "/tmp"


def _sweep(parent):
    """Removes the folders of private daemons whose programs were killed: folders of this user, a
    minute old or older, whose lock no daemon holds."""
    for path in glob.glob(os.path.join(glob.escape(parent), _PREFIX + "*", "run", "kvqd.lock")):
        try:
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                if status.st_uid != os.getuid() or status.st_mtime > time.time() - 60:
                    continue
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(os.path.dirname(os.path.dirname(path)), ignore_errors=True)
        except OSError:
            continue


class _Daemon:
    """A daemon, in a folder that it makes, or in that of one that has ended, whose clients find it
    there."""

    def __init__(self, options, folder=None):
        self.options = options
        self.pid = os.getpid()
        self.process = None  # until it is started
        kvqd = program("kvqd")
        if not kvqd:
            raise Error(Code.E_NO_DAEMON, "no daemon is running, and there is no kvqd to start: it "
                        "is neither in this package nor on the PATH; start one, and name its "
                        "directory by Client(runtime_dir) or KVQ_RUNTIME_DIR")
        parent = _parent()
        if folder:
            os.makedirs(folder, 0o700, exist_ok=True)  # another process may have swept it away
        else:
            _sweep(parent)
            folder = tempfile.mkdtemp(prefix=_PREFIX, dir=parent)
        self.folder = folder  # its log, and its directory
        self.directory = os.path.join(self.folder, "run")
        self.log = os.path.join(self.folder, "kvqd.log")
        flags = [x for name, value in options.items()
                 for x in ("--" + name.replace("_", "-"), str(value))]
        self.held, self.lifetime = os.pipe()
        ready, told = os.pipe()
        try:
            # A session of its own: an interrupt from the terminal is for the program, not for it.
            with open(self.log, "ab") as log:
                self.process = subprocess.Popen(
                    [kvqd, "--runtime-dir", self.directory, "--lifetime-fd", str(self.held),
                     "--http", "no", "--ready-fd", str(told), *flags],
                    pass_fds=[self.held, told], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                    start_new_session=True)
            os.close(told)
            told = None
            answer = select.poll()  # which takes descriptors of any number, unlike select()
            answer.register(ready, select.POLLIN)
            answered = bool(answer.poll(_BOUND * 1000))
            if not answered or not os.read(ready, 64):
                raise Error(Code.E_NO_DAEMON, f"{kvqd} did not start: {self._last_words(answered)}")
        except BaseException:
            self.stop()
            raise
        finally:
            for fd in (ready, told):
                if fd is not None:
                    os.close(fd)

    def _last_words(self, ended):
        if ended:  # or is about to: it has let go of its end of the pipe
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(_END)
        with open(self.log, errors="replace") as log:
            lines = log.read().splitlines()
        if lines:
            return lines[-1]
        status = self.process.poll()
        return (f"it said nothing in {_BOUND} seconds" if status is None else
                f"it ended with status {status} and said nothing")

    def lives(self):
        """Whether the daemon runs. A forked process cannot tell, and takes it for running."""
        return self.pid != os.getpid() or self.process.poll() is None

    def has_ended(self):
        """Whether the daemon, which answers no more, has ended; waits for that. A forked process
        cannot tell."""
        if self.pid != os.getpid():
            return False
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_END)
        return not self.lives()

    def succeeded(self):
        """Another one, in its folder, in its place."""
        _log.warning("kvq: the daemon of this process has ended (status %s); starting another",
                     self.process.returncode)
        self._let_go()
        return _start(self.options, self.folder)

    def _let_go(self):
        """Whether no process holds the daemon any more: nobody has an end of the pipe to write to
        then, which its other end shows."""
        if self.lifetime is None:
            return True
        os.close(self.lifetime)
        self.lifetime = None
        over = select.poll()
        over.register(self.held, 0)
        alone = bool(over.poll(0))
        os.close(self.held)
        return alone

    def stop(self):
        alone = self._let_go()
        if self.pid != os.getpid() or not alone:
            return  # the last process that was forked ends it
        try:
            if self.process:
                self.process.wait(_END)
        except subprocess.TimeoutExpired:
            return  # much is saved: it ends behind this process
        shutil.rmtree(self.folder, ignore_errors=True)


def _start(options, folder=None):
    try:
        return _Daemon(options, folder)
    except OSError as error:
        raise Error(Code.E_NO_DAEMON, f"{program('kvqd')} did not start: {error}") from error


def private_daemon(**options: object) -> str:
    """Starts this process's own daemon, unless it has one, and returns its directory.

    options: kvqd's, as in its configuration file, by names with _ for -, values as str() gives
    them: private_daemon(pool_bytes="8gb", storage_dir="/var/tmp/chats"). Without any, the one that
    is running whatever its options are. ValueError if it has been started with others; kvq.Error if
    it cannot start. Any thread."""
    global _running
    with _lock:
        if _running and _running.lives():
            if options and options != _running.options:
                raise ValueError(f"this process's daemon has been started with {_running.options}, "
                                 f"not with {options}: ask before the first Client")
            return _running.directory
        if _running:
            _running.options = options or _running.options
            _running = _running.succeeded()
        else:
            _running = _start(options)
        _log.warning("kvq: no daemon is running; started one for this process alone, in %s (set "
                     "KVQ_RUNTIME_DIR to share one)", _running.directory)
        return _running.directory


def start_again(directory: str) -> bool:
    """Starts the daemon of that directory again, with the options that it had, if it was this
    process's own and has ended. Whether one runs there now."""
    global _running
    with _lock:
        if not _running or _running.directory != directory:
            return False
        if _running.has_ended():
            _running = _running.succeeded()
        return _running.directory == directory


@atexit.register
def _end():
    if _running:
        for client in list(clients):  # the daemon waits for steps that are open
            with suppress(Exception):  # a thread is in a call: the process's end closes it
                client.close()
        _running.stop()
