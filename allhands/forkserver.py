"""Ranks in a twentieth of a second: a process that has imported torch once, and forks ranks from itself. This is its parent's side.

Why not multiprocessing's own fork server: that one imports the caller's `__main__` again in every child (so scripts need a guard, and
code from a terminal fails), takes a connection and a resource tracker a process, and shares one server with everybody in the kernel.

A run is one socket between the caller and the server. Whatever ends the caller closes the socket, and then the server, which
is the parent of the ranks and so the only one who can name them without doubt, ends them and removes the run's folder.
"""

import atexit
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO

from allhands.job import HEADER, TELL_STACKS, Job, News

is_possible = hasattr(os, "fork")
"""Windows has no fork."""

_PATIENCE_AT_EXIT_SECONDS = 2.0
_READ_BYTES = 65_536
_SERVER_CODE = "import sys; sys.path[:] = {path!r}; from allhands.server import serve; serve({descriptor})"
_SERVER_ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # Sets of strings come in the same order in every run.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # Large pages: a third of the time of a fork is saved.
}


class ServerGoneError(RuntimeError):
    """The fork server could not start, or was killed; before or after the run began."""

    def __init__(self, last_words: str, has_begun: bool) -> None:
        super().__init__(
            f"the process that starts the ranks has ended. The next run starts a new one. Its last words: {last_words or 'none'}"
        )
        self.has_begun = has_begun


class ForkedRanks:
    """The ranks of one run, as their caller sees them: a socket with news of them."""

    def __init__(self, control: socket.socket, job: Job, last_words: Callable[[], str]) -> None:
        self.socket = control
        self._job = job
        self._last_words = last_words
        self._has_begun = False
        self._is_lost = False

    def read(self) -> bytes:
        """What has come over the socket. Raises `ServerGoneError` if nothing ever will."""
        data = self.socket.recv(_READ_BYTES)
        if not data:
            self._is_lost = True
            raise ServerGoneError(self._last_words(), self._has_begun)
        self._has_begun = True
        return data

    def poll(self) -> list[tuple[News, int, int]]:
        """News that does not come over the socket: none."""
        return []

    def ask_for_stacks(self) -> None:
        """Every living rank adds to its `stack` file where it stands."""
        self.socket.sendall(TELL_STACKS)

    def end(self) -> None:
        """End the ranks and remove the run's folder; the server does it, in the background."""
        if self._is_lost:
            shutil.rmtree(self._job.directory, ignore_errors=True)
        else:
            self.socket.shutdown(socket.SHUT_RDWR)  # It counts also if a fork of the caller holds a copy.
        self.socket.close()


class ForkServer:
    """A handle on the server process; started when first needed, and again if it was killed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._log: IO[bytes] | None = None

    def ensure_started(self) -> None:
        """Start the server if there is none. Returns at once: the server imports torch meanwhile."""
        with self._lock:
            self._ensure_started()

    def _ensure_started(self) -> None:
        if self._owner == os.getpid() and self._process is not None and self._process.poll() is None:
            return
        if self._owner != os.getpid():
            atexit.register(self.stop)
        if self._socket is not None and self._log is not None:  # of a server that was killed, or is another process's
            self._socket.close()
            self._log.close()
        self._owner = os.getpid()  # A copy of this object in a forked process must not talk to the original's server.
        self._socket, server_end = socket.socketpair()
        self._log = tempfile.TemporaryFile()
        code = _SERVER_CODE.format(path=sys.path, descriptor=server_end.fileno())
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[server_end.fileno()],
                # Away from Ctrl-C and a kernel's signals, which are the caller's to handle: it then lives to clean up.
                start_new_session=True,
                env={**os.environ, **_SERVER_ENVIRONMENT},
            )

    def start(self, job: Job) -> ForkedRanks:
        """Have the ranks of `job` forked; news of them follows over their socket."""
        ours, servers = socket.socketpair()
        body = pickle.dumps(job)
        with self._lock, servers:
            self._ensure_started()
            try:
                socket.send_fds(self._socket, [HEADER.pack(len(body))], [servers.fileno()])
                self._socket.sendall(body)
            except OSError:  # It has ended just now, which the first read will find out.
                self._process.wait()
        return ForkedRanks(ours, job, self._last_words)

    def _last_words(self) -> str:
        """What the server printed: the reason, if it could not start."""
        if self._log is None or self._log.closed:
            return ""
        return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace").strip()

    def stop(self) -> None:
        """End the server and all that it runs."""
        if self._owner == os.getpid() and self._socket is not None and self._process is not None:
            self._socket.close()
            try:
                self._process.wait(_PATIENCE_AT_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            if self._log is not None:
                self._log.close()


server = ForkServer()
"""The one server of this process."""
