"""Where ranks stand: they are asked, and each writes the calls of its threads into its `stack` file."""

import re
import time
from collections.abc import Iterable
from typing import Protocol

from allhands import rank
from allhands.job import Job
from allhands.stack import Frame, from_faulthandler

_POLL_SECONDS = 0.01


class Ranks(Protocol):
    """Whoever can reach the ranks of a run."""

    def ask_for_stacks(self) -> None:
        """Every living rank adds to its `stack` file where it stands."""


class Stacks:
    """The stacks of one run's ranks."""

    def __init__(self, job: Job, ranks: Ranks) -> None:
        self._job, self._ranks = job, ranks

    def text(self, r: int) -> str:
        """All that a rank has written until now."""
        try:
            with open(self._job.path("stack", r)) as file:
                return file.read()
        except FileNotFoundError:
            return ""

    def ask(self, which: Iterable[int], patience: float) -> dict[int, str]:
        """What these ranks say now, as far as they answer within so many seconds."""
        before = {r: len(self.text(r)) for r in which}
        try:
            self._ranks.ask_for_stacks()
        except OSError:
            return {}
        told: dict[int, str] = {}
        end = time.monotonic() + patience
        while len(told) < len(before) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            for r in before.keys() - told.keys():
                text = self.text(r)[before[r] :]
                if main_thread(text) is not None:  # It is the last that is written.
                    told[r] = text
        return told


def main_thread(text: str) -> list[Frame] | None:
    """The calls of the thread that is the rank's own, outermost first."""
    return from_faulthandler(text, rank.__file__)


def number_of_threads(text: str) -> int:
    """How many Python threads a rank has."""
    return len(re.findall(r"^(?:Current thread|Thread) 0x", text, re.MULTILINE))
