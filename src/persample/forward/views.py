"""Views: where the samples lie in a base after a write through a view, and in a view after a write into its base."""

from __future__ import annotations

from torch import Tensor

from persample._internal import tracing
from persample.layouts import (
    Layout,
    Lost,
    Reduced,
    Scattered,
    Where,
    find_layout_of_ids,
    lose_entries,
    make_sample_ids,
    make_strided_ids,
)


def find_layout_of_base(view: Tensor, layout: Where | None, before: Where | None, batch: int) -> Where | None:
    """The layout of the base of a view after a write into the view, which gave the view this layout.

    `before` is the layout of the base before the write.
    """
    base = view._base
    assert base is not None
    if isinstance(layout, (Lost, Reduced)) and not isinstance(layout, Scattered):
        return lose_entries(layout)
    with tracing.suspend():
        ids = make_strided_ids(base, before, batch)
        of_view = ids.as_strided(view.shape, view.stride(), view.storage_offset())
        of_view.copy_(make_sample_ids(view, layout, batch))
        is_loose = isinstance(layout, (Layout, Scattered)) and layout.loose
        return find_layout_of_ids(ids, batch, is_loose)


def find_layout_of_view(view: Tensor, base: Tensor, layout: Where | None, batch: int) -> Where | None:
    """The layout of a view that was made before samples were written into its base, which has this layout now."""
    if not isinstance(layout, (Layout, Scattered)):
        return None if isinstance(layout, Lost) and layout.listing else lose_entries(layout)
    with tracing.suspend():
        ids = make_strided_ids(base, layout, batch)
        return find_layout_of_ids(ids.as_strided(view.shape, view.stride(), view.storage_offset()), batch, layout.loose)
