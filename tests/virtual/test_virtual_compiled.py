"""torch.compile on the virtual GPU: what compiled code keeps, allocates, moves and computes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from compiled_blocks import (
    CPU,
    CUBLAS_WORKSPACE,
    FF,
    TOKENS,
    E,
    SwiGlu,
    kept,
    kept_by_torch,
    on_h200,
    step_of,
)
from tiny_recipe import TINY_LLAMA, tiny_recipe
from trainfit.catalog.load import gpu
from trainfit.ledger.allocator import CachingAllocator
from trainfit.ledger.ledger import ALLOCATE, FREE, MIDDLE, Event, Ledger, RepeatError, Segment, Storage
from trainfit.ledger.replay import replay
from trainfit.ledger.slices import check_slices
from trainfit.prediction import trace as tracing
from trainfit.prediction.trace import PROGRAM_MARGIN, _Ends, _trace, trace
from trainfit.prediction.traced_steps import run_steps
from trainfit.spec.recipe import Adapter, Batch, Optimizer, Recipe
from trainfit.virtual.compile.pad_matmul import MARGIN, is_padding_faster
from trainfit.virtual.compile.tuning import Kernel, Tuning, headroom, read
from virtual_runs import plain, recipe_of, steady_sum, sums, with_layers

MEASURED = Path(__file__).parents[1] / "data" / "compiled_on_h200.jsonl"
"""Recipe and peak bytes of the steady step's phases, and of the first step's where no cache was there,
measured on an H200 with torch 2.11 and transformers 5.17."""


class Chain(nn.Module):
    """Four elementwise operations."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((x * 2).sin() + 1).exp()


class Lookup(nn.Module):
    """Rows of a table, and a part of each, in one kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(64 * TOKENS, E, device=CPU).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(x.long())
        return rows[:, : E // 2].sin() + rows[:, E // 2 :].cos()


class Head(nn.Module):
    """A vocabulary that no tensor core can take, in bf16."""

    vocabulary = 2049

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(self.vocabulary, 1024, dtype=torch.bfloat16, device=CPU))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), self.weight).float().sum()


def test_a_feed_forward_block_keeps_what_its_products_read() -> None:
    """norm(x), gate, up and their product, and one fp32 scale a token, as torch's partitioner saves."""
    saved = TOKENS * E * 4 + 3 * TOKENS * FF * 4 + TOKENS * 4
    output = TOKENS * E * 4
    alive = kept(step_of(SwiGlu, (1, TOKENS, E), compiled=True))
    assert sum(alive.values()) == saved + output + CUBLAS_WORKSPACE
    assert kept_by_torch(SwiGlu, (1, TOKENS, E)) == saved  # A real module, compiled after a virtual one.


def test_a_fused_chain_allocates_its_output_alone() -> None:
    """Eagerly each of the four operations allocates; fused, one kernel reads x and writes the result."""
    num_bytes = TOKENS * E * 4
    compiled = step_of(Chain, (TOKENS, E), compiled=True, trains=False)
    eager = step_of(Chain, (TOKENS, E), compiled=False, trains=False)
    assert allocated_in_forward(compiled) == [num_bytes]
    assert allocated_in_forward(eager) == 4 * [num_bytes]
    kernels = [op for op in compiled.ops if op.name.startswith("triton_")]
    assert [op.num_bytes for op in kernels] == [2 * num_bytes]


def test_a_kernel_that_reads_rows_of_a_table_counts_the_rows() -> None:
    """Not the whole table, which is 64 times as large; each half of the rows is read with the index."""
    ledger = step_of(Lookup, (TOKENS,), compiled=True, trains=False)
    kernels = [op for op in ledger.ops if op.name.startswith("triton_")]
    index, rows, out = TOKENS * 4, TOKENS * E * 4, TOKENS * E * 4 // 2
    assert [op.num_bytes for op in kernels] == [index + rows + out]


def allocated_in_forward(ledger: Ledger) -> list[int]:
    forward = next(i for i, segment in enumerate(ledger.segments) if segment.phase == "forward")
    return [
        ledger.storages[e.storage].num_bytes
        for e in ledger.events
        if e.segment == forward and e.kind == ALLOCATE and "/tuning/" not in ledger.storages[e.storage].path
    ]


def test_a_product_that_tensor_cores_cannot_take_is_padded() -> None:
    """2049 columns become 2056 in each of the three products."""
    ledger = step_of(Head, (4096, 1024), compiled=True)
    products = [op.flops for op in ledger.ops if op.flops]
    assert products == 3 * [2 * 4096 * 1024 * 2056]


