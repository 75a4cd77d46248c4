"""`%%ranks` in a real kernel: what is in scope, what is shown, and what a mistake looks like."""

import pytest

from kernels import kernel
from leftovers import descendants, wait_until


@pytest.fixture(scope="module")
def shared():
    with kernel() as it:
        yield it


@pytest.fixture
def notebook(shared):
    yield shared
    assert wait_until(lambda: len(descendants(shared.pid)) == 1), "more than the fork server is left"


# --- what is shown ------------------------------------------------------------------------------------------------


def test_the_last_expression_is_shown_by_rank(notebook):
    reply = notebook.cell("%%ranks 4\nx = torch.ones(2) * rank\ndist.all_reduce(x)\nx")
    assert (reply.shown, reply.printed, reply.error) == ("[0-3] tensor([6., 6.])", "", "")


def test_different_values_and_values_of_several_lines(notebook):
    assert notebook.cell("%%ranks 3\nrank").shown == "[0] 0\n[1] 1\n[2] 2"
    assert notebook.cell("%%ranks 2\ntorch.eye(2)").shown == "[0-1] tensor([[1., 0.],\n[0-1]         [0., 1.]])"
    assert notebook.cell("%%ranks 2\n'text'").shown == "[0-1] 'text'"


def test_none_is_not_shown_and_a_value_of_some_ranks_is(notebook):
    assert notebook.cell("%%ranks 2\nNone").shown == ""
    assert notebook.cell("%%ranks 2\nx = 1").shown == ""
    assert notebook.cell("%%ranks 3\n5 if rank == 1 else None").shown == "[1] 5"


def test_text_and_value(notebook):
    reply = notebook.cell("%%ranks 2\nprint('rank', rank)\nworld_size")
    assert (reply.printed, reply.shown) == ("[0] rank 0\n[1] rank 1\n", "[0-1] 2")


def test_a_value_that_cannot_be_pickled_is_shown_all_the_same(notebook):
    assert notebook.cell("%%ranks 2\n(i for i in range(3)).__class__").shown == "[0-1] <class 'generator'>"
    reply = notebook.cell("%%ranks 2\nimport threading\nl = threading.Lock()\nl")
    assert "_thread.lock" in reply.shown and not reply.error


def test_no_number_is_four_ranks_and_a_variable_goes_in_braces(notebook):
    assert notebook.cell("%%ranks\nworld_size").shown == "[0-3] 4"
    notebook.cell("n = 3")
    assert notebook.cell("%%ranks {n}\nworld_size").shown == "[0-2] 3"
    assert notebook.cell("%%ranks 1\nworld_size").shown == "[0] 1"


def test_an_empty_cell(notebook):
    reply = notebook.cell("%%ranks 2\n# nothing to do")
    assert (reply.shown, reply.printed, reply.error) == ("", "", "")


def test_as_keeps_the_run(notebook):
    assert notebook.cell("%%ranks 3 --as job\nprint('hi')\nrank * 10").shown == "[0] 0\n[1] 10\n[2] 20"
    assert notebook.cell("job.results, job.output, job.world_size").shown == "([0, 10, 20], ['hi\\n', 'hi\\n', 'hi\\n'], 3)"
    assert notebook.cell("job").shown == "[0] 0\n[1] 10\n[2] 20"
    error = notebook.cell("%%ranks 2 --as job\n(i for i in range(3))").error
    assert error.startswith("RankError: Both ranks cannot send the result back: ") and "generator" in error


def test_a_semicolon_hides_the_value(notebook):
    assert notebook.cell("%%ranks 2\nprint(1)\nrank;").shown == ""


def test_seed(notebook):
    one, again, other = (notebook.cell(f"%%ranks 2 {option}\ntorch.rand(1)").shown for option in ("", "--seed 0", "--seed 1"))
    assert one == again != other


def test_an_argument_error_of_run_is_shown_without_our_calls(notebook):
    assert notebook.cell("run(int, world_size=0)").error == "ValueError: world_size must be from 1 to 128, but is 0"


