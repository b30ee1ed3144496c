"""Training states in a folder: bitwise the same continuation, any number of stages, whole or not at all."""

import functools
import os
import random
import signal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gpipe_lab as gl

pytestmark = pytest.mark.slow

ADAM = functools.partial(torch.optim.AdamW, lr=0.05, betas=(0.8, 0.95))
MOMENTUM = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FALLING = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
LAYERS = 9


def make_model():
    torch.manual_seed(0)
    inner = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.2)) for _ in range(LAYERS - 3)]
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), *inner, nn.Linear(8, 3))


def make_batch(step, rows=12):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, 5, generator=generator), torch.randn(rows, 3, generator=generator)


def make_pipe(lab, *, seed=0, optimizer=ADAM, scheduler=FALLING, **options):
    return lab.pipeline(
        make_model(),
        loss_fn=F.mse_loss,
        optimizer=optimizer,
        scheduler=scheduler,
        max_norm=1.0,
        seed=seed,
        **options,
    )


def train(pipe, steps, num_microbatches=4):
    schedule = gl.one_f_one_b(pipe.num_stages, num_microbatches // pipe.num_replicas)
    return [pipe.step(schedule, *make_batch(step)).loss for step in steps]


def same(state, other):
    assert list(state) == list(other)
    return all(torch.equal(value, other[name]) for name, value in state.items())


@pytest.mark.parametrize(
    ("num_stages", "num_replicas", "optimizer"),
    [(1, 1, ADAM), (2, 1, ADAM), (4, 1, ADAM), (2, 2, ADAM), (2, 1, MOMENTUM)],
)  # fmt: skip
def test_a_resumed_training_goes_on_bitwise(lab_of, tmp_path, num_stages, num_replicas, optimizer):
    lab = lab_of(num_stages * num_replicas)
    options = {"num_replicas": num_replicas, "optimizer": optimizer}
    pipe = make_pipe(lab, **options)
    train(pipe, range(3))
    pipe.save_state(tmp_path / "state")
    losses = train(pipe, range(3, 6))

    resumed = make_pipe(lab, **options)  # its own weights are the ones from before the training
    resumed.load_state(tmp_path / "state")
    assert train(resumed, range(3, 6)) == losses
    assert same(resumed.state_dict(), pipe.state_dict())
    resumed.load_state(tmp_path / "state")  # and into a pipeline that has gone on
    assert train(resumed, range(3, 6)) == losses


def test_gradients_on_their_way_to_an_update_are_kept(lab_of, tmp_path):
    pipe = make_pipe(lab_of(2))
    train(pipe, range(1))
    x, y = make_batch(7)
    pipe.step(gl.gpipe(2, 3), x, y, update=False)
    pipe.save_state(tmp_path)
    resumed = make_pipe(lab_of(2))
    resumed.load_state(tmp_path)
    assert same(resumed.gradients(), pipe.gradients())
    runs = [p.step(gl.gpipe(2, 3), x, y) for p in (pipe, resumed)]
    assert runs[0].grad_norm == runs[1].grad_norm
    assert same(resumed.state_dict(), pipe.state_dict())
    resumed.save_state(tmp_path)  # after an update there are none
    pipe.load_state(tmp_path)
    assert pipe.gradients() == {}


@pytest.mark.parametrize(("num_stages", "num_replicas"), [(1, 1), (2, 1), (8, 1), (2, 2)])
def test_saved_at_four_stages_loaded_at_any_number(lab_of, tmp_path, num_stages, num_replicas):
    pipe = make_pipe(lab_of(4))
    train(pipe, range(2))
    pipe.save_state(tmp_path)
    saved = pipe.state_dict()
    losses = train(pipe, range(2, 5))
    other = make_pipe(lab_of(num_stages * num_replicas), num_replicas=num_replicas)
    other.load_state(tmp_path)
    assert same(other.state_dict(), saved)
    assert train(other, range(2, 5)) == pytest.approx(losses, rel=1e-5)


def test_weights_in_plain_torch(lab_of, tmp_path):
    pipe = make_pipe(lab_of(4))
    train(pipe, range(2))
    save = pipe.save_state(tmp_path / "state")
    model = make_model()
    model.load_state_dict(gl.load_weights(tmp_path / "state"))
    assert same(model.state_dict(), pipe.state_dict())
    dcp_to_torch_save(save, tmp_path / "state.pt")  # torch's own tool reads it too
    converted = torch.load(tmp_path / "state.pt", weights_only=False)
    assert converted["training"]["steps"] == 2
    assert converted["optimizer"]["0.weight"]["exp_avg"].shape == (8, 5)
    assert same({name: converted["weights"][name] for name in model.state_dict()}, model.state_dict())


class Head(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return F.linear(x, self.weight)


def tied_model(tied=True):
    torch.manual_seed(0)
    embedding = nn.Embedding(11, 8)
    head = Head(embedding.weight if tied else nn.Parameter(embedding.weight.detach().clone()))
    return nn.Sequential(embedding, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), head)


def test_a_tied_weight_is_saved_once(lab_of, tmp_path):
    ids = torch.arange(12) % 11
    options = {"loss_fn": F.cross_entropy, "optimizer": ADAM}
    pipe = lab_of(4).pipeline(tied_model(), **options)
    for _ in range(2):
        pipe.step(gl.gpipe(4, 3), ids, ids)
    save = pipe.save_state(tmp_path)
    dcp_to_torch_save(save, tmp_path / "state.pt")
    assert "4.weight" not in torch.load(tmp_path / "state.pt", weights_only=False)["weights"]
    weights = gl.load_weights(tmp_path)
    tied_model().load_state_dict(weights)
    assert same({name: weights[name] for name in pipe.state_dict()}, pipe.state_dict())
    losses = [pipe.step(gl.gpipe(4, 3), ids, ids).loss for _ in range(2)]
    for num_stages in (1, 2, 4):
        other = lab_of(num_stages).pipeline(tied_model(), **options)
        other.load_state(tmp_path)
        schedule = gl.gpipe(num_stages, 3)
        assert [other.step(schedule, ids, ids).loss for _ in range(2)] == pytest.approx(losses, rel=1e-5)
        state = other.state_dict()
        assert torch.equal(state["0.weight"], state["4.weight"])
    untied = lab_of(2).pipeline(tied_model(tied=False), **options)
    untied.load_state(tmp_path)
    assert same(untied.state_dict(), tied_model().state_dict() | {n: weights[n] for n in untied.state_dict()})
    untied.step(gl.gpipe(2, 3), ids, ids)  # from here the two weights differ
    untied.save_state(tmp_path)
    pipe.load_state(tmp_path)
    state = pipe.state_dict()
    assert torch.equal(state["0.weight"], state["4.weight"])


def by_decay(parameters):
    biases = [p for name, p in parameters if name.endswith("bias")]
    weights = [p for name, p in parameters if not name.endswith("bias")]
    return torch.optim.AdamW([{"params": weights}, {"params": biases, "weight_decay": 0.0}], lr=0.05)


def test_groups_of_an_optimizer_keep_their_settings(lab_of, tmp_path):
    pipe = make_pipe(lab_of(4), optimizer=by_decay)
    train(pipe, range(3))
    pipe.save_state(tmp_path)
    other = make_pipe(lab_of(2), optimizer=by_decay, scheduler=None)
    other.load_state(tmp_path)
    found = lab_of(2).launch(group_settings, other._key)
    assert found == [[(0.025, 0.01), (0.025, 0.0)]] * 2
    mixed = make_pipe(lab_of(2), scheduler=None)
    with pytest.raises(gl.InputError, match="saved with the same settings"):
        mixed.load_state(tmp_path)
    train(mixed, range(1))


def group_settings(context, key):
    groups = context.state[key].updates.optimizer.param_groups
    return [(group["lr"], group["weight_decay"]) for group in groups]


def die_before_the_index_is_written(context):
    """The next save gets all its data written on this rank, and then the process is gone."""
    from torch.distributed.checkpoint import FileSystemWriter

    if context.rank == 0:
        FileSystemWriter.finish = lambda self, metadata, results: os.kill(os.getpid(), signal.SIGKILL)


def die_while_writing(context):
    from torch.distributed.checkpoint import FileSystemWriter

    if context.rank == 1:
        FileSystemWriter.write_data = lambda self, plan, planner: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("crash", [die_before_the_index_is_written, die_while_writing])
def test_a_crash_in_the_middle_leaves_the_previous_save(lab_of, tmp_path, crash):
    lab = lab_of(2)
    pipe = make_pipe(lab)
    train(pipe, range(2))
    first = pipe.save_state(tmp_path)
    losses = train(pipe, range(2, 4))
    lab.launch(crash)
    with pytest.raises(gl.RankFailed, match="SIGKILL"):
        pipe.save_state(tmp_path)
    assert sorted(os.listdir(tmp_path)) == [first.name, "save-000001.part"]
    with pytest.raises(gl.PipelineLost):
        pipe.state_dict()
    pipe.load_state(tmp_path)  # brings it back
    assert train(pipe, range(2, 4)) == losses
    assert pipe.save_state(tmp_path).name == "save-000001"
    assert os.listdir(tmp_path) == ["save-000001"]


def test_a_rank_that_cannot_write_is_told(lab_of, tmp_path):
    def break_disk(context, broken):
        from torch.distributed.checkpoint import FileSystemWriter

        if broken:
            context.state["write_data"] = FileSystemWriter.write_data

            def full(self, plan, planner):
                raise OSError(28, "No space left on device")

            FileSystemWriter.write_data = full
        else:
            FileSystemWriter.write_data = context.state["write_data"]

    lab = lab_of(2)
    pipe = make_pipe(lab)
    pipe.save_state(tmp_path)
    lab.launch(break_disk, True)
    with pytest.raises(gl.RankFailed, match=r"could not be saved.*No space left on device"):
        pipe.save_state(tmp_path)
    pipe.load_state(tmp_path)  # on fresh workers, from the save that is left


def head_slower(parameters):
    """The first layer at a rate of its own, where it is: stages have other groups than each other."""
    first = [p for name, p in parameters if name.startswith("0.")]
    others = [p for name, p in parameters if not name.startswith("0.")]
    groups = [{"params": p, "lr": lr} for p, lr in ((first, 1.0), (others, 0.01)) if p]
    return torch.optim.SGD(groups, lr=0.1)


HALVING = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 0.5**step)
DROPPING = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1)
COSINE = functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10)