def test_compiled_blocks_save_no_more_and_compute_the_same() -> None:
    batch = Batch(micro=2, seq=16, accumulate=2)
    recipe = tiny_recipe(precision="amp-bf16", recompute="full", batch=batch, compile="block")
    eager_flops, compiled_flops = saves_no_more(recipe, trace(recipe))
    assert eager_flops == compiled_flops


def test_a_compiled_model_saves_no_more_and_computes_the_same() -> None:
    """A window is a mask inside its graph: the pairs that it hides count no more than eagerly."""
    config = {**TINY_LLAMA, "model_type": "mistral", "sliding_window": 16, "num_hidden_layers": 1}
    fields = {"precision": "bf16", "recompute": "full", "attention": "eager", "compile": "model"}
    recipe = recipe_of(config, batch=Batch(micro=2, seq=48), **fields)
    eager_flops, compiled_flops = saves_no_more(recipe, trace(recipe))
    # Rotary angles: transformers below 5.20 multiplies them as matrices, 48 positions by half of 8 values.
    assert compiled_flops - eager_flops in (0, 2 * 48 * 4)


def saves_no_more(recipe: Recipe, compiled: Ledger) -> tuple[float, float]:
    """Compare with the eager step; return the model FLOPs of both."""
    eager = trace(recipe.model_copy(update={"compile": False}))
    assert activation_bytes(compiled) <= activation_bytes(eager)
    assert compiled.params == eager.params
    assert any("Inductor" in text for text in compiled.assumptions)
    assert any(op.name.startswith("triton_") for op in compiled.ops)
    return steady_sum(eager, "model_flops"), steady_sum(compiled, "model_flops")


def activation_bytes(ledger: Ledger) -> int:
    """Return the bytes that the steady forward leaves to the backward."""
    forward = next(i for i, segment in enumerate(ledger.segments) if segment == ("steady", "forward"))
    kept = (s for s in ledger.storages if s.category == "activations" and s.op >= 0)
    return sum(s.num_bytes for s in kept if ledger.ops[s.op].segment == forward)


def test_an_update_in_the_backward_frees_gradients() -> None:
    """By block the gradients of one block are alive at a time; nothing is left for the optimizer's phase."""
    ordinary, early = (
        replay(trace(recipe), CachingAllocator()).phases.steady
        for recipe in (
            plain(2, compile="block", optimizer=Optimizer(in_backward=when)) for when in (False, True)
        )
    )
    assert early.backward <= ordinary.backward
    assert early.optimizer < ordinary.optimizer


def test_one_graph_serves_all_blocks_and_both_steps() -> None:
    from trainfit.step import assemble

    with on_h200() as virtual:
        step = assemble(plain(2, compile="block"), CPU, compiler=virtual.compiler)
        virtual.model_is_complete(step.model, [])
        for batches in 2 * [step.random_batches()]:
            step(batches)
            assert virtual.compiler.num_graphs == 1


def test_blocks_that_repeat_equal_all_of_them() -> None:
    """The first block's graph differs, as its input, a frozen embedding's output, needs no gradient."""
    adapter = Adapter(kind="lora", rank=4, targets=("out",))
    recipe = plain(5, compile="block", adapter=adapter)
    row = gpu(recipe.hardware.gpu)
    folded, whole = (_trace(recipe, row, _Ends(None, run_steps), whole=whole) for whole in (False, True))
    assert folded.repeat > 1
    a, b = sums(folded), sums(whole)
    a.pop("calls"), b.pop("calls")  # An optimizer's list is one call a group.
    assert a == b


@pytest.mark.slow
def test_a_model_of_repeated_layers_equals_all_of_them() -> None:
    """Six of seven layers, in one graph: every sum of the whole graph. Slices that differ are noticed."""
    recipe = plain(7, compile="model")
    row = gpu(recipe.hardware.gpu)
    folded, whole = (
        _trace(recipe, row, _Ends(None, run_steps), whole=False, margin=(1, 2)),
        _trace(recipe, row, _Ends(None, run_steps), whole=True),
    )
    assert folded.repeats == (2,)
    a, b = sums(folded), sums(whole)
    a.pop("calls"), b.pop("calls")  # An optimizer's list is one call a group.
    assert a == b
    assert num_host_calls(folded) == num_host_calls(whole)
    for phase in ("forward", "backward"):
        segment = folded.segments.index(Segment("steady", phase))
        for what in ("storages", "ops"):
            check_slices(folded)
            with pytest.raises(RepeatError):
                check_slices(replace(folded, **{what: [*larger(folded, what, segment)]}))


