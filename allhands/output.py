"""What ranks print, on its way to the reader."""

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from allhands.job import Job
from allhands.printed import LiveText, fold

MAX_OUTPUT_BYTES = 1 << 25

_LAST_WORDS = re.compile(r"terminate called after throwing an instance of 'gloo::.*\n.*what\(\):.*\n?")

_this_thread = threading.local()


@contextmanager
def into(sink: list[str]) -> Iterator[None]:
    """What ranks of this thread's runs print goes into a list, and not to the reader."""
    before = getattr(_this_thread, "sink", None)
    _this_thread.sink = sink
    try:
        yield
    finally:
        _this_thread.sink = before


def write(text: str) -> None:
    """Show text; a terminal that lacks some of its characters gets them spelt out, and where there is no terminal there is nothing."""
    sink = getattr(_this_thread, "sink", None)
    if sink is not None:
        sink.append(text)
        return
    if sys.stdout is None or not text:
        return
    try:
        sys.stdout.write(text)
    except UnicodeEncodeError:
        sys.stdout.write(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding))
    sys.stdout.flush()


def without_last_words(text: str) -> str:
    """What gloo says when it ends a process left out: it has been told better, and is said now in one rank, now in another."""
    return _LAST_WORDS.sub("", text)


class PrintedText:
    """The files that the ranks print into, and what of them has been shown."""

    def __init__(self, job: Job, stream: bool) -> None:
        self.paths = [job.path("output", r) for r in range(job.world_size)]
        self.live = [LiveText(r) for r in range(job.world_size)] if stream else []
        self.shown_bytes = [0] * len(self.live)
        self._hides_last_words = False

    def __enter__(self) -> "PrintedText":
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self._show_news(last=True)
        else:
            write(fold([without_last_words(text) if self._hides_last_words else text for text in self.all()]))

    def hide_last_words(self) -> None:
        """Do not show what gloo says when it ends a process."""
        self._hides_last_words = True

    def look(self) -> list[int]:
        """Show what is new, if it is shown live. Returns the ranks that have printed far too much."""
        if self.live:
            self._show_news(last=False)
        return [r for r, path in enumerate(self.paths) if os.path.exists(path) and os.path.getsize(path) > MAX_OUTPUT_BYTES]

    def all(self) -> list[str]:
        """All that each rank has printed. Bytes that are not UTF-8 are spelt out."""
        return [self._read(path, 0).decode(errors="backslashreplace") for path in self.paths]

    def _show_news(self, last: bool) -> None:
        for r, live in enumerate(self.live):
            data = self._read(self.paths[r], self.shown_bytes[r])
            if not last:  # A character may be half written: take whole lines only.
                data = data[: data.rfind(b"\n") + 1]
            self.shown_bytes[r] += len(data)
            write("".join(live.take(data.decode(errors="backslashreplace"), last)))

    @staticmethod
    def _read(path: str, start: int) -> bytes:
        try:
            with open(path, "rb") as file:
                file.seek(start)
                return file.read()
        except FileNotFoundError:
            return b""
