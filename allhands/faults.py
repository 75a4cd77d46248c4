"""What can be wrong with an answer, in the order in which it is told.

It does not end well, it uses what it should build, it changes what is not its own, it returns something else, it leaves messages over, it
breaks its promise, it sends too much.
"""

import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from allhands.afterwards import warnings_of
from allhands.errors import RankDeadlock, RankError, RankTimeout, first_letter_up, name_ranks
from allhands.events import Kind
from allhands.matching import NOBODY
from allhands.stack import tell
from allhands.trial import Trial
from allhands.values import difference, in_words, same, spelt, table
from allhands.watch import Run
from allhands.wording import call, count

ORDINALS = ("first", "second", "third", "fourth", "fifth", "sixth")
_SHOWN_RANKS = 8
_HOW_FAST = "Right answers take some hundredths of a second. Is there a loop without an end, or a sleep? A work is waited for by wait()."


@dataclass(frozen=True)
class Fault:
    """What is wrong with an answer, in words. `likeness`: what other answers with this fault have in common with it, however written."""

    text: str
    likeness: object
    is_not_started: bool = False
    is_common: bool = False
    """Other mistakes may look the same in one case."""
    is_nameless: bool = False
    """That others are alike tells nothing."""


def find_fault(trial: Trial) -> Fault | None:
    """The first thing that is wrong, or None if all is as it should be."""
    if isinstance(trial.ended, RankError):
        return _of_error(trial.ended, trial.limit)
    for look in (_forbidden, _warnings, _changed, _values, _promise, _ledger):
        fault = look(trial, trial.ended)
        if fault:
            return fault
    return None


def slow(limit: float) -> Fault:
    """What is wrong with an answer that would come to its end, but not soon."""
    text = f"What comes out is right so far, but the calls have taken more than {limit:g} seconds. {_HOW_FAST}"
    return Fault(text, "slow", is_nameless=True)


def _of_error(error: RankError, limit: float) -> Fault:
    text = str(error)
    if error.trace.mismatch:  # What came after it may differ from one time to the next.
        return Fault(text, _told(error.trace.mismatch.text))
    if isinstance(error, RankTimeout):
        return Fault(f"Not finished after {limit:g} seconds.\n\n{error.standings}\n\n{_HOW_FAST}", "timeout", is_nameless=True)
    if isinstance(error, RankDeadlock) and error.deadlock:
        trace, stuck = error.trace, error.deadlock.stuck
        if any(trace.matching.partner[each.operation] != NOBODY for each in stuck):
            # Its message was let go of. Whether that makes a rank hang is chance: it is the same fault as where none does.
            return _left_over(warnings_of(trace)) or Fault(text, "lost")
        sites = [trace.columns[each.operation].site for each in stuck]
        return Fault(text, ("deadlock", frozenset((site.rank, site.kind, site.peer) for site in sites)))
    return Fault(text, _told(text), is_not_started=bool(re.match(r".* raised NotImplementedError\n", text)))


def _told(text: str) -> tuple[str, ...]:
    """A text without places and lines of code, which are indented, and are the learner's own."""
    return tuple(line for line in text.splitlines() if line and not line.startswith(" "))


def _forbidden(trial: Trial, ended: Run) -> Fault | None:
    task = trial.task
    if trial.is_borrowed:
        return Fault(f"It calls the course's own {task.name}. Write it yourself: that is the task.", "borrowed")
    for site in ended.trace.columns.sites:
        if site.kind not in (*task.allowed, Kind.NEW_GROUP):
            allowed = ", ".join(kind.label for kind in task.allowed)
            text = f"{first_letter_up(name_ranks([site.rank], trial.case.world_size))} calls {call(site)}:\n{tell(site.place)}\n\n"
            return Fault(
                f"{text}That does the work for you. Build it from these: {allowed}, in their waiting and not waiting forms.", "forbidden"
            )
    return None


def _changed(trial: Trial, ended: Run) -> Fault | None:
    names = list(inspect.signature(trial.task.solution).parameters)
    for rank, result in enumerate(ended.results):
        for place in result.changed:
            whose = first_letter_up(name_ranks([rank], trial.case.world_size))
            was = trial.case.arguments[rank][place]
            text = (
                f"{whose} has changed its argument {names[place]}, which belongs to the caller: it was {in_words(was)} before the call.\n"
                f"Work in tensors of your own, such as torch.empty_like({names[place]})."
            )
            return Fault(text, ("changed", place))
    return None


