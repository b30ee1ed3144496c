"""A pipeline whose weights stay on the workers: training, accumulating, evaluating, saving."""

import functools
import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl

SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAM = functools.partial(torch.optim.AdamW, lr=0.01)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(8)]).double()


def make_batch(rows=10, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, 6, generator=generator, dtype=torch.float64) for _ in range(2))


def train_in_one_process(model, make_optimizer, num_steps, max_norm=None, make_scheduler=None):
    optimizer = make_optimizer(model.named_parameters())
    scheduler = make_scheduler(optimizer) if make_scheduler else None
    losses = []
    for step in range(num_steps):
        x, y = make_batch(seed=step)
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        if scheduler:
            scheduler.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@pytest.mark.parametrize("make", [gl.naive, gl.gpipe, gl.one_f_one_b])
@pytest.mark.parametrize("optimizer", [SGD, ADAM], ids=["sgd", "adamw"])
def test_training_equals_one_process(lab_of, make, optimizer):
    losses, state = train_in_one_process(make_model(), optimizer, 5)
    for num_stages in (1, 2, 4):
        pipe = lab_of(num_stages).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=optimizer)
        mine = [pipe.step(make(num_stages, 4), *make_batch(seed=step)).loss for step in range(5)]
        assert mine == pytest.approx(losses, rel=1e-11)
        assert list(pipe.state_dict()) == list(state)
        for name, value in pipe.state_dict().items():
            assert torch.allclose(value, state[name], rtol=1e-10, atol=1e-12), name


@pytest.mark.parametrize(
    "make", [gl.interleaved, gl.zero_bubble_v, gl.dualpipe_v], ids=lambda make: make.__name__
)
def test_schedules_with_several_stages_on_a_rank_train_too(lab_of, make, tmp_path):
    losses, state = train_in_one_process(make_model(), ADAM, 4)
    schedule = make(2, 4)
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=ADAM, stage_to_rank=schedule)
    mine = [pipe.step(schedule, *make_batch(seed=step)).loss for step in range(3)]
    pipe.save_state(tmp_path / "state")
    again = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=ADAM, stage_to_rank=schedule)
    again.load_state(tmp_path / "state")
    mine.append(again.step(make, *make_batch(seed=3), num_microbatches=4).loss)
    assert mine == pytest.approx(losses, rel=1e-11)
    assert list(again.state_dict()) == list(state)
    for name, value in again.state_dict().items():
        assert torch.allclose(value, state[name], rtol=1e-10, atol=1e-12), name
    x, y = make_batch()
    alone = make_model()
    alone.load_state_dict(again.state_dict())
    assert torch.allclose(again.predict(x, num_microbatches=3), alone(x), rtol=1e-12)
    pipe.load_state_dict(again.state_dict())
    assert pipe.evaluate(x, y) == pytest.approx(F.mse_loss(alone(x), y).item(), rel=1e-12)


def test_a_schedule_with_its_stages_elsewhere_is_refused(lab_of):
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    with pytest.raises(gl.InputError, match=r"stage_to_rank=schedule"):
        pipe.step(gl.interleaved(2, 4), *make_batch())
    with pytest.raises(gl.InputError, match="a stage for every rank"):
        lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, stage_to_rank=(0, 2))


def test_clipping_uses_the_norm_over_all_stages_and_schedulers_step(lab_of):
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)
    losses, state = train_in_one_process(make_model(), SGD, 5, max_norm=0.01, make_scheduler=halve)
    pipe = lab_of(4).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD, scheduler=halve, max_norm=0.01)
    runs = [pipe.step(gl.gpipe(4, 3), *make_batch(seed=step)) for step in range(5)]
    assert [run.loss for run in runs] == pytest.approx(losses, rel=1e-11)
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, state[name], rtol=1e-10, atol=1e-12)
    assert runs[0].grad_norm > 0.01


def test_gradients_below_the_limit_are_left_as_they_are(lab_of):
    plain, clipped = (
        lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD, max_norm=max_norm)
        for max_norm in (None, 1e6)
    )
    for pipe in (plain, clipped):
        pipe.step(gl.gpipe(2, 3), *make_batch())
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in clipped.state_dict().items())