def test_stream(notebook):
    reply = notebook.cell("%%ranks 2 --stream\nimport time\nprint('early')\ntime.sleep(0.5)\nprint('late')")
    assert sorted(reply.printed.splitlines()) == ["[0] early", "[0] late", "[1] early", "[1] late"]
    assert "late" not in reply.streamed[0]


# --- what is in scope ---------------------------------------------------------------------------------------------


def test_variables_functions_classes_and_imports_of_the_notebook(notebook):
    notebook.cell(
        "import math as m\n"
        "factor = 10\n"
        "class Scaled:\n    def __init__(self, x): self.x = x * factor\n"
        "def scaled(x):\n    return Scaled(x).x + offset()\n"
        "def offset():\n    return m.floor(0.5) + 1\n"
    )
    assert notebook.cell("%%ranks 2\nscaled(rank), m.pi > 3").shown == "[0] (1, True)\n[1] (11, True)"


def test_a_cell_and_the_functions_that_it_calls_share_their_variables(notebook):
    notebook.cell("setting = 'of the notebook'\ndef read(): return setting")
    assert notebook.cell("%%ranks 1\nsetting = 'of the cell'\nread()").shown == "[0] 'of the cell'"
    assert notebook.cell("setting").shown == "'of the notebook'"


def test_the_notebook_keeps_nothing_of_a_cell(notebook):
    notebook.cell("%%ranks 2\nonly_there = 1")
    assert notebook.cell("'only_there' in globals(), 'rank' in globals()").shown == "(False, False)"


def test_only_what_a_cell_names_goes_along(notebook):
    notebook.cell("import threading\nlock = threading.Lock()\nclass P: lock = 3\np = P()")
    assert notebook.cell("%%ranks 1\np.lock").shown == "[0] 3"


def test_a_class_body_reads_what_it_sets(notebook):
    notebook.cell("lr = 0.1")
    assert notebook.cell("%%ranks 1\nclass A:\n    lr = lr\nA.lr").shown == "[0] 0.1"


def test_a_variable_that_cannot_go_along_may_stay_if_the_cell_sets_it(notebook):
    notebook.cell("with open('/etc/passwd') as f: pass\ngen = (i for i in range(3))")
    assert notebook.cell("%%ranks 2\ndef f(): return gen\ngen = 5\nf()").shown == "[0-1] 5"


def test_threads_and_finalisers_of_a_cell_keep_its_variables(notebook):
    source = """%%ranks 2
import threading, time
class T:
    def __del__(self): print('bye', time.time() > 0)
x = T()
def loop():
    while True: time.sleep(0.0001)
threading.Thread(target=loop, daemon=True).start()"""
    assert "Error" not in notebook.cell(source).printed


def test_comprehensions_nested_functions_walrus_star_imports_and_annotations(notebook):
    notebook.cell("base = 5")
    source = """%%ranks 1
from math import *
count: int = 3
def add(n):
    global total
    total = base + n
[add(i) for i in range(count) if (last := i) >= 0]
class A:
    inside = base
total, last, A.inside, floor(2.5)"""
    assert notebook.cell(source).shown == "[0] (7, 2, 5, 2)"


def test_a_class_of_the_notebook_in_an_object_collective(notebook):
    notebook.cell("class Box:\n    def __init__(self, x): self.x = x")
    source = "%%ranks 2\nboxes = [None] * world_size\ndist.all_gather_object(boxes, Box(rank))\n[b.x for b in boxes]"
    assert notebook.cell(source).shown == "[0-1] [0, 1]"


def test_a_class_that_went_there_and_back_is_the_same(notebook):
    notebook.cell("class Back: pass")
    notebook.cell("%%ranks 1 --as job\nBack()")
    assert notebook.cell("isinstance(job.results[0], Back)").shown == "True"


# --- mistakes -----------------------------------------------------------------------------------------------------