def one_after_the_other(optimizer):
    lr = torch.optim.lr_scheduler
    inner = [lr.LinearLR(optimizer, 0.5, total_iters=2), lr.CosineAnnealingLR(optimizer, T_max=8)]
    return lr.SequentialLR(optimizer, inner, milestones=[2])


def small_model(layers=4):
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(3, 3) for _ in range(layers)])


def small_step(pipe):
    x = torch.ones(4, 3)
    return pipe.step(gl.gpipe, x, 0.1 * x, num_microbatches=2)


def rates_in_one_process(optimizer, scheduler, steps, model):
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    made = optimizer(named)
    moves = scheduler(made)
    for _ in range(steps):
        made.step()
        moves.step()
    names = {id(p): name for name, p in named}
    return {names[id(p)]: group["lr"] for group in made.param_groups for p in group["params"]}


@pytest.mark.parametrize("scheduler", [HALVING, DROPPING, COSINE, one_after_the_other])
def test_each_weight_goes_on_at_its_own_rate_where_stages_group_them_differently(lab_of, tmp_path, scheduler):
    options = {"loss_fn": F.mse_loss, "optimizer": head_slower, "scheduler": scheduler}
    pipe = lab_of(2).pipeline(small_model(), **options)
    for _ in range(3):
        small_step(pipe)
    pipe.save_state(tmp_path)
    for num_stages in (2, 1, 4):
        resumed = lab_of(num_stages).pipeline(small_model(), **options)
        resumed.load_state(tmp_path)
        for steps in (3, 4):
            expected = rates_in_one_process(head_slower, scheduler, steps, small_model())
            assert resumed.learning_rates() == pytest.approx(expected, rel=1e-12), (num_stages, steps)
            small_step(resumed)
    if scheduler is HALVING:
        assert expected["0.weight"] == 1.0 * 0.5**4 and expected["1.weight"] == 0.01 * 0.5**4


