"""Bad input is refused with its rule, what was given, where, and a remedy, before a process starts."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.loss import read_loss
from gpipe_lab.engine.stage import StepContext
from gpipe_lab.lab.step import cut, plan_step
from gpipe_lab.plan.units import format_bytes, parse_bytes

X = torch.randn(8, 4)
LAYERS = [nn.Linear(4, 4) for _ in range(4)]


def prepare(schedule, **changed):
    options = {
        "num_ranks": 4,
        "layers_per_stage": [1] * 4,
        "inputs": X,
        "targets": X,
        "loss": read_loss(F.mse_loss),
        "step": StepContext(),
    }
    return plan_step(schedule, **(options | changed))


def test_what_is_right_is_accepted():
    assert len(prepare(gl.gpipe(4, 8)).jobs) == 4


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


def hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_hook(lambda module, inputs, output: output + 1)
    return model


class LossWithWeights(nn.Linear):
    def forward(self, output, target):
        return super().forward(output - target).square().mean()


BAD = {
    "more stages than layers": lambda: cut(LAYERS, 5),
    "no layers": lambda: cut([], 1),
    "no stages": lambda: gl.gpipe(0, 4),
    "no micro-batches": lambda: gl.gpipe(4, 0),
    "half a micro-batch": lambda: gl.one_f_one_b(4, 1.5),
    "true for a number": lambda: gl.naive(True, 1),
    "fewer rows than micro-batches": lambda: prepare(gl.gpipe(4, 9)),
    "unknown checkpoint mode": lambda: prepare(gl.gpipe(4, 4), checkpoint="sometimes"),
    "every 0 layers": lambda: prepare(gl.gpipe(4, 4), checkpoint="every:0"),
    "no checkpoint mode": lambda: prepare(gl.gpipe(4, 4), checkpoint=None),
    "a schedule for another P": lambda: prepare(gl.gpipe(3, 4)),
    "something else for a schedule": lambda: prepare("gpipe"),
    "recompute twice": lambda: prepare(gl.with_recompute(gl.gpipe(4, 4), "always"), checkpoint="always"),
    "infinite pace": lambda: gl.Pace(forward_ms=math.inf, backward_ms=1),
    "nan pace": lambda: gl.Pace(forward_ms=1, backward_ms=math.nan),
    "negative pace": lambda: gl.Pace(forward_ms=-1, backward_ms=1),
    "half a pace": lambda: gl.Pace(forward_ms=1),
    "pace of times and a rate": lambda: gl.Pace(forward_ms=1, backward_ms=1, flops_per_ms=1),
    "pace for other stages": lambda: prepare(gl.gpipe(4, 4), pace=gl.Pace(forward_ms=[1, 2], backward_ms=1)),
    "a number for a pace": lambda: prepare(gl.gpipe(4, 4), pace=10),
    "rows of no size": lambda: gl.Pace(forward_ms=1, backward_ms=1, rows=0),
    "targets of other length": lambda: prepare(gl.gpipe(4, 4), targets=X[:5]),
    "inputs that disagree": lambda: prepare(gl.gpipe(4, 4), inputs=(X, X[:5])),
    "inputs without rows": lambda: prepare(gl.gpipe(4, 4), inputs=3),
    "training without targets": lambda: prepare(gl.gpipe(4, 4), targets=None),
    "training without a loss": lambda: prepare(gl.gpipe(4, 4), loss=None),
    "loss that is no function": lambda: read_loss("mse"),
    "loss not reduced": lambda: read_loss(nn.MSELoss(reduction="none")),
    "unknown reduction": lambda: read_loss(F.mse_loss, loss_reduction="median"),
    "loss with weights to train": lambda: read_loss(LossWithWeights(4, 1)),
    "loss that is a sum but called a mean": lambda: read_loss(
        nn.MSELoss(reduction="sum"), loss_reduction="mean"
    ),
    "loss that is a mean but called a sum": lambda: read_loss(nn.MSELoss(), loss_reduction="sum"),
    "weights for a sum": lambda: read_loss(F.mse_loss, loss_reduction="sum", loss_weight=len),
    "a number for a weight": lambda: read_loss(F.mse_loss, loss_weight=2.0),
    "negative weight": lambda: read_loss(F.mse_loss, loss_weight=lambda t: -1.0).scales([X], (8,)),
    "nan weight": lambda: read_loss(F.mse_loss, loss_weight=lambda t: math.nan).scales([X], (8,)),
    "an array in a batch": lambda: prepare(gl.gpipe(4, 4), inputs={"x": X, "mask": X.numpy()}),
    "sequential with a forward of its own": lambda: cut(OwnForward(nn.Linear(4, 4)), 1),
    "sequential with a hook": lambda: cut(hooked(), 1),
    "a function for a layer": lambda: cut([nn.Linear(4, 4), lambda x: x], 1),
    "a class that needs arguments for a layer": lambda: cut([nn.Linear], 1),
    "lazy layer": lambda: cut([nn.LazyLinear(4)], 1),
    "a number for a partition": lambda: cut(LAYERS, 2, 2),
    "true for a pace": lambda: gl.Pace(forward_ms=True, backward_ms=1),
    "tensor for a pace": lambda: gl.Pace(forward_ms=torch.tensor(1.0), backward_ms=1),
    "link pace by stage": lambda: gl.Pace(forward_ms=1, backward_ms=1, link_ms=[1, 2]),
    "rate by stage": lambda: gl.Pace(flops_per_ms=[1, 2]),
    "model that is one module": lambda: cut(nn.Linear(4, 4), 1),
    "partition that drops a layer": lambda: cut(LAYERS, 2, [1, 2]),
    "partition with an empty stage": lambda: cut(LAYERS, 2, [4, 0]),
    "unknown partition": lambda: cut(LAYERS, 2, "best"),
    "no ranks": lambda: gl.Lab(0),
    "unknown device": lambda: gl.Lab(2, device="tpu"),
    "memory limit without a unit": lambda: gl.Lab(2, memory_limit="64"),
    "negative memory limit": lambda: parse_bytes(-1),
    "negative cost": lambda: gl.Costs(forward=-1),
    "mode for segments of unknown layers": lambda: gl.with_recompute(gl.gpipe(2, 2), "every:2"),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input_is_refused_with_a_rule(bad):
    with pytest.raises(gl.InputError) as caught:
        BAD[bad]()
    text = str(caught.value)
    assert text.startswith("rule:") and "got:" in text
    assert caught.value.rule and caught.value.got is not None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(gl.InputError, match="needs a GPU"):
        gl.Lab(2, device="cuda")


@pytest.mark.parametrize(
    ("text", "expected"),
    [("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("10b", 10), (7, 7), (None, None), ("2KiB", 2048)],
)
def test_sizes_are_read(text, expected):
    assert parse_bytes(text) == expected


def test_sizes_are_written():
    assert [format_bytes(n) for n in (10, 1536, 3 * 2**20, 2**31)] == ["10 B", "1.5 KiB", "3 MiB", "2 GiB"]
