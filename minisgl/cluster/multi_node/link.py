"""One connection between rank 0 and a rank of another process group: frames in both directions, and heartbeats.

A thread of its own reads the connection, so that the death of the other side is noticed whatever the main thread does:
it may wait in a collective for a rank that is gone. The other side is gone if it closes the connection, which the
operating system does for a process that ends, or if no frame arrives for `SILENCE_SECONDS`.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Callable

from minisgl.cluster.multi_node.frames import Beat, ChannelError, Frame, Leaving, Session

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""
SILENCE_SECONDS = 6.0
"""Seconds without a frame after which the other side counts as gone. A link that is cut must end both sides in 10 s."""
CAUSE_SECONDS = 0.5
"""Seconds between an error of a rank's main thread and its report. If the cause is the death of another rank, a link
reports that meanwhile, and ends the process."""
_READ_BYTES = 1 << 18
_ENDED = "it has ended, or closed the connection"


class Link:
    """An authenticated connection to the rank ``peer``.

    ``on_message`` gets each received message except heartbeats, and ``on_dead`` gets the reason once the other side is
    gone. A thread of the link calls both; `start` starts it. A heartbeat is sent every ``beat`` seconds; the other side
    counts as gone after ``silence`` seconds without a frame.
    """

    def __init__(
        self,
        sock: socket.socket,
        session: Session,
        peer: str,
        on_message: Callable[[Frame], None],
        on_dead: Callable[[str], None],
        beat: float = BEAT_SECONDS,
        silence: float = SILENCE_SECONDS,
    ):
        sock.settimeout(silence)  # for `sendall`
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._socket, self._session = sock, session
        self._on_message, self._on_dead = on_message, on_dead
        self._beat_seconds, self._silence_seconds = beat, silence
        self._writable = select.poll()
        self._writable.register(sock, select.POLLOUT)
        self._lock = threading.Lock()  # held while a frame is sealed and sent
        self._closed = self._leaving = False
        self._thread = threading.Thread(target=self._run, name=f"link to {peer}", daemon=True)

    def start(self) -> None:
        """Start to receive messages and to send heartbeats."""
        self._thread.start()

    def send(self, message: Frame) -> None:
        """Send a message; every thread may call this. Raise `ChannelError` if the connection is broken.

        The call blocks only while the connection's buffer is full, and at most for ``silence`` seconds.
        """
        with self._lock:
            self._send(message)

    def leave(self) -> None:
        """Have the link's thread send `Leaving`. Unlike `send`, a signal handler may call this."""
        self._leaving = True

    def close(self, last: Frame | None = None) -> None:
        """End the connection, without a call of ``on_dead``. Frames that were sent still arrive.

        ``last`` is a message to be sent before, if the connection still works. The link's thread closes the socket,
        within ``beat`` seconds.
        """
        self._closed = True  # from now on the other side may close the connection
        with contextlib.suppress(OSError, ChannelError):
            if last is not None:
                self.send(last)
            self._socket.shutdown(socket.SHUT_WR)

    def _send(self, message: Frame) -> None:
        try:
            self._socket.sendall(self._session.seal(message))
        except ConnectionError as error:
            raise ChannelError(_ENDED) from error
        except OSError as error:
            raise ChannelError(f"can't send to {self.peer}: {error}") from error

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # also an error of `on_message`: without this thread the link is useless
            if not self._closed:
                text = str(error) if isinstance(error, ChannelError | OSError) else f"{type(error).__name__}: {error}"
                self._on_dead(f"{self.peer}: {text}")
        finally:
            self._socket.close()

    def _watch(self) -> None:
        """Receive messages and send heartbeats, until the link is closed."""
        readable = select.poll()
        readable.register(self._socket, select.POLLIN)
        last_frame, next_beat = time.monotonic(), 0.0
        while not self._closed:
            if (now := time.monotonic()) >= next_beat:
                self._beat()
                next_beat = now + self._beat_seconds
            if readable.poll(1000 * max(0.0, next_beat - now)) and self._receive():
                last_frame = time.monotonic()
            elif time.monotonic() - last_frame > self._silence_seconds:
                raise ChannelError(f"no sign of life for {self._silence_seconds:g} s")

    def _receive(self) -> bool:
        """Handle the frames that the arrived bytes complete. Return whether there was one."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError as error:  # it closed the connection before it had read all of ours
            raise ChannelError(_ENDED) from error
        if not data:
            raise ChannelError(_ENDED)
        self._session.feed(data)
        received = False
        while not self._closed and (message := self._session.next()) is not None:
            received = True
            if not isinstance(message, Beat):
                self._on_message(message)
        return received

    def _beat(self) -> None:
        """Send a heartbeat, unless another thread is sending or the connection's buffer is full.

        This thread must not block, because it also notices that the other side is silent.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._writable.poll(0):
                leaving, self._leaving = self._leaving, False
                self._send(Leaving() if leaving else Beat())
        finally:
            self._lock.release()
