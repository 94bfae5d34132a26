"""The experiments: their exactly known numbers, that all run on a CPU in seconds, and that their pages say what the records say."""

import json
import math
import re
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from trainfit.bench import attention
from trainfit.bench.attention import Case
from trainfit.bench.experiment import Bench
from trainfit.bench.experiments import accumulation, autocast, dataloader, flash, transformer
from trainfit.bench.experiments import attention as attention_experiment
from trainfit.bench.run import RULES, experiment_names, run
from trainfit.bench.stopwatch import CpuStopwatch
from trainfit.catalog import load as catalog
from trainfit.cli.main import main
from trainfit.records import read
from trainfit.report.bench_merge import merged
from trainfit.report.bench_pages import pages, pivoted
from trainfit.report.bench_plot import AXES, OWN_PLOTS, lines_of, plot_of
from trainfit.report.bench_prose import stories
from trainfit.report.bench_table import aligned, grids, reasons
from trainfit.report.flash_goals import goals
from trainfit.spec.bench import BenchResult, BenchRow
from trainfit.spec.errors import InputError
from trainfit.spec.provenance import new_bench_record
from trainfit.spec.result import Record
from trainfit.spec.samples import Environment, Spread

WHERE = Environment(device="a CPU", device_bytes=1, torch="2", python="3", platform="x")


@pytest.fixture(scope="module", params=experiment_names())
def tiny(request: pytest.FixtureRequest) -> BenchResult:
    return run(request.param, device="cpu", form="tiny")


def full(result: BenchResult) -> Record:
    return new_bench_record(result.model_copy(update={"form": "full"}))


def test_every_experiment_runs_on_a_cpu_in_seconds(tiny: BenchResult) -> None:
    assert tiny.rows
    assert {row.status for row in tiny.rows} <= {"done", "unsteady"}, reasons(tiny.rows)
    assert tiny.elapsed_s < 60
    points = [json.dumps(row.point) for row in tiny.rows]
    assert len(points) == len(set(points))


def test_every_experiment_has_a_table_and_a_page(tiny: BenchResult) -> None:
    for grid in grids(tiny.rows):
        assert len({len(line) for line in (grid.titles, *grid.lines)}) == 1
    page = pages([full(tiny)])[tiny.experiment]
    assert stories()[tiny.experiment].title in page.text
    assert set(page.plots) == (
        {f"{tiny.experiment}-cpu.svg"} if tiny.experiment in {*AXES, *OWN_PLOTS} else set()
    )


def test_a_limit_of_no_time_leaves_rows_that_say_so() -> None:
    result = run("flash", device="cpu", form="tiny", limit_s=0)
    assert {row.status for row in result.rows} == {"not-run"}


def test_unknown_experiments_and_devices_are_refused() -> None:
    with pytest.raises(InputError, match="accumulation"):
        run("acumulation")
    with pytest.raises(InputError, match="device"):
        run("accumulation", device="tpu")


def test_a_thousand_hundredths() -> None:
    sums = [
        accumulation.thousand_hundredths(into, addend, cast) for into, addend, cast, _ in accumulation.SUMS
    ]
    assert [f"{total:.4f}" for total in sums] == ["10.0001", "9.9531", "10.0021", "10.0021"]


def test_ways_to_add_agree_with_the_exact_sum_as_theory_says() -> None:
    floats = accumulation.spread_out(3000)
    exact, unit = math.fsum(floats.astype(np.float64).tolist()), 2.0**-24
    errors = {name: abs(float(add(floats)) - exact) / exact for name, add in accumulation.METHODS.items()}
    assert errors["Kahan"] <= 2 * unit  # Kahan's bound for positive addends (Higham, 1993, section 4)
    assert errors["pairwise"] <= math.ceil(math.log2(3000)) * unit
    assert errors["naive"] <= 2999 * unit
    assert errors["Kahan"] < errors["naive"]
    # Integers that fp32 holds are added exactly in any order.
    assert {float(add(np.arange(100, dtype=np.float32))) for add in accumulation.METHODS.values()} == {4950.0}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_autocast_on_a_cpu(low: str) -> None:
    cpu, dtype = torch.device("cpu"), autocast.LOW[low]
    found = {
        name: tuple(autocast.operation_dtypes(operation, cpu, dtype).values())
        for name, operation in autocast.OPERATIONS.items()
    }
    assert {found[name] for name in ("linear", "matmul", "bmm", "einsum", "conv1d", "attention (SDPA)")} == {
        (low, low)
    }
    assert {found[name] for name in ("cross_entropy", "mse_loss", "add of fp32", "cat with fp32")} == {
        ("fp32", "fp32")
    }
    followers = (
        "softmax",
        "log_softmax",
        "layer_norm",
        "rms_norm",
        "exp",
        "pow",
        "rsqrt",
        "sum",
        "mean",
        "relu",
        "gelu",
        "silu",
        "tanh",
        "dropout",
        "cumsum",
        "norm",
    )
    assert {found[name] for name in followers} == {("fp32", low)}


