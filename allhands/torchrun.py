"""`torchrun("script.py")`: run a script as production does, with torchrun's own agents, on machines that are played by this one.

An agent is what `torchrun` starts on a machine: it meets the other agents at the rendezvous, learns which ranks are its own, and starts
them. Here all agents are on this machine. Windows is left out: it has no fork.

The agents are PyTorch's own code, and so is the rendezvous, with two things of ours around it. `TCPStore`, which listens on all interfaces
and which torchrun cannot tell not to, is given sockets of the loopback interface (`machines`). And in each rank something of ours runs the
script, and sends to files what it prints (`script`).
"""

import json
import linecache
import os
import selectors
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass

from allhands import loopback, script
from allhands.errors import Failure, RankError, RankTimeout, RunInterrupted, root_cause, standing, standings
from allhands.interrupt import Interrupts
from allhands.printed import fold
from allhands.stack import Frame, from_faulthandler

MAX_RANKS = 32
_PACKAGE_HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_KEEPER_CODE = (
    "import sys; sys.path[:] = {path!r}; import socket; from allhands.machines import keep; "
    "keep(socket.socket(fileno={control}), socket.socket(fileno={listening}), {folder!r}, {commands!r})"
)
_STACK_SECONDS = 0.5  # for ranks to write down where they stand when their time is over
_LAST_WORDS = 3_000

# What an outer torchrun or pytest may have set, and what would change how torchrun meets: not passed on.
_FOREIGN_PREFIXES = ("TORCHELASTIC_", "PET_", "PYTEST_", "GROUP_", "ROLE_", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE")
_FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Launch:
    """What `torchrun` gave: `command` is what one would type on each machine, `output` what each rank printed, by rank."""

    machines: int
    command: str
    output: list[str]

    def __repr__(self) -> str:
        where = "On one machine" if self.machines == 1 else f"On each of {self.machines} machines"
        return f"{where}:\n  {self.command}\n\n{fold(self.output)}".rstrip("\n")


def torchrun(program: str, *, machines: int = 2, processes: int = 2, timeout: float = 120.0) -> Launch:
    """Run `program`, a module's name or the path of a `.py` file, on so many machines with so many processes each.

    Each rank is a new Python that imports torch for itself, so this takes seconds. What the ranks print on stdout comes back in
    the order of the ranks; stderr, and what the agents say, is kept for errors.

    Raises `RankError` with the root cause if a rank fails, and `RankTimeout` with where each rank stood after `timeout` seconds.
    """
    _check(program, machines, processes, timeout)
    folder = tempfile.mkdtemp(prefix="allhands-")
    try:
        with Interrupts() as interrupts, _Machines(program, machines, processes, timeout, folder) as played:
            return played.follow(interrupts)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # If it still is there, because its keeper was killed.


def _check(program: str, machines: int, processes: int, timeout: float) -> None:
    if not hasattr(os, "fork"):
        raise RuntimeError("torchrun() cannot run here: this system cannot fork processes. Use Linux, macOS or WSL")
    if script.is_file(program) and not os.path.isfile(program):
        raise FileNotFoundError(f"there is no file {program!r} in {os.getcwd()}")
    if machines < 1 or processes < 1 or machines * processes > MAX_RANKS:
        raise ValueError(
            f"there must be from 1 to {MAX_RANKS} ranks in all, since each imports torch for itself, but there are {machines} × {processes}"
        )
    if not timeout > 0:
        raise ValueError(f"timeout must be more than 0 seconds, but is {timeout!r}")


def _options(machines: int, processes: int, endpoint: str) -> list[str]:
    """What is the same on each machine."""
    return f"--nnodes {machines} --nproc-per-node {processes} --rdzv-backend c10d --rdzv-endpoint {endpoint}".split()


def _command(program: str, machines: int, processes: int) -> str:
    """What one would type on each machine. The second line is the program."""
    last = program if script.is_file(program) else f"-m {program}"
    return f"torchrun {' '.join(_options(machines, processes, 'HOST:PORT'))} \\\n      {last}"


def _environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN_NAMES}
    path = os.pathsep.join(part for part in (_PACKAGE_HOME, kept.get("PYTHONPATH")) if part)
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": loopback.interface(), "PYTHONPATH": path}