def test_a_scheduler_moves_by_epoch_where_that_is_asked_for(lab_of):
    lr = torch.optim.lr_scheduler
    halve = functools.partial(lr.StepLR, step_size=1, gamma=0.5)
    options = {"loss_fn": F.mse_loss, "optimizer": SGD, "scheduler_per": "epoch"}
    pipe = lab_of(2).pipeline(make_model(), scheduler=halve, **options)
    for epoch in range(3):
        for _ in range(2):
            pipe.step(gl.gpipe(2, 2), *make_batch())
            assert set(pipe.learning_rates().values()) == {0.1 * 0.5**epoch}
        pipe.scheduler_step()
    plateau = functools.partial(lr.ReduceLROnPlateau, factor=0.1, patience=0)
    pipe = lab_of(2).pipeline(make_model(), scheduler=plateau, **options)
    found = []
    for metric in (3.0, 2.0, 2.5, 1.0):
        pipe.scheduler_step(metric)
        found.append(pipe.learning_rates()["0.0.weight"])
    assert found == pytest.approx([0.1, 0.1, 0.01, 0.01], rel=1e-12)
    with pytest.raises(gl.InputError, match="is given one"):
        pipe.scheduler_step()
    for refused in (
        lambda: lab_of(2).pipeline(make_model(), optimizer=SGD, scheduler=halve).scheduler_step(),
        lambda: lab_of(2).pipeline(make_model(), optimizer=SGD).scheduler_step(),
        lambda: lab_of(2).pipeline(make_model(), optimizer=SGD, scheduler_per="batch"),
    ):
        with pytest.raises(gl.InputError, match='scheduler_per="epoch"'):
            refused()


def test_a_learning_rate_set_in_mid_training(lab_of):
    model = make_model()
    optimizer = SGD(model.parameters())
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    for step, lr in enumerate((0.1, 0.1, 0.02, 0)):
        pipe.set_lr(lr)
        for group in optimizer.param_groups:
            group["lr"] = lr
        x, y = make_batch(seed=step)
        pipe.step(gl.gpipe(2, 2), x, y)
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()
        assert set(pipe.learning_rates().values()) == {lr}
    for name, value in pipe.state_dict().items():
        assert torch.allclose(value, model.state_dict()[name], rtol=1e-10, atol=1e-12)
    for wrong in (-1.0, float("nan"), "0.1"):
        with pytest.raises(gl.InputError, match="a learning rate is a number"):
            pipe.set_lr(wrong)
    with pytest.raises(gl.InputError, match="an optimizer's"):
        lab_of(2).pipeline(make_model()).set_lr(0.1)


class Attending(nn.Module):
    """Mixes the positions of a row as a (T, T) mask allows, and hands the mask on."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, inputs):
        x, mask = inputs
        return self.linear(torch.softmax(mask + 0.0, -1) @ x), mask


def first_of(outputs, targets):
    return F.mse_loss(outputs[0], targets)


def test_a_mask_as_long_as_the_batch_reaches_every_microbatch_whole(lab_of):
    rows = 4
    x, y = torch.randn(rows, rows, 6).double(), torch.randn(rows, rows, 6).double()
    mask = torch.full((rows, rows), float("-inf")).triu(1).double()
    model = nn.Sequential(Attending(), Attending())
    first_of(model((x, mask)), y).backward()
    run = lab_of(2).run(gl.gpipe(2, 4), model, (x, gl.whole(mask)), y, loss_fn=first_of, warmup=False)
    for name, parameter in model.named_parameters():
        assert torch.allclose(run.gradients()[name], parameter.grad, rtol=1e-11), name
    pipe = lab_of(2).pipeline(model)
    found, _ = pipe.predict((x, gl.whole(mask)), num_microbatches=1)
    assert torch.allclose(found, model((x, mask))[0], rtol=1e-12)
    assert len(lab_of(2).profile(model, (x[:1], gl.whole(mask))).layers) == 2


class WithPenalty(nn.Module):
    """Returns an auxiliary loss beside its activations, added to what came in."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, inputs):
        x, penalty = inputs if isinstance(inputs, tuple) else (inputs, 0.0)
        x = self.linear(x)
        return x, penalty + x.square().mean()


def with_penalty(outputs, targets):
    return F.mse_loss(outputs[0], targets) + 0.1 * outputs[1]