@pytest.mark.parametrize("low", ["bf16", "fp16"])
def test_the_toy_models_loss_and_gradients_are_fp32(low: str) -> None:
    found = autocast.component_dtypes(torch.device("cpu"), autocast.LOW[low])
    assert found == {
        "weights": "fp32", "fc1": low, "relu": low, "layer norm": low, "fc2 (logits)": low, "loss": "fp32", "gradients": "fp32",
    }  # fmt: skip


CPU = torch.device("cpu")
CASE = Case("eager", "fp32", batch=3, heads=2, seq=37, head=16, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_bodies_of_attention_agree(is_causal: bool) -> None:
    """Those that a CPU has; FlexAttention's uncompiled, which computes the same."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, _ = attention.tensors(CASE, CPU)
    bodies = [attention.body(name) for name in ("eager", "pytorch", "flash", "ours")]
    outs = [
        run(q.detach(), k.detach(), v.detach(), is_causal)
        for run in (*bodies, attention.flex(flex_attention))
    ]
    for out in outs[1:]:
        torch.testing.assert_close(out, outs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in attention.NAMES if name != "eager"])
def test_the_bodies_of_attention_agree_on_a_gpu(name: str) -> None:
    """In bf16, forward and gradients, against fp32 written out: bf16 keeps 8 bits, sums of 256 differ by a few of the last."""
    cuda = torch.device("cuda")
    case = Case(name, "bf16", batch=2, heads=4, seq=256, head=64, is_causal=True)
    q, k, v, gradient = attention.tensors(case, cuda)
    attention.check(case, cuda)
    out = attention.body(name)(q, k, v, True)
    found = (out, *torch.autograd.grad(out, (q, k, v), gradient))
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    exact = attention.written_out(q, k, v, True)
    wanted = (exact, *torch.autograd.grad(exact, (q, k, v), gradient.float()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, atol=0.02 * float(other.abs().max()), rtol=0.02)


def test_every_body_is_given_the_same_numbers() -> None:
    for one, other in zip(
        attention.tensors(CASE, CPU), attention.tensors(replace(CASE, body="ours"), CPU), strict=True
    ):
        assert torch.equal(one, other)


def test_what_a_body_cannot_do_is_a_row_that_says_so() -> None:
    bench = on_a_cpu()
    rows = [*attention.rows(bench, replace(CASE, body="cudnn"), bench.rule)]
    assert [(row.status, row.point["pass"]) for row in rows] == [
        ("refused", which) for which in attention.PASSES
    ]
    assert "cudnn trains on CUDA only" in rows[0].message
    for name in attention.NAMES:
        refused = name in attention.HALF_ONLY
        with pytest.raises(InputError, match="fp16 and bf16 only") if refused else nullcontext():
            attention.check(replace(CASE, body=name), torch.device("cuda"))
        attention.check(replace(CASE, body=name, dtype="bf16"), torch.device("cuda"))


def test_flops_of_attention_are_two_products_forward_and_five_backward_half_of_each_masked() -> None:
    whole = replace(CASE, batch=8, heads=1, seq=256, is_causal=False)
    assert attention.flops(whole, attention.PRODUCTS["forward"]) == 2 * (2 * 8 * 256 * 256 * 16)
    goal = Case("ours", "bf16", 1, 16, 8192, 128, is_causal=True)
    assert attention.flops(goal, attention.PRODUCTS["both"]) == 7 * 16 * 8192**2 * 128
    for products in (attention.PRODUCTS, attention.LEAST_PRODUCTS):
        assert products["forward"] + products["backward"] == products["both"]


def test_a_run_of_attention_marks_its_forward_and_its_backward() -> None:
    laps: list[str] = []
    run = attention.forward_and_backward(attention.body("eager"), *attention.tensors(CASE, CPU), True)
    assert [gradient.shape for gradient in run(laps.append)] == [CASE.shape] * 3  # pyright: ignore
    assert laps == ["forward", "backward"]
    assert attention.before_backward(run, CPU) == {}


def test_the_published_mistake_is_flagged() -> None:
    """A forward that only asks for its work takes no time on the host: less than the data sheet allows."""
    bench = on_a_cpu()
    bench.gpu = catalog.gpu("h200")
    long = replace(CASE, batch=8, heads=1, seq=1 << 20, is_causal=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "body", lambda name: lambda q, k, v, is_causal: q)
        patch.setattr(attention, "tensors", lambda case, device: (None,) * 4)
        (row,) = attention.unsynchronised(bench, long)
    assert (row.status, row.numbers, row.point["pass"]) == ("impossible", {}, "forward, not synchronised")
    text = pages([new_bench_record(result_of(row, experiment="attention"))])["attention"].text
    assert re.search(r"\| [\d.]+ [num]s: impossible \|", text)


def test_a_plan_of_flash_has_the_goals_first_and_no_case_twice() -> None:
    cases = list(flash.cases("full"))
    assert len(cases) == len(set(cases))
    first = {
        (case.head, case.seq) for case in cases[: len(flash.GOALS["full"]) * len(flash.GOAL_BODIES["full"])]
    }
    assert first == {(128, 8192), (128, 16384), (64, 16384)}
    assert {case.body for case in cases if case.seq > 65536} == {"ours"}


def test_once_a_body_is_out_of_memory_its_longer_sequences_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And where only the one that holds no scores is left, it has run where the others could not, and no further."""

    def row(bench: Bench, case: Case) -> list[BenchRow]:
        full_up = case.seq >= 32768 and case.body != "ours"
        status: Any = "out-of-memory" if full_up else "done"
        return [BenchRow(point=case.point, status=status, message="tried 128 GiB" if full_up else "")]

    monkeypatch.setattr(attention_experiment, "_rows", row)
    rows = list(attention_experiment.run(replace(on_a_cpu(), form="full")))
    seen: dict[Any, list[Any]] = {}
    for found in rows:
        at = found.point
        seen.setdefault((at["dtype"], at["head"]), []).append((at["seq"], at["body"]))
    assert list(seen)[:2] == [("fp32", 64), ("bf16", 64)]
    assert set(seen) == set(attention_experiment.PLAN["full"])
    assert seen["bf16", 64][-3:] == [(32768, "eager"), (32768, "compiled"), (32768, "ours")]
    assert seen["fp32", 64][-2:] == [
        (32768, "eager"),
        (32768, "compiled"),
    ]  # Ours takes a second a run there.
    assert {n for n, _ in seen["fp32", 128]} == {256, 4096, 8192}
    assert {name for _, name in seen["fp32", 32]} == {"eager", "ours"}


def test_the_goals_are_the_first_table_of_flash_and_a_lost_row_says_so() -> None:
    def row(body: str, head: int, seq: int, which: str, **known: Any) -> BenchRow:
        at = {
            "dtype": "bf16",
            "batch": 1,
            "heads": 16,
            "causal": True,
            "head": head,
            "seq": seq,
            "pass": which,
        }
        return BenchRow(point={**at, "body": body}, **known)

    done: dict[str, Any] = {"status": "done", "times": Spread.of([4.357e-3] * 6)}
    rows = [
        row("cudnn", 128, 8192, "forward", **done, numbers={"tflops_per_s": 530.4}),
        row("ours", 128, 8192, "forward", **done, numbers={"tflops_per_s": 571.6}),
        row("ours", 64, 16384, "both", **done, numbers={"tflops_per_s": 1.0, "host_s": 3.21e-4}),
        row("ours", 64, 16384, "forward", **done, numbers={"tflops_per_s": 1.0, "host_s": 1.23e-4}),
        row("cudnn", 64, 16384, "both", status="throttled", message="software power cap"),
    ]
    text = pages([new_bench_record(result_of(*rows))])["flash"].text
    tables = [part for part in text.split("\n\n") if part.startswith("| ")]
    assert "| forward, head 128, 8,192 tokens, TFLOP/s | 500 plain, 640 ours | 530 |  | 572 |" in tables[0]
    assert (
        "| forward + backward, head 64, 16,384 tokens, ms | at most 4.4 | throttled |  | 4.36 |" in tables[0]
    )
    assert "backward, head 128" not in tables[0]
    assert "321 us" in text  # The host's time, of both passes only.
    assert "123 us" not in text
    assert goals([]) is None


def test_a_long_case_rests_longer_and_none_is_timed_without_hiding_the_host() -> None:
    goal = Case("ours", "bf16", 1, 16, 8192, 128, is_causal=True)
    rules = [attention.rule_of(replace(goal, seq=n)) for n in (1024, 8192, 32768, 131072)]
    assert [rule.rest_s for rule in rules] == pytest.approx([0.015, 0.0154, 0.246, 0.3], rel=0.01)
    assert all(rule.hide and rule.max_samples <= 20 for rule in rules)


def on_a_cpu() -> Bench:
    return Bench(CPU, "tiny", CpuStopwatch(), None, RULES["tiny"], ends_at=time.perf_counter() + 60)


def test_the_least_flops_of_a_step_are_below_the_models() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8, bias=False), torch.nn.ReLU(), torch.nn.Linear(8, 2, bias=False)
    )

    class Asked:
        class batch:  # noqa: N801
            micro, seq = 3, 5

    assert transformer.least_flops(model, Asked()) == 6 * (4 * 8 + 8 * 2) * 15  # pyright: ignore[reportArgumentType]


