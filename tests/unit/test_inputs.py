"""Bad input is refused with its rule, what was given, where, and a remedy, before a process starts."""

import inspect
import math
import warnings
from collections import UserDict, deque
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.loss import read_loss
from gpipe_lab.engine.stage import StepContext
from gpipe_lab.lab.model import cut
from gpipe_lab.lab.options import ModelOptions, StepOptions
from gpipe_lab.lab.step import prepare_step
from gpipe_lab.plan.units import format_bytes, parse_bytes

X = torch.randn(8, 4)
LAYERS = [nn.Linear(4, 4) for _ in range(4)]


def prepare(schedule, *, inputs=X, targets=X, loss_fn=F.mse_loss, **options):
    return prepare_step(
        schedule,
        inputs,
        targets,
        num_ranks=4,
        layers_per_stage=[1] * 4,
        loss=ModelOptions(loss_fn=loss_fn).loss_rule(),
        context=StepContext(),
        options=StepOptions(**options),
    )


def test_what_is_right_is_accepted():
    assert len(prepare(gl.gpipe(4, 8)).jobs) == 4


class OwnForward(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + x


def hooked():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_forward_hook(lambda module, inputs, output: output + 1)
    return model


@dataclass
class Sample:
    x: torch.Tensor


def jagged():
    return torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)


def under_autocast():
    with torch.autocast("cpu"):
        prepare(gl.gpipe(4, 4))


class Summed(nn.Module):
    reduction = "sum"

    def forward(self, output, target):
        return (output - target).square().sum()


class Reshaping(nn.CrossEntropyLoss):
    def forward(self, output, target):
        return super().forward(output.flatten(0, 1), target.flatten())


def summed(output, target, reduction):
    return F.mse_loss(output, target, reduction=reduction)


def hooked_backward():
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_full_backward_hook(lambda module, grads, others: None)
    return model


def with_hook(register):
    layer = nn.Linear(4, 4)
    getattr(layer.weight, register)(lambda tensor: None)
    return [layer]


class Keeping(nn.Linear):
    def __init__(self, kept):
        super().__init__(4, 4)
        self.kept = kept


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
    "training without a loss": lambda: prepare(gl.gpipe(4, 4), loss_fn=None),
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
    "a dataclass for inputs": lambda: prepare(gl.gpipe(4, 4), inputs=Sample(X)),
    "a dataclass for targets": lambda: prepare(gl.gpipe(4, 4), targets=Sample(X)),
    "a mapping that is no dict": lambda: prepare(gl.gpipe(4, 4), inputs=UserDict(x=X)),
    "an object within a batch": lambda: prepare(gl.gpipe(4, 4), inputs=(X, SimpleNamespace(mask=X))),
    "a set of tensors": lambda: prepare(gl.gpipe(4, 4), inputs=(X, {X})),
    "a jagged tensor": lambda: prepare(gl.gpipe(4, 4), inputs=jagged()),
    "a sparse tensor": lambda: prepare(gl.gpipe(4, 4), inputs=X.to_sparse()),
    "inputs without values": lambda: prepare(gl.gpipe(4, 4), inputs=X.to("meta")),
    "inputs that are whole alone": lambda: prepare(gl.gpipe(4, 4), inputs=gl.whole(X)),
    "a step under autocast": under_autocast,
    "a sum of one's own that does not say so": lambda: read_loss(Summed()),
    "a part of a function with another reduction": lambda: read_loss(partial(summed, reduction="sum")),
    "a loss derived from torch's": lambda: read_loss(Reshaping()),
    "sequential with a forward of its own": lambda: cut(OwnForward(nn.Linear(4, 4)), 1),
    "sequential with a hook": lambda: cut(hooked(), 1),
    "sequential with a backward hook": lambda: cut(hooked_backward(), 1),
    "weights with a hook": lambda: cut(with_hook("register_hook"), 1),
    "weights with a hook for when they have gradients": lambda: cut(
        with_hook("register_post_accumulate_grad_hook"), 1
    ),
    "weights without values": lambda: cut([nn.Linear(4, 4, device="meta")], 1),
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
    "float16 under autocast": lambda: ModelOptions(autocast=torch.float16),
    "a scheduler alone": lambda: ModelOptions(scheduler=torch.optim.lr_scheduler.StepLR),
    "no replicas": lambda: ModelOptions(num_replicas=0),
    "a norm of nothing": lambda: ModelOptions(max_norm=0),
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