def _values_of(ended: Run) -> tuple[str, ...]:
    return tuple(spelt(result.value) for result in ended.results)


def _values(trial: Trial, ended: Run) -> Fault | None:
    expected, got = trial.task.expected(trial.case), [result.value for result in ended.results]
    wrong = [rank for rank in range(trial.case.world_size) if not same(expected[rank], got[rank])]
    if not wrong:
        return None
    if trial.task.riddle:
        return _wrong_prediction(expected[0], got[0])
    verb = "filled in" if trial.task.fills else "returned"
    whose = first_letter_up(name_ranks(wrong, trial.case.world_size))
    shown = range(trial.case.world_size) if trial.case.world_size <= _SHOWN_RANKS else wrong[:_SHOWN_RANKS]
    names = list(inspect.signature(trial.task.solution).parameters)
    rows = [[f"{rank}", *map(in_words, trial.case.arguments[rank]), in_words(expected[rank]), in_words(got[rank])] for rank in shown]
    is_empty = all(each is None for each in got)
    parts = [
        f"{whose} {verb} something else than expected.{' Is there a return?' if is_empty else ''}",
        table(["rank", *names, "expected", "got"], rows),
        f"The first difference: in rank {wrong[0]}, {difference(expected[wrong[0]], got[wrong[0]])}.",
    ]
    return Fault("\n\n".join(parts), _values_of(ended))


def _wrong_prediction(expected: Any, got: Any) -> Fault:
    if not isinstance(got, list | tuple) or len(got) != len(expected):
        text = f"The answer is {count(len(expected), 'value')} in a tuple, as the text says, but this is {in_words(got)}."
        text += " Is there a return?" if got is None else ""
        return Fault(text, frozenset())
    wrong = [place for place in range(len(expected)) if not same(expected[place], got[place])]
    told = " and ".join(f"the {ORDINALS[place]} ({in_words(got[place])})" for place in wrong)
    text = f"Of your {len(expected)} answers, {told} {'is' if len(wrong) == 1 else 'are'} not what happens."
    return Fault(text, frozenset((place, spelt(got[place])) for place in wrong))


def _warnings(trial: Trial, ended: Run) -> Fault | None:
    return _left_over(ended.warnings)


def _left_over(warnings: Sequence[str]) -> Fault | None:
    if not warnings:
        return None
    told: dict[str, list[str]] = {}  # By all but the first line, which names the rank.
    for warning in warnings:
        told.setdefault(warning.partition("\n")[2], []).append(warning)
    parts = [
        alike[0] + (f"\nIt is the same in {count(len(alike) - 1, 'other case')}." if len(alike) > 1 else "") for alike in told.values()
    ]
    return Fault("\n\n".join(parts), frozenset(warning.rpartition("\n")[2] for warning in warnings))  # Why, and not whose.


def _promise(trial: Trial, ended: Run) -> Fault | None:
    broken = trial.task.promise(trial.case, ended.trace)
    return Fault(broken, broken, is_common=True) if broken else None


def _ledger(trial: Trial, ended: Run) -> Fault | None:
    ledger = ended.trace.ledger()
    for name, wanted in trial.task.ledger(trial.case).items():
        title = name.replace("_", " ")
        got = [getattr(account, name) for account in ledger.ranks]
        if isinstance(wanted, int):
            total = getattr(ledger.total, name)
            if total != wanted:
                text = f"What comes out is right, but not what is sent: {total:,} {title} in all, where {wanted:,} are expected."
                return Fault(f"{text}\n\n{trial.task.because}".rstrip(), (name, tuple(got)), is_common=True)
            continue
        wrong = [rank for rank in range(trial.case.world_size) if got[rank] != wanted[rank]]
        if wrong:
            rows = [[f"{rank}", f"{wanted[rank]:,}", f"{got[rank]:,}"] for rank in wrong[:_SHOWN_RANKS]]
            text = f"What comes out is right, but not what is sent.\n\n{table(['rank', f'{title}: expected', 'got'], rows)}"
            return Fault(f"{text}\n\n{trial.task.because}".rstrip(), (name, tuple(got)), is_common=True)
    return None