def test_a_batch_costs_the_host_its_time_and_a_loader_gives_the_same_ones() -> None:
    there: dict[str, bool | int | float | str] = {
        "data": "on the device",
        "pinned": False,
        "workers": 0,
        "prefetch": 0,
    }
    cpu = torch.device("cpu")
    loaded = dataloader.batches_of({**there, "data": "loaded"}, (16, 8), 0.02, cpu)
    start = time.perf_counter()
    batches = [next(loaded) for _ in range(3)]
    assert time.perf_counter() - start >= 3 * 0.02
    assert {batch.shape for batch in batches} == {torch.Size([16, 8])}
    for where in ("on the device", "on the host"):
        assert next(dataloader.batches_of({**there, "data": where}, (16, 8), 0.0, cpu)).shape == (16, 8)


def test_a_loader_without_workers_makes_the_device_wait() -> None:
    rows = run("dataloader", device="cpu", form="tiny").rows
    alone, on_the_host, first = rows[:3]
    assert on_the_host.point["data"] == "on the host"
    assert alone.times is not None
    assert "waiting_share" not in alone.numbers
    assert first.times is not None
    assert first.times.median >= dataloader.STEPS["tiny"] * dataloader.PREPARE_S["tiny"]
    share = first.numbers["waiting_share"]
    assert share == pytest.approx(1 - alone.times.median / first.times.median)
    assert first.numbers["waits"] is (float(share) > dataloader.WAITS_FROM) is True


