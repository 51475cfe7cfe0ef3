from __future__ import annotations

import subprocess
import sys

import pytest

from astraflow.trainer import UnknownBackend, load_backend
from astraflow.trainer.torch_backend import TorchBackend


def test_torch_is_registered() -> None:
    assert load_backend("torch") is TorchBackend


def test_an_unknown_name_is_answered_with_the_installed_and_the_nearest() -> None:
    with pytest.raises(UnknownBackend, match=r"'tourch'; installed: .*torch.*did you mean 'torch'"):
        load_backend("tourch")


@pytest.mark.parametrize("module", ["astraflow.trainer", "astraflow.trainer.conformance.plugin"])
def test_importing_the_package_imports_no_torch(module: str) -> None:
    """Nor does what pytest loads at the start of every run."""
    code = f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
