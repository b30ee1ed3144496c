"""Wrong answers to the exercises of chapter 03, which each of them must refuse."""

from __future__ import annotations

from functools import partial

from gpipe_lab.course.exercises.ch03_step import variant

MUTANTS = {
    "03-gpipe-step": {
        "inputs not kept": partial(variant, keep=False),
        "no requires_grad on what was received": partial(variant, grad=False),
        "no parameter gradients on the last stage": partial(variant, weights=False),
        "loss unscaled": partial(variant, scale=None),
        "loss/M, whatever the sizes": partial(variant, scale="mean"),
        "both ends of a link receive": partial(variant, hang=True),
    },
}