def result_of(*rows: BenchRow, experiment: str = "flash") -> BenchResult:
    return BenchResult(
        experiment=experiment, form="full", rows=rows, environment=WHERE, limit_s=1.0, elapsed_s=1.0, settings={"spread": 0.02},
    )  # fmt: skip


def point(seq: int, name: str) -> dict[str, bool | int | float | str]:
    return {"dtype": "bf16", "heads": 16, "head": 128, "seq": seq, "body": name, "pass": "both"}


ROWS = (
    BenchRow(
        point=point(128, "ours"), status="done", times=Spread.of([2e-3] * 6), numbers={"tflops_per_s": 123.4}
    ),
    BenchRow(point=point(128, "eager"), status="out-of-memory", message="tried 64 GiB"),
    BenchRow(
        point=point(256, "ours"),
        status="impossible",
        message="faster than light",
        times=Spread.of([1e-9] * 6),
    ),
    BenchRow(point=point(256, "eager"), status="throttled", message="software power cap", discarded=9),
)


def test_a_page_has_rates_of_clean_rows_only_and_says_why_of_the_others() -> None:
    text = pages([new_bench_record(result_of(*ROWS))])["flash"].text
    assert "dtype bf16, heads 16, head 128, pass both\n" in text  # What all share is told once.
    assert "| 128 | 123.4 | out-of-memory |" in text
    assert "| 256 | impossible | throttled |" in text
    assert "faster than light" in text
    assert "software power cap" in text
    assert pivoted(ROWS, "body", "tflops_per_s").titles[-2:] == ("ours, TFLOP/s", "eager, TFLOP/s")


def test_memory_before_backward_has_a_table_of_its_own() -> None:
    def row(body: str, which: str, **known: Any) -> BenchRow:
        return BenchRow(point=point(128, body) | {"pass": which}, **known)

    done: dict[str, Any] = {"status": "done", "times": Spread.of([2e-3] * 6)}
    rows = [
        row("ours", "forward", **done, numbers={"before_backward_bytes": 3 * 2**20}), row("ours", "both", **done),
        row("eager", "forward", status="out-of-memory", message="tried 64 GiB"),
        row("eager", "both", status="out-of-memory", message="tried 64 GiB"),
    ]  # fmt: skip
    text = pages([new_bench_record(result_of(*rows, experiment="attention"))])["attention"].text
    table = text.partition("ours, before backward | eager, before backward")[2]
    assert "3.00 MiB | out-of-memory |" in table
    assert table.count("out-of-memory |") == 1


