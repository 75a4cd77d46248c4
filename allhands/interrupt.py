"""Ctrl-C and the stop button as something that a loop looks at, instead of an exception between any two steps."""

import signal
import socket
import threading
from types import FrameType
from typing import Any


class Interrupts:
    """While this is entered, the first SIGINT is only noted, and `socket` becomes readable. A second one is as ever.

    In other threads than the main one nothing happens: Python interrupts only that.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self.socket, self._waker = socket.socketpair()
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        self.socket.close()
        self._waker.close()
        if error is None:
            self.check()  # It came after the last look.

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_pressed:
            self._before(number, frame)
        self.is_pressed = True
        self._waker.send(b"!")

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self.is_pressed:
            raise KeyboardInterrupt
