"""Ends the processes of a run soon after one of them was killed, with a sentence that names it.

JAX's coordinator finds a dead process by its missing heartbeats, after 100 s by default, and then aborts all others, which wait
in collectives until then. But the system closes the connections of a killed process at once. So each process keeps a connection
to process 0, whose end shows that the process is gone. Where a whole machine is gone, nothing is closed, and JAX's heartbeats
decide.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

_log = logging.getLogger("shardplan")

END_S = 10.0
"""Seconds between the message and the end of a process, in which code may catch a collective's error and save its state."""

_CONNECT_S = 10.0


def serve(own: int) -> str:
    """Watches the connections of all other processes from a thread of process ``own``; returns what `join` needs, as text."""
    family, dual = (socket.AF_INET6, True) if socket.has_dualstack_ipv6() else (socket.AF_INET, False)
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)
    token = secrets.token_hex(16)
    watch = _Watch(server, token, own)
    _at_exit(watch.leave, watch.close)
    _start(watch.run)
    return f"{server.getsockname()[1]} {token}"


def join(own: int, first: int, host: str, told: str) -> None:
    """Connects process ``own`` with process ``first``, which runs on ``host``, and watches that connection from a thread.

    Without a connection there is a warning, and JAX's heartbeats alone find dead processes.
    """
    port, token = told.split()
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
    except OSError as error:
        _log.warning("process %d cannot reach process %d at %s:%s (%s): dead ones are found late", own, first, host, port, error)
        return
    connection.settimeout(None)
    connection.sendall(f"{token} {own}\n".encode())
    _at_exit(lambda: _send(connection, _farewell()), connection.close)
    _start(lambda: _listen(connection, own, first))


def _listen(connection: socket.socket, own: int, first: int) -> None:
    """Waits for messages of process ``first``, or for its end."""
    ended = False
    with suppress(OSError), connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            kind, _, text = line.rstrip("\n").partition(" ")
            ended = ended or kind in ("left", "failed")
            if text:
                _tell(f"process {first} {text}" if kind == "failed" else text, own, ends=kind == "died")
    if not ended:
        _tell(_killed(first), own, ends=True)


class _Watch:
    """Watches the connections of process 0 in a thread."""

    def __init__(self, server: socket.socket, token: str, own: int) -> None:
        self._server, self._token, self._own = server, token, own
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._read: dict[socket.socket, bytes] = {}
        self._process: dict[socket.socket, int] = {}

    def run(self) -> None:
        """Serves until a process has died."""
        while True:
            for key, _ in self._selector.select():
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self._server:
                    accepted, _ = self._server.accept()
                    self._selector.register(accepted, selectors.EVENT_READ)
                    self._read[accepted] = b""
                else:
                    self._hear(connection)

    def leave(self) -> None:
        """Tells all that this process ends."""
        self._all(_farewell())

    def close(self) -> None:
        """Closes the inherited connections in a forked child."""
        for connection in (self._server, *self._read):
            connection.close()

    def _hear(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except OSError:
            data = b""
        *lines, self._read[connection] = (self._read[connection] + data).split(b"\n")
        for line in lines:
            self._line(connection, line.decode("utf-8", "replace"))
        if not data:
            self._selector.unregister(connection)
            connection.close()
            del self._read[connection]
            process = self._process.pop(connection, None)
            if process is not None:
                self._all(f"died {_killed(process)}\n")
                _tell(_killed(process), self._own, ends=True)

    def _line(self, connection: socket.socket, line: str) -> None:
        kind, _, text = line.partition(" ")
        if kind == self._token:
            self._process[connection] = int(text)
        elif connection in self._process:  # other connections have sent no token
            process = self._process.pop(connection)
            if kind == "failed":
                self._all(f"heard process {process} {text}\n")
                _tell(f"process {process} {text}", self._own, ends=False)

    def _all(self, line: str) -> None:
        for connection in list(self._process):
            _send(connection, line)


def _send(connection: socket.socket, line: str) -> None:
    with suppress(OSError):
        connection.sendall(line.encode())


def _farewell() -> str:
    """The message of a process that ends by itself."""
    kind: type[BaseException] | None = getattr(sys, "last_type", None)
    return "left\n" if kind is None else f"failed ended with {kind.__name__}: see its output\n"


def _killed(process: int) -> str:
    return f"process {process} was killed or has crashed: see its output, and whether its machine was short of memory"


def _tell(what: str, own: int, *, ends: bool) -> None:
    """Writes a message; with ``ends``, ends this process `END_S` later."""
    then = f"process {own} ends in {END_S:g} s; start all processes again" if ends else f"process {own} may wait for it in vain"
    os.write(2, f"shardplan: {what}; {then}\n".encode())
    if ends:
        threading.Event().wait(END_S)
        os._exit(1)


def _start(run: Callable[[], None]) -> None:
    threading.Thread(target=run, name="shardplan-watch", daemon=True).start()


def _at_exit(leave: Callable[[], None], close: Callable[[], None]) -> None:
    atexit.register(leave)
    os.register_at_fork(after_in_child=close)  # a child that lives on would hold the connection of a dead process
