"""The part of the network that ends in this machine: host names do not always resolve, and nothing should listen outside."""

import socket

ADDRESS = "127.0.0.1"


def interface() -> str:
    """The name of the loopback interface, which gloo wants to know."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def listen() -> socket.socket:
    """A socket that listens on a port of the system's choice, and for this machine alone."""
    return socket.create_server((ADDRESS, 0))
