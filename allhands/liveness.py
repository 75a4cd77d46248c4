"""Whether processes still do something: they run, or their threads have woken since the last look."""

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator

can_tell = sys.platform == "linux"
"""Only Linux says it of each thread, in /proc."""

# gloo's thread wakes a hundred times a second to see that there is nothing to do.
_IDLE_LOOP = re.compile(r"^Name:\s+gloo_tcp_loop$", re.MULTILINE)


class Quiet:
    """Looks at processes again and again, and knows for how long they have done nothing."""

    def __init__(self) -> None:
        self._switches: dict[str, int] = {}
        self._since: float | None = None
        self._loops_at_rest: set[str] = set()

    def seconds(self, pids: Iterable[int]) -> float:
        """Look once more: for so long no thread has run. A thread that waits for a processor counts as running."""
        now = time.monotonic()
        is_quiet, switches, loops = True, {}, set()
        for thread, status in _threads(pids):
            is_at_rest = not re.search(r"^State:\s+[RD]", status, re.MULTILINE)
            if _IDLE_LOOP.search(status):
                loops.add(thread)
                if is_at_rest:
                    self._loops_at_rest.add(thread)
            else:
                is_quiet = is_quiet and is_at_rest
                switches[thread] = sum(map(int, re.findall(r"ctxt_switches:\s+(\d+)", status)))
        if not is_quiet or switches != self._switches or self._since is None:
            self._switches, self._since, self._loops_at_rest = switches, now, set()
        return now - self._since if loops <= self._loops_at_rest else 0.0


def _threads(pids: Iterable[int]) -> Iterator[tuple[str, str]]:
    """The folder and the status of each thread. A process that has ended has none."""
    for pid in pids:
        try:
            for thread in os.listdir(f"/proc/{pid}/task"):
                folder = f"/proc/{pid}/task/{thread}"
                with open(f"{folder}/status") as file:
                    yield folder, file.read()
        except (FileNotFoundError, ProcessLookupError):
            pass
