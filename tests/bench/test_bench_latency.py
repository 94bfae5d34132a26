"""Memory hierarchy: pointer chases, the sizes that they show, rates of a CPU's caches, marked code."""

import ctypes
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench_rows import CPU, tiny_bench
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import run
from trainfit.bench.kernels import cc, nvcc
from trainfit.bench.workloads import cpu_caches, kernel_code, memory_levels, pointer_chase
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import InputError
from trainfit.spec.units import KIB, MIB

needs_cc = pytest.mark.skipif(not any(map(shutil.which, cc.COMPILERS)), reason="no C compiler")


def has_cuda_compiler() -> bool:
    try:
        return bool(nvcc.nvcc() and nvcc.disassembler())
    except InputError:
        return False


needs_nvcc = pytest.mark.skipif(not has_cuda_compiler(), reason="no nvcc or nvdisasm")


def test_a_random_cycle_visits_every_entry_once() -> None:
    order, following = pointer_chase.random_cycle(1000, CPU)
    at, seen = int(order[0]), []
    for _ in range(1000):
        seen.append(at)
        at = int(following[at])
    assert at == seen[0]
    assert seen == order.tolist()
    assert sorted(seen) == list(range(1000))


@needs_cc
def test_a_chase_ends_where_its_pointers_lead_and_a_wrong_one_is_not_timed() -> None:
    chase = pointer_chase._cpu(64 * KIB)
    chase.check()
    assert chase.times()[0] > 0
    chase.run(8)  # It goes on from where it ended.
    warm, lines = 512, 512
    assert chase.place() == chase.expected(pointer_chase.CHECKED_STEPS + 8 + warm) != chase.expected(0)
    assert lines == 64 * KIB // pointer_chase.LINE_BYTES
    with pytest.raises(ArithmeticError, match="follow"):
        chase.check()  # From here it does not begin at the start.


@needs_cc
def test_a_load_takes_longer_from_memory_than_from_the_first_cache() -> None:
    only = {"chase": [pointer_chase.CPU_MEMORY], "set_kib": ["16", "4096"]}
    near, far = run("gpu", device="cpu", form="tiny", only=only).rows
    assert 0.2 < float(near.numbers["latency_ns"]) < float(far.numbers["latency_ns"])
    assert near.times is not None
    assert near.times.median == pytest.approx(float(near.numbers["latency_ns"]) / 1e9)
    assert "cycles" not in near.numbers, "a CPU's chase knows no cycles"


def test_the_size_of_a_level_is_where_the_latency_rises() -> None:
    latencies = {
        16 * KIB: 20.0,
        64 * KIB: 21.0,
        192 * KIB: 30.0,
        256 * KIB: 110.0,
        MIB: 140.0,
        64 * MIB: 400.0,
    }
    assert pointer_chase.largest_within(latencies, 20.0, 140.0) == 192 * KIB
    assert pointer_chase.largest_within(latencies, 140.0, 600.0) == MIB
    latencies[32 * KIB] = 500.0  # A set inside that is slow ends the level.
    assert pointer_chase.largest_within(latencies, 20.0, 140.0) == 16 * KIB
    # An H100: at 224 KiB an eighth of the loads are L2's.
    latencies = {32 * KIB: 16.2, 208 * KIB: 16.2, 224 * KIB: 33.2, 240 * KIB: 67.7, 4 * MIB: 136.0}
    assert pointer_chase.edge("L1", latencies) == 208 * KIB
    with pytest.raises(InputError, match="full form"):
        pointer_chase.edge("L1", {pointer_chase.IN_L1: 20.0})


def test_a_level_has_the_latency_of_the_nearest_set_of_its_memory() -> None:
    def row(space: str, kib: int, latency: float | None) -> BenchRow:
        numbers = {} if latency is None else {"latency_ns": latency}
        return BenchRow(point={"chase": space, "set_kib": kib}, status="done", numbers=numbers)

    rows = [
        row("global", 64, 20.0),
        row("global", 8192, 150.0),
        row("shared", 8, 16.0),
        row("global", 30, None),
    ]
    assert pointer_chase.nearest(rows, "global", 32 * KIB) is rows[0]
    assert pointer_chase.nearest(rows, "global", 15 * MIB) is rows[1]
    assert pointer_chase.nearest(rows, "shared", 64 * KIB) is rows[2]
    assert pointer_chase.nearest(rows, "local", 64 * KIB) is None


