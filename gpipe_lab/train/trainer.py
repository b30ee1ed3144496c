"""The program of one rank: the course's GPT on the standard library's sources, step after step."""

from __future__ import annotations

import functools
import hashlib
from dataclasses import asdict
from pathlib import Path

import torch

from ..engine.device import now_ms
from ..engine.executor import RankResult
from ..engine.loss import read_loss
from ..engine.mailbox import Board
from ..engine.models import VOCABULARY, batch, corpus, gpt, next_token_loss
from ..engine.rank_pipeline import RankPipeline
from ..engine.saving import load_state, save_state, saves
from ..engine.stage import StepContext
from ..engine.transport import Transport
from ..lab.model import cut, rank_specs
from ..lab.options import ModelOptions, StepOptions
from ..lab.run import assemble
from ..lab.step import PreparedStep, prepare_step
from ..plan.schedules import replicate
from .clock import measure_offset
from .config import TrainConfig
from .world import require_same


class Trainer:
    """One rank's stages and what it takes to train them. All ranks do everything together."""

    def __init__(self, config: TrainConfig, transport: Transport, device_label: str, board: Board) -> None:
        self.config = config
        self.transport = transport
        self.device_label = device_label
        self.text = corpus(config.training.corpus_bytes)
        digest = hashlib.blake2b(self.text.numpy().tobytes(), digest_size=8).hexdigest()
        require_same(
            transport,
            (config, digest),
            "all ranks train the same way on the same text, that of one version of Python",
            where="--config",
            remedy="the same file and the same Python on all hosts",
        )
        training, layout = config.training, config.pipeline
        torch.set_default_dtype(torch.float64 if training.precision == "float64" else torch.float32)
        one = layout.make_schedule(layout.ranks_per_replica(transport.num_ranks))
        self.schedule = replicate(one, layout.num_replicas)
        layers = gpt(vocabulary=VOCABULARY, **asdict(config.model))
        stages = cut(layers, self.schedule.num_stages)
        self.layers_per_stage = [len(stage.layers) for stage in stages]
        options = ModelOptions(
            loss_fn=next_token_loss,
            optimizer=functools.partial(
                torch.optim.AdamW, lr=training.learning_rate, weight_decay=training.weight_decay
            ),
            scheduler=functools.partial(
                torch.optim.lr_scheduler.LambdaLR, lr_lambda=training.learning_rate_factor
            ),
            max_norm=training.max_norm,
            num_replicas=layout.num_replicas,
            seed=training.seed,
        )
        spec = rank_specs(stages, self.schedule.stage_to_rank, transport.num_ranks, options)[transport.rank]
        self.pipeline = RankPipeline(spec, board, transport)
        self.loss = read_loss(next_token_loss)

    def run(self) -> float:
        """Train from the last save, or from the start, to the last step; the loss of the last step.

        Every rank knows the losses; rank 0 prints them.
        """
        config = self.config
        first = self.resume()
        self.say(self.describe(first))
        loss, started_ms, started_at = float("nan"), now_ms(), first
        for step in range(first, config.training.num_steps):
            done = step + 1
            loss, norm = self.step(step)
            is_last = done == config.training.num_steps
            if done % config.log.every == 0 or is_last:
                ms = (now_ms() - started_ms) / (done - started_at)
                self.say(f"step {done}: loss {loss!r}, norm {norm:.4g}, {ms:.1f} ms a step")
                started_ms, started_at = now_ms(), done
            if config.save.folder and (done % config.save.every == 0 or is_last):
                save = save_state(self.pipeline, self.transport, config.save.folder, done)
                self.say(f"step {done}: saved in {save}")
        return loss

    def step(self, step: int) -> tuple[float, float]:
        """One step, counted from 0: the loss of the whole batch and the norm of its gradients."""
        is_traced = self.config.log.trace_file and step + 1 == self.config.log.trace_step
        clock = measure_offset() if is_traced else None
        plan = self.plan(step)
        job = plan.jobs[self.transport.rank]
        result, loss, norm = self.pipeline.step(job, self.transport, update=True)
        if clock is not None:
            self.write_trace(clock.shift(result), plan, clock.error_ms, loss)
        return loss, norm

    def plan(self, step: int) -> PreparedStep:
        """A step's jobs; every rank works out the same ones from the same text."""
        training, layout = self.config.training, self.config.pipeline
        inputs, targets = batch(
            self.text, step, rows=training.rows, length=self.config.model.length, seed=training.seed
        )
        autocast = torch.bfloat16 if training.precision == "bfloat16" else None
        return prepare_step(
            self.schedule,
            inputs,
            targets,
            num_ranks=self.transport.num_ranks,
            layers_per_stage=self.layers_per_stage,
            loss=self.loss,
            context=StepContext(seed=training.seed, step=step, autocast=autocast),
            options=StepOptions(checkpoint=layout.checkpoint),
        )

    def resume(self) -> int:
        """Take on the last save, where there is one; the number of steps that it has behind it."""
        folder = self.config.save.folder
        if not folder:
            return 0
        found = [save.name for save in saves(folder)]
        require_same(
            self.transport,
            found,
            "all hosts see the same save folder",
            where=f"[save] folder = {folder!r}",
            remedy="a folder on a disk that all hosts share",
        )
        return load_state(self.pipeline, self.transport, folder) if found else 0

    def write_trace(self, result: RankResult, plan: PreparedStep, error_ms: float, loss: float) -> None:
        """Put all ranks' measurements together, on rank 0's clock, for Perfetto."""
        found = self.transport.gather((result, error_ms))
        if self.transport.rank > 0:
            return
        results = [each for each, _ in found]
        run = assemble(results, plan.schedule, loss=loss, device=self.device_label, paced=False)
        path = run.trace.to_chrome(Path(self.config.log.trace_file))
        error = max(error for _, error in found)
        self.say(
            f"step {self.config.log.trace_step}: trace in {path}, "
            f"makespan {run.trace.makespan_ms:.1f} ms, bubble {run.trace.bubble_fraction:.1%}, "
            f"clocks of the ranks within {error:.3f} ms"
        )

    def describe(self, first: int) -> str:
        """What is about to run, in one line."""
        schedule = self.schedule
        start = f"resumed after step {first}" if first else "from the start"
        if first >= self.config.training.num_steps:
            start += f", the last of {self.config.training.num_steps}: nothing is left to train"
        return (
            f"{schedule.name}: P = {schedule.ranks_per_replica}, M = {schedule.microbatches_per_replica}, "
            f"replicas = {schedule.num_replicas}, {sum(self.layers_per_stage)} layers, "
            f"{self.device_label}; {start}"
        )

    def say(self, text: str) -> None:
        if self.transport.rank == 0:
            print(text, flush=True)
