"""`check("topic.task", answer)` and `hint("topic.task")`: whether an answer is right, and if not, which mistake it is."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from html import escape
from typing import Any

from allhands import exercises, marks
from allhands.errors import without_traceback
from allhands.exercise import Case, Mistake, Task
from allhands.faults import ORDINALS, Fault, find_fault, slow
from allhands.lanes import Picture
from allhands.launch import run
from allhands.output import write
from allhands.pictures import draw
from allhands.printed import rank_label
from allhands.trial import LIMIT_SECONDS, Trial, attempt, is_busy
from allhands.values import spelt
from allhands.wording import count


class CheckFailed(Exception):
    """An answer is not right. The text says why; `picture` shows what the answer did, if it did something."""

    picture: Picture | None = None

    def _render_traceback_(self) -> list[str]:
        """IPython shows this and no traceback: the lines that matter are in the text."""
        return [f"{type(self).__name__}: {self}"]


@dataclass(frozen=True)
class Passed:
    """A right answer, with the picture of what it did."""

    text: str
    picture: Picture | None

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        picture = self.picture._repr_html_() if self.picture else ""
        return f'<p style="margin:.3em 0;font-weight:600">{escape(self.text)}</p>{picture}'


@dataclass(frozen=True)
class Verdict:
    """The trials of an answer until the first that shows a fault."""

    trials: tuple[Trial, ...]
    fault: Fault | None

    @property
    def last(self) -> Trial:
        """The trial with the fault, if there is one."""
        return self.trials[-1]


def check(task_id: str, answer: Callable[..., Any]) -> Passed:
    """Try an answer in worlds of several sizes: what it returns, what it sends, and whether it keeps its hands off what is not its own.

    Raises `CheckFailed` with the first thing that is wrong, with what was expected and got in each rank, and with the name of the mistake
    if it is one that is known. ValueError for a task that there is not, TypeError for an answer that cannot be called as the task says.
    """
    task = exercises.find(task_id)
    _check_answer(task, answer)
    verdict = judge(task, answer)
    _show_printed(verdict)
    if verdict.fault:
        raise _failed(task_id, task, verdict)
    return _passed(task_id, task, verdict)


def judge(task: Task, answer: Callable[..., Any]) -> Verdict:
    """Try an answer, case by case, until something is wrong."""
    trials = []
    left = LIMIT_SECONDS
    for case in task.cases:
        trials.append(attempt(task, case, answer, left))
        left -= trials[-1].seconds
        fault = find_fault(trials[-1]) or (slow(LIMIT_SECONDS) if left < 0 and not is_busy(case.world_size) else None)
        if fault:
            return Verdict(tuple(trials), fault)
    return Verdict(tuple(trials), None)


def name_mistake(task: Task, verdict: Verdict) -> str:
    """What the known mistake says that goes wrong just as this answer does, in the same case; where several do, the one most like it else.

    Each wrong part of a prediction is a mistake of its own. Empty, if it is none that is known.
    """
    if verdict.fault is None or verdict.fault.is_not_started or verdict.fault.is_nameless:
        return ""
    if task.riddle:
        return _mistakes_of_prediction(task, verdict)
    last = verdict.last
    before = [trial.case for trial in verdict.trials[:-1]]
    alike = [each for each in task.mistakes if not any(_fault_of(task, each, case) for case in before)]
    alike = [each for each in alike if (fault := _fault_of(task, each, last.case)) and fault.likeness == verdict.fault.likeness]
    if len(alike) > 1:
        alike = [each for each in alike if _trial_of(task, each, last.case).sent == last.sent] or alike
    others = iter([case for case in task.cases if case is not last.case])
    while (len(alike) > 1 or (alike and verdict.fault.is_common)) and (case := next(others, None)):
        fault = find_fault(attempt(task, case, last.answer))
        same = [each for each in alike if _likeness(_fault_of(task, each, case)) == _likeness(fault)]
        alike = same if verdict.fault.is_common else same or alike
    return f"What your code does is a known mistake. {alike[0].says}" if alike else ""


def _mistakes_of_prediction(task: Task, verdict: Verdict) -> str:
    wrong = verdict.fault.likeness if isinstance(verdict.fault.likeness, frozenset) else frozenset()
    told = {}
    for mistake in task.mistakes:
        (part,) = _fault_of(task, mistake, verdict.last.case).likeness
        if part in wrong:
            told[part] = f"The {ORDINALS[part[0]]}: {mistake.says}"
    return "\n".join(told[part] for part in sorted(told))


@cache
def _trial_of(task: Task, mistake: Mistake, case: Case) -> Trial:
    return attempt(task, case, mistake.code)


@cache
def _fault_of(task: Task, mistake: Mistake, case: Case) -> Fault | None:
    return find_fault(_trial_of(task, mistake, case))


def _likeness(fault: Fault | None) -> object:
    return fault and fault.likeness


# --- before the trial ---------------------------------------------------------------------------------------------


def _check_answer(task: Task, answer: Any) -> None:
    signature = inspect.signature(task.solution)
    if not callable(answer):
        what = f"{type(answer).__name__} {spelt(answer)[:60]}"
        told = f"check needs your function itself, but got {what}. Write {task.name}, without brackets behind it"
        raise without_traceback(TypeError(told))
    try:
        inspect.signature(answer).bind(*signature.parameters)
    except TypeError as error:
        called = f"{task.name}({', '.join(signature.parameters)})"
        raise without_traceback(TypeError(f"check will call {called}, but your function cannot be called so: {error}")) from None
    except ValueError:  # Some functions written in C do not say what they take; the ranks will.
        pass


# --- what is told -------------------------------------------------------------------------------------------------


def _show_printed(verdict: Verdict) -> None:
    """What the answer printed, in the case that is spoken of; in the first one, if all is well."""
    trial = verdict.last if verdict.fault else verdict.trials[0]
    if trial.printed:
        write(f"What it printed {_world(trial)}:\n{trial.printed}")


def _world(trial: Trial) -> str:
    return f"with {count(trial.case.world_size, 'rank')}"


def _of(case: Case) -> str:
    """What sets a case apart from others with as many ranks."""
    return f", {case.told}" if case.told else ""


def _so_far(verdict: Verdict) -> str:
    """In which cases the answer was right before it failed."""
    sizes = {each.case.world_size for each in verdict.trials[:-1]}
    if not sizes:
        return ""
    if verdict.last.case.world_size in sizes:
        return f" (It is right in {count(len(verdict.trials) - 1, 'other case')}.)"
    return f" (It is right with {rank_label(sizes)} rank{'' if sizes == {1} else 's'}.)"


def _failed(task_id: str, task: Task, verdict: Verdict) -> CheckFailed:
    fault, trial = verdict.fault, verdict.last
    more = f'hint("{task_id}") helps on.'
    if fault.is_not_started and len(verdict.trials) == 1:
        do = "Write its body in that line's place, run its cell, then this one."
        return CheckFailed(f"{task.name} is not started: it still raises NotImplementedError. {do}\n{more}")
    where = "" if task.riddle else f" {_world(trial)}"
    parts = [f"{task.name} is not right yet{where}{_of(trial.case)}.{_so_far(verdict)}", fault.text]
    error = CheckFailed("\n\n".join(filter(None, [*parts, name_mistake(task, verdict), more])))
    error.picture = draw(trial.ended) if trial.has_picture else None
    return error


def _passed(task_id: str, task: Task, verdict: Verdict) -> Passed:
    progress = marks.note(task_id)
    kept = f" {progress}." if progress else ""
    if task.riddle:
        shown: Any = run(task.riddle.program, world_size=task.riddle.world_size)
        return Passed(f"✓ {task.name}: right.{kept} This is what happens:", draw(shown))
    sizes = sorted({trial.case.world_size for trial in verdict.trials})
    text = f"✓ {task.name}: right, in {len(task.cases)} cases, with {rank_label(sizes)} ranks.{kept}"
    first = verdict.trials[0]
    return Passed(f"{text} {_world(first).capitalize()} your code does this:", draw(first.ended) if first.has_picture else None)


# --- hints --------------------------------------------------------------------------------------------------------

_given: dict[str, int] = {}


class Hint(str):
    """A hint, which shows itself as it reads."""

    def __repr__(self) -> str:
        return str(self)


def hint(task_id: str) -> Hint:
    """The next hint to a task: three there are, each of which tells more; then they begin again. Raises ValueError for an unknown task."""
    hints = exercises.find(task_id).hints
    number = _given.get(task_id, 0) % len(hints)
    _given[task_id] = number + 1
    more = f'Again hint("{task_id}") for the next.' if number + 1 < len(hints) else "That was the last."
    return Hint(f"Hint {number + 1} of {len(hints)}: {hints[number]}\n{more}")
