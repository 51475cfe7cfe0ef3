"""The kit's options, known to pytest wherever this distribution is installed (entry point `pytest11`)."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("astraflow trainer conformance")
    group.addoption("--backend", help="trainer backend to test, a name in the entry-point group astraflow.trainers")
    group.addoption("--backend-lr", type=float, default=3e-3, help="learning rate it learns with (default: 3e-3)")
