"""Attention as the experiments time it: bodies that agree, counted work, and the plans of full form."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from bench_rows import CPU, tiny_bench
from trainfit.bench.experiments import attention as attention_experiment
from trainfit.bench.experiments import flash
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import run
from trainfit.bench.workloads import attention
from trainfit.bench.workloads.attention import Case, MaskKind, mask_of, rule_of
from trainfit.catalog import load as catalog
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import InputError

CUDA = torch.device("cuda")
BODIES = ("eager", "compiled", "pytorch", *attention.BACKENDS, "flex", "plain", "ours")
CASE = Case("eager", "fp32", batch=3, heads=2, seq=37, head=16, is_causal=True)
GOAL = Case("ours", "bf16", 1, 16, 8192, 128, is_causal=True)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_bodies_of_attention_agree(is_causal: bool) -> None:
    """Those that a CPU has; FlexAttention's uncompiled, which computes the same."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v, _ = (x.detach() for x in attention.tensors(replace(CASE, body="ours"), CPU))
    bodies = [attention.body(name) for name in ("eager", "pytorch", "flash", "ours")]
    first, *others = [run(q, k, v, is_causal) for run in (*bodies, attention.flex(flex_attention))]
    for out in others:
        torch.testing.assert_close(out, first)
    assert torch.equal(q, attention.tensors(CASE, CPU)[0])  # Every body has the same inputs.


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in BODIES if name != "eager"])
def test_the_bodies_of_attention_agree_on_a_gpu(name: str) -> None:
    """In bf16, forward and gradients, against fp32 written out: bf16 keeps 8 bits."""
    case = Case(name, "bf16", batch=2, heads=4, seq=256, head=64, is_causal=True)
    q, k, v, gradient = attention.tensors(case, CUDA)
    attention.check(case, CUDA)
    out = attention.body(name)(q, k, v, True)
    found = (out, *torch.autograd.grad(out, (q, k, v), gradient))
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    exact = attention.written_out(q, k, v, True)
    wanted = (exact, *torch.autograd.grad(exact, (q, k, v), gradient.float()))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float(), other, atol=0.02 * float(other.abs().max()), rtol=0.02)


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_hides_later_and_far_earlier_tokens(kind: MaskKind) -> None:
    case = replace(CASE, body="pytorch", is_causal=False, mask=kind)
    q, k, v, _ = attention.tensors(case, CPU)
    at = torch.arange(case.seq)
    behind = at[:, None] - at[None, :]
    hidden = (behind < 0) | (behind >= 18)
    scores = (q @ k.transpose(-1, -2) / case.head**0.5).masked_fill(hidden, float("-inf"))
    expected = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(attention.body_of(case, CPU)(q, k, v, False), expected)
    mask = mask_of(kind, case.batch, case.seq, torch.float32, CPU)
    assert mask.shape == (3, 1, 37, 37)
    assert mask.dtype == (torch.bool if kind == "boolean" else torch.float32)
    assert case.point["mask"] == kind
    assert "mask" not in CASE.point


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "efficient"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masked_bodies_agree_on_a_gpu(name: str, kind: MaskKind) -> None:
    case = Case(name, "bf16", batch=2, heads=4, seq=256, head=64, is_causal=False, mask=kind)
    q, k, v, _ = attention.tensors(case, CUDA)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = attention.body_of(replace(case, body="pytorch"), CUDA)(q, k, v, False)
    torch.testing.assert_close(attention.body_of(case, CUDA)(q, k, v, False), exact, atol=0.02, rtol=0.02)


def test_a_body_refuses_the_masks_dtypes_and_devices_that_it_lacks() -> None:
    for name in BODIES:
        case = replace(CASE, body=name, dtype="bf16")
        attention.check(case, CUDA)
        with nullcontext() if name in attention.MASKABLE else pytest.raises(InputError, match="no mask"):
            attention.check(replace(case, is_causal=False, mask="additive"), CUDA)
        fp16_only = pytest.raises(InputError, match="fp16 and bf16 only")
        with fp16_only if name in attention.HALF_ONLY else nullcontext():
            attention.check(replace(CASE, body=name), CUDA)
    rows = [*attention.rows(tiny_bench(), replace(CASE, body="cudnn"))]
    assert [(row.status, row.point["pass"]) for row in rows] == [("refused", one) for one in attention.PASSES]
    assert "cudnn trains on CUDA only" in rows[0].message


