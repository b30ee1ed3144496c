"""Make a notebook cell fail when anything it started fails.

By itself a cell passes although a widget's callback, a thread, an asyncio task, a shell command or a
child process of it failed. Once `enable` has been called, every later cell ends with an error in these
cases, shown under the cell, so that the learner sees it and a headless run stops.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from functools import wraps
from multiprocessing.process import BaseProcess
from typing import Any

from . import mode

# How long a cell waits for what it started: what would keep a program alive, and what would not.
GRACE_S, BACKGROUND_GRACE_S = 2.0, 0.2
LIVE_GRACE_S = 0.05  # somebody is waiting, and later failures reach the next cell

_in_cell: ContextVar[bool] = ContextVar("in_cell", default=False)
_watch: Watch | None = None


class CellFailure(RuntimeError):
    """A cell did not do what it seemed to have done."""


def enable() -> bool:
    """Watch every later cell of this notebook. False where there is no notebook. May be called again."""
    global _watch
    kernel = mode.kernel()
    if kernel is None or sys.platform == "emscripten":
        return False
    if _watch is None:
        _watch = Watch(kernel)
        _watch.install()
    return True


def raise_on_failed_commands(shell: Any) -> None:
    """A shell command (`!false`) that fails raises at its line, whatever the version of IPython."""
    if shell.has_trait("system_raise_on_error"):
        shell.system_raise_on_error = True
        return
    system = shell.system

    @wraps(system)
    def checked(command: str) -> None:
        system(command)
        code = shell.user_ns.get("_exit_code", 0)
        if code:
            raise subprocess.CalledProcessError(code, command)

    shell.system = checked


class Watch:
    """What cells have started, and what of it has failed and not been reported."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.running = False
        self.failures: list[BaseException] = []
        self.tasks: list[asyncio.Task] = []
        self.processes: list[BaseProcess] = []
        self.threads_before: set[threading.Thread] = set()
        self.debt: CellFailure | None = None

    # Hooks, one for each place where a failure hides.

    def install(self) -> None:
        shell = self.kernel.shell
        raise_on_failed_commands(shell)
        self._watch_tracebacks(shell)
        self._watch_threads()
        self._watch_processes()
        asyncio.get_running_loop().set_task_factory(self._new_task)
        self.kernel.do_execute = self._watched(self.kernel.do_execute)

    def _watch_tracebacks(self, shell: Any) -> None:
        """ipywidgets swallows exceptions of callbacks and `with Output()`, but shows each with this."""
        show = shell.showtraceback

        @wraps(show)
        def showtraceback(exc_tuple: Any = None, *args: Any, **kwargs: Any) -> None:
            error = exc_tuple[1] if exc_tuple is not None else sys.exc_info()[1]
            if self.running and error is not None:
                self.failures.append(error)
            show(exc_tuple, *args, **kwargs)

        shell.showtraceback = showtraceback

    def _watch_threads(self) -> None:
        before = threading.excepthook

        def excepthook(args: Any) -> None:
            if args.exc_value is None or args.exc_type is SystemExit:
                before(args)
                return
            name = args.thread.name if args.thread is not None else "unknown"
            self.failures.append(_noted(args.exc_value, f"in thread {name!r}, started by a cell"))
            if not self.running:  # no cell is there to show it under, so it is printed at once
                before(args)

        threading.excepthook = excepthook

    def _watch_processes(self) -> None:
        start = BaseProcess.start

        @wraps(start)
        def watched_start(process: BaseProcess) -> None:
            supervised = _belongs_to_the_lab(process)
            start(process)
            if not supervised:
                self.processes.append(process)

        BaseProcess.start = watched_start  # type: ignore[method-assign, assignment]

    def _new_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **kwargs: Any) -> asyncio.Task:
        task = asyncio.Task(coro, loop=loop, **kwargs)
        if _in_cell.get():
            self.tasks.append(task)
        return task

    # One cell.

    def _watched(self, execute: Callable[..., Awaitable[dict]]) -> Callable[..., Awaitable[dict]]:
        @wraps(execute)
        async def do_execute(code: str, silent: bool, *args: Any, **kwargs: Any) -> dict:
            if silent:
                return await execute(code, silent, *args, **kwargs)
            if self.debt is not None and not self._may_raise():
                return self._fail({}, [self.debt])
            self.running = True
            self.threads_before = set(threading.enumerate())
            token = _in_cell.set(True)
            try:
                reply = await execute(code, silent, *args, **kwargs)
                await self._settle()
            finally:
                _in_cell.reset(token)
                self.running = False
            return self._verdict(reply)

        return do_execute

    async def _settle(self) -> None:
        """Give what the cell started a moment to end, so that its failure is this cell's failure."""
        began = time.monotonic()
        headless = mode.headless()
        while True:
            waited = time.monotonic() - began
            foreground, background = self._unfinished()
            limit = GRACE_S if foreground else BACKGROUND_GRACE_S if background else 0.0
            if waited >= (limit if headless else min(limit, LIVE_GRACE_S)):
                return
            await asyncio.sleep(0.005)

    def _unfinished(self) -> tuple[bool, bool]:
        threads = [
            t
            for t in threading.enumerate()
            if t not in self.threads_before and t.is_alive() and not _belongs_to_the_lab(t)
        ]
        processes = [p for p in self.processes if _exit_code(p) is None]
        waiting = any(not task.done() for task in self.tasks)
        foreground = not all([t.daemon for t in threads] + [p.daemon for p in processes])
        return foreground, waiting or bool(threads) or bool(processes)

    def _verdict(self, reply: dict) -> dict:
        failures = self._collect()
        may_raise = self._may_raise()
        if reply["status"] == "error":
            return reply
        if failures:
            return self._fail(reply, failures)
        if not may_raise:
            return reply
        failure = CellFailure(
            "this cell is tagged raises-exception, but nothing was raised: "
            "remove the tag, or bring the failure back"
        )
        # A client lets a tagged cell fail, so in a headless run the next cell has to stop it.
        self.debt = failure if mode.headless() else None
        return self._fail(reply, [failure])

    def _collect(self) -> list[BaseException]:
        failures, self.failures = self.failures, []
        for task in [task for task in self.tasks if task.done()]:
            self.tasks.remove(task)
            # Reading the exception marks it as retrieved, which awaiting the task would have done.
            if not task.cancelled() and getattr(task, "_log_traceback", False):
                error = task.exception()
                assert error is not None
                failures.append(_noted(error, f"in asyncio task {task.get_name()!r}, started by a cell"))
        for process in [p for p in self.processes if _exit_code(p) is not None]:
            self.processes.remove(process)
            code = _exit_code(process)
            if code not in (0, -signal.SIGTERM):  # terminate() is how a program ends its own child
                failures.append(CellFailure(f"process {process.name!r} died with exit code {code}"))
        return failures

    def _may_raise(self) -> bool:
        """Whether the cell is tagged raises-exception.

        Live clients send a cell's tags. nbclient does not, but stops on errors in all other cells; in
        live clients that says nothing, since some never stop.
        """
        request = self.kernel.get_parent("shell") or {}
        tags = request.get("metadata", {}).get("tags", ())
        stops = request.get("content", {}).get("stop_on_error", True)
        return "raises-exception" in tags or (mode.headless() and not stops)

    def _fail(self, reply: dict, failures: list[BaseException]) -> dict:
        """Show the failures under the cell, and the reply of a cell that failed."""
        shell = self.kernel.shell
        for error in failures:
            shell.showtraceback((type(error), error, error.__traceback__))
        first = failures[0]
        return {
            "payload": [],
            "execution_count": shell.execution_count,
            **reply,
            "status": "error",
            "ename": type(first).__name__,
            "evalue": str(first),
            "traceback": getattr(shell, "_last_traceback", None) or [],
            "user_expressions": {},
        }


def _noted(error: BaseException, note: str) -> BaseException:
    if note not in getattr(error, "__notes__", ()):
        error.add_note(note)
    return error


def _belongs_to_the_lab(worker: Any) -> bool:
    """A lab supervises its own processes and threads and raises their failures itself."""
    owner = getattr(worker, "_target", None) or type(worker)
    return str(getattr(owner, "__module__", "")).partition(".")[0] == "gpipe_lab"


def _exit_code(process: BaseProcess) -> int | None:
    """None while it runs; a process that was closed had been waited for."""
    try:
        return process.exitcode
    except ValueError:
        return 0
