"""Follows the command log on behalf of one server's own tiers.

Knows where it stands in the log, also after a restart, and which commands are its own. Does not
know what a command does, or what the tiers are.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sglang_ext.chunk_index.commands import Command, CommandLog

logger = logging.getLogger(__name__)

BATCH = 256
OWN_KEPT = 1024


class LogFollower:
    """Reads the log bit by bit; not for several threads at once, but for `post`."""

    def __init__(
        self,
        log: CommandLog,
        apply: Callable[[Command], object],
        forget_all: Callable[[], object],
        position_path: Path | None = None,
    ) -> None:
        """Start where the last run stood, or else with what is posted from the first poll on.

        Args:
            log: The log.
            apply: Carries out a command in this server's own tiers.
            forget_all: Empties them, since commands were missed.
            position_path: Where to remember the position for the next run; None for tiers that do
                not outlive this one.
        """
        self._log = log
        self._apply = apply
        self._forget_all = forget_all
        self._path = position_path
        self._after = self._load()
        self._own: deque[str] = deque(maxlen=OWN_KEPT)

    def post(self, command: Command) -> None:
        """Tell all other servers of a command that is carried out here already.

        Raises:
            IndexUnavailable: The log cannot be reached.
        """
        self._own.append(self._log.post(command))

    def poll(self) -> int:
        """Apply what was posted since the last time; returns how many commands.

        Raises:
            IndexUnavailable: The log cannot be reached; the position stays.
        """
        num_applied = 0
        while True:
            batch = self._log.read(self._after, BATCH)
            if batch.has_gap and not batch.is_log_lost:
                logger.warning("pic commands were missed: this server's own tiers are emptied")
                self._forget_all()
            for command_id, command in zip(batch.ids, batch.commands, strict=True):
                if command_id not in self._own:
                    self._apply(command)
                    num_applied += 1
            if batch.last_id != self._after:
                self._after = batch.last_id
                self._save()
            if not batch.commands and not batch.num_unknown:
                return num_applied

    def _load(self) -> str | None:
        if self._path is None:
            return None
        try:
            return self._path.read_text(encoding="ascii").strip() or None
        except (OSError, UnicodeDecodeError):
            return None

    def _save(self) -> None:
        if self._path is None or self._after is None:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with suppress(OSError):  # the next run then applies some commands a second time
            temporary.write_text(self._after + "\n", encoding="ascii")
            temporary.replace(self._path)