def test_outputs_of_a_training_step_and_a_loss_of_inner_layers(lab_of):
    model = nn.Sequential(WithPenalty(), WithPenalty())
    x, y = make_batch(8)
    outputs, penalty = model(x)
    with_penalty((outputs, penalty), y).backward()
    pipe = lab_of(2).pipeline(model, loss_fn=with_penalty)
    for checkpoint in ("never", "always"):
        pipe.zero_grad()
        run = pipe.step(gl.gpipe(2, 4), x, y, update=False, outputs=True, checkpoint=checkpoint)
        found, penalties = run.outputs()
        assert torch.allclose(found, outputs, rtol=1e-12)
        assert penalties.shape == (4,) and penalties.mean().item() == pytest.approx(penalty.item(), rel=1e-12)
        for name, parameter in model.named_parameters():
            assert torch.allclose(pipe.gradients()[name], parameter.grad, rtol=1e-11), name
    run = lab_of(2).run(gl.gpipe(2, 4), model, x, y, loss_fn=with_penalty, outputs=True, repeats=2)
    assert torch.allclose(run.outputs()[0], outputs, rtol=1e-12)
    found, penalties = pipe.predict(x, num_microbatches=2)
    assert penalties.tolist() == pytest.approx([model(half)[1].item() for half in x.split(4)], rel=1e-12)
    run = pipe.step(gl.gpipe(2, 4), x, y, update=False)
    with pytest.raises(gl.InputError, match="outputs=True"):
        run.outputs()
    with pytest.raises(gl.InputError, match=r"pipe\.gradients\(\)"):
        run.gradients()


def test_under_autocast_and_without_gradients(lab_of):
    x, y = make_batch()
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss)
    expected = pipe.predict(x)
    with torch.autocast("cpu", torch.bfloat16):
        for refused in (
            lambda: lab_of(2).run(gl.gpipe(2, 2), make_model(), x, y, loss_fn=F.mse_loss, warmup=False),
            lambda: pipe.step(gl.gpipe(2, 2), x, y, update=False),
            lambda: pipe.predict(x),
            lambda: lab_of(2).profile(make_model(), x),
        ):
            with pytest.raises(gl.InputError, match=r"autocast=torch\.bfloat16"):
                refused()
    pipe.step(gl.gpipe(2, 2), x, y, update=False)
    gradients = pipe.gradients()
    for context in (torch.no_grad, torch.inference_mode):
        pipe.zero_grad()
        with context():
            assert torch.equal(pipe.predict(x.clone()), expected)
            pipe.step(gl.gpipe(2, 2), x.clone(), y.clone(), update=False)
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in pipe.gradients().items())


def test_two_steps_without_zeroing_give_exactly_twice_one(lab_of):
    pipe = lab_of(3).pipeline(make_model(), loss_fn=F.mse_loss)
    x, y = make_batch()
    for schedule in (gl.gpipe(3, 4), gl.one_f_one_b(3, 4)):
        pipe.zero_grad()
        pipe.step(schedule, x, y, update=False)
        once = pipe.gradients()
        pipe.step(schedule, x, y, update=False)
        twice = pipe.gradients()
        assert all(torch.equal(twice[name], 2 * g) for name, g in once.items())


def test_after_an_update_the_next_step_starts_from_zero(lab_of):
    frozen = functools.partial(torch.optim.SGD, lr=0.0)
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=frozen)
    x, y = make_batch()
    pipe.step(gl.gpipe(2, 2), x, y)
    once = pipe.gradients()
    pipe.step(gl.gpipe(2, 2), x, y)
    assert all(torch.equal(pipe.gradients()[name], g) for name, g in once.items())


def test_train_evaluate_predict_in_any_order(lab_of):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6), nn.Dropout(0.5)).double()
    x, y = make_batch()
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss, optimizer=SGD)
    model.eval()
    with torch.no_grad():
        assert pipe.evaluate(x, y, num_microbatches=3) == pytest.approx(
            F.mse_loss(model(x), y).item(), rel=1e-12
        )
    first = pipe.step(gl.gpipe(2, 2), x, y, update=False).loss
    pipe.zero_grad()
    model.load_state_dict(pipe.state_dict())
    with torch.no_grad():
        assert torch.allclose(pipe.predict(x, num_microbatches=4), model(x), rtol=1e-12)
    other = lab_of(2).pipeline(model.train(), loss_fn=F.mse_loss, optimizer=SGD)
    assert other.step(gl.gpipe(2, 2), x, y).loss == first  # an evaluation between changes nothing