def test_an_error_names_the_line_that_the_reader_sees(notebook):
    reply = notebook.cell("%%ranks 3\n# a comment\nif rank == 1:\n    1 / 0\ndist.barrier()")
    assert reply.error_name == "RankError"
    assert reply.error == (
        "RankError: Rank 1 of 3 raised ZeroDivisionError: division by zero\n\n"
        "  This cell, line 4\n      1 / 0\n\nThe other 2 ranks were stopped."
    )


def test_an_error_in_a_function_of_another_cell(notebook):
    notebook.cell("def divide(x):\n    # on purpose\n    return 1 / x")
    assert notebook.cell("%%ranks 2\ndivide(0)").error == (
        "RankError: Both ranks raised ZeroDivisionError: division by zero\n\n"
        "  This cell, line 2\n      divide(0)\n  An earlier cell, line 3, in divide\n      return 1 / x"
    )
    assert notebook.cell("def f():\n    return divide(0)\nrun(f, world_size=2)").error == (
        "RankError: Both ranks raised ZeroDivisionError: division by zero\n\n"
        "  This cell, line 2, in f\n      return divide(0)\n  An earlier cell, line 3, in divide\n      return 1 / x"
    )


def test_leaving_a_cell(notebook):
    assert notebook.cell("%%ranks 2\nexit()").error.startswith("RankError: Both ranks called sys.exit(")


def test_display_in_a_rank(notebook):
    assert notebook.cell("%%ranks 2\ndisplay(3)").error.endswith("In a rank print, or end the cell with the value.")


def test_a_value_that_has_no_text(notebook):
    assert "while the value of the cell's last line was made into text" in notebook.cell("%%ranks 2\n10**5000").error


def test_a_cell_that_is_nested_too_deeply(notebook):
    source = "%%ranks 2\n" + "-" * 50_000 + "1"
    assert notebook.cell(source).error.startswith("CellSyntaxError: ")


def test_a_printed_traceback_is_the_same_every_time(notebook):
    source = "%%ranks 1\nimport traceback\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    traceback.print_exc()"
    assert '[0]   File "<this cell>", line 4, in <module>\n[0]     1 / 0\n' in notebook.cell(source).printed


def test_a_time_out(notebook):
    reply = notebook.cell("%%ranks 2 --timeout 0.5\nimport time\ntime.sleep(9)")
    assert reply.error_name == "RankTimeout"
    assert "Both ranks:\n  This cell, line 3\n      time.sleep(9)\n" in reply.error


def test_a_deadlock_is_drawn_and_told(notebook):
    reply = notebook.cell("%%ranks 2\nx = torch.zeros(1)\ndist.recv(x, src=1 - rank)")
    assert reply.error_name == "RankDeadlock"
    assert reply.error.startswith("RankDeadlock: Deadlock: both ranks wait for what can never come.\n")
    assert "Both ranks wait to receive float32[1] (4 bytes): 0 from 1, 1 from 0:\n  This cell, line 3\n      dist.recv" in reply.error
    assert reply.shown == "[picture: 2 ranks: 0 messages in 0 rounds; deadlock]"
    called = notebook.cell("def hang():\n    dist.recv(torch.zeros(1), 1 - dist.get_rank())\nrun(hang, world_size=2)")
    assert called.shown == reply.shown and called.error.startswith("RankDeadlock: Deadlock: both ranks wait")
    assert "  This cell, line 2, in hang\n" in called.error
    assert notebook.cell("1 + 1").shown == "2"


def test_a_cells_record(notebook):
    assert not notebook.cell("%%ranks 2 --as job\ndist.all_reduce(torch.ones(2))\nrank").error
    shown = notebook.cell("from allhands import draw\nprint(job.trace.ledger())\ndraw(job)")
    assert "each of 0-1            1          8         8           1" in shown.printed
    assert shown.shown == "[picture: 2 ranks: 1 collective in 1 round]"
    assert not notebook.cell("%%ranks 2 --as job --record compute\ntorch.ones(2, 3) @ torch.ones(3, 4)").error
    assert notebook.cell("job.trace.ledger().total.flops").shown == str(2 * 2 * 2 * 3 * 4)
    notebook.cell("%%ranks 2 --as job --record off\nrank")
    assert "this run was not recorded" in notebook.cell("job.trace").error
    assert "argument --record: invalid choice: 'all'" in notebook.cell("%%ranks 2 --record all\nrank").printed


