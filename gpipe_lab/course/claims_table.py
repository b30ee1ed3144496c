"""The table of claims, which cuts nothing off. Apart, since it imports pandas."""

from __future__ import annotations

from typing import Any

import pandas


class ClaimsTable(pandas.DataFrame):
    """A DataFrame that shows every row, column and word; what is made from it is a plain one.

    Its `attrs` travel into the metadata of the cell's output.
    """

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict, dict]:
        return {}, dict(self.attrs)

    def _repr_html_(self) -> str:
        with _in_full():
            return super()._repr_html_()

    def __repr__(self) -> str:
        with _in_full():
            return super().__repr__()


def _in_full() -> pandas.option_context:
    options = ("display.max_colwidth", "display.max_rows", "display.max_columns", "display.width")
    return pandas.option_context(*(item for option in options for item in (option, None)))
