"""Handles: prompts are made of the ids that were sampled; text is encoded once, and only what is new."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow import Message, Sampling
from astraflow.raas import EngineError, GenerateRequest, Generation, Handle, Meter, Policy, load_tokenizer
from astraflow.raas.handles import Transcript, turn_seed

QUESTION = Message("user", "3 + 4")
Z = ord("z")


async def handle(
    kit: Any, *answers: str | tuple[int, ...], tokenizer: Any = None, **changes: Any
) -> tuple[Handle, Any]:
    """A handle whose engine gives `answers` one after the other (text as ids of characters, ended)."""
    left = [a if isinstance(a, tuple) else (*(ord(c) for c in a), kit.STOP) for a in answers]
    engine = kit.ScriptedEngine(answer=lambda request: left.pop(0))
    await engine.start()
    task = kit.make_task(**changes)
    policy = Policy(engine, tokenizer or kit.CharTokenizer())
    return Handle("solver", policy, task.sampling["solver"], task, 2, Transcript(), Meter()), engine


async def test_a_chat_is_the_template_then_the_prefill_then_what_was_sampled(kit: Any) -> None:
    solver, engine = await handle(kit, "7")
    turn = await solver.chat([QUESTION], prefill="3+4=", role="solver")
    turn.reward = 1.0
    assert turn.text == "3+4=7"
    assert turn.finish_reason == "stop"
    (request,) = engine.requests
    tokenizer = kit.CharTokenizer()
    assert request.prompt == tokenizer.encode("<s>user:3 + 4</s><s>assistant:") + tokenizer.encode("3+4=")
    assert request.stop_token_ids == (kit.STOP,)
    (sequence,) = solver.sequences()
    sequence.check()
    assert sequence.tokens.numpy().tolist() == [*request.prompt, ord("7"), kit.STOP]
    assert sequence.loss_mask.numpy().tolist() == [False] * len(request.prompt) + [True, True]
    assert (sequence.role, sequence.reward, sequence.temperature) == ("solver", 1.0, 1.0)


async def test_ids_that_encode_otherwise_are_kept_in_the_next_turn(kit: Any) -> None:
    solver, engine = await handle(kit, (Z, Z, kit.STOP), "ok")
    first = await solver.chat([QUESTION])
    assert first.text == "zz"
    assert kit.CharTokenizer().encode("zz") == (kit.MERGED,)
    tokenizer = solver._tokenizer
    await solver.chat([QUESTION, Message("assistant", first.text), Message("user", "sure?")])
    prompt = engine.requests[1].prompt
    assert prompt[: len(engine.requests[0].prompt) + 3] == (*engine.requests[0].prompt, Z, Z, kit.STOP)
    assert kit.MERGED not in prompt
    assert tokenizer.encoded[-1] == "<s>user:sure?</s><s>assistant:"  # type: ignore[attr-defined]
    (sequence,) = solver.sequences()
    mask = sequence.loss_mask.numpy()
    assert sequence.tokens.numpy()[mask].tolist() == [Z, Z, kit.STOP, ord("o"), ord("k"), kit.STOP]


async def test_an_answer_that_the_template_shows_otherwise_starts_another_sequence(kit: Any) -> None:
    solver, engine = await handle(kit, " 7 ", "ok")
    first = await solver.chat([QUESTION])
    stripped = Message("assistant", first.text.strip())
    await solver.chat([QUESTION, stripped, Message("user", "sure?")])
    first_sequence, second_sequence = solver.sequences()
    rendered = kit.CharTokenizer().render([QUESTION, stripped, Message("user", "sure?")])
    assert engine.requests[1].prompt == kit.CharTokenizer().encode(rendered)
    assert first_sequence.loss_mask.numpy().sum() == 4
    assert second_sequence.loss_mask.numpy().sum() == 3


async def test_a_cut_answer_is_continued_from_its_ids(kit: Any) -> None:
    solver, engine = await handle(kit, (Z, Z), "ok")
    first = await solver.chat([QUESTION], prefill="a")
    assert first.finish_reason == "length"
    await solver.chat([QUESTION, Message("assistant", first.text), Message("user", "go on")])
    assert engine.requests[1].prompt[len(engine.requests[0].prompt) :][:3] == (Z, Z, kit.STOP)
    assert len(solver.sequences()) == 1


async def test_fresh_starts_another_sequence_from_the_same_ids(kit: Any) -> None:
    solver, engine = await handle(kit, (Z, Z, kit.STOP), "ok")
    first = await solver.chat([QUESTION])
    await solver.chat([QUESTION, Message("assistant", first.text), Message("user", "sure?")], fresh=True)
    assert engine.requests[1].prompt[len(engine.requests[0].prompt) :][:2] == (Z, Z)
    assert [int(s.loss_mask.numpy().sum()) for s in solver.sequences()] == [3, 3]


async def test_token_ids_are_continued_as_they_are(kit: Any) -> None:
    solver, _ = await handle(kit, "ab", "c")
    first = await solver.generate([5, 6, 7])
    assert first.text == "ab"
    await solver.generate([5, 6, 7, ord("a"), ord("b"), kit.STOP, 9])
    (sequence,) = solver.sequences()
    assert sequence.tokens.numpy().tolist() == [5, 6, 7, ord("a"), ord("b"), kit.STOP, 9, ord("c"), kit.STOP]


async def test_seeds_differ_by_sample_policy_and_turn_and_come_again(kit: Any) -> None:
    solver, engine = await handle(kit, "a", "b")
    await solver.chat([QUESTION])
    await solver.chat([QUESTION])
    assert [r.seed for r in engine.requests] == [turn_seed(11, 2, "solver", turn) for turn in (0, 1)]
    seeds = {turn_seed(11, index, name, turn) for index in range(8) for name in ("solver", "x") for turn in range(4)}
    assert len(seeds) == 64
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert len({r.request_id for r in engine.requests}) == 2


async def test_greedy_answers_say_the_temperature_of_their_logprobs(kit: Any) -> None:
    solver, engine = await handle(kit, "a", sampling={"solver": Sampling(temperature=0.0)})
    await solver.chat([QUESTION])
    assert engine.requests[0].sampling.temperature == 0.0
    assert solver.sequences()[0].temperature == 1.0


async def test_an_error_says_which_policy_and_turn(kit: Any) -> None:
    class Broken:
        async def generate(self, request: GenerateRequest) -> Generation:
            raise EngineError("too long")

    task = kit.make_task()
    policy = Policy(Broken(), kit.CharTokenizer())  # type: ignore[arg-type]
    solver = Handle("solver", policy, Sampling(), task, 0, Transcript(), Meter())
    with pytest.raises(EngineError) as caught:
        await solver.chat([QUESTION])
    assert "policy 'solver', turn 0" in caught.value.__notes__[0]


def test_the_transcript_shows_each_message_once() -> None:
    transcript = Transcript()
    transcript.add("solver", (QUESTION,), "7")
    more = (QUESTION, Message("assistant", "7"), Message("user", "sure?"))
    transcript.add("solver", more, "yes")
    assert [m.content for m in transcript.messages] == ["3 + 4", "7", "sure?", "yes"]
    assert [m.name for m in transcript.messages] == ["", "solver", "", "solver"]


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer, a chat template and a generation configuration."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate(["<|end|>", "<|im_start|>", "<|im_end|>", *alphabet])}
    vocabulary["zz"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, [("z", "z")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    directory = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(directory)
    (directory / "generation_config.json").write_text('{"eos_token_id": [2, 0]}')
    return directory


def test_a_real_tokenizer_renders_as_its_own_chat_template(chat_model: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(str(chat_model))
    reference = AutoTokenizer.from_pretrained(chat_model)
    chat = [{"role": "user", "content": "Fuzzy 12 + 3?"}]
    wanted = reference.apply_chat_template(chat, add_generation_prompt=True, tokenize=True)["input_ids"]
    text = tokenizer.render([Message("user", "Fuzzy 12 + 3?")])
    assert list(tokenizer.encode(text)) == wanted
    assert tokenizer.stop_token_ids == (2, 0)
    assert tokenizer.decode(wanted, special=True) == text
    assert "<|im_start|>" not in tokenizer.decode(wanted, special=False)


async def test_a_real_tokenizer_keeps_ids_that_encode_otherwise(kit: Any, chat_model: Path) -> None:
    tokenizer = load_tokenizer(str(chat_model))
    (z,) = tokenizer.encode("z")
    (merged,) = tokenizer.encode("zz")
    solver, engine = await handle(kit, (z, z, 2), (z, 2), tokenizer=tokenizer)
    first = await solver.chat([QUESTION])
    assert first.text == "zz"
    await solver.chat([QUESTION, Message("assistant", "zz"), Message("user", "sure?")])
    assert merged not in engine.requests[1].prompt
    assert len(solver.sequences()) == 1


def test_a_tokenizer_without_a_template_is_refused(chat_model: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(chat_model)
    plain.chat_template = None
    plain.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        load_tokenizer(str(tmp_path))