def test_the_name_of_a_run_that_failed_is_not_left_to_an_older_one(notebook):
    notebook.cell("%%ranks 2 --as job\nrank")
    assert notebook.cell("%%ranks 2 --as job\ndist.barrier()\n1 / rank").error.startswith("RankError: Rank 0 of 2 raised ZeroDivisionError")
    assert notebook.cell("from allhands import draw\ndraw(job)").shown == "[picture: 2 ranks: 1 collective in 1 round]"
    assert "has no attribute 'results'" in notebook.cell("job.results").error


def test_a_syntax_error(notebook):
    reply = notebook.cell("%%ranks 2\nx = 1\ny = = 2")
    assert reply.error == "CellSyntaxError: invalid syntax\n\n  This cell, line 3\n      y = = 2\n          ^"
    assert notebook.cell("%%ranks 2\nx = 1\nreturn 3").error == (
        "CellSyntaxError: 'return' outside function\n\n  This cell, line 3\n      return 3\n      ^\n\n"
        "A cell's result is the value of its last line: leave return out."
    )
    assert notebook.cell("%%ranks 2\nfor i in range(3):").error.startswith("CellSyntaxError: expected an indented block")
    assert notebook.cell("%%ranks 2\nx = (1,").error.startswith("CellSyntaxError: '(' was never closed")
    assert notebook.cell("%%ranks 2\nawait x").error.startswith("CellSyntaxError: 'await' outside function")
    assert notebook.cell("%%ranks 2\nif rank:\nprint()").error.startswith("CellSyntaxError: expected an indented block")
    assert notebook.cell("%%ranks 2\nx = '''\n").error.startswith("CellSyntaxError: unterminated triple-quoted string")


@pytest.mark.parametrize("line", ["%time 3", "!ls", "x = !ls", "%%time", "    !ls", "torch?"])
def test_magics_in_ranks(notebook, line):
    reply = notebook.cell(f"%%ranks 2\n{line}")
    assert reply.error.startswith("CellSyntaxError: ")
    assert reply.error.endswith("put this line in a cell of its own.")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("four", "%%ranks needs a whole number of ranks, as in %%ranks 4, but got 'four'. A variable goes in braces: %%ranks {n}"),
        ("2.5", "%%ranks needs a whole number of ranks, as in %%ranks 4, but got '2.5'"),
        ("0", "%%ranks: world_size must be from 1 to 128, but is 0"),
        ("-- -1", "%%ranks: world_size must be from 1 to 128, but is -1"),
        ("10000", "%%ranks: world_size must be from 1 to 128, but is 10,000"),
        ("2 --as for", "%%ranks --as needs the name of a variable, but got 'for'"),
        ("2 --as 3x", "%%ranks --as needs the name of a variable, but got '3x'"),
        ("2 --timeout soon", "argument --timeout: invalid float value: 'soon'"),
        ("2 --timeout 0", "%%ranks: timeout must be more than 0 seconds, but is 0.0"),
        ("2 --fast", "unrecognized arguments: --fast. %%ranks? tells what can be said here"),
    ],
)
def test_options_that_make_no_sense(notebook, line, told):
    reply = notebook.cell(f"%%ranks {line}\nrank")
    assert reply.printed.startswith(f"UsageError: {told}")


def test_a_variable_that_cannot_go_along_is_named(notebook):
    notebook.cell("import threading\nlocks = {'a': threading.Lock()}")
    assert notebook.cell("%%ranks 2\nlocks").printed.startswith(
        "UsageError: %%ranks: locks['a'] is a lock, and that cannot be sent to another process"
    )


def test_help(notebook):
    assert notebook.cell("%ranks?") is not None
    assert (
        "Run this cell in as many new processes (ranks) as you say"
        in notebook.cell("print(get_ipython().magics_manager.magics['cell']['ranks'].__doc__)").printed
    )
