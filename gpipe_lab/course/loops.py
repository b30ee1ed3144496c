"""A progress bar for a loop of runs that takes several seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from . import mode

T = TypeVar("T")


def track(items: Sequence[T], label: Callable[[T], str] = str) -> Iterator[T]:
    """The items one by one, in a live notebook under a bar that names the one in progress.

    Elsewhere nothing is shown. The bar turns red where the loop ends before its last item is done.
    """
    bar = _bar(len(items)) if mode.live() else None
    try:
        for number, item in enumerate(items):
            if bar is not None:
                bar.value, bar.description = number, label(item)
            yield item
        if bar is not None:
            bar.value, bar.description, bar.bar_style = len(items), "done", "success"
    finally:
        if bar is not None and bar.value < len(items):
            bar.bar_style = "danger"


def _bar(length: int) -> Any:
    import ipywidgets as widgets
    from IPython.display import display

    bar = widgets.IntProgress(
        max=length, style={"description_width": "8em"}, layout=widgets.Layout(width="36em")
    )
    display(bar)
    return bar
