"""Two hosts on one machine: network namespaces joined by a cable, each with its own clock if possible."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import gpipe_lab

PACKAGE_ROOT = str(Path(gpipe_lab.__file__).parents[1])


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def why_not():
    """Why hosts cannot be simulated here, or None."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "needs Linux and the ip command (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "needs root, to make network namespaces"
    name = f"gl{os.getpid()}try"
    try:
        run("ip", "netns", "add", name)
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.strip()}"
    run("ip", "netns", "del", name)
    return None


def clock_shift(seconds):
    """A command that starts another with a monotonic clock of its own; () where the kernel cannot."""
    command = ("unshare", "--time", "--monotonic", str(seconds))
    try:
        run(*command, "true")
    except (OSError, subprocess.CalledProcessError):
        return ()
    return command


class Host:
    """A network namespace with an address, a cable to the other host, and what runs in it."""

    def __init__(self, index, shift_s=0):
        self.namespace = f"gl{os.getpid()}h{index}"
        self.interface = f"gl{os.getpid()}v{index}"
        self.address = f"10.213.77.{index + 1}"
        self.shift = clock_shift(shift_s) if shift_s else ()
        self.started = []

    def connect(self, up=True):
        run("ip", "-n", self.namespace, "link", "set", self.interface, "up" if up else "down")

    def start(self, *command, out):
        environment = {
            **os.environ,
            "PYTHONPATH": PACKAGE_ROOT,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": self.interface,
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # or a host that takes another's place waits for good
        }
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *self.shift, *command],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=PACKAGE_ROOT,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def pids(self):
        return [int(pid) for pid in run("ip", "netns", "pids", self.namespace).split()]

    def kill(self):
        """End all that runs here, as a loss of power does."""
        deadline = time.monotonic() + 5
        while (pids := self.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self.started:
            process.wait(5)


@contextmanager
def two_hosts(shift_s=0):
    """(first, second), connected; everything of theirs is gone afterwards."""
    hosts = Host(0), Host(1, shift_s)
    try:
        for host in hosts:
            run("ip", "netns", "add", host.namespace)
        ends = [("name", host.interface, "netns", host.namespace) for host in hosts]
        run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for host in hosts:
            run("ip", "-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", host.interface)
            run("ip", "-n", host.namespace, "link", "set", "lo", "up")
            host.connect()
        yield hosts
    finally:
        for host in hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            subprocess.run(["ip", "netns", "del", host.namespace], capture_output=True)
