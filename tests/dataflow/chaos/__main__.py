"""A whole run of dataflow, workers and trainers as processes, one of which is killed at random, again and again.

    python -m tests.dataflow.chaos --seed 0 --strikes 100 [--drops] [--cut] [--directory DIR]

Prints the figures as JSON; exit code 1 if anything was lost, doubled, out of order or unexplained.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

import anyio
import msgspec

from .plan import POLICIES, WORKERS, Counters, Plan
from .programs import run_dataflow, run_proxy, run_trainer, run_worker
from .verdict import judge

MOST_STEPS_BETWEEN = 9
MOST_S_BETWEEN = 1.5
FASTER_WITH_DROPS = 4
LIMIT_S = 300.0
MOST_FALLS = 3

Program = Callable[[], Awaitable[None]]


class Children:
    """Forked processes by name: they have all modules loaded already."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._programs: dict[str, Program] = {}
        self._pids: dict[str, int] = {}
        self.died: Counter[str] = Counter()

    def start(self, name: str, program: Program) -> None:
        self._programs[name] = program
        pid = os.fork()
        if pid == 0:
            self._become(name, program)
        self._pids[name] = pid

    def _become(self, name: str, program: Program) -> None:
        """In the child: run the program; never return."""
        log = os.open(self._directory / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            anyio.run(program, backend_options={"use_uvloop": True})
            code = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    @property
    def running(self) -> list[str]:
        return list(self._pids)

    def signal(self, name: str, number: int) -> None:
        os.kill(self._pids[name], number)

    def kill(self, name: str) -> None:
        """SIGKILL, and at once another one in its place."""
        pid = self._pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            self.start(name, self._programs[name])
        else:
            self._ended(name, os.waitstatus_to_exitcode(status))

    def reap(self) -> None:
        """Those that ended well are gone; those that fell are started again, and counted."""
        for name, pid in list(self._pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del self._pids[name]
                self._ended(name, os.waitstatus_to_exitcode(status))

    def _ended(self, name: str, code: int) -> None:
        if code != 0:
            self.died[name] += 1
            if self.died[name] > MOST_FALLS:
                log = (self._directory / f"{name}.log").read_text()
                raise RuntimeError(f"{name} fell {self.died[name]} times by itself:\n{log[-3000:]}")
            self.start(name, self._programs[name])

    def stop(self) -> None:
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def run(plan: Plan) -> dict[str, object]:
    began = time.monotonic()
    rng = random.Random(plan.seed)
    counters = Counters()
    children = Children(plan.directory)
    struck: Counter[str] = Counter()
    try:
        children.start("dataflow", partial(run_dataflow, plan))
        if plan.cut:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until the proxy listens to it
            children.start("proxy", partial(run_proxy, plan, 8, counters))
        for number, name in enumerate(WORKERS):
            children.start(name, partial(run_worker, plan, name, number, counters))
        for number, name in enumerate(POLICIES):
            children.start(f"trainer-{name}", partial(run_trainer, plan, name, 4 + number, counters))
        for _ in range(plan.strikes):
            wait_for_steps(plan, rng, counters, children)
            if trainers_done(children):
                break
            if plan.cut:
                children.signal("proxy", signal.SIGUSR1)
                struck["socket"] += 1
            else:
                victim = rng.choice(children.running)
                children.kill(victim)
                struck[victim] += 1
        while not trainers_done(children):
            if time.monotonic() - began > LIMIT_S:
                raise TimeoutError(f"not done after {LIMIT_S:g} s; running: {children.running}")
            children.reap()
            time.sleep(0.02)
    finally:
        children.stop()
    verdict = judge(plan)
    return {
        "seed": plan.seed,
        "drops": plan.drops,
        "struck": dict(struck),
        "strikes": struck.total(),
        "fell": dict(children.died),
        "seconds": round(time.monotonic() - began, 1),
        "counted": {name: counters.total(name) for name in Counters.NAMES},
        "journal_bytes": plan.journal.stat().st_size,
        **msgspec.to_builtins(verdict),
    }


def trainers_done(children: Children) -> bool:
    return not any(name.startswith("trainer-") for name in children.running)


def wait_for_steps(plan: Plan, rng: random.Random, counters: Counters, children: Children) -> None:
    """Until a random number of steps was made, or time has passed; then a random bit of time more. With drops there
    are fewer steps in all."""
    faster = FASTER_WITH_DROPS if plan.drops else 1
    wanted = counters.total("steps") + rng.randint(1, MOST_STEPS_BETWEEN // faster)
    limit = time.monotonic() + rng.uniform(0.05, MOST_S_BETWEEN / faster)
    while counters.total("steps") < wanted and time.monotonic() < limit:
        children.reap()
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.02))
    children.reap()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--strikes", type=int, default=100)
    parser.add_argument("--prompts", type=int, default=500)
    parser.add_argument("--drops", action="store_true")
    parser.add_argument("--cut", action="store_true")
    parser.add_argument("--directory", type=Path, default=None)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        directory = arguments.directory or Path(scratch)
        directory.mkdir(parents=True, exist_ok=True)
        plan = Plan(
            directory=directory,
            seed=arguments.seed,
            strikes=arguments.strikes,
            prompts=arguments.prompts,
            drops=arguments.drops,
            cut=arguments.cut,
        )
        figures = run(plan)
    print(msgspec.json.format(msgspec.json.encode(figures), indent=1).decode())
    return 1 if figures["faults"] or figures["fell"] else 0


if __name__ == "__main__":
    sys.exit(main())
