"""The catalog's table of attention times: its loader and its writer."""

from pathlib import Path
from typing import Any, get_args

import pytest

from evidence.scripts import attention_table
from evidence.scripts.attention_table import runs_of, text_of
from measured_attention import SHAPE, TABLE
from trainfit.catalog.attention import (
    FILE,
    AttentionRate,
    attention_runs,
    nearest,
    nearest_rate,
)
from trainfit.catalog.load import gpus
from trainfit.kernels.flash_attention import dispatch as flash_attention_choice
from trainfit.planning.attention import COMPARED_WITH
from trainfit.records import append, load
from trainfit.spec.bench import BenchResult, BenchRow, Environment, Spread
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.spec.provenance import new_bench_record
from trainfit.spec.recipe import AttentionKernel

ROOT = Path(__file__).parents[2]
RECORDS = ("bench.jsonl", "kernels/attention-grid-h200.jsonl")

# -- the table -----------------------------------------------------------------------------------------------


def test_the_shipped_table_is_read_and_its_gpus_are_the_catalogs() -> None:
    assert {run.gpu for run in attention_runs()} <= set(gpus())
    assert text_of(attention_runs()) == FILE.read_text()


def test_the_shipped_table_is_that_of_the_records() -> None:
    found = [one for name in RECORDS for one in load(ROOT / "evidence/records" / name)]
    assert text_of(runs_of(found)) == FILE.read_text()
    named = " and ".join(f"`{name}`" for name in RECORDS)
    assert f"writes `attention.toml`, from {named};" in (ROOT / "evidence/README.md").read_text()


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ('gpu = "h200"', 'gpu = "h9000"', "h9000"),
        ('measured_at = "2026"', "measured_at = 1", "measured_at"),
        (", cudnn = 2.0 }", " }", "seconds"),
        ("cudnn = 2.0", "cudnn = 0.0", "seconds"),
        ("cudnn = 2.0", "flush = 2.0", "seconds"),
        ("shapes = [", "shapes = [SHAPE,", "measured twice"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    shape = (
        '{ dtype = "bf16", head = 64, causal = true, seq = 1024, heads = 16, batch = 8, '
        "seconds = { flash = 1.0, cudnn = 2.0 } }"
    )
    good = (
        '[[run]]\ngpu = "h200"\nmeasured_at = "2026"\ntorch = "2"\nexperiment = "flash"\n'
        f"shapes = [\n{shape}]\n"
    )
    path, bad = tmp_path / "attention.toml", tmp_path / "bad.toml"
    path.write_text(good)
    assert attention_runs(path)[0].shapes[0].seconds == {"flash": 1.0, "cudnn": 2.0}
    bad.write_text(good.replace(old, new.replace("SHAPE", shape)))
    with pytest.raises(InputError, match=why):
        attention_runs(bad)


def test_the_nearest_length_is_by_ratio_and_never_of_another_kind() -> None:
    found = nearest(TABLE, gpu="h200", dtype="bf16", head=64, seq=3000)
    assert found is not None
    assert found.shape.seq == 8192  # 2.7 times 3000; 1024 is 2.9 times less.
    wanted: dict[str, Any] = {"gpu": "h200", "dtype": "bf16", "head": 64, "seq": 1024}
    assert nearest(TABLE, **wanted) is not None
    others: list[dict[str, Any]] = [{"gpu": "h100-sxm"}, {"dtype": "fp32"}, {"head": 128}, {"causal": False}]
    assert [nearest(TABLE, **(wanted | other)) for other in others] == [None] * 4


# -- the writer ----------------------------------------------------------------------------------------------


def row(body: str, seconds: float, which: str = "both", samples: int = 6, **point: Any) -> BenchRow:
    at = SHAPE | {"body": body, "pass": which} | point
    return BenchRow(point=at, status="unsteady", times=Spread.of([seconds] * samples))


def passes(body: str, seconds: float = 1e-3, **point: Any) -> list[BenchRow]:
    return [row(body, seconds, "forward", **point), row(body, 3 * seconds, "backward", **point)]


def record(*rows: BenchRow, at: str = "2026-11-21T15:00:00", **fields: Any) -> Any:
    where = Environment(device="NVIDIA H200", device_bytes=1, torch="2.11", python="3", platform="x")
    known: dict[str, Any] = {"experiment": "flash", "form": "full", "gpu": "h200"}
    result = BenchResult(**(known | fields), rows=rows, environment=where, limit_s=1.0, elapsed_s=1.0)
    return new_bench_record(result).model_copy(update={"created_at": at})


def test_the_table_is_written_from_records_and_read_again(tmp_path: Path) -> None:
    file, into = tmp_path / "records.sqlite", tmp_path / "attention.toml"
    throttled = BenchRow(
        point=SHAPE | {"body": "cudnn", "pass": "both", "seq": 512}, status="throttled", message="hot"
    )
    append(file, record(
        row("flash", 3e-3), row("ours", 1e-3), row("ours", 1e-9, "forward"), row("flex", 1e-9),
        row("pytorch", 7e-9, heads=1), row("ours", 1e-9, heads=1),  # One head leaves the GPU idle.
        row("flash", 3e-9, seq=2048, heads=1), row("ours", 1e-9, seq=2048, heads=1),
        row("flash", 3e-9, seq=4096), row("ours", 1e-9, seq=4096, samples=5),  # Too few samples.
        row("flash", 1.0, seq=512), throttled, row("flash", 1.0, seq=128),  # Nothing to compare with.
    ))  # fmt: skip
    assert attention_table.main([str(file), "--into", str(into)]) == 0
    (run,) = attention_runs(into)
    (shape,) = run.shapes
    assert shape.seconds == {"flash": 3e-3, "triton": 1e-3}
    assert (run.gpu, run.measured_at, run.torch) == ("h200", "2026-11-21T15:00:00", "2.11")
    assert text_of([run]) == into.read_text()


def test_the_newest_record_of_a_shape_counts_and_only_as_a_whole() -> None:
    old = record(
        row("flash", 3e-3), row("ours", 1e-3), row("flash", 1e-3, seq=512), row("ours", 2e-3, seq=512)
    )
    new = record(row("flash", 5e-3), row("cudnn", 4e-3), at="2026-11-22T15:00:00")
    first, second = runs_of([new, old])
    assert [(shape.seq, shape.seconds) for shape in first.shapes] == [(512, {"flash": 1e-3, "triton": 2e-3})]
    assert [(shape.seq, shape.seconds) for shape in second.shapes] == [(1024, {"flash": 5e-3, "cudnn": 4e-3})]
    fewer = record(
        row("flash", 9e-3), row("ours", 8e-3), row("cudnn", 7e-3, samples=5), at="2026-11-23T15:00:00"
    )
    whole = record(row("flash", 3e-3), row("ours", 1e-3), row("cudnn", 2e-3))
    (run,) = runs_of([whole, fewer])  # The later one had no time for cuDNN.
    assert run.shapes[0].seconds == {"flash": 3e-3, "triton": 1e-3, "cudnn": 2e-3}


def test_one_head_takes_the_place_of_nothing_and_of_no_more_heads() -> None:
    most = record(row("flash", 3e-3, seq=65536), row("ours", 1e-3, seq=65536))
    one: dict[str, Any] = {"heads": 1, "batch": 1, "seq": 65536}
    fewer = record(
        row("flash", 9e-4, **one), row("ours", 8e-4, **one), row("ours", 7e-4, head=32, **one),
        row("pytorch", 6e-4, head=32, **one), at="2026-11-22T15:00:00",
    )  # fmt: skip
    first, second = runs_of([most, fewer])
    assert [(shape.head, shape.heads) for shape in first.shapes] == [(64, 16)]
    assert [(shape.head, shape.heads, shape.seconds) for shape in second.shapes] == [
        (32, 1, {"triton": 7e-4, "sdpa": 6e-4})
    ]


def test_the_writer_knows_where_the_plain_kernels_do_not_run() -> None:
    assert attention_table.HOPPER == flash_attention_choice.HOPPER
    heads = set(attention_table.GLUON_HEADS)
    assert heads == set(flash_attention_choice.BACKWARD)
    assert heads | set(attention_table.WIDE_GLUON_HEADS) == set(flash_attention_choice.FORWARD)
    assert max(flash_attention_choice.IN_PASSES) == attention_table.WIDEST
    assert set(COMPARED_WITH) == set(get_args(AttentionKernel))


def test_rates_are_of_the_kernel_that_ran_and_of_the_most_heads() -> None:
    one = record(
        row("ours", 1.0), *passes("ours"), *passes("ours", dtype="fp32"), *passes("ours", head=32),
        *passes("pytorch"), *passes("pytorch", dtype="fp32"), *passes("flash", seq=65536, heads=1, batch=1),
        *passes("flash", seq=65536), *passes("flex"), *passes("plain", seq=64),
        *passes("plain", causal=False), row("plain", 1e-3, "forward"), row("flash", 1.0),
        at="2026-11-28T15:00:00",
    )  # fmt: skip
    (run,) = runs_of([one])
    found = {(rate.kernel, rate.dtype, rate.head, rate.seq): rate for rate in run.rates}
    assert set(found) == {
        ("gluon", "bf16", 64, 1024), ("plain", "fp32", 64, 1024), ("plain", "bf16", 32, 1024),
        ("cudnn", "bf16", 64, 1024), ("efficient", "fp32", 64, 1024), ("flash", "bf16", 64, 65536),
    }  # fmt: skip
    assert found["flash", "bf16", 64, 65536].heads == 16
    gluon, plain = found["gluon", "bf16", 64, 1024], found["plain", "fp32", 64, 1024]
    pairs = 8 * 16 * 1024 * 1025 / 2
    assert gluon.flops_per_s(backward=False) == plain.flops_per_s(backward=False) == 4 * 64 * pairs / 1e-3
    assert gluon.flops_per_s(backward=True) == pytest.approx(5 * 2 * 64 * pairs / 3e-3)
    assert plain.flops_per_s(backward=True) == pytest.approx(7 * 2 * 64 * pairs / 3e-3)
    assert attention_table.text_of([run]).count("kernel = ") == 6


def test_older_times_of_ours_in_fp32_are_left_out() -> None:
    """They are of kernels without tensor cores; the other kernels' rates of the same record stay."""
    rows = [row(name, 1.0, dtype="fp32") for name in ("ours", "pytorch", "efficient")]
    rows += [*passes("ours", dtype="fp32"), *passes("pytorch", dtype="fp32")]
    rows += [row("flash", 1.0), row("ours", 1.0)]
    old, new = (runs_of([record(*rows, at=f"2026-11-{day}T15:00:00")])[0] for day in (21, 28))
    assert [[set(shape.seconds) for shape in run.shapes] for run in (old, new)] == [
        [{"flash", "triton"}],
        [{"flash", "triton"}, {"sdpa", "efficient", "triton"}],
    ]
    assert [{rate.kernel for rate in run.rates} for run in (old, new)] == [
        {"efficient"},
        {"efficient", "plain"},
    ]


def test_older_shapes_of_wide_heads_do_not_say_what_is_fastest_on_hopper() -> None:
    rows = [row(name, 1.0, head=head) for head in (64, 256) for name in ("ours", "cudnn", "flash")]
    rows += passes("cudnn", head=256)

    def heads(day: int, gpu: str) -> list[int]:
        (run,) = runs_of([record(*rows, at=f"2026-11-{day}T15:00:00", gpu=gpu)])
        assert [rate.kernel for rate in run.rates] == ["cudnn"]
        return [shape.head for shape in run.shapes]

    assert [heads(21, "h200"), heads(28, "h200"), heads(21, "a100-sxm4-80gb")] == [[64], [64, 256], [64, 256]]


def test_few_heads_of_many_sequences_take_the_place_of_more_heads() -> None:
    old = record(row("flash", 3e-3), row("ours", 1e-3), *passes("flash"))
    many: dict[str, Any] = {"heads": 4, "batch": 128}
    new = record(
        row("flash", 9e-3, **many), row("ours", 8e-3, **many), *passes("flash", 2e-3, **many),
        at="2026-11-22T15:00:00",
    )  # fmt: skip
    (run,) = runs_of([old, new])
    assert [(shape.heads, shape.seconds["flash"]) for shape in run.shapes] == [(4, 9e-3)]
    assert [(rate.heads, rate.forward) for rate in run.rates] == [(4, 2e-3)]


def test_of_wide_heads_on_hopper_forward_and_backward_are_kernels_of_their_own() -> None:
    rows = (row("ours", 1.0), row("flash", 1.0), *passes("ours", head=256), *passes("ours", head=512))
    old, new = (runs_of([record(*rows, at=f"2026-11-{day}T15:00:00")])[0] for day in (21, 28))
    kernels = [{(rate.kernel, rate.head) for rate in run.rates} for run in (old, new)]
    assert kernels[0] == {("plain", 256), ("plain", 512)}
    assert kernels[1] == {("gluon", 256), ("plain", 512), ("passes", 512)}
    elsewhere = runs_of([record(*rows, at="2026-11-28T15:00:00", gpu="a100-sxm4-80gb")])[0]
    assert {rate.kernel for rate in elsewhere.rates} == {"plain"}


def test_rates_with_a_mask_are_rates_of_their_own(tmp_path: Path) -> None:
    """The kernel gets an additive mask; a boolean one is first converted by an operation of its own."""
    file, into = tmp_path / "records.sqlite", tmp_path / "attention.toml"
    additive: dict[str, Any] = {"causal": False, "mask": "additive"}
    append(file, record(
        row("flash", 3e-3), row("cudnn", 1e-3), *passes("cudnn"), *passes("cudnn", 2e-3, **additive),
        *passes("cudnn", 5e-3, causal=False, mask="boolean"), row("cudnn", 8e-3, **additive),
        row("efficient", 9e-3, **additive), *passes("cudnn", 4e-3, head=256, mask="none"),
    ))  # fmt: skip
    assert attention_table.main([str(file), "--into", str(into)]) == 0
    (run,) = attention_runs(into)
    assert len(run.shapes) == 1  # What ``attention: best`` chooses by is of causal attention alone.
    found = {(rate.head, rate.masked): (rate.forward, rate.backward, rate.causal) for rate in run.rates}
    assert found == {
        (64, False): (1e-3, pytest.approx(3e-3), True),
        (64, True): (2e-3, pytest.approx(6e-3), False),
        (256, False): (4e-3, pytest.approx(12e-3), True),
    }
    assert into.read_text().count("masked = true") == 1
    assert text_of(attention_runs(into)) == into.read_text()
    wanted: dict[str, Any] = {"gpu": "h200", "kernel": "cudnn", "dtype": "bf16", "head": 200, "seq": 1024}
    plain, masked = (nearest_rate([run], masked=which, **wanted) for which in (False, True))
    assert (plain and plain.head, masked and masked.head) == (256, 64)
    wanted["dtype"] = "fp32"
    assert nearest_rate([run], masked=True, **wanted) is None
    assert masked is not None
    assert masked.flops_per_s(backward=False) == pytest.approx(4 * 64 * 8 * 16 * 1024**2 / 2e-3)


def test_records_without_such_rows_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = (row("flash", 3e-3), row("ours", 1e-3))
    for useless in (record(*rows, form="tiny"), record(*rows, gpu=None), record(rows[0])):
        with pytest.raises(InputError, match="trainfit bench flash"):
            runs_of([useless])
    assert attention_table.main([str(tmp_path / "nothing.jsonl")]) == 65
    assert "nothing.jsonl" in capsys.readouterr().err
    rate: dict[str, Any] = {**SHAPE, "kernel": "cudnn", "forward": 1e-3, "backward": 1e-3, "masked": True}
    with pytest.raises(InputError, match="SDPA takes one of them"):
        parse(AttentionRate, rate)
