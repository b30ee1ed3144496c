"""Nothing outlives the driver: no process, file or port, however it ends."""

import contextlib
import gc
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from socket import AF_INET

import cloudpickle
import psutil
import pytest
import torch.distributed as dist

from gpipe_lab.lab.lab import Lab
from tests.processes import interruptible, still_running

pytestmark = pytest.mark.dist
cloudpickle.register_pickle_by_value(sys.modules[__name__])
ROOT = Path(__file__).parents[2]

HEAD = """
import os, sys, time
from gpipe_lab.lab.forkserver import start_forkserver
start_forkserver()  # sooner than a lab would, to save time
from gpipe_lab.lab.failures import RunStopped
from gpipe_lab.lab.lab import Lab

def hang(context):
    print("hanging")
    time.sleep(60)

def run():
    try:
        lab.launch(hang)
    except RunStopped:
        pass
"""


class Driver:
    """A script that holds a lab, in a process group and a temp folder of its own."""

    def __init__(self, body):
        self.folder = tempfile.mkdtemp(prefix="drv")
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", HEAD + body],
            cwd=ROOT,
            env={**os.environ, "TMPDIR": self.folder, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            preexec_fn=interruptible,
        )
        self.family = []

    def wait_for(self, text):
        """Read the driver's output up to a line with `text`, and note all its processes."""
        for line in self.process.stdout:
            if text in line:
                self.family = psutil.Process(self.process.pid).children(recursive=True)
                return
        pytest.fail(self.process.stderr.read())

    def workers(self):
        """The processes whose parent is the forkserver, which is a child of the driver."""
        return [process for process in self.family if process.ppid() != self.process.pid]

    def finish(self):
        """What is left of the output, once the driver has ended."""
        out, err = self.process.communicate(timeout=20)
        return out, err

    def assert_nothing_is_left(self):
        assert self.family
        assert still_running(self.family) == []
        ours = [name for name in os.listdir(self.folder)]
        assert ours == [], "torch's own cache apart, which torch keeps for every process"


