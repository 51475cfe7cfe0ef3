"""The reference of `benchmarks/dataflow.py`: rollouts over HTTP as pickled dictionaries, served by Flask.

    python flask_reference.py serve tensors|arrays          prints its address
    python flask_reference.py load URL tensors|arrays INDEX takes rounds on standard input, answers with figures

`tensors` is what AstraFlow does: dictionaries of torch tensors, pickled, a new connection for every call. `arrays` is
the best that is usual: numpy arrays, connections kept. The server only appends to a list and takes from it: no
validation, no statistics, no durability.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np
import requests
from flask import Flask, request
from werkzeug.serving import make_server

BATCH = 256
SAMPLES = 8
TOKENS = 1000
SAMPLED = 800


def serve(kind: str) -> None:
    if kind == "tensors":
        import torch

        torch.set_num_threads(1)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    app = Flask("reference")
    buffer: deque[dict[str, Any]] = deque(maxlen=16 * BATCH)
    lock = threading.Lock()

    @app.post("/submit")
    def submit() -> bytes:
        group = pickle.loads(request.get_data())
        with lock:
            buffer.extend(group["samples"])
        return pickle.dumps({"ok": True})

    @app.get("/batch")
    def batch() -> bytes:
        with lock:
            enough = len(buffer) >= BATCH
            samples = [buffer.popleft() for _ in range(BATCH)] if enough else None
        return pickle.dumps({"ok": True, "result": samples})

    server = make_server("127.0.0.1", 0, app, threaded=True)
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()


def sample(kind: str, draw: np.random.Generator) -> dict[str, Any]:
    mask = np.arange(TOKENS) >= TOKENS - SAMPLED
    made: dict[str, Any] = {
        "input_ids": draw.integers(0, 150_000, TOKENS).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -draw.random(TOKENS), 0).astype(np.float32),
        "versions": np.where(mask, 3, -1).astype(np.int32),
    }
    if kind == "tensors":
        import torch

        torch.set_num_threads(1)
        made = {name: torch.from_numpy(values) for name, values in made.items()}
    return {**made, "model_id": "solver", "reward": 1.0}


class Load:
    """One client process: it submits one group after the other; the first one takes the batches as well."""

    def __init__(self, url: str, kind: str, first: bool) -> None:
        draw = np.random.default_rng(0)
        self._url = url
        self._kept = kind == "arrays"
        self._first = first
        self._group = {"samples": [sample(kind, draw) for _ in range(SAMPLES)]}

    def round(self, seconds: float) -> dict[str, Any]:
        end, spent = time.perf_counter() + seconds, time.process_time()
        submits: list[float] = []
        batches: list[float] = []
        taker = threading.Thread(target=self._take, args=(end, batches))
        if self._first:
            taker.start()
        client = self._client()
        while (began := time.perf_counter()) < end:
            reply = client.post(f"{self._url}/submit", data=pickle.dumps(self._group), timeout=60)
            assert pickle.loads(reply.content)["ok"]
            submits.append(time.perf_counter() - began)
        if self._first:
            taker.join()
        return {"submits": submits, "batches": batches, "cpu": time.process_time() - spent}

    def _take(self, end: float, batches: list[float]) -> None:
        client = self._client()
        while (began := time.perf_counter()) < end:
            reply = client.get(f"{self._url}/batch", timeout=60)
            if pickle.loads(reply.content)["result"] is not None:
                batches.append(time.perf_counter() - began)
            else:
                time.sleep(0.02)

    def _client(self) -> Any:
        """Module-level calls of requests make a connection each."""
        return requests.Session() if self._kept else requests


def main() -> None:
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
        return
    load = Load(sys.argv[2], sys.argv[3], sys.argv[4] == "0")
    print("ready", flush=True)
    for line in sys.stdin:
        print(msgspec.json.encode(load.round(float(line))).decode(), flush=True)


if __name__ == "__main__":
    main()
