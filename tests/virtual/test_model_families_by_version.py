"""Peaks of the catalog's transformers families, by the version of transformers and of torch that is
installed; their products are those of the closed form.

Supported are transformers 5.17 to 5.23 and torch 2.11 to 2.13. A family whose peak differs between the two
ends holds both numbers; a difference that is not here fails. Where the virtual GPU itself changes, run this
file with both versions of transformers before the numbers are replaced.
"""

import inspect
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

import pytest

from trainfit.catalog.load import gpu, model, models
from trainfit.flops.closed_form import product_step_flops
from trainfit.prediction.estimate import estimate
from trainfit.prediction.machine import machine_with
from trainfit.prediction.predict import ledger_of
from trainfit.spec.recipe import Batch
from virtual_runs import recipe_of, steady_sum, with_layers

OLDEST, NEWEST = (5, 17), (5, 23)
BEFORE_LT_IS_SHARED = (2, 12)
"""torch below it keeps a second cuBLASLt workspace of 1 MiB once a linear layer with a bias has run."""
LT_WORKSPACE_BYTES = 1 << 20

Peak = int | tuple[int, int]  # Bytes; of a family that differs, by transformers 5.17 and by 5.23


class Family(NamedTuple):
    """A model of the family with so many layers, 2 x 1024 tokens in bf16 on an H200: its steady peak."""

    model: str
    layers: int
    sdpa: Peak
    eager: Peak | None = None  # None: the function is Llama's, and adds to SDPA what it adds there
    biased: bool = False  # Whether it has linear layers with a bias that run through cuBLASLt


FAMILIES = [
    Family("gpt2", 3, 1_955_745_280, 2_334_245_376, biased=True),
    Family("pythia-160m", 3, 2_080_704_000, 2_503_899_648, biased=True),
    Family("gpt-j-6b", 3, 9_460_189_184, 9_460_189_184, biased=True),
    Family("opt-125m", 3, 1_810_422_272, (2_263_240_192, 2_264_809_984), biased=True),
    Family("bloom-560m", 3, 8_818_974_208, 8_818_974_208, biased=True),
    Family("falcon-7b", 3, 10_893_452_800, 8_959_583_744),
    Family("llama-3.2-1b", 3, 6_592_593_408, 7_837_512_192),
    Family("smollm3-3b", 4, 7_807_939_584),
    Family("mistral-7b-v0.1", 3, 7_654_100_992),
    Family("qwen2.5-0.5b", 3, 5_269_689_344, biased=True),
    Family("qwen3-0.6b", 3, 5_479_695_872),
    Family("gemma-2b", 3, 12_643_131_392),
    Family("gemma-2-2b", 4, (14_253_101_056, 14_823_260_160), 14_823_260_160),
    Family("gemma-3-270m", 6, 8_436_210_176, 8_762_376_704),
    Family("phi-3-mini-4k", 3, 5_096_969_728),
    Family("phi-2", 3, 5_217_506_816, 6_397_938_176, biased=True),
    Family("olmo-2-7b", 3, 12_847_373_312),
    Family("olmoe-1b-7b", 3, (11_908_820_480, 11_908_804_096)),
    Family("mixtral-8x7b", 3, (37_144_724_480, 37_144_720_384)),
    Family("qwen3-30b-a3b", 3, (20_012_253_184, 20_012_777_472)),
    Family("deepseek-v2-lite", 3, (13_840_644_608, 13_844_027_904), (14_391_799_296, 14_396_755_456)),
    Family("gpt-oss-20b", 4, (35_689_248_256, 35_687_937_536), (35_689_248_256, 35_687_937_536), biased=True),
]
"""Gemma 2 differs because its attention is eager from 5.21 on, as SDPA cannot cap scores
(docs/reference/models.md has the others)."""


def installed(library: str) -> tuple[int, int]:
    major, minor, *_ = version(library).split(".")
    return int(major), int(minor)


def known_peaks(peak: Peak, biased: bool) -> set[int]:
    """Both ends' where a version between them is installed, which of them changed it is not written down."""
    oldest, newest = (peak, peak) if isinstance(peak, int) else peak
    by_version = {OLDEST: {oldest}, NEWEST: {newest}}
    known = by_version.get(installed("transformers"), {oldest, newest})
    extra = LT_WORKSPACE_BYTES if biased and installed("torch") < BEFORE_LT_IS_SHARED else 0
    return {num_bytes + extra for num_bytes in known}


CASES = [
    pytest.param(family, attention, id=f"{family.model}-{attention}")
    for family in FAMILIES
    for attention in ("sdpa", "eager")
    if attention == "sdpa"
    or family.eager not in (None, family.sdpa)  # The same code where SDPA is not supported.
]


@pytest.mark.parametrize(("family", "attention"), CASES)
def test_a_family_takes_what_this_version_is_known_to_take(family: Family, attention: str) -> None:
    recipe = recipe_of(
        with_layers(family.model, family.layers),
        batch=Batch(micro=2, seq=1024),
        precision="bf16",
        attention=attention,
    )
    ledger = ledger_of(recipe)
    found = estimate(recipe, machine_with(gpu("h200")), ledger).phases.steady.peak
    assert found in known_peaks(getattr(family, attention), family.biased)
    for pairs, quantity in (("causal", "model_flops"), ("full", "model_flops_full")):
        closed = product_step_flops(dict(recipe.model.config), batch=2, seq=1024, attention=pairs)
        assert closed.model_flops == steady_sum(ledger, quantity)


def eager_attention(name: str) -> str:
    """Return the source of a family's eager attention."""
    kind = model(name).config["model_type"]
    module = import_module(f"transformers.models.{kind}.modeling_{kind}")
    return inspect.getsource(module.eager_attention_forward)


def test_families_without_a_peak_of_eager_attention_have_llamas() -> None:
    same = [family.model for family in FAMILIES if family.eager is None]
    assert len(same) == 10
    assert {eager_attention(name) for name in same} == {eager_attention("llama-3.2-1b")}


def test_every_family_of_the_catalog_is_here() -> None:
    known = {model(family.model).config["model_type"] for family in FAMILIES}
    every = {row.config["model_type"] for row in models().values()}
    assert every - known == {"deepseek_v3", "trainfit"}  # Their products are in test_mfu_accounting.py.
