"""Any torch tensors through publisher and puller: bf16 and fp8, any bits, any shape, tied."""

from __future__ import annotations

import anyio
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from astraflow.weightsync import MemoryStore, Publisher, Puller, TensorSink

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float16, torch.float32, torch.int8]
SHAPES = [(), (0,), (3, 0, 2), (1,), (1, 1000), (7, 13), (4099,), (64, 129)]
# +0, -0, smallest subnormal, +inf, -inf, quiet and signalling NaN with payloads, largest finite
SPECIAL = torch.tensor([0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x7F7F], dtype=torch.int32)

Tensors = dict[str, torch.Tensor]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def random_bits(size: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


@st.composite
def versions(draw: st.DrawFn) -> list[Tensors]:
    """Three versions of one model: nothing changes, some of it, or all; `tied` shares memory with another."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    first: Tensors = {"plain": torch.zeros(5)}
    for number in range(draw(st.integers(1, 4))):
        dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))
        size = torch.Size(shape).numel() * dtype.itemsize
        first[f"t{number}"] = random_bits(size, generator).view(dtype).reshape(shape)
    special = SPECIAL.to(torch.int16).view(torch.bfloat16)
    first["special"] = special[torch.randint(0, 8, (2000,), generator=generator)]
    made = [first]
    for share in (draw(st.sampled_from([0.0, 0.02, 1.0])), draw(st.sampled_from([0.0, 0.3, 1.0]))):
        after = {name: tensor.clone() for name, tensor in made[-1].items()}
        for tensor in after.values():
            bits = raw(tensor)
            hit = torch.rand(bits.shape, generator=generator) < share
            bits[hit] = random_bits(int(hit.sum()), generator)
        shuffled = torch.randint(0, 8, (2000,), generator=generator)
        after["special"] = torch.where(
            torch.rand(2000, generator=generator) < share, special[shuffled], after["special"]
        )
        made.append(after)
    for tensors in made:
        tensors["tied"] = tensors["t0"]
    return made


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(made=versions())
def test_any_torch_tensors_round_trip(made: list[Tensors], small_frames: int) -> None:
    async def run() -> None:
        store = MemoryStore("every-tensor")
        try:
            live = {name: torch.zeros_like(tensor) for name, tensor in made[0].items()}
            live["tied"] = live["t0"]
            publisher, puller = Publisher(store, stream="s", incarnation=1), Puller(store, TensorSink(live))
            for version, tensors in enumerate((*made, made[0])):
                await publisher.publish(tensors, version)
                report = await puller.pull()
                assert report is not None
                assert all(torch.equal(raw(live[name]), raw(tensor)) for name, tensor in tensors.items())
        finally:
            store.close()

    anyio.run(run)
