"""What the documentation points at exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_every_link_leads_to_a_file(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text("utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_function_of_the_lifecycle_exists() -> None:
    text = (ROOT / "docs" / "lifecycle.md").read_text("utf-8")
    steps = re.split(r"(?m)^\d+\. ", text)[1:]
    assert len(steps) == 20
    sources = "\n".join(p.read_text("utf-8") for p in (ROOT / "packages").glob("*/src/**/*.py"))
    for name in re.findall(r"`([A-Za-z_]+(?:\.[a-z_]+)?)`", " ".join(steps)):
        last = name.split(".")[-1]
        assert re.search(rf"\b(def|class) {last}\b|\b{last}\s*[:=]|\.{last}\b", sources), name


def test_the_readme_names_the_test_command_that_ci_runs() -> None:
    command = "uv run pytest"
    assert f"\n{command}\n" in (ROOT / "README.md").read_text("utf-8")
    assert f"\n{command}\n" in (ROOT / ".ci" / "run").read_text("utf-8")
