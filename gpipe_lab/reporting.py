"""From a model and a batch to one page: layers measured, a setting proposed, run for real, and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from .course.doctor import available_cores
from .course.loops import track
from .engine.batch import Tree, batch_size, split, tensors
from .engine.loss import LossFn
from .engine.pace import Pace
from .engine.profile import Profile
from .lab.failures import RankFailed
from .lab.lab import Lab
from .lab.model import named_layers
from .lab.run import Run
from .plan.errors import require, require_count
from .plan.trace import Trace
from .plan.units import parse_bytes
from .planner.choose import CHECKPOINTS, PROPOSED, Plans, choose
from .planner.estimate import Plan, Setting, measured_layers
from .view.report_page import Report, TraceReport, report_html, trace_html, trace_report


def report(
    model: Any,
    inputs: Tree = None,
    targets: Tree | None = None,
    *,
    loss_fn: LossFn | None = None,
    memory_limit: str | int | None = None,
    num_ranks: int = 2,
    path: str | Path = "report.html",
    microbatch_sizes: Sequence[int] | None = None,
    schedules: Sequence[str] = PROPOSED,
    checkpoints: Sequence[str] = CHECKPOINTS,
    device: str = "auto",
    seed: int = 0,
    repeats: int = 3,
) -> Report | TraceReport:
    """Propose how to train `model` on up to `num_ranks` ranks with such batches, try it, and write a page.

    Every layer is measured on this machine at each micro-batch size (powers of two that divide the batch
    unless given); settings of P, m, M, schedule and checkpointing are ranked by simulation under the memory
    limit (of one rank: weights, gradients, activations, messages; no optimizer); the best is run `repeats`
    times by real processes under that limit, and the page at `path` shows what was predicted beside what was
    measured. model, inputs, targets and loss_fn are as in `Lab.run`. More ranks than cores run paced at the
    measured times, scaled by how many share a core.

    In place of a model a `gl.Trace` with its schedule, such as `gl.read_profile` gives: then nothing runs,
    and the page takes that step apart.

    Raises `InputError` for bad input, and where no setting fits: it names the least that does.
    """
    path = Path(path)
    _check_path(path)
    if isinstance(model, Trace):
        taken_apart = trace_report(model, path)
        path.write_text(trace_html(taken_apart), encoding="utf-8")
        return taken_apart
    limit_bytes = parse_bytes(memory_limit)
    missing = [
        name
        for name, given in (("inputs", inputs), ("targets", targets), ("loss_fn", loss_fn))
        if given is None
    ]
    _check(num_ranks, repeats, missing)
    names, _ = named_layers(model)
    num_rows = batch_size(inputs)
    sizes = _sizes(num_rows, microbatch_sizes)
    with Lab(1, device=device, memory_limit=None) as lab, _steps(len(sizes) + 2) as next_step:
        profiles: dict[int, Profile] = {}
        input_bytes: dict[int, int] = {}
        for m in sizes:
            next_step(f"layers at m = {m}")
            some, wanted = (
                tree if tree is None else split(tree, num_rows // m)[0] for tree in (inputs, targets)
            )
            profiles[m] = lab.profile(model, some, wanted, loss_fn=loss_fn, seed=seed)
            input_bytes[m] = sum(tensor.numel() * tensor.element_size() for tensor in tensors(some))
        plans = choose(
            _settings(num_ranks, num_rows, sizes, schedules, checkpoints),
            lambda setting: measured_layers(
                profiles[setting.microbatch_size],
                input_bytes=input_bytes[setting.microbatch_size],
                slower=_shared_cores(lab, setting.num_stages),
            ),
            limit_bytes=limit_bytes,
            most=10,
        )
        plan = plans.best
        next_step(f"running P = {plan.setting.num_stages}")
        lab.resize(plan.setting.num_stages)
        lab.memory_limit = limit_bytes
        plan, run, failed = _first_that_runs(
            lab, plans, model, inputs, targets, loss_fn=loss_fn, seed=seed, repeats=repeats
        )
        next_step("the page")
        found = Report(
            path=path,
            plans=plans,
            plan=plan,
            trace=run.trace,
            memory=run.memory,
            makespans_ms=run.makespans_ms,
            failed=tuple(failed),
            names=names,
            layers=profiles[plan.setting.microbatch_size].frame(),
            device=lab.device_plan.label,
            num_cores=available_cores(),
        )
        path.write_text(report_html(found), encoding="utf-8")
    return found


def _check_path(path: Path) -> None:
    require(
        path.parent.is_dir() and not path.is_dir(),
        "the page is written to a file in a folder that exists",
        got=str(path),
        where="report",
        remedy='path="report.html"',
    )


def _check(num_ranks: int, repeats: int, missing: Sequence[str]) -> None:
    require_count(num_ranks, "num_ranks", where="report")
    require_count(repeats, "repeats", where="report")
    require(
        not missing,
        "a training step has a loss, inputs and something to compare with",
        got=f"no {' and no '.join(missing)}",
        where="report",
        remedy="report(model, inputs, targets, loss_fn=torch.nn.functional.mse_loss)",
    )


def _sizes(num_rows: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """The micro-batch sizes to measure: divisors of the batch."""
    if given is None:
        powers = [2**k for k in range(num_rows.bit_length()) if num_rows % 2**k == 0]
        return tuple(powers[-4:])
    for size in given:
        require_count(size, "a micro-batch size", where="report")
        require(
            num_rows % size == 0,
            "micro-batch sizes divide the batch",
            got=f"{size} for {num_rows} rows",
            where="report",
            remedy=f"microbatch_sizes=({num_rows},)",
        )
    require(bool(given), "at least one micro-batch size is tried", got="none", where="report")
    return tuple(given)


def _settings(
    num_ranks: int, num_rows: int, sizes: Sequence[int], schedules: Sequence[str], checkpoints: Sequence[str]
) -> Iterator[Setting]:
    for p, m, name, mode in product(range(1, num_ranks + 1), sizes, schedules, checkpoints):
        yield Setting(
            num_stages=p, microbatch_size=m, num_microbatches=num_rows // m, schedule=name, checkpoint=mode
        )


def _shared_cores(lab: Lab, num_stages: int) -> float:
    """How many ranks of a lab share a core, at least 1: on GPUs every rank is taken to have its own."""
    if lab.device_plan.kind != "cpu":
        return 1.0
    return max(1.0, num_stages / available_cores())


def _first_that_runs(
    lab: Lab,
    plans: Plans,
    model: Any,
    inputs: Tree,
    targets: Tree | None,
    *,
    loss_fn: LossFn | None,
    seed: int,
    repeats: int,
) -> tuple[Plan, Run, list[tuple[Setting, str]]]:
    """The best plan whose run stays within the limit; those before it that did not, and what they said."""
    failed: list[tuple[Setting, str]] = []
    for plan in plans.ranked:
        setting = plan.setting
        if lab.num_ranks != setting.num_stages:
            lab.resize(setting.num_stages)
        schedule = setting.build()
        costs = _stage_costs(plan)
        paced = lab.device_plan.is_shared or _shared_cores(lab, setting.num_stages) > 1
        try:
            run = lab.run(
                schedule,
                model,
                inputs,
                targets,
                loss_fn=loss_fn,
                checkpoint=setting.checkpoint,
                partition=[len(span) for span in plan.spans],
                seed=seed,
                repeats=repeats,
                pace=Pace(**costs) if paced else None,
            )
        except RankFailed as error:
            if "OutOfMemory" not in f"{error.reason} {type(error.__cause__).__name__}":
                raise
            failed.append((setting, error.reason))
            last = error
        else:
            return plan, run, failed
    raise last


def _stage_costs(plan: Plan) -> dict[str, Any]:
    """The mean time of each stage's forwards and backwards in the plan's trace, as a pace takes them."""
    schedule = plan.trace.schedule
    assert schedule is not None
    found: dict[str, list[float]] = {"forward_ms": [], "backward_ms": []}
    for stage in range(schedule.num_stages):
        for name, kinds in (("forward_ms", "F"), ("backward_ms", "BIW")):
            total = sum(
                e.duration_ms
                for e in plan.trace.computations
                if e.op.stage == stage and e.op.kind.value in kinds
            )
            found[name].append(total / schedule.num_microbatches)
    return found


@contextmanager
def _steps(number: int) -> Iterator[Callable[[str], None]]:
    """A function that moves a progress bar on to the step it names."""
    labels: list[str] = [""]
    bar = track(range(number + 1), lambda _: labels[0])

    def next_step(label: str) -> None:
        labels[0] = label
        next(bar)

    try:
        yield next_step
        for _ in bar:
            pass
    finally:
        bar.close()  # type: ignore[attr-defined]
