"""The progress bar in colours, drawn by the package rich. Other output is printed above it."""

from __future__ import annotations

from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from shardplan.report.standing import Standing
from shardplan.report.tables import seconds


class RichBar:
    """A line with the stage, a bar that pulses if the share is unknown, the time, and the best plan so far."""

    def __init__(self, stream: TextIO) -> None:
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(24),
            TextColumn("{task.fields[share]}"),
            TextColumn("{task.fields[lasted]}", style="dim"),
            TextColumn("{task.fields[best]}", style="bold"),
            console=Console(file=stream),
            transient=True,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("", total=None, share="", lasted="", best="")

    def draw(self, standing: Standing, lasted_s: float) -> None:
        """Draws the line in place of the one before."""
        share = standing.share
        total, done, text = (None, 0.0, "") if share is None else (1.0, min(max(share, 0.0), 1.0), f"{share:.0%}")
        task = self._progress.tasks[0]
        task.total = total
        self._progress.update(
            self._task, completed=done, description=standing.stage, share=text, lasted=seconds(lasted_s), best=standing.best
        )
        if self._progress.live.is_started:
            self._progress.refresh()
        else:
            self._progress.start()

    def wipe(self) -> None:
        """Removes the line."""
        self._progress.stop()
