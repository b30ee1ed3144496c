"""The command line of `gpipe_lab.train`, for one process or for those that torchrun starts.

    python -m gpipe_lab.train --config data/train.toml
    torchrun --nproc-per-node 4 -m gpipe_lab.train --config data/train.toml
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29400 --max-restarts 3 \\
        -m gpipe_lab.train --config data/train.toml                            # on each of two hosts
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from .config import TrainConfig, read_config
from .trainer import Trainer
from .watchdog import Watchdog
from .world import join


@record  # tells the launcher what was raised
def train(config: TrainConfig) -> float:
    """Train as `config` says, in this process and those started with it; the loss of the last step."""
    with join(config.pipeline.device, config.training.timeout_s) as (label, transport):
        watchdog = Watchdog(transport.rank, transport.num_ranks, config.training.watchdog_s)
        try:
            with watchdog:
                return Trainer(config, transport, label, watchdog).run()
        except BaseException as error:
            error.add_note(watchdog.where())
            raise


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m gpipe_lab.train", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="a TOML file; see data/train.toml")
    status = 0
    try:
        train(read_config(parser.parse_args().config))
    except Exception:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by way of the interpreter's end: a thread may be waiting for a peer that is gone, and torch's own
    # threads, should they still be ending, would abort the process.
    os._exit(status)


if __name__ == "__main__":
    main()
