"""Every task of the course: what has to be accepted is, what has to be rejected is, and by its name."""

import re
import time

import pytest

from allhands import exercises
from allhands.checking import CheckFailed, check, judge, name_mistake
from allhands.trial import LIMIT_SECONDS
from mutations import mutants
from right_answers import RIGHT

TASKS = [task_id for topic in exercises.topics() for task_id in exercises.task_ids(topic)]
MISTAKES = [(task_id, number) for task_id in TASKS for number in range(len(exercises.find(task_id).mistakes))]

pytestmark = pytest.mark.usefixtures("fork_server")


@pytest.mark.parametrize("task_id", TASKS)
def test_the_solution_and_other_right_answers_are_accepted(task_id, clean):
    task = exercises.find(task_id)
    assert len(RIGHT[task_id]) >= 2
    for answer in (task.solution, *RIGHT[task_id]):
        verdict = judge(task, answer)
        assert verdict.fault is None, f"{answer.__name__}: {verdict.fault.text}"
        assert len(verdict.trials) == len(task.cases)


@pytest.mark.parametrize("task_id", TASKS)
def test_the_stub_is_not_started(task_id):
    def stub(*arguments):
        raise NotImplementedError

    with pytest.raises(CheckFailed, match="is not started: it still raises NotImplementedError"):
        check(task_id, stub)


@pytest.mark.parametrize(("task_id", "number"), MISTAKES)
def test_a_wrong_answer_is_rejected_and_named(task_id, number, clean):
    mistake = exercises.find(task_id).mistakes[number]
    with pytest.raises(CheckFailed) as caught:
        check(task_id, mistake.code)
    assert mistake.says in str(caught.value)
    named = "The (first|second|third): " if exercises.find(task_id).riddle else "What your code does is a known mistake. "
    assert re.search(rf"^{named}{re.escape(mistake.says)}$", str(caught.value), re.MULTILINE)


@pytest.mark.parametrize("task_id", TASKS)
def test_there_are_enough_known_mistakes_and_hints(task_id):
    task = exercises.find(task_id)
    assert len({mistake.says for mistake in task.mistakes}) == len(task.mistakes) >= 5
    assert len(set(task.hints)) == 3
    sizes = {case.world_size for case in task.cases}
    assert task.riddle or len(sizes) >= 3


@pytest.mark.parametrize("task_id", TASKS)
def test_no_mutant_of_the_solution_is_accepted(task_id):
    task = exercises.find(task_id)
    all_mutants = list(mutants(task.solution))
    assert len(all_mutants) > 5 or task.riddle
    assert [text for text, mutant in all_mutants if judge(task, mutant).fault is None] == []


def test_a_mistake_is_recognized_in_other_words(clean):
    """The comparison is of what an answer does, not of how it is written."""
    import torch
    import torch.distributed as dist

    def mine(tensor):
        n, me = dist.get_world_size(), dist.get_rank()
        box = torch.zeros(tensor.shape)
        dist.recv(box, src=(me - 1) % n)
        dist.send(tensor, dst=(me + 1) % n)
        return box

    task = exercises.find("ranks_and_messages.shift")
    assert (
        name_mistake(task, judge(task, mine)) == "What your code does is a known mistake. All receive first, so nobody ever comes to send."
    )


def test_a_correct_answer_is_far_from_the_limit():
    task = exercises.find("ranks_and_messages.shift")
    begin = time.monotonic()
    judge(task, task.solution)
    assert (time.monotonic() - begin) / len(task.cases) < LIMIT_SECONDS / 2