@pytest.fixture
def three_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for index, (level, kind, size) in enumerate(
        [
            ("1", "Data", "48K"),
            ("1", "Instruction", "32K"),
            ("2", "Unified", "2048K"),
            ("3", "Unified", "32M"),
        ]
    ):
        folder = tmp_path / f"index{index}"
        folder.mkdir()
        for name, text in (("level", level), ("type", kind), ("size", size)):
            (folder / name).write_text(f"{text}\n")
    monkeypatch.setattr(cpu_caches, "CACHES", tmp_path)


@pytest.mark.usefixtures("three_caches")
def test_each_cache_is_read_by_a_set_that_it_holds_and_the_nearer_ones_do_not() -> None:
    assert cpu_caches.caches() == {"L1d": 48 * KIB, "L2": 2 * MIB, "L3": 32 * MIB}
    assert cpu_caches.sets("full") == {
        "L1d of the CPU": 24 * KIB, "L2 of the CPU": 192 * KIB, "L3 of the CPU": 8 * MIB,
        "memory of the CPU": 128 * MIB,
    }  # fmt: skip
    assert list(cpu_caches.sets("tiny")) == ["L1d of the CPU", "L2 of the CPU"]


def test_a_system_that_reports_no_caches_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_caches, "CACHES", tmp_path / "none")
    assert cpu_caches.sets("full") == {}


@needs_cc
def test_every_byte_of_a_set_is_read_in_every_turn() -> None:
    cpu_caches.build(24 * KIB, "tiny")(lambda name: None)
    held = torch.arange(1000)
    function = cc.library("memory").stream
    assert function(held.data_ptr(), 1000, 3) == sum(int((held ^ turn).sum()) for turn in range(3))


def test_without_a_compiler_the_rows_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cc.shutil, "which", lambda name, path=None: None)
    cc.library.cache_clear()
    rows = run("gpu", device="cpu", form="tiny", only={"chase": [pointer_chase.CPU_MEMORY]}).rows
    assert {(row.status, "C compiler" in row.message) for row in rows} == {("refused", True)}


def test_an_instruction_belongs_to_the_line_that_the_table_names() -> None:
    ptx = [
        "\t.loc\t1 30 5", "\tadd.s32 \t%r1, %r2, 8;", "$L__BB0_4:", "\t.pragma \"nounroll\";",
        "\t.loc\t1 40 9, function_name $L__info_string0, inlined_at 1 30 5", "\t// begin inline asm",
        "\tld.global.ca.u64 %rd1, [%rd1];", "\tld.global.ca.u64 %rd1, [%rd1];", "\t// end inline asm",
        "\t.loc\t2 40 9", "\tmul.lo.s32 \t%r3, %r3, 2;", "\t.loc\t1 30 5", "\t@%p1 bra \t$L__BB0_4;",
    ]  # fmt: skip
    located = list(kernel_code._located_ptx(ptx))
    assert located == [
        (30, "add.s32 %r1, %r2, 8"), *[(40, "ld.global.ca.u64 %rd1, [%rd1]")] * 2,
        (0, "mul.lo.s32 %r3, %r3, 2"), (30, "@%p1 bra $L__BB0_4"),
    ]  # fmt: skip
    marked = {30: (2, "for ...", "count"), 40: (1, "p = *p", "load")}
    assert kernel_code.codes(iter(located), marked) == [
        (2, "add.s32 %r1, %r2, 8", 1), (1, "ld.global.ca.u64 %rd1, [%rd1]", 2), (2, "@%p1 bra $L__BB0_4", 1),
    ]  # fmt: skip


@needs_cc
def test_the_loads_of_a_cpus_chase_are_in_its_assembly() -> None:
    _, assembly = kernel_code._c()
    (loads,) = [code for code in assembly if code.mark == 1]
    assert loads.count == 8
    assert {code.mark for code in assembly} == {1, 2}


