"""A port at which nobody listens, and that nobody is given meanwhile."""

from __future__ import annotations

import os
import socket
import weakref


class HeldPort:
    """Its number, for as long as this lives. Bound and not listened at: who connects is refused at once, and
    who asks the system for any free port gets another one. Who names this one may listen there, with
    SO_REUSEADDR as all servers do."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((host, 0))
            self.port = int(sock.getsockname()[1])
            weakref.finalize(self, os.close, sock.detach())
