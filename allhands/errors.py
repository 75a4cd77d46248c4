"""The few exceptions that a learner can meet, and their wording."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from allhands.printed import group_equal, rank_label
from allhands.stack import Frame, tell

_SHOWN_OTHER_CAUSES = 4


class Recorded:
    """What a run leaves behind, well or badly ended: the record of all that its ranks did."""

    recorded: Any = None

    @property
    def trace(self) -> Any:
        """The `Trace`: every operation of every rank. Raises ValueError if the run was not recorded."""
        if self.recorded is None:
            raise without_traceback(ValueError("this run was not recorded: leave record=False (or --record off) out"))
        return self.recorded


class RankError(Recorded, Exception):
    """Something went wrong in a rank. The text says what, in which ranks, and on which line of the learner's code.

    `output` holds what each rank had printed until then, and `trace` what all of them had done.
    """

    output: tuple[str, ...] = ()

    def _render_traceback_(self) -> list[str]:
        """IPython shows this and no traceback: the kernel's own calls say nothing about the ranks."""
        return [f"{type(self).__name__}: {self}"]


class RankDeadlock(RankError):
    """Ranks wait for what can never come. The text says who waits for whom, on which lines, and why. `draw(error)` shows it."""

    deadlock: Any = None


class RankTimeout(RankError, TimeoutError):
    """The ranks had not ended in time. The text says where each of them stood, and so does `standings`."""

    standings: str = ""


class RunInterrupted(Recorded, KeyboardInterrupt):
    """The reader stopped the run. The text says where each rank stood."""

    output: tuple[str, ...] = ()
    _render_traceback_ = RankError._render_traceback_


class CellSyntaxError(Exception):
    """A `%%ranks` cell is not Python. No rank was started."""

    _render_traceback_ = RankError._render_traceback_


def without_traceback(error: Exception) -> Exception:
    """The same error, of which IPython shows the text alone: it is about what the reader wrote, not about our calls."""
    told = f"{type(error).__name__}: {error}"
    error._render_traceback_ = partial(list, [told])  # Not a lambda: an error may be pickled.
    return error


@dataclass(frozen=True)
class Failure:
    """Why a rank gave no result, worded to follow "rank 1 of 4 ": "raised ValueError: bad luck".

    `is_consequence` marks what only tells of another rank's end, such as a connection that its peer closed.
    """

    what: str
    frames: tuple[Frame, ...] = ()
    hint: str = ""
    is_consequence: bool = False

    @property
    def account(self) -> str:
        """Where it happened and what to try: all but the first line."""
        return "\n\n".join(part for part in (tell(self.frames), self.hint) if part)


def name_ranks(ranks: Sequence[int], world_size: int) -> str:
    """`rank 1 of 4`, `ranks 0-2 of 4`, `all 4 ranks`, `both ranks`, or `the only rank`."""
    if len(ranks) == world_size:
        return {1: "the only rank", 2: "both ranks"}.get(world_size, f"all {world_size} ranks")
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_label(ranks)} of {world_size}"


def first_letter_up(text: str) -> str:
    """The text as the beginning of a sentence."""
    return text[:1].upper() + text[1:]


def root_cause(failures: dict[int, Failure], world_size: int, done: Collection[int] = ()) -> str:
    """What went wrong, from what each failed rank said: equal causes once, the lowest rank's in full.

    Consequences are not shown, and the text does not depend on which rank was faster. `done`: ranks that nobody had to stop.
    """
    causes = {rank: failure for rank, failure in failures.items() if not failure.is_consequence} or failures
    order = sorted(causes)
    groups = [([order[i] for i in places], cause) for places, cause in group_equal([causes[rank] for rank in order])]
    ranks, first = groups[0]
    parts = [first_letter_up(f"{name_ranks(ranks, world_size)} {first.what}"), first.account]
    others = [f"{name_ranks(ranks, world_size)} {other.what}".partition("\n")[0] for ranks, other in groups[1:]]
    if len(others) > _SHOWN_OTHER_CAUSES:
        others[_SHOWN_OTHER_CAUSES:] = [f"and {len(others) - _SHOWN_OTHER_CAUSES} more"]
    if others:
        parts.append("\n".join(["And also:", *(f"  {other}" for other in others)]))
    stopped = world_size - len({*causes, *done})
    if stopped:
        parts.append(f"The other {f'{stopped} ranks were' if stopped > 1 else 'rank was'} stopped.")
    return "\n\n".join(part for part in parts if part)


def standing(stack: Sequence[Frame] | None, doing: Mapping[str, str]) -> str:
    """Where a rank stands: on a line of the learner's, else what the function of ours, where its stack begins, is `doing`."""
    if stack is None:
        return "  did not say where it is"
    return tell(stack) or f"  {doing.get(stack[0].function if stack else '', 'was starting or ending')}"


def standings(told: Sequence[str]) -> str:
    """Where the ranks stand: one paragraph for ranks that stand at the same place."""
    return "\n".join(f"{first_letter_up(name_ranks(ranks, len(told)))}:\n{text}" for ranks, text in group_equal(told))
