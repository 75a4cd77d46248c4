"""`explore(fn, world_size=(1, 8))`: a function's result under sliders. Moving one runs it again, and the last setting wins.

A kernel handles messages one by one, so a callback that ran the function itself could never be overtaken. A thread runs it, and a newer
setting stops what runs. Where no front end is (nbval, an exported page), the result at the first setting stands there, still.
"""

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from ipywidgets import HTML, ValueWidget, VBox, interactive

from allhands.errors import RankError, without_traceback
from allhands.interrupt import StopButton
from allhands.output import into
from allhands.pictures import draw, is_figure
from allhands.report import name_and_message
from allhands.stack import from_traceback, tell

_PRE = '<pre style="margin:.3em 0;line-height:1.35;white-space:pre-wrap;font-size:.95em">{}</pre>'


@dataclass(frozen=True)
class _Shown:
    """A result for the reader: as HTML, and as text where there is none."""

    html: str
    text: str

    def __add__(self, other: "_Shown") -> "_Shown":
        return _Shown(self.html + other.html, "\n".join(filter(None, (self.text, other.text))))


def _as_text(text: str) -> _Shown:
    return _Shown(_PRE.format(escape(text)) if text else "", text)


def _shown(result: Any) -> _Shown:
    """Anything that can be displayed. Several things in a tuple or a list stand below each other."""
    if result is None:
        return _Shown("", "")
    if isinstance(result, tuple | list) and any(hasattr(each, "_repr_html_") or is_figure(each) for each in result):
        together = _Shown("", "")
        for each in result:
            together += _shown(each)
        return together
    if is_figure(result):
        shown = _shown(draw(result))
        if "matplotlib.pyplot" in sys.modules:  # Else it would show the figure once more, below the next cell.
            sys.modules["matplotlib.pyplot"].close(result)
        return shown
    data, _ = InteractiveShell.instance().display_formatter.format(result)
    text = data.get("text/plain", "")
    if "text/html" in data:
        return _Shown(data["text/html"], text)
    if "image/svg+xml" in data:
        return _Shown(data["image/svg+xml"], text)
    if "image/png" in data:
        return _Shown(f'<img alt="{escape(text)}" src="data:image/png;base64,{data["image/png"]}">', text)
    return _as_text(text)


def _shown_error(error: BaseException) -> _Shown:
    """What went wrong: a rank's error as it is, another one with the reader's own lines. A deadlock with its picture."""
    if isinstance(error, RankError):
        picture = _shown(draw(error)) if getattr(error, "deadlock", None) else _Shown("", "")
        return picture + _as_text(f"{type(error).__name__}: {error}")
    where = tell(from_traceback(error.__traceback__))
    return _as_text(f"{name_and_message(error)}\n{where}")


class Explorer(VBox):
    """Controls, and below them what the function gives for their setting."""

    def __init__(self, fn: Callable[..., Any], controls: dict[str, ValueWidget]) -> None:
        self._fn = fn
        self._controls = controls
        self._lock = threading.Lock()
        self._wanted: dict[str, Any] | None = None
        self._button: StopButton | None = None
        self._first = self._make(self.setting, StopButton())
        self._first_setting = self.setting
        self._result = HTML(self._first.html)
        super().__init__([*controls.values(), self._result])
        for control in controls.values():
            control.observe(self._moved, "value")

    @property
    def setting(self) -> dict[str, Any]:
        """The value of each control, by name."""
        return {name: control.value for name, control in self._controls.items()}

    def _make(self, setting: dict[str, Any], button: StopButton) -> _Shown:
        """The function's result for a setting, what the ranks printed above it. Raises KeyboardInterrupt when the button is pressed."""
        printed: list[str] = []
        with button.of_this_thread(), into(printed):
            try:
                shown = _shown(self._fn(**setting))
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                shown = _shown_error(error)
        if not shown.text and not printed:
            shown = _as_text(f"{getattr(self._fn, '__name__', 'The function')} returned nothing: does it end with return?")
        return _as_text("".join(printed).removesuffix("\n")) + shown

    def _moved(self, _: Any) -> None:
        """A control has another value: stop what runs, and run for the newest setting."""
        with self._lock:
            self._wanted = self.setting
            if self._button is not None:
                self._button.press()
            else:
                self._button = StopButton()
                threading.Thread(target=self._work, daemon=True).start()

    def _work(self) -> None:
        """Run for the newest setting, until there is no newer one."""
        while True:
            with self._lock:
                setting, self._wanted = self._wanted, None
                if setting is None:
                    self._button = None
                    return
                self._button = button = StopButton()
            try:
                shown = self._make(setting, button)
            except KeyboardInterrupt as stopped:  # By a newer setting; or the function itself says so.
                shown = _shown_error(stopped)
            with self._lock:
                is_newest = self._wanted is None and not button.is_pressed
            if is_newest:
                self._result.value = shown.html

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The widget; and for those who have no front end, the result at the first setting."""
        bundle = super()._repr_mimebundle_(**kwargs)
        data = bundle[0] if isinstance(bundle, tuple) else bundle
        told = ", ".join(f"{name}={value!r}" for name, value in self._first_setting.items())
        data["text/html"] = _PRE.format(escape(told)) + self._first.html
        data["text/plain"] = f"{told}\n{self._first.text}"
        return bundle


def explore(fn: Callable[..., Any], /, *unnamed: Any, **controls: Any) -> Explorer:
    """Show `fn(name=value, …)` under a control for each name, and make it anew whenever one is moved.

    A control is one of ipywidgets' abbreviations: `(1, 8)` or `(1, 8, 1)` a slider, a list a choice, a bool a box to tick, a text a field;
    or a widget. `fn` returns anything that a notebook can show, or several such in a tuple; what ranks print stands above it. A run that
    fails shows its error.

    Raises TypeError for what is no function or no control.
    """
    if not callable(fn):
        raise without_traceback(TypeError(f"explore needs a function, but got {type(fn).__name__}: write explore(fn, world_size=(1, 8))"))
    if unnamed or not controls:
        raise without_traceback(TypeError("explore needs something to move, by its name: write explore(fn, world_size=(1, 8))"))
    widgets = {}
    for name, abbreviation in controls.items():
        try:
            widget = interactive.widget_from_abbrev(abbreviation, abbreviation)
        except Exception:  # ipywidgets and traitlets have their own ways to say that they cannot use it.
            widget = None
        if not isinstance(widget, ValueWidget) or (isinstance(abbreviation, list | tuple) and not abbreviation):
            raise without_traceback(
                TypeError(
                    f"{name}={abbreviation!r} is no control: "
                    "give a range from small to large as (1, 8), a list, True or False, a text, or a widget"
                )
            )
        if not widget.description:
            widget.description = name
        widgets[name] = widget
    return Explorer(fn, widgets)
