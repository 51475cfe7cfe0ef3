from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from astraflow.recipes import models, smollm2
from astraflow.recipes.models import ModelError, build_once, cache_directory, resolve_model
from astraflow.recipes.tiny import make_tiny

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny() -> Path:
    return resolve_model("package:tiny")


def test_tiny_is_a_small_chat_model(tiny: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(tiny)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert (tiny / "model.safetensors").stat().st_size <= 2_000_000
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    chat = [{"role": "system", "content": ""}, {"role": "user", "content": "What is 34 + 59?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|user|>What is 34 + 59?<|end|><|assistant|>"
    prompt = tokenizer.encode(text) + tokenizer.encode("34 + 59 = ")
    answer = model.generate(torch.tensor([prompt]), max_new_tokens=4, do_sample=False)[0, len(prompt) :].tolist()
    assert answer[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(answer[:-1]).isdigit()


def test_tiny_tokenizer_loses_nothing_and_tokenises_a_prefill_apart(tiny: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    for text in ("34 + 59 = 39", "Work out 3*4 - 1, the number\n only", "é 中 \t{}"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("34 + 59 = ") + tokenizer.encode("39") == tokenizer.encode("34 + 59 = 39")
    turns = [("user", "1"), ("assistant", "2"), ("user", "3")]
    chat = [{"role": role, "content": content} for role, content in turns]
    whole = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    opened = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, tokenize=False)
    assert whole.startswith(opened + "2<|end|>")


def test_tiny_ships_what_its_script_makes(tiny: Path, tmp_path: Path) -> None:
    """Its tokenizer and its shapes are the shipped ones, and a seed decides its training."""
    tokenizer = make_tiny.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "tokenizer.json").read_text()) == json.loads((tiny / "tokenizer.json").read_text())
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        model = make_tiny.make_model(tokenizer)
        losses.append(make_tiny.train(model, tokenizer, seed=0, steps=6, batch_size=16, lr=2e-3))
    assert losses[0] == losses[1]
    assert losses[0] < torch.log(torch.tensor(float(len(tokenizer))))
    shipped = load_file(tiny / "model.safetensors")
    assert {k: v.shape for k, v in model.state_dict().items() if k != "lm_head.weight"} == {
        k: v.shape for k, v in shipped.items()
    }


def test_a_directory_is_taken_as_it_is(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(tiny, copy)
    assert resolve_model(str(copy)) == copy


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("config.json", "config.json"),
        ("model.safetensors", "model.safetensors"),
        ("tokenizer.json", "a tokenizer"),
        ("chat_template.jinja", "a chat template"),
    ],
)
def test_a_directory_that_lacks_something_is_refused(tiny: Path, tmp_path: Path, name: str, named: str) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(tiny, copy)
    (copy / name).unlink()
    with pytest.raises(ModelError, match=f"lacks {named}"):
        resolve_model(str(copy))


def test_a_missing_shard_is_named(tiny: Path, tmp_path: Path) -> None:
    copy = tmp_path / "mine"
    shutil.copytree(tiny, copy)
    (copy / "model.safetensors").unlink()
    save_file({"a": torch.zeros(1)}, copy / "model-1.safetensors")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"lacks model-2\.safetensors\."):
        resolve_model(str(copy))


def test_unknown_references_say_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="there are smollm2, tiny"):
        resolve_model("package:small")
    with pytest.raises(ModelError, match="no such directory"):
        resolve_model(str(tmp_path / "nowhere"))


def test_the_hub_is_asked_and_its_absence_explained(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    asked: list[str] = []

    def found(ref: str, **_: Any) -> str:
        asked.append(ref)
        return str(tiny)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", found)
    assert resolve_model("someone/some-model") == tiny
    assert asked == ["someone/some-model"]

    def unreachable(ref: str, **_: Any) -> str:
        raise LocalEntryNotFoundError(ref)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"hub cannot be reached.*package:smollm2"):
        resolve_model("someone/some-model")


def test_the_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(models.CACHE_VARIABLE, str(tmp_path))
    assert cache_directory() == tmp_path
    monkeypatch.delenv(models.CACHE_VARIABLE)
    assert cache_directory().name == "astraflow"


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def build(target: Path) -> None:
        (target / "half").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "model", build)
    assert list(tmp_path.iterdir()) == []


def test_the_slower_of_two_builds_takes_the_result_of_the_faster(tmp_path: Path) -> None:
    target = tmp_path / "model"

    def fast(temporary: Path) -> None:
        (temporary / "by").write_text("fast")

    def slow(temporary: Path) -> None:
        (temporary / "by").write_text("slow")
        build_once(target, fast)

    assert build_once(target, slow) == target
    assert (target / "by").read_text() == "fast"
    assert list(tmp_path.iterdir()) == [target]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resolve_model("package:smollm2", tmp_path_factory.mktemp("cache"))


@pytest.mark.slow
def test_two_processes_convert_smollm2_at_once(tmp_path: Path) -> None:
    code = "import sys; from astraflow.recipes.models import resolve_model; print(resolve_model('package:smollm2'))"
    environment = {**os.environ, models.CACHE_VARIABLE: str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True) for _ in "12"
    ]
    said = [process.communicate(timeout=110)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert said[0] == said[1]
    assert [path.name for path in (tmp_path / "models").iterdir()] == [Path(said[0]).name]


@pytest.mark.slow
def test_smollm2_answers_and_ends(converted: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(converted)
    tokenizer = AutoTokenizer.from_pretrained(converted)
    assert model.dtype == torch.bfloat16
    assert model.generation_config.eos_token_id == [2, 0]
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a 39")) == ["a", "Ġ", "3", "9"]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    reply = model.generate(**prompt, max_new_tokens=16, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert tokenizer.decode(reply, skip_special_tokens=True) == "The capital of France is Paris."
    assert int(reply[-1]) == 2


@pytest.mark.slow
def test_smollm2_equals_what_transformers_reads(converted: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers reads GGUF files only with accelerate")
    from transformers import AutoModelForCausalLM

    source = smollm2.find_gguf()
    ours = AutoModelForCausalLM.from_pretrained(converted)
    theirs = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    expected = theirs.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in ours.state_dict().items())
    ids = torch.arange(20, 60)[None]
    with torch.inference_mode():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
