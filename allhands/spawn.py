"""Ranks where no process can be forked (Windows): each imports torch for itself, so a run takes seconds to begin."""

import multiprocessing
import os
import shutil
import socket
import warnings

from allhands.job import STACK_SIGNAL, Job, News
from allhands.rank import main

_context = multiprocessing.get_context("spawn")
_READ_BYTES = 65_536
_is_said = False


class SpawnedRanks:
    """The ranks of one run, as their caller sees them. The same as `ForkedRanks`, with multiprocessing below it."""

    def __init__(self, job: Job) -> None:
        _say_once()
        self._job = job
        self.socket, ranks_end = socket.socketpair()
        self._processes = []
        self._told: set[int] = set()
        try:
            with ranks_end:
                for rank in range(job.world_size):
                    process = _context.Process(target=main, args=(job, rank, ranks_end), daemon=True)
                    process.start()
                    self._processes.append(process)
        except BaseException:
            self.end()
            raise

    def read(self) -> bytes:
        """What has come over the socket."""
        return self.socket.recv(_READ_BYTES)

    def poll(self) -> list[tuple[News, int, int]]:
        """News that does not come over the socket: who started and who exited."""
        news = []
        if not self._told:
            news = [(News.STARTED, rank, process.pid or 0) for rank, process in enumerate(self._processes)]
            self._told.add(-1)
        for rank, process in enumerate(self._processes):
            if process.exitcode is not None and rank not in self._told:
                self._told.add(rank)
                news.append((News.EXITED, rank, process.exitcode))
        return news

    def ask_for_stacks(self) -> None:
        """Every living rank adds to its `stack` file where it stands, if the system has such a signal."""
        for process in self._processes:
            if STACK_SIGNAL is not None and process.exitcode is None:
                os.kill(process.pid, STACK_SIGNAL)

    def end(self) -> None:
        """End the ranks and remove the run's folder."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        self.socket.close()
        shutil.rmtree(self._job.directory, ignore_errors=True)


def _say_once() -> None:
    global _is_said
    if not _is_said:
        _is_said = True
        warnings.warn("this system cannot fork processes, so ranks take seconds to start", RuntimeWarning, stacklevel=5)