@pytest.mark.parametrize("scheduler", [HALVING, DROPPING, COSINE, one_after_the_other])
@pytest.mark.parametrize("frozen", [(0,), (1, 3)])
def test_a_scheduler_goes_on_where_stages_have_nothing_to_train(lab_of, tmp_path, scheduler, frozen):
    sgd = functools.partial(torch.optim.SGD, lr=0.5)
    options = {"loss_fn": F.mse_loss, "optimizer": sgd, "scheduler": scheduler}

    def model():
        made = small_model()
        for layer in frozen:
            made[layer].requires_grad_(False)
        return made

    pipe = lab_of(4).pipeline(model(), **options)
    for _ in range(3):
        small_step(pipe)
    pipe.save_state(tmp_path)
    for num_stages in (4, 2):
        resumed = lab_of(num_stages).pipeline(model(), **options)
        resumed.load_state(tmp_path)
        for steps in (3, 4):
            expected = rates_in_one_process(sgd, scheduler, steps, model())
            assert resumed.learning_rates() == pytest.approx(expected, rel=1e-12), (num_stages, steps)
            small_step(resumed)


def test_what_is_not_there_is_refused(lab_of, tmp_path):
    pipe = make_pipe(lab_of(2))
    with pytest.raises(gl.InputError, match="a state is loaded from a folder"):
        pipe.load_state(tmp_path / "nowhere")
    with pytest.raises(gl.InputError, match="a state is loaded from a folder"):
        gl.load_weights(tmp_path)