@pytest.fixture
def drive():
    drivers = []

    def start(body):
        drivers.append(Driver(body))
        return drivers[-1]

    yield start
    for driver in drivers:
        for process in [*driver.family, driver.process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        driver.process.communicate()
        shutil.rmtree(driver.folder, ignore_errors=True)


@pytest.mark.parametrize(("doing", "sent_to"), [("idle", "the driver"), ("a call", "its process group")])
def test_a_killed_driver_leaves_nothing(drive, doing, sent_to):
    run = "print('idle'); time.sleep(60)" if doing == "idle" else "lab.launch(hang)"
    driver = drive(f"lab = Lab(3, device='cpu')\n{run}")
    driver.wait_for("idle" if doing == "idle" else "[rank 1] hanging")
    assert len(driver.workers()) == 3
    assert os.listdir(driver.folder), "the rendezvous is in this folder"
    if sent_to == "the driver":
        driver.process.kill()
    else:
        os.killpg(driver.process.pid, signal.SIGKILL)
    driver.process.wait(timeout=5)
    driver.assert_nothing_is_left()


CHILDREN = """
import multiprocessing

def with_children(context, how):
    def sleep():
        time.sleep(60)
    context.state["children"] = [multiprocessing.get_context("fork").Process(target=sleep) for _ in range(2)]
    for child in context.state["children"]:
        child.start()
    print("hanging")
    if how == "a call":
        time.sleep(60)
"""


@pytest.mark.parametrize("doing", ["idle", "a call"])
@pytest.mark.parametrize("end", ["the driver is killed", "a worker is killed", "the lab is closed"])
def test_what_a_rank_has_started_ends_with_it(drive, doing, end):
    driver = drive(
        CHILDREN
        + f"""
lab = Lab(2, device="cpu")
import threading
def run():
    try:
        lab.launch(with_children, {doing!r})
    except Exception as error:
        print("ended", type(error).__name__)
threading.Thread(target=run, daemon=True).start()
print(sys.stdin.readline())
lab.close()
print("closed")
time.sleep(60)
"""
    )
    for _ in range(2):
        driver.wait_for("hanging")
    time.sleep(0.3)
    driver.family = psutil.Process(driver.process.pid).children(recursive=True)
    grandchildren = [p for p in driver.family if p.parent() in driver.workers()]
    assert len(grandchildren) >= 4
    match end:
        case "the driver is killed":
            driver.process.kill()
            driver.process.wait(timeout=5)
            driver.assert_nothing_is_left()
        case "a worker is killed":
            killed = grandchildren[0].parent()
            orphans = killed.children()
            killed.kill()
            assert still_running(orphans) == []
        case "the lab is closed":
            driver.process.stdin.write("go on\n")
            driver.process.stdin.flush()
            driver.wait_for("closed")
            assert still_running(grandchildren) == []


SUBPROCESSES = """
import subprocess

def with_subprocesses(context, ending):
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    daemon = f"import subprocess; subprocess.Popen({command!r}, start_new_session=True)"
    subprocess.Popen(command)
    subprocess.Popen(command, start_new_session=True)
    subprocess.run([sys.executable, "-c", daemon])  # its parent has ended
    print("hanging")
    sys.stdout.flush()
    if ending == "crash" and context.rank == 0:
        time.sleep(1.5)
        os._exit(3)
    time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the process group alone ends elsewhere")
@pytest.mark.parametrize("ending", ["the driver is killed", "stop", "crash"])
def test_what_a_rank_has_started_by_subprocess_ends_with_it(drive, ending):
    driver = drive(
        SUBPROCESSES
        + f"""
lab = Lab(2, device="cpu")
import threading
if {ending!r} == "stop":
    threading.Timer(2.5, lab.stop).start()
try:
    lab.launch(with_subprocesses, {ending!r})
except Exception as error:
    print("ended", type(error).__name__)
print("over")
sys.stdin.readline()
"""
    )
    for _ in range(2):
        driver.wait_for("hanging")
    time.sleep(0.3)
    driver.family = psutil.Process(driver.process.pid).children(recursive=True)
    started = [p for p in driver.family if "time.sleep(60)" in " ".join(p.cmdline())]
    assert len(started) == 6
    if ending == "the driver is killed":
        driver.process.kill()
    else:
        family = driver.family
        driver.wait_for("over")
        driver.family = family
        assert still_running(started) == []
        driver.process.stdin.write("go on\n")
        driver.process.stdin.flush()
    driver.process.wait(timeout=10)
    driver.assert_nothing_is_left()


def fork_from_a_thread(context):
    """A child that a short-lived thread has started, and whether it still is there afterwards."""
    children = []

    def start():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,))
        child.start()
        children.append(child)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.3)
    return children[0].is_alive()


def test_a_child_outlives_the_thread_that_started_it():
    with Lab(1, device="cpu") as lab:
        assert lab.launch(fork_from_a_thread) == [True]


def test_a_driver_killed_after_it_closed_its_lab_leaves_nothing(drive):
    driver = drive("Lab(2, device='cpu').close()\nprint('closed')\ntime.sleep(60)")
    driver.wait_for("closed")
    assert driver.workers() == []
    os.killpg(driver.process.pid, signal.SIGKILL)
    driver.process.wait(timeout=5)
    driver.assert_nothing_is_left()


def test_a_driver_that_ends_during_a_call_leaves_nothing_and_says_nothing_more(drive):
    driver = drive("""
import threading
lab = Lab(2, device="cpu")
idle = Lab(2, device="cpu")
threading.Thread(target=run, daemon=True).start()
time.sleep(0.3)
raise LookupError("mine")
""")
    driver.wait_for("hanging")
    _, err = driver.finish()
    assert err.rstrip().endswith("LookupError: mine")
    assert err.count("Traceback") == 1
    driver.assert_nothing_is_left()


@pytest.mark.alone
def test_an_interrupt_ends_the_call_and_the_lab_is_usable(drive):
    driver = drive("""
lab = Lab(3, device="cpu")
for _ in range(2):
    try:
        lab.launch(hang)
    except KeyboardInterrupt:
        begin = time.monotonic()
        print("interrupted")
        print(lab.launch(lambda context: context.rank), time.monotonic() - begin < 1)
lab.launch(hang)
""")
    for _ in range(2):
        driver.wait_for("[rank 2] hanging")
        os.killpg(driver.process.pid, signal.SIGINT)
        driver.wait_for("interrupted")
        assert driver.process.stdout.readline() == "[0, 1, 2] True\n"
    driver.wait_for("hanging")
    os.killpg(driver.process.pid, signal.SIGINT)  # this time nobody catches it
    _, err = driver.finish()
    assert err.rstrip().endswith("KeyboardInterrupt")
    assert err.count("Traceback") == 1
    driver.assert_nothing_is_left()


def test_two_drivers_at_once(drive):
    with Lab(2, device="cpu") as lab:
        driver = drive("lab = Lab(2, device='cpu')\nprint(lab.launch(lambda c: c.rank))\ntime.sleep(60)")
        driver.wait_for("[0, 1]")
        assert lab.launch(lambda context: context.rank) == [0, 1]
        driver.process.kill()
        driver.process.wait(timeout=5)
        driver.assert_nothing_is_left()
        assert lab.launch(lambda context: context.rank) == [0, 1]


def worker_processes(lab):
    return [psutil.Process(pid) for pid in lab.launch(lambda context: os.getpid())]


@pytest.mark.alone
def test_close_and_the_end_of_a_with_block_end_the_workers():
    with Lab(2, device="cpu") as lab:
        workers = worker_processes(lab)
        folder = Path(lab._workers.rendezvous)
        assert folder.is_dir()
        assert folder.stat().st_mode & 0o077 == 0
    begin = time.monotonic()
    assert still_running(workers) == []
    assert time.monotonic() - begin < 0.5
    assert not folder.exists()
    lab.close()


def test_a_lab_that_nobody_holds_ends():
    lab = Lab(2, device="cpu")
    workers = worker_processes(lab)
    del lab
    gc.collect()
    assert still_running(workers) == []


def test_labs_leave_no_open_file_and_no_thread():
    me = psutil.Process()
    for _ in range(2):  # the first one starts what stays: the forkserver
        Lab(2, device="cpu").close()
        gc.collect()
        before = me.num_fds(), threading.active_count()
    for _ in range(3):
        with Lab(3, device="cpu") as lab:
            lab.launch(lambda context: None)
            lab.resize(2)
    del lab
    gc.collect()
    assert (me.num_fds(), threading.active_count()) == before


def test_a_fork_of_the_driver_does_not_end_its_workers():
    with Lab(2, device="cpu") as lab:
        before = lab.launch(lambda context: os.getpid())
        child = os.fork()
        if child == 0:
            lab._workers.end()
            os._exit(0)
        os.waitpid(child, 0)
        assert lab.launch(lambda context: os.getpid()) == before


def listening(processes):
    """The addresses that these processes listen on."""
    return {
        connection.laddr.ip
        for process in processes
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def other_interface():
    """An interface beside loopback that has an address: (name, address), or None."""
    up = [name for name, stats in psutil.net_if_stats().items() if stats.isup]
    found = [(name, a.address) for name in up for a in psutil.net_if_addrs()[name] if a.family == AF_INET]
    return next((pair for pair in found if not pair[1].startswith("127.")), None)


def test_nothing_listens_off_loopback(monkeypatch):
    """Not even where the environment names another interface, as that of a cluster's node may."""
    other = other_interface()
    if other is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", other[0])

    def program(context):
        dist.barrier()
        dist.barrier(dist.new_group([0, 1, 2]))

    def listen_there(context):
        os.environ["GLOO_SOCKET_IFNAME"] = other[0]
        dist.barrier(dist.new_group([0, 1, 2]))

    loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    with Lab(3, device="cpu") as lab:
        lab.launch(program)
        workers = worker_processes(lab)
        assert listening(workers) and listening(workers) <= loopback
        assert listening([psutil.Process(), *psutil.Process().children(recursive=True)]) <= loopback
        if other is not None:  # what this test would see if there were something to see
            lab.launch(listen_there)
            assert not listening(workers) <= loopback