def test_options_are_keywords_of_the_functions_that_take_them():
    shown = inspect.signature(gl.Lab.run).parameters
    assert list(shown)[:5] == ["self", "schedule", "model", "inputs", "targets"]
    assert {"warmup", "loss_fn", "checkpoint", "num_replicas", "strict"} < set(shown)
    assert not {"options", "optimizer", "stage_to_rank"} & set(shown), "a run keeps nothing, nor learns"
    assert shown["checkpoint"].default == "never" and shown["checkpoint"].kind.name == "KEYWORD_ONLY"
    assert {"optimizer", "stage_to_rank"} < set(inspect.signature(gl.Lab.pipeline).parameters)
    for name, parameter in shown.items():
        assert parameter.kind.name != "KEYWORD_ONLY" or f"{name}" in gl.Lab.run.__doc__
    assert "optimizer" not in gl.Lab.run.__doc__ and "optimizer: a" in gl.Lab.pipeline.__doc__


def test_a_misspelt_option_is_refused_before_anything_runs():
    with pytest.raises(TypeError, match="'chekpoint'; did you mean 'checkpoint'"):
        gl.Lab.run(None, gl.gpipe(4, 4), LAYERS, X, X, chekpoint="always")
    with pytest.raises(TypeError, match="'optimizer'"):
        gl.Lab.run(None, gl.gpipe(4, 4), LAYERS, X, X, optimizer=torch.optim.SGD)


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


class Segmentation(nn.Module):
    """A mean over rows of one's own, with names that torch's losses have too."""

    def __init__(self):
        super().__init__()
        self.ignore_index, self.weight, self.reduction = 0, torch.tensor([1.0, 5.0]), "mean"


TARGETS = [torch.tensor([0, 0, 1]), torch.tensor([1, 1])]


@pytest.mark.parametrize(
    ("loss", "options", "scales"),
    [
        (Segmentation(), {}, [0.6, 0.4]),
        (partial(lambda output, target, ignore_index: output, ignore_index=0), {}, [0.6, 0.4]),
        (nn.CrossEntropyLoss(ignore_index=0), {}, [1 / 3, 2 / 3]),
        (partial(F.cross_entropy, ignore_index=0), {}, [1 / 3, 2 / 3]),
        (nn.NLLLoss(weight=torch.tensor([1.0, 5.0])), {}, [7 / 17, 10 / 17]),
        (Reshaping(ignore_index=0), {"loss_weight": lambda target: (target != 0).sum()}, [1 / 3, 2 / 3]),
        (Reshaping(), {"loss_reduction": "mean"}, [0.6, 0.4]),
        (Summed(), {"loss_reduction": "sum"}, [1.0, 1.0]),
    ],
)
def test_only_torchs_own_losses_are_read(loss, options, scales):
    assert read_loss(loss, **options).scales(TARGETS, (3, 2)) == pytest.approx(scales, rel=1e-15)


def test_a_part_without_rows_goes_whole_to_every_microbatch():
    mask, table = torch.ones(8, 8).tril().bool(), torch.arange(3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        job = prepare(gl.gpipe(4, 4), inputs=(X, gl.whole({"mask": mask, "table": table}))).jobs[0]
    for m, (x, rest) in job.inputs.items():
        assert torch.equal(x, X[2 * m : 2 * m + 2])
        assert torch.equal(rest["mask"], mask) and torch.equal(rest["table"], table)


@pytest.mark.parametrize("mask", [torch.ones(8, 8).tril().bool(), torch.zeros(8, 8)])
def test_a_square_as_long_as_the_batch_is_warned_of(mask):
    with pytest.warns(UserWarning, match=r"gl.whole\(mask\)"):
        prepare(gl.gpipe(4, 4), inputs=(X, mask))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepare(gl.gpipe(4, 4), inputs=mask.float())  # the only tensor has the rows
        prepare(gl.gpipe(4, 4), inputs=(X, mask.long()))  # ids, say
        prepare(gl.gpipe(4, 1), inputs=(X, mask))  # nothing is cut


@pytest.mark.parametrize("make", [dict, list, set, deque, bytearray, lambda: ({},), lambda: {"inner": []}])
def test_a_container_that_two_stages_share_is_refused(make):
    kept = make()
    with pytest.raises(gl.InputError, match="share nothing that can be changed") as caught:
        cut([Keeping(kept), nn.Tanh(), Keeping(kept)], 3)
    assert "of stage 0" in caught.value.got and "of stage 2" in caught.value.got
    cut([Keeping(kept), Keeping(kept), nn.Tanh()], 2)  # on one stage it is one object
    cut([Keeping(make()), Keeping(make())], 2)


def test_what_cannot_be_changed_or_has_always_been_shared_is_not_refused():
    conv = nn.Conv2d(3, 3, 3, padding="same")  # has a list of its own
    layer = Keeping([])
    for layers in (
        [Keeping((1, "a")), Keeping((1, "a"))],
        [conv, conv],
        [layer, layer],
        [Keeping(print)] * 2,
    ):
        cut(layers, 2)
    with pytest.raises(gl.InputError, match="running statistics"):
        cut([nn.utils.spectral_norm(nn.Linear(4, 4))] * 2, 2)
    cut([nn.utils.spectral_norm(nn.Linear(4, 4)).eval()] * 2, 2)