def num_host_calls(ledger: Ledger) -> list[int]:
    """Views, calls of modules and graphs, and reads of a steady step of all layers."""
    counts = [[ledger.times(op) * count for count in op.host] for op in ledger.steady_ops]
    return [sum(column) for column in zip(*counts, strict=True)]


def larger(ledger: Ledger, what: str, segment: int) -> Iterator[Any]:
    """Yield the entries, the first of the middle slice in a segment with a byte more."""
    seen = False
    for entry in getattr(ledger, what):
        op = ledger.ops[entry.op] if what == "storages" else entry
        found = not seen and entry.group == MIDDLE and op.segment == segment and entry.num_bytes
        seen = seen or bool(found)
        yield entry._replace(num_bytes=entry.num_bytes + 512) if found else entry


def test_a_real_module_compiles_afterwards() -> None:
    """The real device's program is not the virtual one's, nor the other way round."""
    step_of(Chain, (8, 8), compiled=True)
    module = Chain()
    module.compile(backend="aot_eager")
    x = torch.ones(3)
    assert torch.equal(module(x), ((x * 2).sin() + 1).exp())


ROWS = [json.loads(line) for line in MEASURED.read_text().splitlines()]


@pytest.mark.parametrize("row", ROWS, ids=[row["id"] for row in ROWS])
def test_peaks_are_those_of_an_h200(row: dict[str, Any]) -> None:
    """Peak bytes of the phases: within 0.1 % by the Inductor that was measured, within 6 % by another.

    The first step where nothing was compiled on the machine before: kernels are tuned in it. GPT-2's whole
    graph within 0.5 %: the benchmark of its padded products, which is not followed, leaves free blocks that
    later phases take whole.
    """
    from trainfit.spec.parsing.recipe_file import recipe_from

    same_inductor = torch.__version__.startswith("2.11.")
    recipe: Recipe = recipe_from(row["recipe"])
    ledger = trace(recipe)
    assert not ledger.ops_without_flops
    replayed = replay(ledger, CachingAllocator(), empty_cache_after_init=True).phases
    within = 0.06 if not same_inductor else 0.005 if row["id"].startswith("gpt2-hf-model") else 0.001
    for step in ("first", "steady"):
        for phase, num_bytes in row.get(step, {}).items():
            found = getattr(getattr(replayed, step), phase)
            assert found == pytest.approx(num_bytes, rel=within), (step, phase)


def test_a_model_with_two_kinds_of_layers_compiles() -> None:
    kinds = {"layer_types": ["sliding_attention", "full_attention"]}
    ledger = trace(recipe_of(with_layers("gemma-3-1b", 2) | kinds, compile="block"))
    assert any(op.name.startswith("triton_") for op in ledger.ops)
    assert not ledger.ops_without_flops


# -- choices that a GPU makes by benchmark: padded products, and what tuning allocates ----------------------

BENCHMARKED = Path(__file__).parents[1] / "data" / "padding_on_h200.jsonl"
"""What ``pad_mm``'s benchmark found on an H200 with torch 2.11: milliseconds of a product as it is, and
padded with the copies that it needs. "10": the first operand's padding costs nothing."""
A_TIE = 0.02
L2 = 1 << 20
POINTWISE = """
import triton

@triton_heuristics.pointwise(
    size_hints={'x': %d},
    filename=__file__,
    triton_meta={'signature': {}, 'device': DeviceProperties(type='cuda', index=0, multi_processor_count=132,
    cc=90,
                 major=9, regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048, warp_size=32)},
    inductor_meta={'autotune_hints': set(), 'mutated_arg_names': ['in_out_ptr0'], 'optimize_mem': %s},
    min_elem_per_thread=0
)
@triton.jit
def kernel(in_ptr0, in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    pass
"""


def test_products_are_padded_as_on_an_h200() -> None:
    rows = [json.loads(line) for line in BENCHMARKED.read_text().splitlines()]
    decisions = [(row, free) for row in rows for free in row["padded_ms"]]
    assert [(row, free) for row, free in decisions if not agrees(row, free)] == []


def agrees(row: dict[str, Any], free: str) -> bool:
    gain = row["ms"] / row["padded_ms"][free]
    if abs(gain / MARGIN - 1) < A_TIE:
        return True  # Another benchmark may decide otherwise.
    m, k, n, dtype = row["m"], row["k"], row["n"], getattr(torch, row["dtype"])
    mat1 = matrix(k, m, dtype).t() if row["kind"] == "dw" else matrix(m, k, dtype)
    mat2 = matrix(n, k, dtype).t() if row["kind"] == "fwd" else matrix(k, n, dtype)
    return is_padding_faster(mat1, mat2, free1=free[0] == "1", free2=free[1] == "1") == (gain > MARGIN)


def matrix(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=dtype, device="meta")


