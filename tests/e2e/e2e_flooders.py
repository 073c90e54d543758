# SPDX-License-Identifier: Apache-2.0
"""Client processes that take what they can get, and one that works meanwhile; for e2e_floods.py.

Each becomes another user first, if it is told one.
"""
import os
import resource
import socket
import struct

from e2e_rig import BOUND, Tokens, kvq

KINDS = {"control.sock": socket.SOCK_STREAM, "attach.sock": socket.SOCK_SEQPACKET}


def become(user):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if user is not None:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)


def step_when_told(say, wait, check_step, directory, user):
    """A step with each line of input; says the largest error of its output."""
    tokens = Tokens(5, 2000, layers=1)  # first: that user may not be able to read all of Python
    become(user)
    with kvq.Client(directory, name="victim") as client, client.queue() as queue:
        session = client.session(tokens.rows, "f16")
        say("ready")
        while True:
            try:
                wait()
            except SystemExit:
                return
            say(float(check_step(queue, tokens, session, 3)))


def connect(directory, name):
    plain = socket.socket(socket.AF_UNIX, KINDS[name])
    for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # connect waits for the backlog, too
        plain.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", BOUND, 0))
    plain.connect(os.path.join(directory, name))
    return plain


def come_to_the_end(plain):
    """Ends our side and reads until the daemon has ended its own: it has then looked at all who
    came before."""
    plain.shutdown(socket.SHUT_WR)
    try:
        while plain.recv(4096):
            pass
    except ConnectionResetError:
        pass
    plain.close()


def has_ended(plain):
    """Whether the daemon has closed it, with or without words."""
    plain.setblocking(False)
    try:
        plain.recv(4096)
        return True
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def connect_plainly(say, wait, directory, user, name, n):
    """Connections that say nothing, as many as it takes."""
    become(user)
    all_of_them = [connect(directory, name) for _ in range(n)]
    come_to_the_end(connect(directory, name))
    refused = sum(has_ended(x) for x in all_of_them)
    say({"standing": n - refused, "refused": refused})
    wait()


def connect_one_by_one(say, wait, directory, user, name, n):
    """Connections that say nothing and go, each when the daemon has ended the one before."""
    become(user)
    for _ in range(n):
        come_to_the_end(connect(directory, name))
    say(n)
    wait()


def open_queues(say, wait, directory, user, n_clients, n_queues):
    """Clients with queues, until one is refused."""
    become(user)
    clients, queues, why = [], [], ""
    try:
        for _ in range(n_clients):
            clients.append(kvq.Client(directory, name="flood"))
            for _ in range(n_queues):
                queues.append(clients[-1].queue())
    except kvq.Error as error:
        why = str(error)
    say({"clients": len(clients), "queues": len(queues), "why": why})
    wait()
    for x in queues + clients:
        x.close()


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48)
READY = b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"


def shake_hands(plain):
    """Until messages may follow: ZeroMQ refuses those that come before it has sent its part."""
    plain.sendall(GREETING + READY)
    for bound in (len(GREETING), 2):
        said = plain.recv(bound, socket.MSG_WAITALL)
    if len(said) == 2:
        plain.recv(said[1], socket.MSG_WAITALL)


def send_frames(say, wait, directory, user, frame, most):
    """The same frame again and again, until the daemon ends the connection or it took so many
    bytes."""
    become(user)
    plain, sent, ended = connect(directory, "control.sock"), 0, False
    frames = (bytes.fromhex(frame["flags"]) + struct.pack(">Q", frame["bytes"])
              + bytes(frame["bytes"]))
    frames *= 1 + 65536 // len(frames)
    shake_hands(plain)
    try:
        while sent < most:
            sent += plain.send(frames[sent % len(frames):])
    except (BrokenPipeError, ConnectionResetError):
        ended = True
    say({"sent": sent, "ended": ended})
    wait()


def come_and_go(say, directory, user):
    """Silent connections, such that begin to speak ZeroMQ's protocol, and such that speak another,
    twenty at a time, for ever."""
    become(user)
    words = [b"", GREETING, GREETING + READY, b"GET / HTTP/1.1\r\n\r\n" * 8, b"\x00\x03abc"]
    say("begun")
    while True:
        some = [connect(directory, "control.sock") for _ in range(20)]
        for i, plain in enumerate(some):
            try:
                if words[i % len(words)] == words[-1]:
                    shake_hands(plain)
                plain.send(words[i % len(words)])
            except (BrokenPipeError, ConnectionResetError):
                pass
        for plain in some:
            plain.close()
