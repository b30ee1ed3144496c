"""A lab in a real Jupyter kernel: interrupted, restarted, killed; two labs, and two kernels at once."""

import os
import signal
import time
from queue import Empty

import psutil
import pytest
from jupyter_client.manager import KernelManager

SETUP = """
import torch, torch.nn.functional as F, gpipe_lab as gl
class Layer(torch.nn.Module):                      # defined in a cell
    def __init__(self): super().__init__(); self.linear = torch.nn.Linear(8, 8)
    def forward(self, x): return torch.tanh(self.linear(x))
model = [Layer() for _ in range(4)]
x = torch.randn(8, 8)
lab = gl.Lab(4, device="cpu")
def run(pace=None, lab=lab): return lab.run(gl.gpipe(4, 4), model, x, x, loss_fn=F.mse_loss, pace=pace)
print("loss", run().loss)
"""
LONG = "run(gl.Pace(forward_ms=2000, backward_ms=2000))"


class Notebook:
    """A kernel and its client, as JupyterLab has them."""

    def __init__(self):
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel()
        self.connect()

    def connect(self):
        self.client = self.manager.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def start(self, code):
        self.id = self.client.execute(code)

    def output(self, timeout=60):
        """(printed text, name of the error or None) of the cell that was started."""
        text, error = "", None
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                continue
            if message["parent_header"].get("msg_id") != self.id:
                continue
            match message["msg_type"]:
                case "stream":
                    text += message["content"]["text"]
                case "error":
                    error = message["content"]["ename"]
                case "status" if message["content"]["execution_state"] == "idle":
                    return text, error
        raise TimeoutError(f"the cell did not end in {timeout} s; so far: {text!r}")

    def run(self, code, timeout=60):
        self.start(code)
        return self.output(timeout)

    @property
    def pid(self):
        return self.manager.provisioner.pid

    def family(self):
        """The kernel's children, and theirs."""
        return psutil.Process(self.pid).children(recursive=True)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook():
    made = Notebook()
    yield made
    made.close()


def wait_until_gone(processes, timeout=5):
    _, alive = psutil.wait_procs(processes, timeout=timeout)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


def test_interrupt_ends_the_step_and_leaves_the_lab_usable(notebook):
    text, error = notebook.run(SETUP)
    assert error is None and "loss" in text, text
    notebook.start(LONG)
    time.sleep(1.5)
    began = time.monotonic()
    notebook.manager.interrupt_kernel()
    _, error = notebook.output()
    assert error == "KeyboardInterrupt"
    assert time.monotonic() - began < 2
    text, error = notebook.run("print('again', run().loss)")
    assert error is None and "again" in text, text


def test_restart_leaves_no_process(notebook):
    notebook.run(SETUP)
    notebook.start(LONG)
    time.sleep(1)
    family = notebook.family()
    assert len(family) >= 4
    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=True)
    wait_until_gone(family)
    notebook.connect()
    text, error = notebook.run(SETUP)
    assert error is None and "loss" in text, text


def test_a_killed_kernel_leaves_no_process(notebook):
    notebook.run(SETUP)
    notebook.start(LONG)
    time.sleep(1)
    family = notebook.family()
    assert len(family) >= 4
    os.kill(notebook.pid, signal.SIGKILL)
    wait_until_gone(family)


def test_two_labs_in_one_notebook_and_two_notebooks_at_once(notebook):
    other = Notebook()
    try:
        for each in (notebook, other):
            each.start(SETUP + "second = gl.Lab(4, device='cpu')\nprint('other lab', run(lab=second).loss)")
        for each in (notebook, other):
            text, error = each.output()
            assert error is None and "loss" in text and "other lab" in text, text
    finally:
        other.close()