def test_flops_of_attention_are_two_products_forward_and_five_backward_half_of_each_masked() -> None:
    whole = replace(CASE, batch=8, heads=1, seq=256, is_causal=False)
    assert attention.flops(whole, attention.PRODUCTS["forward"]) == 2 * (2 * 8 * 256 * 256 * 16)
    assert attention.flops(GOAL, attention.PRODUCTS["both"]) == 7 * 16 * 8192**2 * 128
    for products in (attention.PRODUCTS, attention.LEAST_PRODUCTS):
        assert products["forward"] + products["backward"] == products["both"]


def test_a_run_of_attention_marks_its_forward_and_its_backward() -> None:
    laps: list[str] = []
    run = attention.forward_and_backward(attention.body("eager"), *attention.tensors(CASE, CPU), True)
    gradients: Any = run(laps.append)
    assert [gradient.shape for gradient in gradients] == [CASE.shape] * 3
    assert laps == ["forward", "backward"]
    assert attention.before_backward(run, CPU) == {}


def test_an_unsynchronized_forward_is_impossible(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward that is only issued takes no time on the host: less than the data sheet allows."""
    monkeypatch.setattr(attention, "body", lambda name: lambda q, k, v, is_causal: q)
    monkeypatch.setattr(attention, "tensors", lambda case, device: (None,) * 4)
    long = replace(CASE, batch=8, heads=1, seq=1 << 20, is_causal=False)
    (row,) = attention.unsynchronised(tiny_bench(gpu=catalog.gpu("h200")), long)
    assert (row.status, row.numbers, row.point["pass"]) == ("impossible", {}, "forward, not synchronised")


# -- plans of full form --

SIZES = (16, 32, 64, 128)
DTYPES = ("fp32", "bf16")
LENGTHS = (256, 1024, 4096, 8192, 16384)


def shapes(name: str, *keys: str, **only: list[str]) -> set[tuple[object, ...]]:
    """Values of ``keys`` of every point in full form, none of which has time."""
    rows = run(name, device="cpu", form="full", limit_s=0, only=only or None).rows
    assert {row.status for row in rows} == {"not-run"}
    return {tuple(row.point[key] for key in keys) for row in rows}


def test_attention_and_flash_have_every_head_size_at_every_length() -> None:
    keys = ("dtype", "heads", "head", "seq", "body")
    found = shapes("attention", *keys)
    assert found >= set(product(DTYPES, [1], SIZES, LENGTHS, ("eager", "ours")))
    assert found >= set(product(DTYPES, [1], SIZES, (256, 16384), ("compiled",)))
    assert found >= set(product(DTYPES, [1], [64], (*LENGTHS, 65536), ("compiled",)))
    assert len([shape for shape in found if shape[-1] == "compiled"]) < 30  # Each takes seconds to compile.
    powers = [2**power for power in range(7, 17)]
    assert shapes("flash", *keys, heads=["1"]) == set(
        product(DTYPES, [1], SIZES, powers, ("ours", "pytorch"))
    )


def test_attention_has_masks_by_each_kernel_that_takes_them_and_heads_of_256() -> None:
    lengths = (1024, 2048, 4096, 8192)
    keys = ("dtype", "head", "seq", "body")
    masked = set(product(["bf16"], (64, 128, 256), lengths, ("cudnn", "efficient")))
    fp32 = set(product(["fp32"], (64, 128, 256), lengths, ["efficient"]))
    assert shapes("attention", *keys, mask=["additive"]) == masked | fp32
    boolean = {shape for shape in masked if shape[2] in (2048, 8192)}
    assert shapes("attention", *keys, mask=["boolean"]) == boolean
    wide = set(product(["bf16"], [256], lengths, ("cudnn", "flash", "efficient", "ours")))
    narrow = set(product(["bf16"], (64, 128), lengths, ["efficient"]))
    fp32 = set(product(["fp32"], [256], lengths, ["efficient"]))
    assert shapes("attention", *keys, mask=["none"]) == wide | narrow | fp32
    kinds = shapes("attention", "heads", "causal", "mask", mask=["additive", "boolean", "none"])
    assert kinds == {(16, False, "additive"), (16, False, "boolean"), (16, True, "none")}


def test_a_plan_of_flash_has_the_compared_shapes_first_and_no_case_twice() -> None:
    cases = list(flash.cases("full"))
    assert len(cases) == len(set(cases))
    first = cases[: 3 * len(flash.COMPARED_BODIES["full"])]
    assert {(case.head, case.seq) for case in first} == {(128, 8192), (128, 16384), (64, 16384)}
    assert {case.body for case in cases if case.seq > 65536} == {"ours"}


@pytest.mark.parametrize("status", ["out-of-memory", "failed"])
def test_only_out_of_memory_ends_the_lengths_of_a_body(status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(bench: Bench, case: Case) -> Iterator[BenchRow]:
        hit = (case.dtype, case.head, case.seq, case.body) == ("fp32", 64, 4096, "eager")
        known = {"status": status, "message": "why"} if hit else {"status": "done"}
        yield BenchRow.model_validate({"point": case.point, **known})

    monkeypatch.setattr(attention_experiment, "rows", rows)
    points = [row.point for row in run("attention", device="cpu", form="full").rows]
    one_head = [point for point in points if point["heads"] == 1]
    body = [one for one in one_head if (one["dtype"], one["head"], one["body"]) == ("fp32", 64, "eager")]
    assert max(int(point["seq"]) for point in body) == (4096 if status == "out-of-memory" else 65536)
    assert {(point["dtype"], point["head"]) for point in one_head} == set(product(DTYPES, SIZES))


def test_the_body_that_holds_no_scores_runs_where_the_others_ran_out_of_memory_and_no_further(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def row(bench: Bench, case: Case) -> list[BenchRow]:
        full_up = case.seq >= 32768 and case.body != "ours"
        known = {"status": "out-of-memory", "message": "tried 128 GiB"} if full_up else {"status": "done"}
        return [BenchRow.model_validate({"point": case.point, **known})]

    monkeypatch.setattr(attention_experiment, "rows", row)
    seen: dict[Any, list[Any]] = {}
    for found in attention_experiment.run(tiny_bench(form="full")):
        at = found.point
        if at["heads"] == 1:
            seen.setdefault((at["dtype"], at["head"]), []).append((at["seq"], at["body"]))
    assert list(seen)[:2] == [("fp32", 64), ("bf16", 64)]
    assert set(seen) == set(attention_experiment.PLAN["full"])
    beyond = [(32768, "eager"), (32768, "compiled")]
    assert seen["bf16", 64][-3:] == [*beyond, (32768, "ours")]
    assert seen["fp32", 64][-2:] == beyond  # In fp32 ours takes a second a run there.
    assert {n for n, _ in seen["fp32", 128]} == set(LENGTHS)
    assert {n for n, name in seen["fp32", 32] if name == "compiled"} == {256, 16384}


def test_a_long_case_rests_longer_and_in_fp32_has_time_for_its_few_samples() -> None:
    rules = [rule_of(replace(GOAL, seq=n)) for n in (1024, 8192, 32768, 131072)]
    assert [rule.rest_s for rule in rules] == pytest.approx([0.015, 0.0154, 0.246, 0.3], rel=0.01)
    assert all(rule.hide and rule.max_samples <= 20 for rule in rules)
    # 3.8 TFLOP: two to four seconds a run where the kernel makes one to two TFLOP/s.
    rule = rule_of(Case("ours", "fp32", 1, 1, 65536, 128, is_causal=True))
    assert rule.min_samples == rule.max_samples == 6
    assert rule.cap_s >= 6 * (4 + rule.rest_s)
