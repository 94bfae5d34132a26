"""LiveBytes against closed forms and against torch's own CPU allocator tally."""

import gc
import resource

import pytest
import torch
from torch import nn

from trainfit.measurement.live import LiveBytes
from trainfit.measurement.meter import CpuMeter
from trainfit.spec.units import MIB

CPU = torch.device("cpu")


def test_counts_storages_once_and_frees_them():
    live = LiveBytes(CPU)
    with live:
        x = torch.zeros(1000)  # 4000 B -> 4096
        view = x[10:20].view(2, 5)
        assert live.live_bytes == 4096
        y = x + 1
        assert live.live_bytes == 8192
        del y
        assert live.live_bytes == 4096
        del x
        assert live.live_bytes == 4096  # the view keeps it
        del view
        assert live.live_bytes == 0
    assert live.take_peak()[0] == 8192
    assert live.take_peak()[0] == 0


def test_follows_what_autograd_saves():
    live = LiveBytes(CPU)
    weight = torch.randn(256, 256, requires_grad=True)  # 262,144 B, made before the mode
    with live:
        live.assign([weight], "weights")
        live.category = "activations"
        x = torch.randn(128, 256)  # 131,072 B
        loss = (x @ weight).relu().square().sum()
        # Kept: weight, x, relu's result (saved by relu and by square), the scalar. The product itself is
        # dead.
        assert live.live_bytes == 262_144 + 131_072 + 131_072 + 512
        live.category = "temporary"
        loss.backward()
        assert weight.grad is not None
        live.assign([weight.grad], "gradients")
        del loss
        assert live.live_bytes == 2 * 262_144 + 131_072
        peak, held = live.take_peak()
    assert held.total == peak
    assert held.weights == 262_144
    assert held.activations >= 2 * 131_072


def test_resize_is_followed_and_assign_moves_between_categories():
    live = LiveBytes(CPU)
    with live:
        x = torch.empty(0)
        torch.add(torch.ones(256), 1, out=x)
        assert live.live_bytes == 1024
        x.resize_(2560)
        assert live.live_bytes == 10240
        live.assign([x], "optimizer")
        y = torch.zeros(128)
        peak, held = live.take_peak()
    assert (peak, held.optimizer, held.temporary) == (10752, 10240, 512)
    del x, y


def test_peak_equals_the_cpu_allocators_own_tally():
    """torch.profiler reports every allocation of the CPU allocator: an MLP's step agrees within 1 %."""
    torch.manual_seed(0)
    model = nn.Sequential(*[layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.GELU())])
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False, fused=True)
    x = torch.randn(512, 256)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    gc.collect()
    live = LiveBytes(CPU)
    with live:
        live.assign([x, *model.parameters()], "weights")
        live.assign([t for s in optimizer.state.values() for t in s.values()], "optimizer")
        start = live.live_bytes
        live.take_peak()
        step()
        grown = live.take_peak()[0] - start
    with torch.profiler.profile(
        profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]
    ) as profile:
        step()
    assert grown == pytest.approx(_allocator_growth(profile), rel=0.01)


def _allocator_growth(profile: torch.profiler.profile) -> int:
    """Highest sum of allocations minus frees, in the order they happened, bytes."""
    results = profile.profiler.kineto_results  # pyright: ignore
    sizes, queue = [], list(results.experimental_event_tree())
    while queue:
        event = queue.pop()
        queue.extend(event.children)
        if str(event.tag).endswith("Allocation"):
            sizes.append((event.start_time_ns, event.extra_fields.alloc_size))
    now = top = 0
    for _, size in sorted(sizes, key=lambda item: item[0]):
        now += size
        top = max(top, now)
    assert top > 0
    return top


def test_more_than_the_limit_is_out_of_memory_and_not_counted():
    live = LiveBytes(CPU)
    live.limit_bytes = 4096
    with live:
        kept = torch.empty(512)
        with pytest.raises(torch.OutOfMemoryError, match="2,560 bytes more than the 2,048 alive"):
            torch.empty(640)
        assert live.live_bytes == 2048
        kept.resize_(1024)
        with pytest.raises(torch.OutOfMemoryError):
            kept.resize_(1025)
        del kept
        torch.empty(1024)
    assert live.take_peak()[0] == 4096


def test_a_limit_holds_where_the_heap_has_room():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    blocks = [b"x" * 100_000 for _ in range(640)]
    pin = b"x" * 100_000  # the heap's last block: what is freed before it stays in this process
    blocks.clear()
    meter = CpuMeter(CPU, tracked=True)
    meter.limit(8 * MIB)
    try:
        with meter.watching(), pytest.raises(torch.OutOfMemoryError):
            torch.stack([torch.empty(16_384) for _ in range(256)])  # 16 MiB before they are stacked
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)
    taken = meter.take()
    assert taken is not None
    assert 8 * MIB - 65_536 <= taken[0] <= 8 * MIB, len(pin)
