"""What must not be left behind: processes, files, descriptors. And whether the machine is quiet enough to time something."""

import glob
import os
import tempfile
import time
from contextlib import contextmanager

import psutil

from allhands.forkserver import server


def wait_until(condition, seconds=10.0):
    """True as soon as `condition()` is; False if it is not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def descendants(pid=None):
    """Living processes below a process, but for the fork server of this one."""
    server_pid = server._process.pid if server._process else None
    pids = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    return [pid for pid in pids if pid != server_pid and is_alive(pid)]


def is_alive(pid):
    """Whether a process is there and not just waiting to be forgotten."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def run_folders():
    """The folders of runs, wherever they are now."""
    return set(glob.glob(os.path.join(tempfile.gettempdir(), "allhands-*")))


@contextmanager
def nothing_left_behind(patience=10.0):
    """What is done inside leaves no process, no folder and no descriptor."""
    processes, folders, descriptors = set(descendants()), run_folders(), len(os.listdir("/proc/self/fd"))
    yield
    assert wait_until(lambda: set(descendants()) <= processes, patience), f"processes left: {set(descendants()) - processes}"
    assert wait_until(lambda: run_folders() <= folders, patience), f"folders left: {run_folders() - folders}"
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def is_quiet():
    """Whether at least one core and a half are idle, so that a time means something."""
    return psutil.cpu_times_percent(interval=0.2).idle > 75
