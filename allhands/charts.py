"""Charts by matplotlib in the course's one style, as SVG that is the same on every machine and takes the page's text colour."""

import io
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from allhands import palette

# On a new machine it tells how long it looks for fonts, which would be part of a cell's output.
logging.getLogger("matplotlib.font_manager").setLevel(logging.ERROR)

_STYLE = Path(__file__).with_name("course.mplstyle")
_STAND_IN = "#010203"  # the text colour in the style file


@contextmanager
def style() -> Iterator[None]:
    """While this is entered, figures are made in the style of the course."""
    with matplotlib.rc_context(fname=_STYLE):
        matplotlib.rcParams["axes.prop_cycle"] = cycler(color=palette.RANKS)
        yield


def axes(title: str = "", x: str = "", y: str = "") -> Axes:
    """Empty axes in the style of the course, on a figure of their own (`axes.figure`, for `draw`)."""
    with style():
        made = Figure().add_subplot()
        made.set(xlabel=x, ylabel=y)
        made.set_title(title)
        return made


def to_svg(figure: Figure) -> str:
    """A figure as SVG to stand in a page: no date, no random names, text as text."""
    with style():
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :].strip(), flags=re.DOTALL)
    svg = re.sub(r'<svg ([^>]*?)height="[^"]*"', r"<svg \1", svg, count=1)
    title = title_of(figure)
    begin = f'<svg role="img" aria-label="{title}" style="max-width:100%;height:auto;display:block;font-family:{palette.FONT}" '
    return svg.replace(_STAND_IN, palette.INK).replace("<svg ", begin.replace('"DejaVu Sans"', "DejaVu Sans"), 1)


def title_of(figure: Figure) -> str:
    """What a figure is about: the titles of its axes."""
    return "; ".join(filter(None, (made.get_title(loc) for made in figure.axes for loc in ("left", "center", "right")))) or "chart"
