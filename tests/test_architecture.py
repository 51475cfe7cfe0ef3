"""The rules between packages that import-linter cannot say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "packages").glob("*/src/astraflow/**/*.py"))
LONGEST_FILE = 500


def foreign_modules(own: str, source: str) -> list[str]:
    """Imports of another package's modules, rather than of its public names, in a source of package `own`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "astraflow" and len(parts) > 2 and parts[1] != own:
                found.append(f"line {node.lineno} imports {name}")
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "packages")))
def test_a_package_imports_another_only_through_its_public_names(path: Path) -> None:
    own = path.relative_to(ROOT / "packages").parts[0]
    assert foreign_modules(own, path.read_text("utf-8")) == []


def test_the_rule_sees_a_breach() -> None:
    source = "from astraflow.dataflow.buffer import Buffer\nimport astraflow.rpc\n"
    assert foreign_modules("raas", source) == ["line 1 imports astraflow.dataflow.buffer"]
    assert foreign_modules("dataflow", source) == []


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "packages")))
def test_files_are_short_enough_to_read(path: Path) -> None:
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST_FILE


@pytest.mark.parametrize("package", ["rpc", "weightsync", "dataflow", "raas", "trainer", "recipes"])
def test_every_public_name_exists(package: str) -> None:
    module = __import__(f"astraflow.{package}", fromlist=["__all__"])
    for name in getattr(module, "__all__", ()):
        assert hasattr(module, name), f"astraflow.{package}.{name}"
