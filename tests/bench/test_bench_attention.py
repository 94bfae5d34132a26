"""Attention as the experiments time it: bodies that agree, counted work, plans, and what is impossible."""

import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from trainfit.bench.experiments import attention as attention_experiment
from trainfit.bench.experiments import flash
from trainfit.bench.harness.bench import Bench
from trainfit.bench.harness.runner import RULES
from trainfit.bench.harness.stopwatch import CpuStopwatch
from trainfit.bench.workloads import attention
from trainfit.bench.workloads.attention import Case, MaskKind, mask_of
from trainfit.catalog import load as catalog
from trainfit.spec.bench import BenchRow
from trainfit.spec.errors import InputError

CPU = torch.device("cpu")
BODIES = ("eager", "compiled", "pytorch", *attention.BACKENDS, "flex", "plain", "ours")
CASE = Case("eager", "fp32", batch=3, heads=2, seq=37, head=16, is_causal=True)


def on_a_cpu() -> Bench:
    return Bench(CPU, "tiny", CpuStopwatch(), None, RULES["tiny"], ends_at=time.perf_counter() + 60)


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
@pytest.mark.parametrize("name", [name for name in BODIES if name != "eager"])
def test_the_bodies_of_attention_agree_on_a_gpu(name: str) -> None:
    """In bf16, forward and gradients, against fp32 written out: bf16 keeps 8 bits."""
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


@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_a_mask_hides_what_comes_later_and_what_is_far_back(kind: MaskKind) -> None:
    case = replace(CASE, body="pytorch", is_causal=False, mask=kind)
    q, k, v, _ = attention.tensors(case, CPU)
    at = torch.arange(case.seq)
    behind = at[:, None] - at[None, :]
    scores = (q @ k.transpose(-1, -2) / case.head**0.5).masked_fill(
        (behind < 0) | (behind >= 18), float("-inf")
    )
    expected = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(attention.body_of(case, CPU)(q, k, v, False), expected)
    mask = mask_of(kind, case.batch, case.seq, torch.float32, CPU)
    assert mask.shape == (3, 1, 37, 37)
    assert mask.dtype == (torch.bool if kind == "boolean" else torch.float32)
    assert case.point["mask"] == kind
    assert "mask" not in CASE.point


def test_bodies_that_take_no_mask_say_so() -> None:
    bench = on_a_cpu()
    for name in BODIES:
        case = replace(CASE, body=name, dtype="bf16", is_causal=False, mask="additive")
        refused = name not in attention.MASKABLE
        with pytest.raises(InputError, match="takes no mask") if refused else nullcontext():
            attention.check(case, torch.device("cuda"))
    rows = [*attention.rows(bench, replace(CASE, body="ours", is_causal=False, mask="boolean"), bench.rule)]
    assert {row.status for row in rows} == {"refused"}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cudnn", "efficient"])
@pytest.mark.parametrize("kind", ["boolean", "additive"])
def test_masked_bodies_agree_on_a_gpu(name: str, kind: MaskKind) -> None:
    cuda = torch.device("cuda")
    case = Case(name, "bf16", batch=2, heads=4, seq=256, head=64, is_causal=False, mask=kind)
    q, k, v, _ = attention.tensors(case, cuda)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        exact = attention.body_of(replace(case, body="pytorch"), cuda)(q, k, v, False)
    torch.testing.assert_close(attention.body_of(case, cuda)(q, k, v, False), exact, atol=0.02, rtol=0.02)


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
    for name in BODIES:
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


def test_a_plan_of_flash_has_the_compared_shapes_first_and_no_case_twice() -> None:
    cases = list(flash.cases("full"))
    assert len(cases) == len(set(cases))
    first = {
        (case.head, case.seq)
        for case in cases[: len(flash.COMPARED["full"]) * len(flash.COMPARED_BODIES["full"])]
    }
    assert first == {(128, 8192), (128, 16384), (64, 16384)}
    assert {case.body for case in cases if case.seq > 65536} == {"ours"}


def test_once_a_body_is_out_of_memory_its_longer_sequences_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The body that holds no scores runs where the others ran out of memory, and no further."""

    def row(bench: Bench, case: Case) -> list[BenchRow]:
        full_up = case.seq >= 32768 and case.body != "ours"
        status: Any = "out-of-memory" if full_up else "done"
        return [BenchRow(point=case.point, status=status, message="tried 128 GiB" if full_up else "")]

    monkeypatch.setattr(attention_experiment, "_rows", row)
    ran = attention_experiment.run(replace(on_a_cpu(), form="full"))
    rows = [found for found in ran if found.point["heads"] == 1]
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
    assert {n for n, _ in seen["fp32", 128]} == {256, 1024, 4096, 8192, 16384}
    assert {n for n, name in seen["fp32", 32] if name == "compiled"} == {256, 16384}


def test_a_long_case_rests_longer_and_none_is_timed_without_hiding_the_host() -> None:
    goal = Case("ours", "bf16", 1, 16, 8192, 128, is_causal=True)
    rules = [attention.rule_of(replace(goal, seq=n)) for n in (1024, 8192, 32768, 131072)]
    assert [rule.rest_s for rule in rules] == pytest.approx([0.015, 0.0154, 0.246, 0.3], rel=0.01)
    assert all(rule.hide and rule.max_samples <= 20 for rule in rules)