def test_a_layer_that_was_given_in_evaluation_mode_stays_in_it(lab_of):
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6)).double()
    x, y = make_batch()
    model[1].eval()
    pipe = lab_of(2).pipeline(model, loss_fn=F.mse_loss)
    for _ in range(2):
        assert pipe.step(gl.gpipe(2, 2), x, y, update=False).loss == pytest.approx(
            pipe.evaluate(x, y), rel=1e-12
        )


def test_batches_of_changing_size(lab_of):
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss)
    for rows in (8, 5, 8, 13, 5):
        x, y = make_batch(rows)
        model = make_model()
        F.mse_loss(model(x), y).backward()
        pipe.zero_grad()
        pipe.step(gl.gpipe(2, 4), x, y, update=False)
        for name, parameter in model.named_parameters():
            assert torch.allclose(pipe.gradients()[name], parameter.grad, rtol=1e-10)


def test_saved_from_four_stages_loaded_into_any_and_into_torch(lab_of, tmp_path):
    pipe = lab_of(4).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    x, y = make_batch()
    pipe.step(gl.gpipe(4, 2), x, y)
    path = pipe.save(tmp_path / "weights.pt")
    assert os.listdir(tmp_path) == ["weights.pt"]
    saved = pipe.state_dict()
    expected = pipe.evaluate(x, y)
    plain = make_model()
    plain.load_state_dict(torch.load(path, weights_only=True))
    assert F.mse_loss(plain(x), y).item() == pytest.approx(expected, rel=1e-12)
    for num_stages in (1, 2, 8):
        other = lab_of(num_stages).pipeline(make_model(), loss_fn=F.mse_loss)
        other.load(path)
        assert all(torch.equal(value, saved[name]) for name, value in other.state_dict().items())
        assert other.evaluate(x, y) == pytest.approx(expected, rel=1e-12)


class FailsOnce(nn.Module):
    def forward(self, x):
        if (x > 100).any():
            raise ValueError("too large")
        return x


def test_after_a_failure_the_pipeline_is_lost_until_reloaded():
    with gl.Lab(2, device="cpu") as lab:
        model = nn.Sequential(nn.Linear(6, 6), FailsOnce(), nn.Linear(6, 6)).double()
        pipe = lab.pipeline(model, loss_fn=F.mse_loss, optimizer=SGD)
        x, y = make_batch()
        pipe.step(gl.gpipe(2, 2), x, y)
        state = pipe.state_dict()
        with pytest.raises(gl.RankFailed, match="too large"):
            pipe.step(gl.gpipe(2, 2), x + 1e6, y)
        for use in (pipe.gradients, pipe.state_dict, pipe.zero_grad, lambda: pipe.step(gl.gpipe(2, 2), x, y)):
            with pytest.raises(gl.PipelineLost, match="remedy"):
                use()
        pipe.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())
        pipe.step(gl.gpipe(2, 2), x, y)


def test_two_pipelines_on_one_lab_do_not_mix(lab_of):
    lab = lab_of(2)
    x, y = make_batch()
    first = lab.pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    second = lab.pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    first.step(gl.gpipe(2, 2), x, y)
    lab.run(gl.gpipe(2, 2), make_model(), x, y, loss_fn=F.mse_loss, warmup=False)
    initial = make_model().state_dict()
    assert all(torch.equal(value, initial[name]) for name, value in second.state_dict().items())
    del first
    second.step(gl.gpipe(2, 2), x, y)


def test_a_state_of_another_model_is_refused_and_the_pipeline_goes_on(lab_of):
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss)
    state = pipe.state_dict()
    missing = {name: value for name, value in state.items() if name != "7.0.bias"}
    for wrong, told in [
        (state | {"8.0.bias": torch.zeros(6)}, "8.0.bias, which the model has not"),
        (missing, "no 7.0.bias"),
        (state | {"0.0.weight": torch.zeros(2, 2)}, r"0.0.weight of shape \(2, 2\)"),
    ]:
        with pytest.raises(gl.InputError, match=told):
            pipe.load_state_dict(wrong)
    assert all(torch.equal(value, state[name]) for name, value in pipe.state_dict().items())


