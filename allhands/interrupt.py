"""Ctrl-C and the stop button as something that a loop looks at, instead of an exception between any two steps."""

import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_this_thread = threading.local()


class Interrupts:
    """While this is entered, the first SIGINT is only noted, and `socket` becomes readable. A second one is as ever.

    Python interrupts only the main thread. In another one it is a `StopButton` that counts, if the thread has one.
    """

    def __init__(self) -> None:
        self.is_pressed = False
        self.socket, self._waker = socket.socketpair()
        self._before: Any = None

    def __enter__(self) -> "Interrupts":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._before = signal.signal(signal.SIGINT, self._note)
        self._button = getattr(_this_thread, "button", None)
        if self._button is not None:
            self._button.attach(self)
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
        if self._button is not None:
            self._button.attach(None)
        self.socket.close()
        self._waker.close()
        if error is None:
            self.check()  # It came after the last look.

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.is_pressed:
            self._before(number, frame)
        self.press()

    def press(self) -> None:
        """As if the stop button had been pressed."""
        self.is_pressed = True
        self._waker.send(b"!")

    def check(self) -> None:
        """Raise KeyboardInterrupt if there was one."""
        if self.is_pressed:
            raise KeyboardInterrupt


class StopButton:
    """Stops what one thread runs, and all that it would run after that; pressed in another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: Interrupts | None = None
        self.is_pressed = False

    @contextmanager
    def of_this_thread(self) -> Iterator[None]:
        """While this is entered, the button is for what this thread runs."""
        before = getattr(_this_thread, "button", None)
        _this_thread.button = self
        try:
            yield
        finally:
            _this_thread.button = before

    def attach(self, running: Interrupts | None) -> None:
        """Say what a press would stop."""
        with self._lock:
            self._running = running
            if running is not None and self.is_pressed:
                running.press()

    def press(self) -> None:
        """Stop it."""
        with self._lock:
            self.is_pressed = True
            if self._running is not None:
                self._running.press()
