"""`draw(job)`: one verb for all pictures.

Nothing is drawn from a clock: positions come from the replay, in which each message takes one round.
"""

from importlib import import_module
from typing import Any

from allhands.condensed import Condensed
from allhands.errors import Recorded, without_traceback
from allhands.lanes import Picture
from allhands.spacetime import SpaceTime
from allhands.trace import Trace

_LARGEST = {"ranks": 16, "operations": 1000, "rounds": 80}  # of a picture that shows each message


def is_figure(what: Any) -> bool:
    """Whether it is one of matplotlib's. Asked like this, matplotlib is imported by those only who have a chart."""
    return type(what).__module__ == "matplotlib.figure"


def draw(what: Any) -> Picture:
    """The space-time picture of a run: of what `run` gave, of its `trace`, or of a `RankError`, as far as it came. Or a matplotlib figure.

    Time goes to the right in rounds: in one round a rank sends one message at most and receives one at most. Rest the mouse on anything
    to read what it is, and its line of code. More than 16 ranks, 80 rounds or some hundred messages are shown condensed.
    Raises TypeError for what has no trace, ValueError for a run that was not recorded.
    """
    if is_figure(what):
        charts = import_module("allhands.charts")
        return Picture(charts.to_svg(what), f"[chart: {charts.title_of(what)}]")
    if not isinstance(what, Trace | Recorded):
        raise without_traceback(
            TypeError(f"draw needs what run() gave, a trace, a RankError, or a figure, but got {type(what).__name__}: write draw(job)")
        )
    trace = what if isinstance(what, Trace) else what.trace
    size = {"ranks": trace.world_size, "operations": len(trace), "rounds": trace.timeline.rounds}
    is_small = all(size[name] <= limit for name, limit in _LARGEST.items())
    return (SpaceTime if is_small else Condensed)(trace, getattr(what, "deadlock", None)).picture()