class _Machines:
    """The machines of one launch, as their caller sees them. When this is left, all their processes have ended."""

    def __init__(self, program: str, machines: int, processes: int, timeout: float, folder: str) -> None:
        self.command = _command(program, machines, processes)
        self.machines, self.world_size = machines, machines * processes
        self.timeout, self.folder = timeout, folder
        self.deadline = time.monotonic() + timeout
        seconds = min(timeout, threading.TIMEOUT_MAX / 2)
        self.socket, keepers_end = socket.socketpair()
        with keepers_end, loopback.listen() as listening:
            endpoint = f"{loopback.ADDRESS}:{listening.getsockname()[1]}"
            commands = [
                [
                    *_options(machines, processes, endpoint),
                    *("--local-addr", loopback.ADDRESS),  # Else it asks for the name of this host.
                    *("--rdzv-conf", f"is_host={int(number == 0)}"),  # All would think that they are.
                    *("--log-dir", os.path.join(folder, f"logs-{number}")),  # Else it makes a folder that stays.
                    *("-m", "allhands.script", folder, str(time.time() + seconds), program),
                ]
                for number in range(machines)
            ]
            code = _KEEPER_CODE.format(
                path=sys.path, control=keepers_end.fileno(), listening=listening.fileno(), folder=folder, commands=commands
            )
            with open(os.path.join(folder, "keeper"), "w") as log:
                self.keeper = subprocess.Popen(
                    [sys.executable, "-P", "-c", code],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[keepers_end.fileno(), listening.fileno()],
                    start_new_session=True,  # Away from Ctrl-C, which is the caller's to handle: it then lives to clean up.
                    env=_environment(),
                )

    def __enter__(self) -> "_Machines":
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()  # The keeper ends what still runs.
        self.keeper.wait()

    def follow(self, interrupts: Interrupts) -> Launch:
        """Until all ranks have ended, well or badly."""
        linecache.checkcache()  # Errors quote the script as it is now.
        try:
            told = self._wait(interrupts)
        except KeyboardInterrupt:
            raise self._with_output(RunInterrupted("The run was stopped, on all machines.")) from None
        if not told:
            raise RuntimeError(f"the process that plays the machines has ended. Its last words: {self._read('keeper')[-_LAST_WORDS:]}")
        if not any(json.loads(told)):
            return Launch(self.machines, self.command, self._output())
        failures = self._failures()
        if not failures:
            words = "\n".join(text for number in range(self.machines) if (text := self._read(f"machine-{number}")[-_LAST_WORDS:]))
            raise self._with_output(RankError(f"torchrun failed before a rank did. It says:\n\n{words}"))
        raise self._with_output(RankError(root_cause(failures, self.world_size, self._done())))

    def _wait(self, interrupts: Interrupts) -> bytes:
        """What the keeper tells at the end: nothing, if it was killed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self.socket, selectors.EVENT_READ)
            selector.register(interrupts.socket, selectors.EVENT_READ)
            ready = selector.select(min(self.deadline - time.monotonic(), threading.TIMEOUT_MAX / 2))
            interrupts.check()
            if not ready:
                time.sleep(_STACK_SECONDS)
                raise self._with_output(RankTimeout(self._timeout_text()))
        with self.socket.makefile("rb") as file:
            return file.read()

    def _timeout_text(self) -> str:
        seconds = f"{self.timeout:g} second{'' if self.timeout == 1 else 's'}"
        told = [self._standing(rank) for rank in range(self.world_size)]
        return (
            f"Not finished after {seconds}.\n\n{standings(told)}\n\nIf they were only slow, give them longer: timeout={2 * self.timeout:g}."
        )

    def _standing(self, rank: int) -> str:
        if rank in self._done():
            return "  had finished"
        dump = self._read(f"stack-{rank}")
        return standing(from_faulthandler(dump, script.__file__), script.DOING) if dump else "  had not come to the script yet"

    def _done(self) -> list[int]:
        return [rank for rank in range(self.world_size) if os.path.exists(script.path_of(self.folder, "done", rank))]

    def _failures(self) -> dict[int, Failure]:
        """Why ranks failed, as they or their machine's agent wrote it down."""
        texts = {rank: self._read(f"failure-{rank}") for rank in range(self.world_size)}
        told = {rank: json.loads(text) for rank, text in texts.items() if text}
        return {rank: Failure(**{**each, "frames": tuple(Frame(*frame) for frame in each["frames"])}) for rank, each in told.items()}

    def _output(self) -> list[str]:
        return [self._read(f"output-{rank}") for rank in range(self.world_size)]

    def _with_output(self, error: RankError | RunInterrupted) -> RankError | RunInterrupted:
        error.output = tuple(self._output())
        return error

    def _read(self, name: str) -> str:
        try:
            with open(os.path.join(self.folder, name), errors="backslashreplace") as file:
                return file.read()
        except FileNotFoundError:
            return ""
