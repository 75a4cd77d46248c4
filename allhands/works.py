"""What an operation gives back: its work, with the waits for it written down."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from allhands import pen
from allhands.events import HAS_FAILED, HAS_FUTURE, HAS_LIMIT
from allhands.pen import OVER, WAITED, ticks

NO_TIMEOUT = timedelta(0)
"""What PyTorch says of a wait that lasts as long as it takes."""


class Message:
    """The work of a send or a receive. Not a `dist.Work`, which would cost as much again; nothing but Python waits for it."""

    __slots__ = ("_place", "_view", "_work")

    def __init__(self, work: Any, row: tuple[memoryview, int]) -> None:
        self._work = work
        self._view, self._place = row

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> Any:
        """Wait until the message has been handed over. Once: gloo would hang at the second time."""
        if self._view[self._place + WAITED]:
            raise RuntimeError(
                "this message has been waited for already, and gloo would wait for ever: call wait() once for each isend or irecv"
            )
        return self._wait(timeout)

    def _wait(self, timeout: timedelta) -> Any:
        view, place, head = self._view, self._place, pen.current.head
        # C++ always names a time, and means by none of it that the wait has no limit.
        has_limit = timeout != NO_TIMEOUT
        view[place + WAITED] |= next(ticks) | (HAS_LIMIT if has_limit else 0)
        head[0] = next(ticks)
        failed = HAS_FAILED
        try:
            result = self._work.wait(timeout) if has_limit else self._work.wait()
            failed = 0
        finally:
            view[place + OVER] = next(ticks) | failed
            head[0] = next(ticks)
        return result

    def _note_over(self) -> None:
        """Whoever asks until the work is over has waited for it in his own way."""
        view, place = self._view, self._place
        if not view[place + WAITED]:
            view[place + WAITED] = next(ticks)
            view[place + OVER] = pen.current.head[0] = next(ticks)

    def __del__(self) -> None:
        """Let go of: a send that is not through by then is lost. Over, and not waited for, is how that is written down."""
        if not self._view[self._place + WAITED] and not pen.current.is_muted:
            self._view[self._place + OVER] = next(ticks)

    def is_completed(self) -> bool:
        """Whether it is over."""
        is_over = self._work.is_completed()
        if is_over:
            self._note_over()
        return is_over

    def get_future(self) -> Any:
        """A future of it. Whoever takes it waits in his own way."""
        future = self._work.get_future()
        self._note_over()
        return future

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


class MessageFromAny(Message):
    """The work of a receive from whoever sends: who it was is known afterwards."""

    __slots__ = ("_learn",)

    def __init__(self, work: Any, row: tuple[memoryview, int], learn: Callable[[int], int]) -> None:
        super().__init__(work, row)
        self._learn = learn

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> Any:
        """Wait until a message has come."""
        done = super().wait(timeout)
        self._view[self._place] = self._learn(self._work._source_rank())
        return done


class CollectiveWork(dist._Work):
    """The work of a collective. C++ too may wait for it, so it has to be a `dist.Work`."""

    def __init__(self, work: Any, row: tuple[memoryview, int]) -> None:
        super().__init__()
        self._work = work
        self._view, self._place = row

    _wait = Message._wait
    _note_over = Message._note_over
    is_completed = Message.is_completed

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until it is done. Only the first wait counts."""
        if self._view[self._place + WAITED] & ~HAS_FUTURE:
            return self._work.wait(timeout)
        return self._wait(timeout)

    def get_future(self) -> Any:
        """A future of it, which DDP waits for. What is to be done when it is over may be said there."""
        future = self._work.get_future()
        self._view[self._place + WAITED] |= HAS_FUTURE
        return future

    def result(self) -> Any:
        """The tensors."""
        return self._work.result()

    def synchronize(self) -> None:
        """For devices with streams."""
        self._work.synchronize()

    def exception(self) -> Any:
        """Why it failed."""
        return self._work.exception()

    def is_success(self) -> bool:
        """Whether it did not fail."""
        return self._work.is_success()
