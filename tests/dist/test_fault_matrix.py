"""Every operation of a small grid, on every rank, failing in every way: named, and the next run works."""

import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from tests.faults import TOLD, fail

pytestmark = pytest.mark.slow

GRIDS = {
    "gpipe with recompute": (gl.gpipe(2, 1), "always"),
    "zero_bubble_h1": (gl.zero_bubble_h1(2, 1), "never"),
}
CASES = [
    (name, op, fault)
    for name, (schedule, mode) in GRIDS.items()
    for ops in gl.lower(gl.with_recompute(schedule, mode)).ops
    for op in ops
    for fault in TOLD
    if name == "gpipe with recompute" or op.kind in (gl.Kind.I, gl.Kind.W)
]


def inject(context, target, fault):
    """Make this worker fail when it comes to `target`, inside the engine's own code."""
    from gpipe_lab.engine.executor import Step
    from gpipe_lab.engine.mailbox import Mailbox

    def wrapped(method):
        def run(self, op, *args):
            if op == target:
                fail(fault)
            return method(self, op, *args)

        return run

    for cls, names in (
        (Step, ("_forward", "_recompute", "_backward", "_backward_weight")),
        (Mailbox, ("send", "post")),
    ):
        for name in names:
            setattr(cls, name, wrapped(getattr(cls, name)))


@pytest.fixture(scope="module")
def lab():
    with gl.Lab(2, device="cpu") as made:
        made.watchdog_s = 0.5
        yield made


@pytest.mark.parametrize(("grid", "op", "fault"), CASES, ids=lambda value: str(value))
def test_a_fault_anywhere_is_named_within_seconds(lab, grid, op, fault):
    schedule, mode = GRIDS[grid]
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    x = torch.randn(2, 4)

    def run():
        return lab.run(schedule, layers, x, x, loss_fn=F.mse_loss, checkpoint=mode, warmup=False)

    lab.call(inject, [(op, fault)] * 2)
    began = time.monotonic()
    with pytest.raises(gl.RankFailed) as caught:
        run()
    assert time.monotonic() - began < 3
    assert caught.value.op == op
    assert caught.value.rank == op.stage and TOLD[fault] in str(caught.value)
    assert run().loss > 0
