"""Where a program stands: frames from tracebacks and from stack dumps, told in the reader's terms.

A reader thinks in notebook cells, not in the temporary files that a kernel names them after; and not by the number of a
cell, which is another one each time it is run (under nbval it is always 0).
"""

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

THIS_CELL = "<this cell>"
"""The file name of a `%%ranks` cell's code, the same for all, so that printed tracebacks are the same every time."""

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
_COURSE = tuple(os.path.join(_PACKAGE, folder) + os.sep for folder in ("parallel", "exercises"))
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_SHOWN_FRAMES = 6


@dataclass(frozen=True)
class Frame:
    """One call on a stack: the file, the line (from 1), the function."""

    filename: str
    line: int
    function: str

    @property
    def is_library(self) -> bool:
        """Whether this is code that the reader did not write and the course does not teach."""
        if self.filename.startswith(_COURSE):
            return False
        return self.filename.startswith((_PACKAGE + os.sep, _STANDARD_LIBRARY, "<frozen")) or bool(
            re.search(r"[/\\](site|dist)-packages[/\\]", self.filename)
        )

    @property
    def place(self) -> str:
        """`This cell, line 2`, or `ring.py, line 2`; with the function, if there is one."""
        inside = "" if self.function == "<module>" else f", in {self.function}"
        return f"{_cell_name(self.filename) or _short_path(self.filename)}, line {self.line}{inside}"

    @property
    def text(self) -> str:
        """The line of code, without its indentation; empty if its source is not at hand."""
        return linecache.getline(self.filename, self.line).strip()


def _cell_name(filename: str) -> str | None:
    """`This cell` or `An earlier cell`, if the file is one of the running IPython's. IPython is asked, never imported."""
    if filename == THIS_CELL:
        return "This cell"
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if not shell or not shell.compile.format_code_name(filename):
        return None
    caller = sys._getframe()
    while caller is not None and caller.f_code.co_filename != filename:
        caller = caller.f_back
    return "An earlier cell" if caller is None else "This cell"


def _short_path(filename: str) -> str:
    """A path below the working directory as it is from there; a library's from its package on; else the file's name."""
    packaged = re.search(r"[/\\](?:site|dist)-packages[/\\](.*)", filename)
    if packaged:
        return packaged[1]
    for folder in (os.path.dirname(_PACKAGE), os.getcwd()):
        if filename.startswith(folder + os.sep):
            return filename[len(folder) + 1 :]
    return os.path.basename(filename)


def from_traceback(traceback: TracebackType | None) -> list[Frame]:
    """The frames of an exception, outermost first."""
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        frames.append(Frame(code.co_filename, traceback.tb_lineno or 0, code.co_name))
        traceback = traceback.tb_next
    return frames


def from_faulthandler(dump: str, base: str) -> list[Frame] | None:
    """What `faulthandler` wrote of the thread that runs in the file `base`: its last call there, and those below, outermost first.

    None if there is no such thread.
    """
    for section in re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.MULTILINE)[1:]:
        frames = [
            Frame(filename.encode("ascii", "replace").decode("unicode_escape"), int(line), function)
            for filename, line, function in re.findall(r'^  File "(.*)", line (\d+) in (.*)$', section, re.MULTILINE)
        ][::-1]
        bases = [index for index, frame in enumerate(frames) if frame.filename == base]
        if bases:
            return frames[bases[-1] :]
        if re.search(r"^  \.\.\.$", section, re.MULTILINE):  # So deep that the outer calls are not told.
            return frames
    return None


def tell(frames: Sequence[Frame]) -> str:
    """The reader's own calls on a stack, in lines of text: the places, and the code that stands there.

    Library calls below them are left out: their lines change with each release, and the exception already speaks for them.
    """
    shown = [frame for frame in frames if not frame.is_library]
    lines: list[str] = []
    for index, frame in enumerate(shown):
        if len(shown) > _SHOWN_FRAMES and _SHOWN_FRAMES // 2 <= index < len(shown) - _SHOWN_FRAMES // 2:
            if index == _SHOWN_FRAMES // 2:
                lines.append("  … more calls like these …")
            continue
        lines.append(f"  {frame.place}")
        if frame.text:
            lines.append(f"      {frame.text}")
    return "\n".join(lines)
