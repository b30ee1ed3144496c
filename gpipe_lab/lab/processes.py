"""What a worker is as a process: it makes no labs, and the processes that it starts end with it."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import stat
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal that a process gets when its parent ends
PR_SET_CHILD_SUBREAPER = 36  # and: processes whose parent has ended become children of this one
WORKERS_VARIABLE = "GPIPE_LAB_WORKERS"  # in a worker's environment: which set of workers it is one of

_is_rank = False


def may_have_labs() -> bool:
    """Whether labs can be made in this process: not in a rank, nor in what ends without notice."""
    return not (_is_rank or multiprocessing.current_process().daemon)


def become_rank() -> None:
    """Called first in a worker: from now on it may start processes, and they end with it, however it ends.

    multiprocessing forbids daemons to have children, as a DataLoader's are. A worker that leaves kills all
    that descend from it (`kill_descendants`). After one that could not, the kernel ends what its main thread
    has forked, and the driver its process group and what it has started by a command
    (`kill_what_was_started_by`); the forkserver ends whatever is left. Off Linux the group alone is killed.
    """
    global _is_rank
    _is_rank = True
    vars(multiprocessing.current_process())["_config"]["daemon"] = False
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)
    adopt_orphans()
    if sys.platform == "linux":
        _end_forks_with_their_parent()


def adopt_orphans() -> None:
    """Have all that descends from this process stay its descendants, whoever between them ends (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_descendants() -> None:
    """Kill every process that descends from this one (on Linux), also those started meanwhile."""
    _kill_all(lambda: _descendants(os.getpid()) if _has_children() else [])


def kill_what_was_started_by(workers: str) -> None:
    """Kill what one of the `workers` has started by a command, which inherits their mark (on Linux).

    A command may leave the group of the worker that started it, and it outlives the worker's crash.
    """
    mark = f"{WORKERS_VARIABLE}={workers}".encode()
    _kill_all(lambda: [pid for pid, environment in _read_all("environ") if mark in environment.split(b"\0")])


def _kill_all(find: Callable[[], list[int]]) -> None:
    """Kill what `find` finds until it finds nothing new; to be gone takes a killed process a moment."""
    killed: set[int] = set()
    while new := set(find()) - killed:
        for pid in new:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= new


def _read_all(name: str) -> Iterator[tuple[int, bytes]]:
    """A file of every process in Linux's /proc, where it is there and may be read."""
    for pid in filter(str.isdecimal, os.listdir("/proc") if sys.platform == "linux" else ()):
        with suppress(OSError):  # the process has ended, or it is another user's
            yield int(pid), Path("/proc", pid, name).read_bytes()


def kill_group(pid: int) -> None:
    """Kill a worker and what it has started, unless that has left the worker's group."""
    if hasattr(os, "killpg"):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)


def _has_children() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except (ChildProcessError, AttributeError):  # it has none; a system without the call
        return False
    return True


def _descendants(ancestor: int) -> list[int]:
    children: dict[int, list[int]] = defaultdict(list)
    for pid, status in _read_all("stat"):
        _, parent, *_ = status.rpartition(b")")[2].split()
        children[int(parent)].append(pid)
    found = [ancestor]
    for pid in found:
        found += children[pid]
    return found[1:]


def _end_forks_with_their_parent() -> None:
    """The kernel's signal follows the thread that forked, so it is set for the main thread's forks alone."""
    libc = ctypes.CDLL(None)
    forking = [0]

    def note_parent() -> None:
        forking[0] = os.getpid() if threading.current_thread() is threading.main_thread() else 0

    def end_with_parent() -> None:
        if not forking[0]:
            return
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != forking[0]:  # it ended before the call
            os._exit(0)

    os.register_at_fork(before=note_parent, after_in_child=end_with_parent)


_needed: dict[int, tuple[int, int]] = {}  # sockets by file descriptor: which ones they are


def note_sockets() -> None:
    """Remember the sockets that are open now and that stay open whatever other processes do (on Linux).

    Those are the pipe to the driver, and the one at which a process group listens.
    """
    for name in os.listdir("/proc/self/fd") if sys.platform == "linux" else ():
        if (which := _socket_at(int(name))) is not None and not _may_end_from_afar(int(name)):
            _needed[int(name)] = which


def sockets_are_closed() -> bool:
    """Whether what runs here, such as a layer, has closed a socket that this process needs."""
    return any(_socket_at(descriptor) != which for descriptor, which in _needed.items())


def _socket_at(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:  # it has been closed
        return None
    return (status.st_dev, status.st_ino) if stat.S_ISSOCK(status.st_mode) else None


def _may_end_from_afar(descriptor: int) -> bool:
    """Whether it is a connection between ranks, which is closed at both ends when one is gone."""
    looked_at = socket.socket(fileno=descriptor)
    try:
        is_local = looked_at.family == socket.AF_UNIX
        return not is_local and not looked_at.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    finally:
        looked_at.detach()
