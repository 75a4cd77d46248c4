"""A real kernel, driven as a notebook drives it."""

import os
import signal
from contextlib import contextmanager
from dataclasses import dataclass, field

from jupyter_client.manager import start_new_kernel


@dataclass
class Reply:
    """What one cell put out."""

    printed: str = ""
    shown: str = ""
    error: str = ""
    error_name: str = ""
    streamed: list = field(default_factory=list)


class Kernel:
    """Cells in, outputs out."""

    def __init__(self, manager, client):
        self.manager = manager
        self.client = client
        self.pid = manager.provisioner.process.pid

    def press_stop(self):
        """What Jupyter does for its stop button: the signal goes to the kernel's whole process group."""
        os.killpg(os.getpgid(self.pid), signal.SIGINT)

    def cell(self, source, timeout=60):
        reply = Reply()

        def note(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                reply.printed += content["text"]
                reply.streamed.append(content["text"])
            elif message["msg_type"] in ("execute_result", "display_data"):
                reply.shown += content["data"]["text/plain"]
            elif message["msg_type"] == "error":
                reply.error = "\n".join(content["traceback"])
                reply.error_name = content["ename"]

        self.client.execute_interactive(source, output_hook=note, timeout=timeout)
        return reply


@contextmanager
def kernel(setup="%load_ext allhands\nfrom allhands import run\nimport time, torch, torch.distributed as dist\nrun(int);"):
    """A kernel that has the extension and a fork server that is ready."""
    manager, client = start_new_kernel(kernel_name="python3")
    try:
        it = Kernel(manager, client)
        reply = it.cell(setup)
        assert not reply.error, reply.error
        yield it
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
        manager.cleanup_resources()
        client.context.destroy(linger=0)
