"""Programs with one small thing wrong: a statement dropped, a condition turned round, a number off by one."""

import ast
import inspect
import textwrap

import torch
import torch.distributed as dist


def mutants(function):
    """Each mutant of a function, with what was changed on which of its lines."""
    source = textwrap.dedent(inspect.getsource(function))
    for number, what in enumerate(_changes(ast.parse(source))):
        tree = ast.parse(source)
        change = list(_changes(tree))[number]
        change.apply()
        namespace = {"torch": torch, "dist": dist, "__name__": "__main__"}
        exec(compile(ast.fix_missing_locations(tree), "<mutant>", "exec"), namespace)
        yield what.text, namespace[function.__name__]


class _Change:
    def __init__(self, node, what, apply):
        self.text, self.apply = f"line {node.lineno}: {what}: {ast.unparse(node).splitlines()[0]}", apply


def _changes(tree):
    (function,) = tree.body
    function.decorator_list, function.returns = [], None
    for argument in function.args.args:
        argument.annotation = None
    if ast.get_docstring(function):
        del function.body[0]
    for parent in ast.walk(function):
        for name in ("body", "orelse"):
            block = getattr(parent, name, None)
            for place, statement in enumerate(block if isinstance(block, list) else []):
                yield _Change(statement, "dropped", lambda block=block, place=place: block.__setitem__(place, ast.Pass()))
        if isinstance(parent, ast.If | ast.IfExp | ast.While):
            turned = ast.UnaryOp(ast.Not(), parent.test)
            yield _Change(parent.test, "turned round", lambda parent=parent, turned=turned: setattr(parent, "test", turned))
        for field, value in ast.iter_fields(parent):
            for place, child in enumerate(value if isinstance(value, list) else [value]):
                if isinstance(child, ast.Constant) and type(child.value) in (int, float):
                    for by in (-1, 1):
                        where = (value, place) if isinstance(value, list) else (parent, field)
                        yield _Change(
                            child, f"{by:+}", lambda where=where, child=child, by=by: _put(*where, ast.Constant(child.value + by))
                        )


def _put(where, at, what):
    if isinstance(where, list):
        where[at] = what
    else:
        setattr(where, at, what)