@pytest.mark.parametrize(
    ("saved", "told"),
    [
        (lambda: small_model(2), "no 2.weight; no 2.bias"),
        (lambda: small_model(4), "3.weight, which the model has not; 3.bias, which the model has not"),
        (
            lambda: nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 3)),
            r"0.weight of shape \(4, 3\)",
        ),
    ],
)
def test_the_state_of_another_model_is_refused_and_the_pipeline_goes_on(lab_of, tmp_path, saved, told):
    lab_of(2).pipeline(saved()).save_state(tmp_path)
    pipe = lab_of(2).pipeline(small_model(3), loss_fn=F.mse_loss, optimizer=ADAM)
    small_step(pipe)
    before = pipe.state_dict()
    with pytest.raises(gl.InputError, match=told):
        pipe.load_state(tmp_path)
    assert same(pipe.state_dict(), before)
    small_step(pipe)


def test_an_optimizer_or_scheduler_of_another_kind_is_refused(lab_of, tmp_path):
    options = {"loss_fn": F.mse_loss, "optimizer": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)}
    pipe = lab_of(2).pipeline(small_model(), **options, scheduler=DROPPING)
    small_step(pipe)
    pipe.save_state(tmp_path)
    for changed in ({"optimizer": ADAM}, {"scheduler": COSINE}):
        other = lab_of(2).pipeline(small_model(), **options | {"scheduler": DROPPING} | changed)
        with pytest.raises(gl.InputError, match="one of its own kind") as caught:
            other.load_state(tmp_path)
        assert "saved, for torch.optim" in caught.value.got
        other.load_state_dict(gl.load_weights(tmp_path))  # the remedy
        assert same(other.state_dict(), pipe.state_dict())


def test_a_save_of_another_format_is_refused_but_for_its_weights(lab_of, tmp_path):
    lab = lab_of(2)
    pipe = lab.pipeline(small_model(), loss_fn=F.mse_loss, optimizer=ADAM)
    small_step(pipe)
    lab.launch(write_format, 1)
    pipe.save_state(tmp_path)
    lab.launch(write_format, 2)
    with pytest.raises(gl.InputError, match="in format 1"):
        pipe.load_state(tmp_path)
    assert same(gl.load_weights(tmp_path), pipe.state_dict())


def write_format(context, number):
    from gpipe_lab.engine import saving

    saving.FORMAT = number


class Counting(nn.Linear):
    """Keeps something in `state_dict` that is not a tensor."""

    seen = 0

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


def test_what_a_layer_adds_to_its_state_is_kept(lab_of, tmp_path):
    model = nn.Sequential(Counting(3, 3), nn.Linear(3, 3), Counting(3, 3))
    model[2].seen = 5
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss, optimizer=ADAM)
    assert pipe.state_dict()["2._extra_state"] == {"seen": 5}
    small_step(pipe)
    pipe.save_state(tmp_path / "state")
    pipe.save(tmp_path / "weights.pt")
    for load in (lambda p: p.load_state(tmp_path / "state"), lambda p: p.load(tmp_path / "weights.pt")):
        fresh = nn.Sequential(Counting(3, 3), nn.Linear(3, 3), Counting(3, 3))
        other = lab_of(2).pipeline(fresh, loss_fn=F.mse_loss)
        load(other)
        assert other.state_dict()["2._extra_state"] == {"seen": 5}
    plain = nn.Sequential(Counting(3, 3), nn.Linear(3, 3), Counting(3, 3))
    plain.load_state_dict(gl.load_weights(tmp_path / "state"))
    assert plain[2].seen == 5


def test_a_state_without_an_optimizer_sets_the_weights_alone(lab_of, tmp_path):
    plain = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss)
    plain.save_state(tmp_path)
    pipe = make_pipe(lab_of(2))
    train(pipe, range(2))
    pipe.load_state(tmp_path)
    assert same(pipe.state_dict(), plain.state_dict())
    plain.load_state(tmp_path)


class OwnNoise(nn.Linear):
    """Draws from generators of its own, of every kind."""

    def __init__(self):
        super().__init__(3, 3)
        self.torch, self.plain, self.numpy = torch.Generator(), random.Random(0), np.random.default_rng(0)

    def forward(self, x):
        noise = torch.rand(3, generator=self.torch) + self.plain.random() + self.numpy.random()
        return super().forward(x) + noise


@pytest.mark.parametrize(("before", "after", "num_replicas"), [(2, 2, 1), (2, 1, 1), (4, 4, 2)])
def test_a_layers_own_random_numbers_go_on(lab_of, tmp_path, before, after, num_replicas):
    def pipe_of(num_ranks):
        torch.manual_seed(0)
        model = nn.Sequential(OwnNoise(), OwnNoise())
        return lab_of(num_ranks).pipeline(
            model, loss_fn=F.mse_loss, optimizer=ADAM, num_replicas=num_replicas
        )

    pipe = pipe_of(before)
    for _ in range(2):
        small_step(pipe)
    pipe.save_state(tmp_path)
    losses = [small_step(pipe).loss for _ in range(2)]
    resumed = pipe_of(after)
    resumed.load_state(tmp_path)
    assert [small_step(resumed).loss for _ in range(2)] == losses
