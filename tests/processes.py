"""Processes of tests: whether they are still there, and whether they hear an interrupt."""

import signal
import time

import psutil


def still_running(processes, limit_s=3.0):
    """Which processes have not ended in time; one that only waits for its parent to notice has."""
    deadline = time.monotonic() + limit_s
    running = list(processes)
    while running and time.monotonic() < deadline:
        running = [process for process in running if is_running(process)]
        time.sleep(0.01)
    return running


def is_running(process):
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def interruptible():
    """Called in a child before its program: it hears interrupts, also where the tests do not (nohup, `&`)."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
