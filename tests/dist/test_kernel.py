"""A lab in a real Jupyter kernel: interrupted, restarted, killed; two labs, and two kernels at once."""

import os
import signal
import tempfile
import time
from queue import Empty

import psutil
import pytest
from jupyter_client.manager import KernelManager

from tests.processes import still_running

SETUP = """
import torch, torch.nn.functional as F, gpipe_lab as gl
class Layer(torch.nn.Module):                      # defined in a cell
    def __init__(self): super().__init__(); self.linear = torch.nn.Linear(8, 8)
    def forward(self, x): return torch.tanh(self.linear(x))
model = [Layer() for _ in range(4)]
x = torch.randn(8, 8)
lab = gl.Lab(4, device="cpu")
def run(pace=None, lab=lab):
    return lab.run(gl.gpipe(4, 4), model, x, x, loss_fn=F.mse_loss, pace=pace, warmup=False)
print("loss", run().loss)
"""
LONG = "run(gl.Pace(forward_ms=2000, backward_ms=2000))"


class Notebook:
    """A kernel and its client, as JupyterLab has them."""

    def __init__(self, folder):
        # Under nbmake the kernel knows that it is tested, and no longer shows what children print.
        env = {**os.environ, "TMPDIR": folder, "PYTEST_CURRENT_TEST": "as under nbmake"}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(env=env)
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
def folder():
    with tempfile.TemporaryDirectory(prefix="krn") as path:  # pytest's own is too long for a socket's name
        yield path


@pytest.fixture
def notebook(folder):
    made = Notebook(folder)
    yield made
    made.close()


def assert_no_file_is_left(folder):
    assert [name for name in os.listdir(folder) if name.startswith("pymp")] == []


@pytest.mark.alone
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


CELLS = [
    ("print(all(type(r) is Mine for r in lab.launch(program)))", None, ["True", *["hello"] * 4]),
    ("lab.launch(fail)", "RankFailed", []),
    ("print(lab.launch(lambda context: context.rank))", None, ["[0, 1, 2, 3]"]),
]


def test_a_cells_own_class_and_function_and_its_prints(notebook):
    define = """
class Mine: pass
def program(context):
    print("hello")
    return Mine()
def fail(context): raise ValueError("mine")
"""
    assert notebook.run(SETUP + define)[1] is None
    for code, error, lines in CELLS:
        text, raised = notebook.run(code)
        assert raised == error
        tagged = [f"[rank {rank}] hello" for rank in range(lines.count("hello"))]
        assert sorted(text.splitlines()) == sorted([line for line in lines if line != "hello"] + tagged)


def test_a_schedule_function_of_a_cell_runs_as_its_value(notebook):
    code = """
def mine(num_ranks, num_microbatches):
    rows = [[gl.Op(kind, stage, m) for kind in (gl.Kind.F, gl.Kind.B) for m in range(num_microbatches)]
            for stage in range(num_ranks)]
    return gl.Schedule("mine", num_microbatches, tuple(range(num_ranks)), tuple(map(tuple, rows)))
by_function = lab.run(mine, model, x, x, loss_fn=F.mse_loss, num_microbatches=4, warmup=False)
by_value = lab.run(mine(4, 4), model, x, x, loss_fn=F.mse_loss, warmup=False)
print(by_function.loss == by_value.loss, by_function.trace.schedule == by_value.trace.schedule)
print(all(torch.equal(g, by_value.gradients()[n]) for n, g in by_function.gradients().items()))
"""
    text, error = notebook.run(SETUP + code)
    assert error is None and text.splitlines()[-2:] == ["True True", "True"], text


def family_at_work(notebook):
    """The kernel's processes, during a long run."""
    notebook.run(SETUP)
    notebook.start(LONG)
    time.sleep(1)
    family = notebook.family()
    assert len(family) >= 4
    return family


def test_restart_leaves_no_process(notebook, folder):
    family = family_at_work(notebook)
    notebook.client.stop_channels()
    notebook.manager.restart_kernel(now=True)
    assert still_running(family, 5) == []
    assert_no_file_is_left(folder)
    notebook.connect()
    text, error = notebook.run(SETUP)
    assert error is None and "loss" in text, text


def test_a_killed_kernel_leaves_no_process(notebook, folder):
    family = family_at_work(notebook)
    os.kill(notebook.pid, signal.SIGKILL)
    assert still_running(family, 5) == []
    assert_no_file_is_left(folder)


def test_two_labs_in_one_notebook_and_two_notebooks_at_once(notebook, folder):
    other = Notebook(folder)
    try:
        for each in (notebook, other):
            each.start(SETUP + "second = gl.Lab(4, device='cpu')\nprint('other lab', run(lab=second).loss)")
        for each in (notebook, other):
            text, error = each.output()
            assert error is None and "loss" in text and "other lab" in text, text
    finally:
        other.close()
