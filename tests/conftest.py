"""Fixtures that several test modules share, and how Hypothesis runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.harness import Harness

# The same examples in every run; a slow shared machine is no failure.
settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def model_path() -> str:
    """Folder of the small model; a missing one is a failure, not a reason to skip."""
    path = os.environ.get("PIC_MODEL", "")
    if not (Path(path) / "config.json").is_file():
        pytest.fail(
            f"PIC_MODEL: got {path!r}, expected the folder of the converted SmolLM2 "
            "(`make model` makes it)",
            pytrace=False,
        )
    return path


@pytest.fixture(scope="session")
def harness(model_path: str) -> Harness:
    """A scheduler in this process; SGLang cannot build a second one, nor take this one down."""
    from tests.harness import Harness

    return Harness(model_path, max_total_tokens=20000, max_running_requests=8, log_level="warning")
