"""`torchrun(module)`: start a script as a cluster would, with PyTorch's own launcher; this machine plays all machines. For Linux and macOS.

The script's ranks talk over the loopback interface. The one thing that is open to the network while it runs, some seconds, is the small
store in which ranks find each other: PyTorch 2.13 has no way to bind that to one interface.
"""

import contextlib
import ctypes
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass

from allhands.errors import Failure, RankError, RankTimeout, root_cause
from allhands.printed import fold
from allhands.rank import loopback

_TRIES = 3  # Between the moment in which a port is found to be free and that in which it is used, somebody else may take it.
_LOOK_SECONDS = 0.05
_PATIENCE_SECONDS = 20.0  # for an agent to end its workers
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG from <sys/prctl.h>
_OURS_ALONE = ("TORCHELASTIC_", "PYTEST_", "MASTER_", "LOCAL_", "GROUP_", "ROLE_")  # What an outer launcher or a test has set.


@dataclass(frozen=True)
class Launched:
    """What a launch gave: the command that each machine runs, and what each rank printed."""

    commands: tuple[str, ...]
    output: tuple[str, ...]

    def __repr__(self) -> str:
        commands = "\n".join(f"machine {number} $ {command}" for number, command in enumerate(self.commands))
        return f"{commands}\n\n{fold(self.output)}".rstrip("\n")


def torchrun(module: str, machines: int = 2, processes: int = 2, timeout: float = 120.0) -> Launched:
    """Run a module as a script in `machines` × `processes` ranks, by one torchrun agent for each machine, and wait for the end.

    Raises RankError with the last words of the ranks that failed, and RankTimeout after `timeout` seconds; either way nothing goes on.
    """
    for name, number in (("machines", machines), ("processes", processes)):
        if not isinstance(number, int) or number < 1:
            raise ValueError(f"{name} must be a whole number from 1, but is {number!r}")
    for last_try in (False,) * (_TRIES - 1) + (True,):
        with tempfile.TemporaryDirectory(prefix="allhands-") as folder:
            launch = _Launch(folder, module, machines, processes)
            launch.wait(time.monotonic() + timeout, timeout)
            if launch.has_lost_its_port() and not last_try:
                continue
            return launch.result()
    raise AssertionError("the last try returns or raises")


class _Launch:
    """One try: agents, each with a folder in which the words of its workers are."""

    def __init__(self, folder: str, module: str, machines: int, processes: int) -> None:
        self.folder, self.module, self.machines, self.processes = folder, module, machines, processes
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.agents: list[subprocess.Popen[bytes]] = []

    def command(self, machine: int, host: str, port: str) -> list[str]:
        """What one machine runs, behind the name of the program."""
        machines = ["--nnodes", str(self.machines), "--node-rank", str(machine), "--nproc-per-node", str(self.processes)]
        return [*machines, "--master-addr", host, "--master-port", port, "-m", self.module]

    def wait(self, deadline: float, timeout: float) -> None:
        """Start the agents and wait until all have ended, or one has failed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_OURS_ALONE)}
        environment |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback()}
        with self._ended_whatever_happens():
            for machine in range(self.machines):
                logs = ["--log-dir", self._logs(machine), "--redirects", "3"]
                command = [sys.executable, "-m", "torch.distributed.run", *logs, *self.command(machine, "127.0.0.1", str(self.port))]
                with open(os.path.join(self.folder, f"agent-{machine}"), "wb") as words:
                    self.agents.append(
                        subprocess.Popen(
                            command, env=environment, stdin=subprocess.DEVNULL, stdout=words, stderr=words, preexec_fn=_die_with_parent
                        )
                    )
            while any(agent.poll() is None for agent in self.agents) and not any(agent.poll() for agent in self.agents):
                if time.monotonic() > deadline:
                    self._end()
                    raise RankTimeout(
                        f"Not finished after {timeout:g} seconds. What the ranks have printed:\n\n{fold(self._words('stdout'))}"
                    )
                time.sleep(_LOOK_SECONDS)

    @contextlib.contextmanager
    def _ended_whatever_happens(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._end()

    def _end(self) -> None:
        """An agent that is asked to end ends its workers first."""
        for agent in self.agents:
            if agent.poll() is None:
                agent.terminate()
        for agent in self.agents:
            try:
                agent.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()

    def has_lost_its_port(self) -> bool:
        """Whether somebody else was faster."""
        return self.agents[0].returncode != 0 and "EADDRINUSE" in self._agents_words(0)

    def result(self) -> Launched:
        """What was printed; raises RankError if something failed."""
        if any(agent.returncode for agent in self.agents):
            raise RankError(self._why())
        commands = [shlex.join(["torchrun", *self.command(machine, "HOST", "PORT")]) for machine in range(self.machines)]
        return Launched(tuple(commands), tuple(self._words("stdout")))

    def _why(self) -> str:
        told = {rank: text.strip() for rank, text in enumerate(self._words("stderr")) if "Traceback" in text}
        # What only tells that a connection was lost comes from a rank whose peer has failed.
        failures = {
            rank: Failure(f"failed: {text.splitlines()[-1]}\n\n{text}", is_consequence="Connection closed by peer" in text)
            for rank, text in told.items()
        }
        if failures:
            return root_cause(failures, self.machines * self.processes)
        machine = next(number for number, agent in enumerate(self.agents) if agent.returncode)
        return f"torchrun ended with code {self.agents[machine].returncode} on machine {machine}:\n\n{self._agents_words(machine)[-2000:]}"

    def _agents_words(self, machine: int) -> str:
        with open(os.path.join(self.folder, f"agent-{machine}"), errors="backslashreplace") as file:
            return file.read()

    def _logs(self, machine: int) -> str:
        return os.path.join(self.folder, f"logs-{machine}")

    def _words(self, stream: str) -> list[str]:
        """What each rank wrote: torchrun's file for it is in RUN/attempt_0/LOCAL_RANK, and the ranks of machine 0 come first."""
        words = []
        for rank in range(self.machines * self.processes):
            machine, number = divmod(rank, self.processes)
            words.append("")
            for folder, _, files in os.walk(self._logs(machine)):
                if os.path.basename(folder) == str(number) and f"{stream}.log" in files:
                    with open(os.path.join(folder, f"{stream}.log"), errors="backslashreplace") as file:
                        words[-1] = file.read()
        return words


def _die_with_parent() -> None:
    """In an agent, before it begins: on Linux it is asked to end when the notebook's kernel is gone, and ends its workers."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