def test_each_pattern_of_eager_attention_has_two_batched_products() -> None:
    """Graphs with fewer are compiled without these patterns."""
    from torch._inductor.fx_passes import fuse_attention, serialized_patterns
    from torch._inductor.pattern_matcher import PatternPrettyPrinter

    with FakeTensorMode():
        registered = fuse_attention._get_sfdp_patterns(CPU)
    assert registered
    for name, settings in registered:
        module = import_module(f"{serialized_patterns.__name__}.{settings['search_fn'].__name__}")
        assert PatternPrettyPrinter.run(getattr(module, name)).count("aten.bmm.default") >= 2


def test_layer_norm_keeps_its_statistics_in_fp32() -> None:
    """Mean and 1/deviation, 4 bytes a token each; on a CPU they are of the input's dtype."""
    dtype = torch.bfloat16

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(E, device=CPU, dtype=dtype)
            self.linear = nn.Linear(E, E, False, CPU, dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x.to(dtype)))

    ledger = step_of(Normed, (TOKENS, E), compiled=True)
    sizes = sorted(kept(ledger).values())
    assert sizes[:2] == [TOKENS * 4, TOKENS * 4]


def test_one_product_in_a_batch_is_a_product() -> None:
    class Product(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.bmm(x, x.transpose(1, 2))

    ledger = step_of(Product, (1, 64, 32), compiled=True, trains=False)
    names = {op.name for op in ledger.ops if op.flops}
    assert names == {"aten.mm.default"} or names == {"aten.mm.out"}, names


def test_kernels_are_read_as_torch_describes_them() -> None:
    # ``pointwise``: one dimension, autotune_pointwise.
    assert read(POINTWISE % (1 << 20, True)) == Kernel(num_configs=2, changed=(1,), spares_memory=True)


def test_tuning_allocates_a_cache_and_clones_once() -> None:
    tuning, source = Tuning(L2), POINTWISE % (1 << 20, False)
    x = torch.empty(3000)
    y = torch.empty(4000)[1000:]
    expected = [(4 * 4000,), (L2, 4 * 4000)]
    assert tuning.scratch(source, (x, y, 3000), Ledger()) == expected
    assert tuning.scratch(source, (x, y, 3000), Ledger()) == []
    assert tuning.scratch(POINTWISE % (1 << 21, False), (x, y, 3000), Ledger()) == expected


@pytest.mark.parametrize(("room", "clones"), [(4096, ()), (16384, (16000,))])
def test_clones_that_would_raise_the_peak_go_to_the_host(room: int, clones: tuple[int, ...]) -> None:
    """``copy_args_to_cpu_if_needed``: 16000 bytes fit below the highest point if that is as far above."""
    ledger = ledger_with(room)
    assert headroom(ledger) == room
    found = Tuning(L2).scratch(POINTWISE % (1 << 20, True), (None, torch.empty(4000), 4000), ledger)
    assert found == [clones, (L2, *clones)]


def ledger_with(room: int) -> Ledger:
    """In the running phase ``room`` bytes, in sizes that no block has, were allocated and freed."""
    ledger = Ledger()
    ledger.segments += [Segment("first", "forward"), Segment("first", "backward")]
    ledger.storages += [
        Storage(1 << 30, "temporary", -1, -1, "before"),
        Storage(room - 1, "temporary", -1, -1, "here"),
    ]
    ledger.events += [Event(ALLOCATE, 0, -1, 0), Event(ALLOCATE, 1, -1, 1), Event(FREE, 1, -1, 1)]
    return ledger


def test_only_the_first_step_tunes() -> None:
    """One kernel in a layer, one buffer as large as an H200's L2 cache, and none when it runs again."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sin().exp()

    ledger = step_of(Twice, (TOKENS, E), compiled=True, trains=False)
    assert [s.num_bytes for s in ledger.storages if "/tuning/" in s.path] == [60 << 20]


def test_a_refused_model_of_few_layers_is_traced_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[tuple[bool, tuple[int, int]]] = []
    ledger = trace(tiny_recipe("native", layers=1), whole=True)

    def refused(*_: Any, whole: bool, margin: tuple[int, int] = (0, 0)) -> Ledger:
        tried.append((whole, margin))
        if not whole:
            raise RepeatError("the layers differ")
        return ledger

    monkeypatch.setattr(tracing, "_trace", refused)
    monkeypatch.setattr("trainfit.techniques.compile.model.COMPARED", (2, 11))  # Older ones are traced whole.
    assert trace(tiny_recipe("native", layers=10, compile="model")) is ledger
    assert tried == [(False, PROGRAM_MARGIN), (True, (0, 0))]
