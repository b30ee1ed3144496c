"""The process that workers are forked from: it imports torch while the driver does. Needs no torch itself."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..plan.errors import require
from .processes import may_have_labs

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerContext, SpawnContext

PRELOAD = "gpipe_lab.lab.preload"
SCRATCH_VARIABLE = "GPIPE_LAB_SCRATCH"
SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103  # that a socket's address has room for
SOCKET_NAME = "/pymp-xxxxxxxx/listener-xxxxxxxx"  # what multiprocessing adds to the temporary folder

LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"  # the network interface at which ranks meet

_starting = threading.RLock()  # the main module and the environment are changed while a process starts


def require_loopback() -> None:
    """Raise `RuntimeError` where the loopback interface, over which ranks meet, does not work."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
    except OSError as error:
        raise RuntimeError(
            "rule:   the ranks of a lab exchange messages over the loopback interface of this machine\n"
            f"got:    {LOOPBACK} (127.0.0.1) is not reachable: {error}\n"
            "where:  the processes of a lab\n"
            f"remedy: bring it up, as root: ip link set {LOOPBACK} up"
        ) from error


def start_forkserver() -> ForkServerContext | SpawnContext:
    """The context that workers start from; its forkserver begins to import torch in the background.

    Where a platform has no forkserver, workers are spawned, which is slower and otherwise the same.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    if not may_have_labs():  # a rank may touch gl.Lab
        return context
    with _starting:
        changes = {
            SCRATCH_VARIABLE: _own_temp_dir(),
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "PYTHONSAFEPATH": "1",  # or a file in the working folder could stand in for a module of its name
            # Before Python 3.12 a forkserver does not get sys.path.
            "PYTHONPATH": os.pathsep.join(filter(None, [_package_root(), os.environ.get("PYTHONPATH")])),
        }
        with hidden_main(), _changed_environment(changes):
            context.set_forkserver_preload([PRELOAD])
            forkserver.ensure_running()
    return context


_temp_dir_owner: int | None = None


def _own_temp_dir() -> str:
    """multiprocessing's folder of this process, for the forkserver to remove in the end.

    A process that multiprocessing itself has made is given its parent's, which the parent still needs.
    """
    global _temp_dir_owner
    if _temp_dir_owner != os.getpid():
        config = vars(multiprocessing.current_process())["_config"]
        if multiprocessing.parent_process() is not None:
            config.pop("tempdir", None)
        if not _fits_a_socket(tempfile.gettempdir()) and "tempdir" not in config:
            config["tempdir"] = tempfile.mkdtemp(prefix="pymp-", dir=_short_temp_dir())
        _temp_dir_owner = os.getpid()
    return util.get_temp_dir()


def _short_temp_dir() -> str:
    """A folder for temporary files whose path leaves room for a socket's name."""
    folders = [folder for folder in ("/tmp", "/var/tmp", "/dev/shm") if os.access(folder, os.W_OK | os.X_OK)]
    room = SOCKET_PATH_BYTES - len(SOCKET_NAME)
    require(
        bool(folders),
        f"processes meet at a socket, whose path may have {SOCKET_PATH_BYTES} bytes, so that the temporary "
        f"folder's may have {room}",
        got=f"TMPDIR={tempfile.gettempdir()!r}",
        where="Lab",
        remedy="export TMPDIR=/tmp",
    )
    return folders[0]


def _fits_a_socket(folder: str) -> bool:
    return len(os.fsencode(folder + SOCKET_NAME)) <= SOCKET_PATH_BYTES


def _package_root() -> str:
    return str(Path(__file__).resolve().parents[2])


@contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in its children."""
    main: dict[str, Any] = vars(sys.modules["__main__"])
    with _starting:
        hidden: dict[str, Any] = {name: main[name] for name in ("__file__", "__spec__") if name in main}
        main.pop("__file__", None)
        main["__spec__"] = None
        try:
            yield
        finally:
            main.pop("__spec__")
            main.update(hidden)


@contextmanager
def _changed_environment(changes: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
