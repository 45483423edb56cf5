"""Networks between worker processes that can be cut, without any rights."""

import contextlib
import ctypes
import os
import pathlib
import socket
import stat
import struct
import threading

_SO_ATTACH_FILTER = 26
_RETURN_NOTHING = struct.pack("HBBI", 0x06, 0, 0, 0)


class Forwarder:
    """A port that leads to another, until it is cut: then nobody hears anything."""

    def __init__(self):
        self._is_cut = threading.Event()
        self._sockets = []
        self._server = self._kept(socket.create_server(("127.0.0.1", 0)))

    def leading_to(self, port):
        """The port whose connections are forwarded to `port`."""
        self._port = port
        threading.Thread(target=self._serve, daemon=True).start()
        return self._server.getsockname()[1]

    def cut(self):
        """What is under way is lost, and no connection is closed."""
        self._is_cut.set()

    def close(self):
        self.cut()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def _kept(self, one):
        self._sockets.append(one)
        return one

    def _serve(self):
        with contextlib.suppress(OSError):
            while True:
                near = self._kept(self._server.accept()[0])
                if self._is_cut.is_set():
                    continue
                try:
                    far = self._kept(
                        socket.create_connection(("127.0.0.1", self._port))
                    )
                except OSError:  # nobody listens yet
                    near.close()
                    continue
                for way in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=way, daemon=True).start()

    def _pump(self, source, target):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                if self._is_cut.is_set():
                    return
                target.sendall(part)
            target.shutdown(socket.SHUT_WR)


def cut_off():
    """Lets nothing more in from other processes at any TCP socket of this one.

    The kernel drops each packet at a filter: to both sides it is as a cut cable. What
    listens is deaf as well; a process still hears itself.
    """
    program = ctypes.create_string_buffer(_RETURN_NOTHING)
    option = struct.pack("HL", 1, ctypes.addressof(program))
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(one) for one in _own_sockets()]
        own = {one.getsockname() for one in found if _peer(one) is not None}
        for one in found:
            if _peer(one) not in own:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, option)


def _own_sockets():
    for entry in list(pathlib.Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            number = int(entry.name)
            if stat.S_ISSOCK(os.fstat(number).st_mode):
                one = socket.socket(fileno=os.dup(number))
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    yield one
                else:
                    one.close()


def _peer(one):
    with contextlib.suppress(OSError):
        return one.getpeername()
    return None
