import pytest

from allhands import run
from allhands.forkserver import server
from leftovers import nothing_left_behind


@pytest.fixture(scope="session")
def fork_server():
    """Started once, so that no test's time-out contains an import of torch."""
    run(int, world_size=1)
    yield server
    server.stop()


@pytest.fixture
def clean(fork_server):
    """The test must leave nothing behind."""
    with nothing_left_behind():
        yield
