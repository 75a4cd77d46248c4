"""A process that plays several machines: each is a torchrun agent, forked from here, which starts that machine's ranks.

It is the only one who can name all their processes without doubt. When its caller wants no more, or has died, it ends them and removes
their folder: the agents are its children, and on Linux it adopts the ranks of an agent that has ended. Elsewhere a rank ends when
the folder has gone.
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from contextlib import suppress
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from allhands import lineage, loopback
from allhands.script import path_of

_LOOK_SECONDS = 0.05
_SETTLE_SECONDS = 2.0  # for the other machines, when one has failed


def keep(control: socket.socket, listening: socket.socket, folder: str, commands: list[list[str]]) -> None:
    """Start a machine for each command (torchrun's arguments), wait for their end, and tell their exit codes, as JSON, over `control`.

    `listening` is where the rendezvous will be, on the first machine. The folder stays until the other end of `control` has been closed.
    """
    lineage.adopt_orphans()
    machines: dict[int, int] = {}
    codes = [0] * len(commands)
    try:
        bind_stores_to_loopback(listening)
        for number, arguments in enumerate(commands):
            pid = os.fork()
            if pid == 0:
                control.close()
                if number > 0:
                    listening.close()  # Else the port would seem open when the first machine has gone.
                _be_machine(folder, number, arguments)
            machines[pid] = number
        listening.close()
        end = float("inf")
        while machines and time.monotonic() < end and not _is_readable(control, _LOOK_SECONDS):
            for pid in list(machines):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    number = machines.pop(pid)
                    codes[number] = os.waitstatus_to_exitcode(status)
                    if codes[number] and end == float("inf"):
                        end = time.monotonic() + _SETTLE_SECONDS
    finally:
        _end(list(machines))
        with suppress(OSError):  # The caller may have gone.
            control.sendall(json.dumps(codes).encode())
            control.shutdown(socket.SHUT_WR)
            _is_readable(control, None)  # The caller never sends anything: it closes its end.
        shutil.rmtree(folder, ignore_errors=True)


def _is_readable(control: socket.socket, seconds: float | None) -> bool:
    return bool(select.select([control], [], [], seconds)[0])


def _end(machines: list[int]) -> None:
    for pid in machines:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    while orphans := lineage.children():  # Those of an orphan come up when it has been killed.
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def bind_stores_to_loopback(listening: socket.socket) -> None:
    """From now on this process's `TCPStore` serves the loopback interface only. Torch's own listens on all, and torchrun has no say in it.

    The store of the rendezvous takes `listening` over, which has been open from the start, so that nobody can take its port in between.
    """
    rendezvous_port = listening.getsockname()[1]

    class LoopbackStore(dist.TCPStore):
        def __init__(self, host_name: str, port: int, *args: Any, is_master: bool = False, **options: Any) -> None:
            if is_master:
                server = listening if port == rendezvous_port else loopback.listen()
                port = server.getsockname()[1]
                options["master_listen_fd"] = server.detach()
            super().__init__(host_name, port, *args, is_master=is_master, **options)

    dist.TCPStore = LoopbackStore
    from torch.distributed import run  # noqa: F401  Not before: its modules look the name up when they are imported.


def _be_machine(folder: str, number: int, arguments: list[str]) -> NoReturn:
    """Be `torchrun` with these arguments."""
    code = 1
    try:
        lineage.die_with_parent()
        os.setsid()
        log = os.open(path_of(folder, "machine", number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for descriptor in (1, 2):
            os.dup2(log, descriptor)
        sys.modules["torch.distributed.run"].main(arguments)
        code = 0
    except ChildFailedError as error:
        for rank, failure in error.failures.items():
            _note_death(path_of(folder, "failure", rank), failure.exitcode)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _note_death(path: str, code: int) -> None:
    """A rank's failure, if it could not write one itself."""
    what = f"exited with code {code}" if code >= 0 else f"died of {signal.Signals(-code).name}"
    # Gloo aborts a process whose peer has gone, and torchrun ends those whose neighbour has failed.
    is_consequence = -code in (signal.SIGABRT, signal.SIGTERM)
    with suppress(FileExistsError), open(path, "x") as file:
        json.dump({"what": what, "frames": [], "hint": "", "is_consequence": is_consequence}, file)
