"""Small faults, each of one line, and the tests that find them: what the suite detects, and a way to try it.

`python -m tests.injected_faults` puts one fault after another into a copy of the package and runs there the
tests that are to fail; with names (or parts of them) only those. A fault that its tests miss is an error.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("gpipe_lab", "tests", "data", "pyproject.toml", "conftest.py", "README.md")
TESTS_FAILED = 1  # pytest's exit code; any other but 0 says that they could not be run
LIMIT_S = 60  # for one test: some faults hang


class Fault(NamedTuple):
    """`before`, which `file` holds once, becomes `after`; then the `tests` (arguments of pytest) fail."""

    name: str
    file: str  # within gpipe_lab
    before: str
    after: str
    tests: str  # within tests


FAULTS = (
    # plan: schedules
    Fault(
        "1F1B warms up with one forward more",
        "plan/schedules.py",
        "return alternate(forwards, backwards, num_warmup=num_stages - 1 - stage)",
        "return alternate(forwards, backwards, num_warmup=num_stages - stage)",
        "unit/test_schedules.py",
    ),
    Fault(
        "GPipe's backwards run in the order of its forwards",
        "plan/schedules.py",
        '(backwards[::-1] if backward == "reversed" else backwards)',
        "backwards",
        "unit/test_schedules.py",
    ),
    Fault(
        "interleaved 1F1B warms up half as long",
        "plan/schedules.py",
        "num_warmup = (num_chunks - 1) * num_ranks + 2 * (num_ranks - 1 - rank)",
        "num_warmup = (num_chunks - 1) * num_ranks + (num_ranks - 1 - rank)",
        "unit/test_interleaved.py",
    ),
    Fault(
        "ZB-H1 holds back one W fewer",
        "plan/schedules.py",
        "            if len(waiting) > held_back:",
        "            if len(waiting) >= max(1, held_back):",
        "unit/test_zero_bubble.py",
    ),
    Fault(
        "DualPipeV runs its W's last in, first out",
        "plan/schedules.py",
        'oldest = next(op for op in put_off if letter == "*" or op.stage == stage)',
        'oldest = next(op for op in put_off[::-1] if letter == "*" or op.stage == stage)',
        "unit/test_schedules.py",
    ),
    Fault(
        "with replicas, only the last of them spares its last micro-batch",
        "plan/recompute.py",
        "is_last = (op.microbatch + 1) % schedule.microbatches_per_replica == 0",
        "is_last = op.microbatch + 1 == schedule.num_microbatches",
        "unit/test_replicate.py",
    ),
    # plan: simulation and lowering
    Fault(
        "a transfer does not wait for the one before it at its other end",
        "plan/walk.py",
        "start = max(last_transfer[rank], last_transfer[ranks[other]])",
        "start = last_transfer[rank]",
        "unit/test_walk.py unit/test_simulate.py",
    ),
    Fault(
        "a split backward's first half lasts as long as a whole backward",
        "plan/simulate.py",
        'return self._of("backward", op.stage, schedule) / 2',
        'return self._of("backward", op.stage, schedule)',
        "unit/test_simulate.py",
    ),
    Fault(
        "each segment's recompute lasts as long as the whole stage's",
        "plan/simulate.py",
        "return self._of(name, op.stage, schedule) / num_segments",
        "return self._of(name, op.stage, schedule)",
        "unit/test_simulate.py",
    ),
    Fault(
        "receives are posted one operation too early",
        "plan/lowering.py",
        "first = follower - hoist if transfer.kind in RECEIVES else follower",
        "first = follower - hoist - 1 if transfer.kind in RECEIVES else follower",
        "unit/test_lowering.py",
    ),
    Fault(
        "the order of transfers is that of the walk, whatever operations cost",
        "plan/lowering.py",
        "for number in sorted(schedule.walked.order, key=ends.__getitem__):",
        "for number in schedule.walked.order:",
        "unit/test_lowering.py",
    ),
    # plan: what is read off a trace
    Fault(
        "a split backward lets go of its micro-batch at I",
        "plan/memory.py",
        "elif kind is W or (kind is B and segment == 0):",
        "elif kind is I or (kind is B and segment == 0):",
        "unit/test_schedules.py",
    ),
    Fault(
        "a recompute restores the kept input a second time",
        "plan/memory.py",
        "    restored = saved - given",
        "    restored = saved",
        "unit/test_plan_memory.py",
    ),
    Fault(
        "recomputes count as useful",
        "plan/trace.py",
        "USEFUL = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})",
        "USEFUL = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.R})",
        "unit/test_simulate.py unit/test_trace.py",
    ),
    Fault(
        "slices of an exported trace are in ms where µs are meant",
        "plan/trace.py",
        '"dur": max(event.duration_ms * 1000, SHORTEST_US)',
        '"dur": max(event.duration_ms, SHORTEST_US)',
        "unit/test_trace.py",
    ),
    Fault(
        "a critical path changes ranks as early as can be",
        "plan/analysis.py",
        "found.append((there, False, source))",
        "found.insert(0, (there, True, source))",
        "unit/test_critical_path.py",
    ),
    Fault(
        "interleaved's peak falls by one from rank to rank",
        "plan/formulas.py",
        "return min(num_chunks * num_microbatches, (num_chunks + 1) * num_ranks - 1 - 2 * rank)",
        "return min(num_chunks * num_microbatches, (num_chunks + 1) * num_ranks - 1 - rank)",
        "unit/test_interleaved.py",
    ),
    Fault(
        "the last stages take the layers that are left over",
        "plan/partition.py",
        "sizes = [share + (stage < left_over) for stage in range(num_stages)]",
        "sizes = [share + (num_stages - stage <= left_over) for stage in range(num_stages)]",
        "unit/test_schedules.py unit/test_partition.py",
    ),
    Fault(
        "a listing's sends and receives are kept unless asked for",
        "plan/torch_csv.py",
        "    if not comms:",
        "    if comms:",
        "unit/test_torch_csv.py",
    ),
    Fault(
        "operations may stand on a rank of another replica",
        "plan/validate.py",
        "if place[stage] != rank_within or microbatch // per_replica != replica:",
        "if place[stage] != rank_within:",
        "unit/test_validate.py unit/test_replicate.py",
    ),
    # planner
    Fault(
        "tensor parallelism sums its activations twice a layer",
        "planner/traffic.py",
        "return 4 * num_layers * all_reduce_bytes(boundary_bytes, num_ranks)",
        "return 2 * num_layers * all_reduce_bytes(boundary_bytes, num_ranks)",
        "unit/test_traffic.py",
    ),
    Fault(
        "a step's time leaves out the sum over replicas",
        "planner/estimate.py",
        "return self.trace.makespan_ms + self.reduce_ms",
        "return self.trace.makespan_ms",
        "unit/test_planner.py",
    ),
    Fault(
        "ZeRO-1 divides the optimizer's state by one rank more",
        "planner/propose.py",
        "round(parameters / t * precision.optimizer_bytes / optimizer_shards)",
        "round(parameters / t * precision.optimizer_bytes / (optimizer_shards + 1))",
        "unit/test_planner.py",
    ),
    Fault(
        "ZeRO-1 leaves gradients whole and optimizer state too",
        "planner/sharing.py",
        'if cuts_all or method in ("ZeRO-1", "ZeRO-2") else 1',
        'if cuts_all or method == "ZeRO-2" else 1',
        "unit/test_sharing.py",
    ),
    # engine: one rank's step
    Fault(
        "the batch is not copied ahead of a first layer that works in place",
        "engine/executor.py",
        "batch = self.device.copy_in(self.inputs[op.microbatch])",
        "batch = self.inputs[op.microbatch]",
        "dist/test_parity.py::test_a_stage_may_start_with_a_layer_that_works_in_place",
    ),
    Fault(
        "a stage's input stays in the ledger",
        "engine/executor.py",
        "self.ledger.release(entering.category, entering.held)",
        "pass",
        "dist/test_memory.py",
    ),
    Fault(
        "a step ends before its messages have left",
        "engine/executor.py",
        "self.mailbox.settle(wait=True)",
        "self.mailbox.settle()",
        "dist/test_memory.py dist/test_measured_trace.py",
    ),
    Fault(
        "random layers are keyed within their stage",
        "engine/stage.py",
        "layer_seed(step.seed, step.step, self.first_layer + position, microbatch)",
        "layer_seed(step.seed, step.step, position, microbatch)",
        "dist/test_parity.py::test_dropout_equals_one_process_and_is_the_same_for_every_p",
    ),
    Fault(
        "an input kept for recomputing is not shielded from a layer that works in place",
        "engine/stage.py",
        "shielded = map_tensors(torch.clone, value)",
        "shielded = value",
        "dist/test_parity.py::test_a_stage_may_start_with_a_layer_that_works_in_place",
    ),
    Fault(
        "the second step's gradients replace the first's",
        "engine/gradients.py",
        "self.parameters[name].grad = earlier if gradient is None else earlier.add_(gradient)",
        "self.parameters[name].grad = earlier if gradient is None else gradient",
        "dist/test_pipeline.py::test_two_steps_without_zeroing_give_exactly_twice_one",
    ),
    Fault(
        "gradients of bf16 weights are summed in bf16",
        "engine/gradients.py",
        "torch.zeros_like(parameter, dtype=torch.float32)",
        "torch.zeros_like(parameter)",
        "dist/test_precision.py",
    ),
    Fault(
        "micro-batches count alike, whatever their sizes",
        "engine/loss.py",
        "return [w / total if total else 0.0 for w in weights]",
        "return [1 / len(weights) if total else 0.0 for w in weights]",
        "dist/test_parity.py::test_every_batch_size_is_weighted_by_true_sizes",
    ),
    Fault(
        "class weights are left out of a micro-batch's weight",
        "engine/loss.py",
        "return class_weights.to(counted.device)[counted].sum().item()",
        "return counted.numel()",
        "dist/test_parity.py::test_torch_losses_are_read",
    ),
    Fault(
        "batch norm's running variance is the biased one",
        "engine/layer_state.py",
        "unbiased = variance * count / max(count - 1, 1)",
        "unbiased = variance",
        "dist/test_batchnorm.py",
    ),
    Fault(
        "a recompute moves batch norm's statistics again",
        "engine/layer_state.py",
        "is_again = self.recomputing or torch._C._current_graph_task_id() != -1",
        "is_again = torch._C._current_graph_task_id() != -1",
        "dist/test_batchnorm.py",
    ),
    Fault(
        "what W keeps stays in the ledger",
        "engine/weight_gradients.py",
        'self.ledger.release("deferred", keys)',
        "pass",
        "unit/test_weight_gradients.py",
    ),
    Fault(
        "a weight that was changed before its backward is not told of",
        "engine/weight_gradients.py",
        "            require_unchanged(weight, ctx.version)",
        "            pass",
        "unit/test_weight_gradients.py",
    ),
    Fault(
        "a tensor with gaps in its memory crosses with what lies in them",
        "engine/messages.py",
        "            return tensor.contiguous()",
        "            return tensor",
        "unit/test_engine_parts.py dist/test_odd_models.py::test_what_crosses_a_boundary",
    ),
    Fault(
        "a tied weight counts on every rank in the norm",
        "engine/gradients.py",
        "self.borrowed = {id(p) for tie, p in self._parameters.items() if tie.owner != rank}",
        "self.borrowed = set()",
        "dist/test_ties.py",
    ),
    Fault(
        "replicas keep batch norm's statistics to themselves",
        "engine/layer_state.py",
        "        transport.all_reduce(self._statistics.sums(most), replicas)",
        "        self._statistics.sums(most)",
        "dist/test_data_parallel.py::test_batch_norm_statistics_are_those_of_the_whole_batch",
    ),
    Fault(
        "clipping makes small gradients larger",
        "engine/rank_pipeline.py",
        "self.gradients.scale(min(1.0, self.spec.max_norm / (norm + 1e-6)))",
        "self.gradients.scale(self.spec.max_norm / (norm + 1e-6))",
        "dist/test_pipeline.py::test_gradients_below_the_limit_are_left_as_they_are",
    ),
    Fault(
        "a layer's numpy numbers are drawn without a key",
        "engine/device.py",
        "    np.random.seed(seed % 2**32)",
        "    pass",
        "dist/test_odd_models.py::test_pythons_and_numpys_random_numbers_are_keyed_as_torchs",
    ),
    Fault(
        "a pace does not scale with the micro-batch",
        "engine/pace.py",
        "scale = rows / (self.rows or largest)",
        "scale = 1.0",
        "dist/test_pacing.py::test_times_scale_with_the_size_of_the_microbatch",
    ),
    # lab
    Fault(
        "a hang is blamed on a rank that waits",
        "lab/board.py",
        "return [rank for rank in working if not self._board.waits(rank)] or working",
        "return [rank for rank in working if self._board.waits(rank)] or working",
        "dist/test_faults.py::test_a_hanging_rank_is_found_by_the_watchdog_with_its_stack",
    ),
    Fault(
        "a rank that lost its peer is blamed",
        "lab/failures.py",
        "if not failure.is_consequence:",
        "if failure:",
        "dist/test_pool.py::test_a_consequence_is_not_blamed",
    ),
    Fault(
        "the driver's default dtype stays at home",
        "lab/worker.py",
        "torch.set_default_dtype(dtype or torch.float32)",
        "torch.set_default_dtype(torch.float32)",
        "dist/test_pool.py::test_default_dtype_travels_with_the_job",
    ),
    Fault(
        "memory is on another clock than the trace",
        "lab/run.py",
        "row._replace(time_ms=row.time_ms - start)",
        "row._replace(time_ms=row.time_ms)",
        "dist/test_memory.py::test_memory_is_on_the_trace_s_clock",
    ),
    Fault(
        "of repeated runs the slowest is shown",
        "lab/run.py",
        "abs(run.trace.makespan_ms - median(makespans))",
        "abs(run.trace.makespan_ms - max(makespans))",
        "unit/test_engine_parts.py",
    ),
    Fault(
        "a fork of the driver ends its workers",
        "lab/workers.py",
        "    if os.getpid() != owner:",
        "    if owner is None:",
        "dist/test_cleanup.py::test_a_fork_of_the_driver_does_not_end_its_workers",
    ),
    Fault(
        "what a rank printed without an end of line is kept back",
        "lab/worker.py",
        "            stream.end_line()",
        "            pass",
        "dist/test_pool.py::test_prints_are_tagged_in_order",
    ),
    Fault(
        "after a resume, random layers are keyed from step 0",
        "lab/pipeline.py",
        "        self._steps = found\n",
        "        pass\n",
        "dist/test_save_state.py::test_a_resumed_training_goes_on_bitwise",
    ),
)


def occurrences(fault: Fault, root: Path = ROOT) -> int:
    """How often today's code holds what the fault changes: once, or the entry has to follow the code."""
    path = root / "gpipe_lab" / fault.file
    return path.read_text(encoding="utf-8").count(fault.before) if path.is_file() else 0


def found_by(fault: Fault, root: Path = ROOT) -> str | None:
    """The first test that fails with the fault in a copy of `root`; None where all pass."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (root / name).is_dir():
                shutil.copytree(root / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(root / name, copy / name)
        path = copy / "gpipe_lab" / fault.file
        text = path.read_text(encoding="utf-8")
        path.write_text(text.replace(fault.before, fault.after), encoding="utf-8")
        tests = [f"tests/{test}" for test in fault.tests.split()]
        options = ["-x", "-q", "--tb=no", "-rfE", "-p", "no:cacheprovider", f"--timeout={LIMIT_S}"]
        command = [sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    assert done.returncode == TESTS_FAILED, done.stdout + done.stderr
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split()[1] if failed else "a test that hung"


def main(wanted: list[str]) -> int:
    chosen = [f for f in FAULTS if not wanted or any(part in f.name for part in wanted)]
    missed = 0
    for fault in chosen:
        assert occurrences(fault) == 1, f"{fault.name}: {fault.file} has its text {occurrences(fault)} times"
        began = time.monotonic()
        test = found_by(fault)
        missed += test is None
        told = "MISSED" if test is None else f"found by {test.removeprefix('tests/')}"
        print(f"{fault.name}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} found")
    return bool(missed)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
