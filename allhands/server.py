"""The fork server's own process: it has imported all that a rank needs, forks ranks on request, and looks after them."""

import ctypes
import errno
import gc
import os
import pickle
import selectors
import shutil
import signal
import socket
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from allhands import lineage
from allhands import rank as rank_process
from allhands.job import HEADER, RECORD, STACK_SIGNAL, TELL_STACKS, Job, News

_LOOK_FOR_PARENT_SECONDS = 1.0
_LINE_BUFFERED = 1  # _IOLBF, from <stdio.h>


@dataclass
class _Live:
    """A run that the server looks after: its living ranks by process id."""

    job: Job
    control: socket.socket
    ranks: dict[int, int] = field(default_factory=dict)
    is_ending: bool = False

    def report(self, news: News, rank: int, number: int) -> None:
        with suppress(OSError):  # The caller may have gone; the end of its socket will be seen next.
            self.control.sendall(RECORD.pack(news, rank, number))

    def end(self) -> None:
        """Kill what still lives, with all that it started (a rank leads a process group of its own)."""
        self.is_ending = True
        for pid in self.ranks:
            _kill_group(pid)
            os.kill(pid, signal.SIGKILL)  # It may have left its group.


class _Server:
    def __init__(self, requests: socket.socket) -> None:
        self.requests = requests
        self.parent = os.getppid()
        self.runs: list[_Live] = []
        self.selector = selectors.PollSelector()  # Unlike epoll it has no descriptor that a fork would share.
        self.child_ended, wakeup = os.pipe()
        for end in (self.child_ended, wakeup):
            os.set_blocking(end, False)
        self.own_descriptors = [self.child_ended, wakeup, requests.fileno()]
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self.selector.register(requests, selectors.EVENT_READ, self.take_request)
        self.selector.register(self.child_ended, selectors.EVENT_READ, self.reap)

    def serve(self) -> None:
        """Until the caller has gone."""
        try:
            while os.getppid() == self.parent:
                for key, _ in self.selector.select(_LOOK_FOR_PARENT_SECONDS):
                    key.data()
        except EOFError:
            pass
        finally:
            for run in self.runs:
                run.end()
            for run in self.runs:
                for pid in run.ranks:
                    os.waitpid(pid, 0)
                shutil.rmtree(run.job.directory, ignore_errors=True)
            _kill_adopted()

    def take_request(self) -> None:
        header, descriptors, _, _ = socket.recv_fds(self.requests, HEADER.size, 1)
        if not header:
            raise EOFError
        (length,) = HEADER.unpack(header)
        body = self.requests.recv(length, socket.MSG_WAITALL)
        if len(body) < length:
            raise EOFError
        job: Job = pickle.loads(body)
        run = _Live(job, socket.socket(fileno=descriptors[0]))
        self.runs.append(run)
        self.selector.register(run.control, selectors.EVENT_READ, lambda: self.obey(run))
        for rank in range(job.world_size):
            try:
                pid = os.fork()
            except OSError as error:
                run.report(News.NOT_STARTED, rank, error.errno or errno.EAGAIN)
                break
            if pid == 0:
                self.become_rank(run, rank)
            with suppress(OSError):  # Here and in the child, so that it holds whoever comes first.
                os.setpgid(pid, pid)
            run.ranks[pid] = rank
            run.report(News.STARTED, rank, pid)

    def become_rank(self, run: _Live, rank: int) -> NoReturn:
        try:
            lineage.die_with_parent()
            os.setpgid(0, 0)
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for descriptor in self.own_descriptors:
                os.close(descriptor)
            for other in self.runs:
                if other is not run:
                    other.control.close()
            gc.enable()
            rank_process.main(run.job, rank, run.control)
        finally:
            os._exit(1)

    def obey(self, run: _Live) -> None:
        """The caller asks where the ranks are, or has closed its end."""
        try:
            command = run.control.recv(1)
        except OSError:
            command = b""
        if command == TELL_STACKS:
            for pid in run.ranks:
                os.kill(pid, STACK_SIGNAL)
        elif not run.is_ending:
            self.selector.unregister(run.control)
            run.end()
            self.forget_if_over(run)

    def reap(self) -> None:
        os.read(self.child_ended, 4096)
        while True:
            ended = _reap_one()
            if ended is None:
                break
            pid, status = ended
            for run in self.runs:
                if pid in run.ranks:
                    run.report(News.EXITED, run.ranks.pop(pid), os.waitstatus_to_exitcode(status))
                    self.forget_if_over(run)
                    break
        if not self.runs:
            _kill_adopted()

    def forget_if_over(self, run: _Live) -> None:
        if run.is_ending and not run.ranks:
            shutil.rmtree(run.job.directory, ignore_errors=True)
            run.control.close()
            self.runs.remove(run)


def _reap_one() -> tuple[int, int] | None:
    """The process id and status of a child that has ended, if there is one; what it had started ends with it."""
    with suppress(ChildProcessError):
        if not hasattr(os, "waitid"):  # macOS before Python 3.13: what a crashed rank had started stays.
            pid, status = os.waitpid(-1, os.WNOHANG)
            return (pid, status) if pid else None
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # Not yet waited for, its number is still its own.
        if ended is not None:
            _kill_group(ended.si_pid)
            return os.waitpid(ended.si_pid, 0)
    return None


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # Nothing of its group may be left.
        os.killpg(pid, signal.SIGKILL)


def _kill_adopted() -> None:
    """End what ranks had started and detached: when no rank is left, every child of this process is such a one (on Linux)."""
    for pid in lineage.children():
        os.kill(pid, signal.SIGKILL)


def _write_whole_lines() -> None:
    """C libraries then write line by line, so that little is lost when a rank dies."""
    libc = ctypes.CDLL(None)
    for name in ("stdout", "__stdoutp"):  # Linux, macOS
        try:
            stream = ctypes.c_void_p.in_dll(libc, name)
        except ValueError:
            continue
        libc.setvbuf(stream, None, _LINE_BUFFERED, 0)


def serve(descriptor: int) -> None:
    """The server's main function. `descriptor` is its end of the caller's socket."""
    torch.set_num_threads(1)
    lineage.adopt_orphans()
    signal.signal(STACK_SIGNAL, signal.SIG_IGN)  # Until a rank has something to answer with.
    _write_whole_lines()
    gc.collect()
    gc.freeze()  # Nothing of what is here now will be moved, so ranks go on sharing its memory.
    gc.disable()
    _Server(socket.socket(fileno=descriptor)).serve()