def test_tables_apart_have_columns_of_their_own() -> None:
    one_head = BenchRow(
        point=point(64, "pytorch") | {"heads": 1},
        status="done",
        times=Spread.of([1.0]),
        numbers={"tflops_per_s": 5.0},
    )
    text = pages([new_bench_record(result_of(*ROWS, one_head))])["flash"].text
    assert "heads 16" in text
    assert "ours, TFLOP/s | eager, TFLOP/s |\n" in text
    assert "| pytorch, TFLOP/s |\n" in text


def test_an_impossible_time_is_not_drawn() -> None:
    assert lines_of(result_of(*ROWS), AXES["flash"]) == {"ours": [(128, 123.4)]}
    assert plot_of(result_of(*ROWS[1:])) is None


def test_the_newest_full_record_of_a_point_makes_the_page() -> None:
    throttled = BenchRow(point=ROWS[0].point, status="throttled", message="software power cap")
    old, new = (new_bench_record(result_of(row)) for row in (throttled, ROWS[0]))
    text = pages([new, old])["flash"].text
    assert "123.4" in text
    assert "throttled" not in text
    tiny = new_bench_record(result_of(*ROWS).model_copy(update={"form": "tiny"}))
    with pytest.raises(InputError, match="full form"):
        pages([tiny])


def test_records_of_one_experiment_make_one_page_and_keep_what_is_known() -> None:
    slower = ROWS[0].model_copy(update={"numbers": {"tflops_per_s": 99.5}})
    lost = BenchRow(point=point(128, "ours"), status="not-run", message="no time")
    part = BenchRow(
        point={key: cell for key, cell in point(128, "ours").items() if key != "pass"}, status="throttled",
        message="held",
    )  # fmt: skip
    records = [
        new_bench_record(result_of(*rows)) for rows in ((part, ROWS[0], ROWS[3]), (slower,), (lost, ROWS[1]))
    ]
    (one,) = merged(list(reversed(records)))
    assert one.result.rows == (slower, ROWS[3], ROWS[1])  # The newest with a number; nothing of the part.
    assert len(one.records) == 3
    assert "3 records, commit" in pages(records)["flash"].text
    other = result_of(lost).model_copy(update={"environment": WHERE.model_copy(update={"torch": "9.9"})})
    (newest,) = merged([*records, new_bench_record(other)])
    assert newest.result.rows == (lost,)  # Times of another torch are not mixed in.


def test_only_the_points_asked_for_are_run() -> None:
    result = run("gpu", device="cpu", form="tiny", only={"cache": ["warm"], "copied_mib": ["4", "0.25"]})
    assert [(row.point["cache"], row.point["copied_mib"]) for row in result.rows] == [
        ("warm", 0.25),
        ("warm", 4.0),
    ]
    assert all(row.times for row in result.rows)
    with pytest.raises(InputError, match="cache"):
        run("gpu", device="cpu", form="tiny", only={"cash": ["warm"]})
    with pytest.raises(InputError, match="cold, warm"):
        run("gpu", device="cpu", form="tiny", only={"cache": ["hot"]})


def test_only_one_warm_up_of_a_transformer() -> None:
    result = run(
        "transformer", device="cpu", form="tiny", only={"warm-up": ["5"], "precision": ["bf16", "fp32"]}
    )
    assert [(row.point["precision"], row.point["warm-up"]) for row in result.rows] == [
        ("fp32", 5),
        ("bf16", 5),
    ]


def test_a_table_tells_once_what_all_rows_share() -> None:
    (grid,) = grids(ROWS)
    assert grid.same == "dtype bf16, heads 16, head 128, pass both"
    assert grid.titles[:2] == ("seq", "body")
    assert aligned(grid)[1].split() == ["128", "ours", "2", "ms", "0%", "6", "123.4"]


def test_the_command_prints_json_and_keeps_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "records.sqlite"
    assert main(["bench", "autocast", "--device", "cpu", "--json", "--record", str(file)]) == 0
    printed = BenchResult.model_validate_json(capsys.readouterr().out)
    (record,) = read(file, "bench")
    assert record.bench == printed
    assert main(["records", "list", str(file)]) == 0
    assert "autocast, tiny" in capsys.readouterr().out
    assert main(["bench", "nonsense"]) == 65
    assert "NAME" in capsys.readouterr().err
