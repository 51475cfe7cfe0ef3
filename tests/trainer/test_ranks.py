"""Two and three processes under torchrun train as one: the same gradients and weights, resumable by any number."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from astraflow.trainer.ranks import shares
from astraflow.weightsync import DirectoryStore, Puller, SafetensorsSink

PROGRAM = Path(__file__).with_name("ranks_program.py")


def launch(ranks: int, *arguments: object) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(PROGRAM)]
    if ranks == 1:
        command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=110, cwd=str(arguments[1])
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@pytest.fixture(scope="module")
def alone(make_model: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("alone") / "gradients.pt"
    launch(1, "gradients", make_model(), out)
    found: dict[str, Any] = torch.load(out)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_and_published_weights_are_those_of_one_process(
    ranks: int, alone: dict[str, Any], make_model: Callable[..., Path], tmp_path: Path
) -> None:
    launch(ranks, "gradients", make_model(), tmp_path / "gradients.pt")
    found = torch.load(tmp_path / "gradients.pt")
    assert found.keys() == alone.keys()
    differing = total = 0
    for name, tensor in alone.items():
        if name.startswith("bf16."):
            apart = (tensor.view(torch.int16).int() - found[name].view(torch.int16).int()).abs()
            assert int(apart.max()) <= 1, name
            differing, total = differing + int(apart.sum()), total + apart.numel()
        else:
            assert (found[name] - tensor).norm() <= 1e-5 * tensor.norm(), name
    assert differing <= 0.001 * total


@pytest.mark.slow
async def test_it_publishes_without_a_gather_and_resumes_onto_another_number_of_ranks(
    make_model: Callable[..., Path], tmp_path: Path
) -> None:
    """One process through four steps against three ranks for two steps, then two ranks for two more."""
    model = make_model()
    launch(1, "train", model, tmp_path / "one", "0,1,2,3")
    launch(3, "train", model, tmp_path / "three", "0,1")
    launch(2, "train", model, tmp_path / "two", "2,3", tmp_path / "three")
    assert len(list((tmp_path / "three").glob("training-*-of-00003.safetensors"))) == 3
    want = json.loads((tmp_path / "one" / "metrics.json").read_text("utf-8"))
    got = [json.loads((tmp_path / name / "metrics.json").read_text("utf-8")) for name in ("three", "two")]
    for left, right in zip(want, got[0] + got[1], strict=True):
        for name in ("loss", "grad_norm", "ratio_mean", "entropy", "kl", "tokens", "m2", "lr"):
            assert right[name] == pytest.approx(left[name], rel=2e-2, abs=1e-5), name
    whole, split = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    for name, tensor in whole.items():
        assert (split[name] - tensor).abs().mean() < 1e-4, name
    sink = SafetensorsSink(tmp_path / "pulled")
    report = await Puller(DirectoryStore(tmp_path / "two.store"), sink).pull()
    assert report is not None
    assert report.version == 3
    pulled = load_file(tmp_path / "pulled" / "current" / "model.safetensors")
    assert all(torch.equal(pulled[name], tensor) for name, tensor in split.items())


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 6))
def test_shares_cover_everything_once_in_order_and_are_balanced(sizes: list[int], count: int) -> None:
    parts = shares(sizes, count)
    assert [i for part in parts for i in part] == list(range(len(sizes)))
    assert len(parts) == count
    largest = max(sizes, default=0)
    for part in parts:
        assert sum(sizes[i] for i in part) <= sum(sizes) / count + largest
