"""Routers that know pods and no ranks, as llm-d does: AllBlocksCleared of one rank is that of all."""

from __future__ import annotations

from tests.doubles.never_asks import NeverAsks
from tests.doubles.router import PlainSetRouter


class ClearsByPod(NeverAsks):
    """One set for all ranks of all streams."""

    def _view(self, stream: int, rank: int) -> PlainSetRouter:
        return self._views.setdefault((0, 0), PlainSetRouter())
