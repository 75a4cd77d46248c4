import tempfile

import pytest

from allhands import run
from allhands.forkserver import server
from leftovers import nothing_left_behind


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory):
    """The folders of runs go to a place of the tests' own, so that what somebody else runs meanwhile is not taken for a leftover."""
    folder = str(tmp_path_factory.mktemp("runs"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", folder)
        patch.setattr(tempfile, "tempdir", None)
        yield


@pytest.fixture(scope="session")
def fork_server(own_temporary_folder):
    """Started once, so that no test's time-out contains an import of torch."""
    run(int, world_size=1)
    yield server
    server.stop()


@pytest.fixture
def clean(fork_server):
    """The test must leave nothing behind."""
    with nothing_left_behind():
        yield
