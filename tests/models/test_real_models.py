"""Models that other people wrote, from their configurations: equal to one process, however they are cut."""

import functools
from contextlib import nullcontext
from importlib.util import find_spec
from itertools import cycle

import pytest
import torch
from torch import nn

import gpipe_lab as gl
from tests.comparing import distance

for package in ("transformers", "torchvision"):
    if find_spec(package) is None:
        pytest.skip(
            f"{package} is missing: pip install -r tests/models/requirements.txt", allow_module_level=True
        )

from .real import IGNORED, MODELS, make  # noqa: E402

pytestmark = pytest.mark.slow

NUM_MICROBATCHES, NUM_STEPS, MAX_NORM = 4, 3, 0.1
SCHEDULES = [name for name in gl.SCHEDULES if name != "forward_only"]
MODES = ["never", "always", "except_last", "every:1"]
LOSS = nn.CrossEntropyLoss(ignore_index=IGNORED)
# The gradient of a key's bias is rounding alone, which a smaller eps would blow up to a whole step.
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-3)


@pytest.fixture(scope="module")
def lab():
    with gl.Lab(2, device="cpu") as lab:
        yield lab


def named(layers):
    """The weights as a pipeline names them."""
    return dict(nn.Sequential(*layers).named_parameters())


def parts(tree):
    """The micro-batches of a batch, as plain torch cuts it."""
    if isinstance(tree, tuple):
        return list(zip(*map(parts, tree), strict=True))
    return tree.chunk(NUM_MICROBATCHES)


def on_one_process(real, autocast):
    """The model itself, its micro-batches one after the other; yields the loss, having set the gradients."""
    targets = parts(real.targets)
    counted = [(target != IGNORED).sum() for target in targets]
    total = 0.0
    for inputs, target, count in zip(parts(real.inputs), targets, counted, strict=True):
        with torch.autocast("cpu", dtype=autocast) if autocast else nullcontext():
            loss = LOSS(real.call(inputs), target) * (count / sum(counted))
        loss.backward()
        total += loss.item()
    return total


@functools.lru_cache(maxsize=1)
def trained(name, autocast):
    """What three steps of one process give: losses, the first's gradients, and the weights at the end."""
    real = make(name)
    weights = named(real.layers)
    optimizer = OPTIMIZER(list(weights.items()))
    losses = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        losses.append(on_one_process(real, autocast))
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in weights.items()}
        torch.nn.utils.clip_grad_norm_(weights.values(), MAX_NORM)
        optimizer.step()
    return losses, gradients, {name: p.detach() for name, p in weights.items()}


def moved(weights, name):
    """How far training has brought the weights: what of them is to be compared, small as it is."""
    return {key: weights[key] - p.detach() for key, p in named(make(name).layers).items()}


# Every schedule with every model, and in turn every mode; the other precision starts with another mode.
CASES = [
    (name, schedule, mode, autocast)
    for name in MODELS
    for offset, autocast in ((0, None), (1, torch.bfloat16))
    for schedule, mode in zip(SCHEDULES, cycle(MODES[offset:] + MODES[:offset]), strict=False)
]


@pytest.mark.parametrize("name, schedule, mode, autocast", CASES)
def test_three_steps_equal_one_process(lab, name, schedule, mode, autocast):
    losses, gradients, weights = trained(name, autocast)
    real = make(name)
    plan = gl.SCHEDULES[schedule](2, NUM_MICROBATCHES)
    pipe = lab.pipeline(
        real.layers,
        loss_fn=LOSS,
        optimizer=OPTIMIZER,
        max_norm=MAX_NORM,
        stage_to_rank=plan,
        autocast=autocast,
    )
    far = 1e-4 if autocast is None else 0.02
    first = pipe.step(plan, real.inputs, real.targets, update=False, checkpoint=mode)
    assert distance(pipe.gradients(), gradients) <= far
    assert first.loss == pytest.approx(losses[0], rel=far)
    pipe.zero_grad()
    for loss in losses:
        run = pipe.step(plan, real.inputs, real.targets, checkpoint=mode)
        assert run.loss == pytest.approx(loss, rel=far)
    state = pipe.state_dict()
    found = {key: state[key] for key in weights}
    assert distance(moved(found, name), moved(weights, name)) <= far
