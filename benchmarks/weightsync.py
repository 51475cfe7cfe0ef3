"""What a weight version costs, in weightsync's codecs and in others'; the same as `weightsync bench`.

    uv run python benchmarks/weightsync.py [SEED]

Writes docs/benchmarks/weightsync.md. Three minutes on two quiet cores, and one more the first time, when the model is
trained.
"""

from __future__ import annotations

import sys
from pathlib import Path

from astraflow.weightsync.bench import judge, page, run

REPORT = Path(__file__).parent.parent / "docs" / "benchmarks" / "weightsync.md"


def main() -> int:
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    results = run(seed, lambda text: print(text, flush=True))
    REPORT.write_text(page(results, seed))
    for bar in judge(results):
        print(f"{'PASS' if bar.passed else 'FAIL'}  {bar.what}: {bar.measured}")
    print(f"written to {REPORT}")
    return 0 if all(bar.passed for bar in judge(results)) else 1


if __name__ == "__main__":
    sys.exit(main())
