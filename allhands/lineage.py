"""Processes that must not outlive those that they work for."""

import ctypes
import os
import signal
import sys
import threading
import time

_DIE_WITH_PARENT, _ADOPT_ORPHANS = 1, 36  # PR_SET_PDEATHSIG and PR_SET_CHILD_SUBREAPER, from <sys/prctl.h>
_LOOK_SECONDS = 0.5


def die_with_parent() -> None:
    """This process, which has just been forked, is killed when its parent ends. Only Linux knows how."""
    if sys.platform == "linux":
        parent = os.getppid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        if os.getppid() != parent:  # It ended before we had asked.
            os._exit(1)


def adopt_orphans() -> None:
    """What this process's children had started becomes its own child when they end, so that it can be ended too. Only Linux knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_ADOPT_ORPHANS, 1)


def children() -> list[int]:
    """The process ids of this process's own children, adopted ones too; none where the system does not say (macOS)."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as file:
            return [int(pid) for pid in file.read().split()]
    except FileNotFoundError:
        return []


def live_no_longer_than(path: str) -> None:
    """This process ends soon after a file or folder has gone, whatever it does. All systems can do that."""

    def look() -> None:
        while os.path.exists(path):
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=look, name="live_no_longer_than", daemon=True).start()
