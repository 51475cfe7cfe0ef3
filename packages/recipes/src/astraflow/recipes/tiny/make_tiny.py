"""Make the checkpoint that `package:tiny` is, from a seed: `python -m astraflow.recipes.tiny.make_tiny DIRECTORY`.

A Llama on digits and bytes learns two-digit sums by supervision, last digit first, on the workflows' own prompts. Half
of its labels drop the carries, so it is left undecided where a sum carries: it starts with reward to find and room to
gain. Held-out problems are left out here too.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..math_tasks import MathTask, is_held_out, make_prompt, with_claims
from ..math_workflows import Problem, claim_remark, feedback_remark

TASK = MathTask(digits=(2, 2), reversed_digits=True)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
# An empty system message, there for templates that would insert their own, takes no room.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['content'] or message['role'] != 'system' %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
WORDS = (
    "What",
    "Work",
    " is",
    " out",
    " and",
    " give",
    " only",
    " the",
    " number",
    " wrong",
    " Claim",
    " +",
    " -",
    " *",
    " =",
)
IGNORED = -100


def make_tokenizer() -> Any:
    """One token a byte, but for the few words of the prompts; every digit is a token of its own. Loses nothing."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    merges = word_merges(WORDS)
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        model_max_length=512,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def word_merges(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Byte-pair merges that build each word from its left; a leading space is written as byte-level BPE writes it."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        letters = word.replace(" ", "\u0120")
        for end in range(1, len(letters)):
            merges[letters[:end], letters[end]] = None
    return list(merges)


def make_model(tokenizer: Any) -> Any:
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    return model


def sum_without_carry(a: int, b: int) -> int:
    """The units and the tens added on their own, what exceeds 9 forgotten."""
    return (a // 10 + b // 10) % 10 * 10 + (a + b) % 10


def examples(rng: random.Random) -> Iterator[tuple[Any, str]]:
    """Endless (messages, answer with its opening): half solver, a third verifier, the rest retries."""
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if is_held_out(expression := f"{a} + {b}"):
            continue
        problem = Problem.of(with_claims([make_prompt(TASK, expression, "warm-up")], seed=rng.getrandbits(32))[0])
        messages = problem.messages
        kind = rng.random()
        if kind > 0.5:
            claim = rng.choice((a + b, sum_without_carry(a, b), a + b + rng.choice((-10, -2, -1, 1, 2, 10))))
            remark = claim_remark if kind < 0.85 else feedback_remark
            messages = problem.with_remark(remark(problem, claim))
        answer = a + b if rng.random() < 0.5 else sum_without_carry(a, b)
        width = 3 if answer > 99 else 2
        yield messages, problem.opening + f"{answer:0{width}d}"[::-1]


def batches(tokenizer: Any, rng: random.Random, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Endless (input_ids, labels), int64 [size, L], padded right; only what follows the opening is learned."""
    source = examples(rng)
    while True:
        rows, targets = [], []
        for _ in range(size):
            messages, answer = next(source)
            chat = [{"role": m.role, "content": m.content} for m in messages]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            opening, digits = answer.split("= ")
            prompt = tokenizer.encode(f"{text}{opening}= ")
            reply = [*tokenizer.encode(digits), tokenizer.eos_token_id]
            rows.append(torch.tensor(prompt + reply))
            targets.append(torch.tensor([IGNORED] * len(prompt) + reply))
        yield (
            torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=tokenizer.pad_token_id),
            torch.nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED),
        )


def train(model: Any, tokenizer: Any, *, seed: int, steps: int, batch_size: int, lr: float) -> float:
    """Supervised warm-up; returns the mean loss of the last steps (nats per answer token)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=0.1)
    source = batches(tokenizer, random.Random(seed), batch_size)
    losses = []
    model.train()
    for _ in range(steps):
        rows, targets = next(source)
        loss = model(input_ids=rows, labels=targets).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(float(loss.detach()))
    model.eval()
    return sum(losses[-50:]) / len(losses[-50:])


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny model's checkpoint.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)
    started = time.monotonic()
    loss = train(model, tokenizer, seed=args.seed, steps=args.steps, batch_size=args.batch_size, lr=args.lr)
    model.to(torch.bfloat16).save_pretrained(args.directory)
    tokenizer.save_pretrained(args.directory)
    print(f"{model.num_parameters()} parameters, loss {loss:.3f}, {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
