"""Tokens a second of a training step: this trainer, TRL's GRPO trainer and a plain padded loop, on one batch.

    uv run --group bench python benchmarks/trainer.py [--rounds 3] [--out docs/benchmarks/trainer.md]

SmolLM2-135M, 64 sequences of 16 to 256 tokens (8 prompts of 8 samples), clipped surrogate, no reference, AdamW, clip
by norm; each contestant in a process of its own, in turn, several times, two threads. Every contestant makes one
optimiser step of the whole batch; TRL and the padded loop in micro-batches of 8 rows, sorted by length in the padded
loop, ours of as many tokens as one of theirs may have.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.dataflow import Array, Sequence, TrainBatch, TrainSample
from astraflow.recipes.models import resolve_model
from astraflow.trainer import LossConfig, PolicySpec, TrainerConfig

PROMPTS, SAMPLES, SHORTEST, LONGEST = 8, 8, 16, 256
ROWS = 8
STEPS = 3
"""Timed steps of a process, after one that warms up."""


Rows = list[tuple[list[int], list[int], float]]
"""(prompt, completion, advantage) of each sequence."""


def make_rows(shared: bool) -> Rows:
    """64 sequences; samples of a prompt share it, or every sequence has its own."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(PROMPTS):
        prompt = rng.integers(100, 49000, int(rng.integers(SHORTEST // 2, LONGEST // 2))).tolist()
        for _ in range(SAMPLES):
            if not shared:
                prompt = rng.integers(100, 49000, len(prompt)).tolist()
            total = int(rng.integers(max(SHORTEST, len(prompt) + 4), LONGEST + 1))
            rows.append((prompt, rng.integers(100, 49000, total - len(prompt)).tolist(), float(rng.normal())))
    return rows


def ours(rows: Rows, model: Path) -> Iterator[Callable[[], None]]:
    from astraflow.trainer.torch_backend import TorchBackend

    samples = []
    for i, (prompt, completion, advantage) in enumerate(rows):
        mask = np.arange(len(prompt) + len(completion)) >= len(prompt)
        sequence = Sequence(
            model_id="p", role="r", tokens=Array.of(np.array(prompt + completion, np.int32)),
            loss_mask=Array.of(mask), logprobs=Array.of(np.where(mask, -9.0, 0.0).astype(np.float32)),
            versions=Array.of(np.where(mask, 0, -1).astype(np.int32)), temperature=1.0, finish_reason="stop",
            reward=advantage,
        )  # fmt: skip
        group = TrainSample(
            sequence=sequence, sample_id=str(i), group_id=str(i // SAMPLES), group_mean=0.0, group_std=1.0, group_size=8
        )
        samples.append(group)
    config = TrainerConfig(lr=1e-6, minibatches=1, micro_tokens=ROWS * LONGEST, loss=LossConfig(name="ppo", kl=0.0))
    backend = TorchBackend(PolicySpec(model_id="p", model=str(model), directory="unused"), config)
    batch = TrainBatch(batch_id="b", model_id="p", version=0, samples=tuple(samples))

    def step() -> None:
        backend.step(batch)

    while True:
        yield step


def padded_rows(rows: Rows) -> dict[str, torch.Tensor]:
    """TRL's layout: prompts padded on their left, completions on their right."""
    longest = [max(len(prompt) for prompt, _, _ in rows), max(len(completion) for _, completion, _ in rows)]
    made = {name: torch.zeros(len(rows), longest[k], dtype=torch.long)
            for k, kind in enumerate(("prompt", "completion")) for name in (f"{kind}_ids", f"{kind}_mask")}  # fmt: skip
    for i, (prompt, completion, _) in enumerate(rows):
        made["prompt_ids"][i, longest[0] - len(prompt) :] = torch.tensor(prompt)
        made["prompt_mask"][i, longest[0] - len(prompt) :] = 1
        made["completion_ids"][i, : len(completion)] = torch.tensor(completion)
        made["completion_mask"][i, : len(completion)] = 1
    return made | {"advantages": torch.tensor([row[2] for row in rows])}


def padded(rows: Rows, model: Path) -> Iterator[Callable[[], None]]:
    """What one writes first: transformers, right padding, rows of similar length together, the same loss."""
    from transformers import AutoModelForCausalLM

    policy: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, fused=True)
    ordered = sorted(rows, key=lambda row: len(row[0]) + len(row[1]))
    total = sum(len(row[1]) for row in rows)

    def step() -> None:
        for start in range(0, len(ordered), ROWS):
            part = ordered[start : start + ROWS]
            longest = max(len(p) + len(c) for p, c, _ in part)
            tokens, mask = torch.zeros(len(part), longest, dtype=torch.long), torch.zeros(len(part), longest)
            trained = torch.zeros(len(part), longest - 1)
            for i, (prompt, completion, _) in enumerate(part):
                size = len(prompt) + len(completion)
                tokens[i, :size] = torch.tensor(prompt + completion)
                mask[i, :size] = 1
                trained[i, len(prompt) - 1 : size - 1] = 1
            logits = policy(input_ids=tokens, attention_mask=mask, use_cache=False).logits[:, :-1]
            logprobs = torch.log_softmax(logits.float(), -1).gather(-1, tokens[:, 1:, None])[..., 0]
            advantages = torch.tensor([row[2] for row in part])[:, None]
            ratio = (logprobs - logprobs.detach()).exp()
            loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
            ((loss * trained).sum() / total).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    while True:
        yield step


def trl(rows: Rows, model: Path) -> Iterator[Callable[[], None]]:
    """`GRPOTrainer.train` with our batch in place of what it would generate; a step is what its callbacks bracket."""
    import threading

    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    steps = STEPS + 1
    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(), per_device_train_batch_size=ROWS, gradient_accumulation_steps=len(rows) // ROWS,
        num_generations=SAMPLES, max_steps=steps, learning_rate=1e-6, beta=0.0, bf16=False, use_cpu=True, report_to=[],
        logging_steps=1000, save_strategy="no", gradient_checkpointing=False, disable_tqdm=True,
        model_init_kwargs={"dtype": "bfloat16"}, loss_type="dapo", epsilon_high=0.28, max_grad_norm=1.0,
    )  # fmt: skip
    go, done = threading.Semaphore(0), threading.Semaphore(0)

    class Paced(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.release()

    class OnOurBatch(GRPOTrainer):  # type: ignore[misc]
        turn = 0

        def _prepare_inputs(self, inputs: Any) -> Any:
            start = self.turn * ROWS % len(rows)
            self.turn += 1
            part = padded_rows(rows[start : start + ROWS])
            return part | {"num_items_in_batch": torch.tensor(sum(len(row[1]) for row in rows))}

    dataset = Dataset.from_list([{"prompt": "x"}] * (len(rows) * steps))
    tokenizer = AutoTokenizer.from_pretrained(model)
    trainer = OnOurBatch(
        model=str(model), reward_funcs=lambda completions, **_: [0.0] * len(completions), args=args,
        train_dataset=dataset, processing_class=tokenizer, callbacks=[Paced()],
    )  # fmt: skip
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        go.release()
        done.acquire()

    while True:
        yield step


CONTESTANTS = {"ours": ours, "padded": padded, "trl": trl}


def child(name: str, shared: bool, model: Path) -> None:
    """Time a few steps and print what they took."""
    torch.set_num_threads(2)
    rows = make_rows(shared)
    steps = CONTESTANTS[name](rows, model)
    next(steps)()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(STEPS):
        next(steps)()
    result = {
        "seconds": (time.perf_counter() - wall) / STEPS,
        "cpu": (time.process_time() - cpu) / STEPS,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }
    print(json.dumps(result), flush=True)


def measure(rounds: int, shared: bool, model: Path) -> dict[str, dict[str, float]]:
    """Medians over the rounds, every contestant once a round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CONTESTANTS}
    for _ in range(rounds):
        for name in CONTESTANTS:
            command = [
                sys.executable,
                __file__,
                "--child",
                name,
                "--model",
                str(model),
                *(["--shared"] if shared else []),
            ]
            done = subprocess.run(command, capture_output=True, text=True, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-3000:]}")
            found[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, "shared" if shared else "own prompts", found[name][-1], file=sys.stderr)
    return {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]} for name, runs in found.items()}


def table(shared: bool, found: dict[str, dict[str, float]]) -> list[str]:
    tokens = sum(len(prompt) + len(completion) for prompt, completion, _ in make_rows(shared))
    titles = {"ours": "AstraFlow", "padded": "padded transformers loop", "trl": "TRL `GRPOTrainer`"}
    lines = [
        "| | tokens/s | tokens per CPU-second | seconds a step | peak memory | AstraFlow is faster by |",
        "|---|---|---|---|---|---|",
    ]
    for name, figures in found.items():
        ratio = figures["seconds"] / found["ours"]["seconds"]
        lines.append(
            f"| {titles[name]} | {tokens / figures['seconds']:.0f} | {tokens / figures['cpu']:.0f} | "
            f"{figures['seconds']:.2f} | {figures['memory']:.2f} GiB | {'' if name == 'ours' else f'{ratio:.2f}×'} |"
        )
    return lines


def verdict(found: dict[str, dict[str, float]]) -> list[str]:
    lines = []
    for name, bar in (("trl", 1.5), ("padded", 1.3)):
        ratio = found[name]["seconds"] / found["ours"]["seconds"]
        lines.append(f"* at least {bar}× {name}: {ratio:.2f}×, {'PASS' if ratio >= bar else 'FAIL'}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", choices=CONTESTANTS)
    parser.add_argument("--shared", action="store_true")
    parser.add_argument("--model", type=Path)
    options = parser.parse_args()
    model = options.model or resolve_model("package:smollm2")
    if options.child:
        child(options.child, options.shared, model)
        return
    grouped, apart = (measure(options.rounds, shared, model) for shared in (True, False))
    text = "\n".join(
        [
            "# A training step", "",
            "`uv run --group bench python benchmarks/trainer.py --out docs/benchmarks/trainer.md`: " + PAGE.strip(), "",
            f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, one run, medians of "
            f"{options.rounds} rounds.", "",
            "Eight prompts of eight samples, as a GRPO batch is:", "", *table(True, grouped), "", *verdict(grouped), "",
            "Every sequence with a prompt of its own (nothing to share):", "", *table(False, apart), "",
        ]
    )  # fmt: skip
    print(text)
    if options.out:
        options.out.write_text(text, "utf-8")


PAGE = """
SmolLM2-135M in bf16, 64 sequences of 16 to 256 tokens, one optimiser step (clipped surrogate, no reference, AdamW,
clip by norm). TRL runs its own `train()` on this batch in place of one it would generate, weights and moments in bf16,
8 rows at a time; the padded loop sorts its rows by length; ours keeps fp32 masters and moments, which they do not.
"""

if __name__ == "__main__":
    main()