@needs_nvcc
def test_the_loads_of_a_gpus_chase_are_in_its_ptx_and_sass() -> None:
    source, ptx, sass = kernel_code._cuda(kernel_code.HOPPER)
    for stage in (source, ptx, sass):
        assert {code.mark for code in stage} == {1, 2, 3, 4}
    # Eight in the loop that is timed, one in that of the warm-up; none is taken out of it or left out.
    assert [code.count for code in ptx if code.mark == 2] == [9]
    (loads,) = [code for code in sass if code.mark == 2]
    assert (loads.text.split()[0].split(".")[0], loads.count) == ("LDG", 9)
    assert [code.text.split()[0] for code in sass if code.mark == 1] == ["CS2R"]


@needs_nvcc
def test_no_read_of_a_stream_is_taken_out_of_its_loop(tmp_path: Path) -> None:
    """ptxas takes equal reads of local memory out of a loop, and puts what it can into registers."""
    cubin = tmp_path / "streams.cubin"
    nvcc.compiled("memory_streams", kernel_code.HOPPER, cubin, "-cubin")
    done = kernel_code.subprocess.run([nvcc.disassembler(), "-c", cubin], capture_output=True, text=True)
    loops = {
        name: _in_the_loop(kernel_code._between(done.stdout, rf"^\.text\.\w*{name}", r"^\s*\.section"))
        for name in ("register_stream", "constant_stream", "local_stream")
    }
    assert sum("LDL.128" in line for line in loops["local_stream"]) == 8
    assert sum("LDC" in line and "c[0x3]" in line for line in loops["constant_stream"]) == 16
    assert sum("FFMA" in line for line in loops["register_stream"]) == 32


