"""Figures in the sentences of llama-405b-mi300x.md are those of the published log and the predictions."""

from statistics import fmean

import pytest

from evidence.scripts.tables import llama_405b as run
from page_claims import check
from trainfit.catalog.load import model as find_model
from trainfit.flops.layer_times import Layers, Mesh, compute_bound_tokens
from trainfit.spec.units import GIB

PAGE = "evidence/pages/llama-405b-mi300x.md"


def test_the_pages_figures() -> None:
    published = run.published()
    recipe, estimate = run.predictions()[0]
    assert estimate.step_s is not None
    assert recipe.batch.tokens * run.CARDS == published["tokens_per_step"]
    shares = [100 * share for share in published["busy_share"]]
    check(PAGE, r"Why did Llama 3.1 405B take # s", (run.step_s(),))
    check(PAGE, r"trainfit predicts # s\.", (estimate.step_s,))
    check(PAGE, r"in a step of # s the cards work for # s and wait for the host for # s",
          (run.step_s(), fmean(run.busy_s()), run.step_s() - fmean(run.busy_s())))  # fmt: skip
    check(PAGE, r"busy in # % of the time on average", (fmean(shares),))
    check(PAGE, r"down to # %\.", (shares[-1],))
    check(PAGE, r"Card 7, which waits least, works # s a step", (run.busy_s()[-1],))
    check(PAGE, r"the forward took # s", (published["forward_s"],))
    check(PAGE, r"the bounds of this one are # to # s",
          (estimate.bounds["step_s"].low, estimate.bounds["step_s"].high))  # fmt: skip
    check(PAGE, r"rank 8 on all linears has # million parameters, # GB",
          (estimate.trainable_params / 1e6, 2 * estimate.trainable_params / 1e9))  # fmt: skip
    params = find_model("llama-3.1-405b").published_params
    assert params is not None
    traffic = 2 * (2 * params) * 7 / 8
    sent = run.LAYERS * 4 * (2 * 1024 * run.HIDDEN) * 2 * 7 / 8
    check(PAGE, r"each card # GB a step instead of # TB", (sent / 1e9, traffic / 1e12))
    check(PAGE, r"a quarter of each card, # GiB", (0.25 * estimate.device_bytes / GIB,))


def test_the_log_says_what_the_text_does() -> None:
    published = run.published()
    assert published["tokens_per_step"] / run.step_s() == pytest.approx(published["tokens_per_s"], rel=0.15)
    assert published["forward_s"] + published["backward_s"] == pytest.approx(run.step_s(), rel=0.06)
    assert sorted(published["busy_share"], reverse=True) == published["busy_share"]


def test_fsdp_is_compute_bound_from_the_pages_tokens() -> None:
    mesh = Mesh(data=8, flops_per_s=1.3074e15, data_bytes_per_s=4.48e11, tensor_bytes_per_s=4.48e11)
    tokens = compute_bound_tokens(Layers(hidden=16384, feed_forward=53248), mesh) / 8
    check(PAGE, r"compute-bound on these links from # tokens a card", (round(tokens, -2),))


def test_tensor_parallel_takes_the_products_and_the_traffic() -> None:
    assert run.tensor_parallel_s(2048) == pytest.approx(2 * run.tensor_parallel_s(1024))
    assert 0.3 < run.tensor_parallel_s(1024) < 0.6