def test_a_save_that_fails_leaves_no_file(tmp_path):
    with gl.Lab(2, device="cpu") as lab:
        pipe = lab.pipeline(make_model(), loss_fn=F.mse_loss)
        pipe.save(tmp_path / "whole")
        lab.resize(1)
        with pytest.raises(gl.PipelineLost):
            pipe.save(tmp_path / "lost")
    assert os.listdir(tmp_path) == ["whole"]
    (tmp_path / "other").touch()
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "other").stat().st_mode


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "sgd"},
        {"optimizer": SGD, "scheduler": 3},
        {"scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2)},
        {"max_norm": "1"},
    ],
)
def test_what_makes_no_optimizer_is_refused(lab_of, options):
    with pytest.raises(gl.InputError):
        lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, **options)


class NeedsClosure(torch.optim.SGD):
    def step(self, closure):
        return closure()


KNOWN = [  # without a call, from the class
    {"optimizer": torch.optim.LBFGS},
    {"optimizer": functools.partial(torch.optim.LBFGS, lr=0.1)},
    {"optimizer": functools.partial(NeedsClosure, lr=0.1)},
    {"optimizer": nn.Linear},
    {"optimizer": SGD, "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau},
    {
        "optimizer": SGD,
        "scheduler": functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=2),
    },
]
FOUND_BY_A_RANK = [
    {"optimizer": lambda named: torch.optim.LBFGS([p for _, p in named])},
    {"optimizer": lambda named: NeedsClosure(named, lr=0.1)},
    {"optimizer": lambda named: None},
    {"optimizer": SGD, "scheduler": lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)},
]


@pytest.mark.parametrize("options", KNOWN)
def test_an_optimizer_whose_step_needs_more_is_refused_before_a_process_works(lab_of, options, monkeypatch):
    lab = lab_of(2)
    monkeypatch.setattr(lab, "call", None)
    with pytest.raises(gl.InputError) as caught:
        lab.pipeline(make_model(), loss_fn=F.mse_loss, **options)
    assert "step" in caught.value.rule and caught.value.got and caught.value.where and caught.value.remedy


@pytest.mark.parametrize("options", FOUND_BY_A_RANK)
def test_what_only_a_rank_finds_is_an_input_error_too(lab_of, options):
    with pytest.raises(gl.InputError) as caught:
        lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, **options)
    assert "step needs no" in caught.value.rule
    assert caught.value.got and caught.value.where and caught.value.remedy
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=SGD)
    assert pipe.step(gl.gpipe(2, 2), *make_batch()).loss > 0, "the lab is usable again"


def test_a_factory_that_builds_no_module_is_refused_with_its_name(lab_of):
    model = [lambda: nn.Linear(6, 6), lambda: torch.zeros(3)]
    x, y = (t.float() for t in make_batch())
    for refused in (
        lambda: lab_of(2).run(gl.gpipe(2, 2), model, x, y, loss_fn=F.mse_loss, warmup=False),
        lambda: lab_of(2).pipeline(model, loss_fn=F.mse_loss),
    ):
        with pytest.raises(gl.InputError) as caught:
            refused()
        assert caught.value.where == "layer '1'" and caught.value.got == "Tensor" and caught.value.remedy
        assert lab_of(2).run(gl.gpipe(2, 2), [model[0]] * 2, x, y, loss_fn=F.mse_loss, warmup=False).loss > 0


def test_a_failure_in_the_optimizer_is_placed_there(lab_of):
    class Failing(torch.optim.SGD):
        def step(self, closure=None):
            raise ArithmeticError("no step")

    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss, optimizer=functools.partial(Failing, lr=0.1))
    with pytest.raises(gl.RankFailed, match="optimizer step") as caught:
        pipe.step(gl.gpipe(2, 2), *make_batch())
    assert str(caught.value.op) in ("0STEP0", "1STEP0")


def test_gradients_of_earlier_steps_count_beside_those_of_the_step(lab_of):
    pipe = lab_of(2).pipeline(make_model(), loss_fn=F.mse_loss)
    size = 4 * (6 * 6 + 6) * 8
    peaks = [
        pipe.step(gl.gpipe(2, 2), *make_batch(), update=False).memory.peak_bytes(0, "gradients")
        for _ in range(3)
    ]
    assert peaks == [size, 2 * size, 2 * size]
    pipe.zero_grad()
    run = pipe.step(gl.gpipe(2, 2), *make_batch(), update=False)
    assert run.memory.peak_bytes(0, "gradients") == size