def _in_the_loop(lines: list[str]) -> list[str]:
    """Return the longest part of a kernel from a label to a branch back to it."""
    labels = {line.strip()[:-1]: at for at, line in enumerate(lines) if line.strip().endswith(":")}
    parts = [
        lines[labels[name] : at]
        for at, line in enumerate(lines)
        for name in labels
        if "BRA" in line and f"`({name})" in line and labels[name] < at
    ]
    return max(parts, key=len)


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench of a GPU that is not here, without time: it lists its points and builds nothing."""
    known = SimpleNamespace(
        multi_processor_count=132, L2_cache_size=50 * MIB, total_memory=80 * 2**30,
        shared_memory_per_multiprocessor=228 * KIB, regs_per_multiprocessor=65536,
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)
    return replace(tiny_bench(form="full"), device=torch.device("cuda"), ends_at=-math.inf)


def test_every_level_of_a_gpu_has_a_size_a_latency_and_a_rate(gpu_bench: Bench) -> None:
    levels = memory_levels.to_chase(gpu_bench)
    assert {str(level.point["level"]) for level in levels} == {
        "device memory", "L2", "L1", "shared memory", "constant memory", "local memory", "registers",
    }  # fmt: skip
    chased = [
        row.model_copy(update={"status": "done", "message": "", "numbers": {"latency_ns": float(index)}})
        for index, row in enumerate(pointer_chase.rows(gpu_bench, levels))
        if "chase" in row.point
    ]
    for level in levels:
        assert pointer_chase.nearest(chased, level.space, level.set_bytes) is not None
    assert memory_levels._sizes(gpu_bench.device, chased).keys() == {
        str(one.point["level"]) for one in levels
    }


@pytest.mark.parametrize(
    ("only", "chases"),
    [
        ({"level": {"shared memory"}}, [("shared", 64)]),
        ({"level": {"device memory"}}, [("global", 2**20)]),
        ({"level": {"L1"}}, [("global", size // KIB) for size in pointer_chase.GLOBAL_BYTES["full"]]),
        ({"size of": {"L2"}}, [("global", size // KIB) for size in pointer_chase.GLOBAL_BYTES["full"]]),
        ({"chase": {"local"}, "set_kib": {"32"}}, [("local", 32)]),
        ({"dtype": {"bf16"}}, []),
    ],
)
def test_a_selected_level_chases_what_it_needs(
    gpu_bench: Bench, only: dict[str, set[str]], chases: list[tuple[str, int]]
) -> None:
    gpu_bench.only = {key: frozenset(values) for key, values in only.items()}
    rows = pointer_chase.rows(gpu_bench, memory_levels.to_chase(gpu_bench))
    found = [(row.point["chase"], row.point["set_kib"]) for row in rows if "chase" in row.point]
    assert found == chases


@pytest.mark.gpu
def test_chases_and_streams_pass_their_own_checks_on_a_gpu() -> None:
    """Each build checks where its chase ends, or the sums of what was read."""
    only = {"chase": list(pointer_chase.OTHER_BYTES)}
    rows = run("gpu", device="cuda", form="tiny", only=only).rows
    rows += run("gpu", device="cuda", form="tiny", only={"level": ["registers", "local memory", "L1"]}).rows
    rows += run("gpu", device="cuda", form="tiny", only={"level": ["constant memory"]}).rows
    assert {row.status for row in rows} <= {"done", "unsteady"}, [row.message for row in rows]
    nearest = {str(row.point["chase"]): row.numbers["cycles"] for row in rows if "chase" in row.point}
    assert float(nearest["register"]) < float(nearest["shared"]) < 100


C_TYPES = {"int": ctypes.c_int, "float": ctypes.c_float}


def checked_launch(name: str, *arguments: Any, source: str) -> dict[str, Any]:
    """Compare arguments with the C signature in the source, and return them by their names there."""
    text = (nvcc.SOURCES / f"{source}.cu").read_text()
    (signature,) = re.findall(rf'extern "C" int {name}\(([^)]*)\)', text)
    *parameters, stream = [one.strip().rpartition(" ") for one in signature.split(",")]
    assert stream[2] == "stream"
    for (kind, _, parameter), argument in zip(parameters, arguments, strict=True):
        wanted = torch.Tensor if kind.endswith("void*") else C_TYPES[kind]
        assert isinstance(argument, wanted), f"{name}: {parameter}"
    return {parameter: one for (_, _, parameter), one in zip(parameters, arguments, strict=True)}


def chased_on_the_host(name: str, *arguments: Any, source: str) -> None:
    """Do to the arguments of a chase what its kernel does."""
    by_name = checked_launch(name, *arguments, source=source)
    place, steps = by_name["place"], by_name["steps"].value
    assert steps % 8 == 0
    steps += by_name["warm"].value if "warm" in by_name else 0
    by_name["out"].copy_(torch.tensor([2 * steps, steps]))
    if name == "chase_register":
        place += steps * by_name["addend"].value
    elif name == "chase_global":
        at = int(place)
        for _ in range(steps):
            at = ctypes.c_int64.from_address(at).value
        place.fill_(at)
    else:
        cycle, at = by_name["cycle"].tolist(), int(place)
        assert by_name["words"].value == len(cycle)
        for _ in range(steps):
            at = cycle[at // 4]
        place.fill_(at)


@pytest.mark.parametrize("space", [pointer_chase.GLOBAL, *pointer_chase.OTHER_BYTES])
def test_each_chase_gives_its_kernel_the_cycle_that_it_checks(
    space: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvcc, "launch", chased_on_the_host)
    chase = pointer_chase._gpu(space, 32 * KIB if space != pointer_chase.REGISTER else 0, CPU)
    chase.check()
    ns, cycles = chase.times()
    assert ns >= pointer_chase.CHECKED_STEPS
    assert cycles == 2 * ns
    if space != pointer_chase.REGISTER:  # Its chain begins anew.
        chase.run(8)
        with pytest.raises(ArithmeticError, match="follow"):
            chase.check()


def test_streams_give_their_kernels_what_they_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sums here are those that the kernels' definitions give, each thread's own."""

    def launch(name: str, *arguments: Any, source: str) -> None:
        by_name = checked_launch(name, *arguments, source=source)
        turns, sums = by_name["turns"].value, by_name["sums"]
        assert sums.numel() == by_name["blocks"].value * memory_levels.STREAM_THREADS
        if name == "stream_constant":
            total = sum(int((by_name["words"].long() ^ turn).sum()) for turn in range(turns)) % 2**32
            sums.fill_(total - 2**32 if total >= 2**31 else total)
        elif name == "stream_local":
            sums.fill_(turns * sum(4 * (by_name["first"].value + vector) for vector in range(8)))
        else:
            sums.fill_(sum(chain + turns * by_name["addend"].value for chain in range(8)))

    monkeypatch.setattr(nvcc, "launch", launch)
    for build in (memory_levels._constant, memory_levels._local, memory_levels._registers):
        build(2, CPU)(lambda name: None)
