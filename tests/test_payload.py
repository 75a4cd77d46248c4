"""Values that travel between processes come out as they went in, and those that cannot are named."""

import threading
from functools import partial

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from allhands import payload

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture(scope="module")
def there_and_back(tmp_path_factory):
    folder, count = tmp_path_factory.mktemp("payload"), iter(range(10**9))

    def travel(value):
        path = str(folder / str(next(count)))
        payload.save(path, value)
        return payload.load(path)

    return travel


@given(st.lists(st.integers(0, 4), max_size=4), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 3))
def test_tensors_of_every_shape_and_dtype(there_and_back, shape, dtype, transposed, offset):
    tensor = torch.arange(1000).to(dtype)[offset : offset + torch.Size(shape).numel()].reshape(shape)
    tensor = tensor.T if transposed and len(shape) == 2 else tensor
    back = there_and_back({"a": [tensor]})["a"][0]
    assert back.dtype == dtype and back.shape == tensor.shape and torch.equal(back, tensor)
    back.zero_()  # writable


@given(st.recursive(st.none() | st.integers() | st.text() | st.binary(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)))
def test_plain_values(there_and_back, value):
    assert there_and_back(value) == value


def test_a_view_travels_without_the_rest_of_its_tensor(tmp_path):
    payload.save(str(tmp_path / "view"), torch.zeros(10_000_000)[:2])
    assert (tmp_path / "view").stat().st_size < 1000


def test_special_tensors(there_and_back):
    leaf = torch.ones(2, requires_grad=True)
    assert there_and_back(leaf).requires_grad
    assert there_and_back((leaf * 2).sum()).item() == 4  # a loss with its graph comes as its value
    parameter = there_and_back(torch.nn.Parameter(torch.ones(3)))
    assert isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(there_and_back(sparse).to_dense(), torch.eye(3))
    assert torch.equal(there_and_back(torch.ones(2, dtype=torch.complex64).conj()), torch.ones(2, dtype=torch.complex64))
    assert there_and_back(torch.empty(3, device="meta")).device.type == "meta"
    module = there_and_back(torch.nn.Linear(2, 3))
    assert module(torch.ones(2)).shape == (3,)


def test_one_tensor_twice_is_one_tensor(there_and_back):
    tensor = torch.ones(2)
    first, second = there_and_back([tensor, tensor])
    assert first is second


def test_arrays_and_bytearrays_are_writable(there_and_back):
    array, transposed, data = there_and_back([numpy.arange(6.0), numpy.arange(6).reshape(2, 3).T, bytearray(b"abc")])
    array[0] = data[0] = 9
    assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]] and array[0] == 9


def test_functions_keep_their_file_name(there_and_back):
    scope = {"__name__": "__main__"}
    exec(compile("def f(): return g()\ndef g(): return 3", "<cell 7>", "exec"), scope)
    back = there_and_back(scope["f"])
    assert back() == 3 and back.__code__.co_filename == back.__globals__["g"].__code__.co_filename == "<cell 7>"


def test_a_file_is_never_overwritten(tmp_path):
    payload.save(str(tmp_path / "x"), 1)
    with pytest.raises(FileExistsError):
        payload.save(str(tmp_path / "x"), 2)


LOCK = threading.Lock()


class Holder:
    def __init__(self):
        self.inside = {"lock": LOCK}


class Anything:
    def __getattr__(self, name):
        return 5

    def __reduce__(self):
        raise TypeError("never")


def function_with(value):
    return lambda: value


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (LOCK, "x is a lock"),
        ([1, {"a": (LOCK,)}], "x[1]['a'][0] is a lock"),
        (Holder(), "x.inside['lock'] is a lock"),
        (function_with(LOCK), "x, in its variable value is a lock"),
        (partial(print, 1, file=LOCK), "x.keywords['file'] is a lock"),
        ((i for i in range(3)), "x is a generator"),
        (Holder().__init__, "x.__self__.inside['lock'] is a lock"),
        (Anything(), "x is a Anything"),
    ],
)
def test_what_cannot_be_pickled_is_named(value, told):
    assert payload.why_unpicklable(value, "x").startswith(f"{told}, and that cannot be sent to another process (")


def test_what_is_nested_too_deeply_is_said_in_short():
    deep = []
    for _ in range(9000):
        deep = [deep]
    why = payload.why_unpicklable(deep, "x")
    assert why.startswith("x is a list") and "recursion" in why and len(why) < 300


def test_what_can_be_pickled_is_not_named():
    assert payload.why_unpicklable({"a": torch.ones(2)}, "x") is None


def test_a_loop_does_not_go_round_for_ever():
    loop = [LOCK]
    loop.insert(0, loop)
    assert payload.why_unpicklable(loop, "x") is not None
