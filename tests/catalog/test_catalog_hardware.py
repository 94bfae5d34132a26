"""The catalog's accelerators, links, prices and recipes: complete, with sources, dense peaks."""

import re
import subprocess
import sys

import pytest

from trainfit.catalog import load
from trainfit.prediction.machine import machine_of
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import load_recipe
from trainfit.spec.recipe import Hardware
from trainfit.spec.units import GIB

GPUS = load.gpus()


def test_the_accelerators_that_people_ask_for_are_there() -> None:
    assert len(GPUS) >= 24
    assert set(GPUS) >= {
        "v100-sxm2-32gb", "t4", "a10", "a100-sxm4-40gb", "a100-sxm4-80gb", "l4", "l40s", "rtx-3090",
        "rtx-4090", "rtx-5090", "h100-pcie", "h100-sxm", "h100-nvl", "h200", "b200", "gb200", "mi250x",
        "mi300x", "mi325x", "mi355x", "tpu-v5e", "tpu-v5p", "tpu-v6e", "rtx-6000-ada", "rtx-pro-6000",
    }  # fmt: skip


def test_every_row_is_whole() -> None:
    for gpu in GPUS.values():
        assert gpu.source.url.startswith("https://")
        assert re.fullmatch(r"20\d\d-\d\d-\d\d|not re-read", gpu.source.accessed)
        assert (gpu.price_per_hour is None) == (gpu.price_source is None)
        # ECC and the driver take their share.
        assert 0.9 * gpu.memory_bytes < gpu.usable_bytes <= gpu.memory_bytes
        assert load.link(gpu.link).bytes_per_s < gpu.memory_bytes_per_s
        assert (gpu.compute_capability is not None) == (gpu.vendor == "nvidia")


# Dense peaks in TFLOP/s as public tables of them state, from outside this catalog: torchtitan and nanochat's
# tables of peak FLOP/s, and the TPU pages of docs.cloud.google.com.
DENSE_BF16_TFLOPS = {
    "a100-sxm4-80gb": 312, "h100-sxm": 989, "h100-nvl": 835, "h100-pcie": 756, "h200": 989, "b200": 2250,
    "l40s": 362, "l4": 121, "a40": 149.7, "a30": 165, "rtx-a6000": 154.8, "rtx-3090": 71, "rtx-4090": 165.2,
    "rtx-5090": 209.5, "mi250x": 383, "mi300x": 1307.4, "mi325x": 1307.4, "mi355x": 2500, "tpu-v5e": 197,
    "tpu-v5p": 459, "tpu-v6e": 918, "h20": 148, "rtx-6000-ada": 364, "rtx-pro-6000": 503.8,
}  # fmt: skip


def test_peaks_are_dense() -> None:
    """Also, a sparse figure among dense ones would break the pattern 1 : 2 : 4 of tf32, bf16 and fp8."""
    found = {name: GPUS[name].peak_flops_per_s["bf16"] / 1e12 for name in DENSE_BF16_TFLOPS}
    assert found == pytest.approx(DENSE_BF16_TFLOPS, rel=0.01)
    for gpu in GPUS.values():
        peaks = gpu.peak_flops_per_s
        if gpu.vendor == "nvidia" and "bf16" in peaks:
            assert peaks["bf16"] == peaks["fp16"]
            assert peaks["bf16"] / peaks["tf32"] == pytest.approx(2, rel=0.03)
            assert peaks.get("fp8", 2 * peaks["bf16"]) / peaks["bf16"] == pytest.approx(2, rel=0.03)
    assert not [name for name in ("v100-sxm2-32gb", "t4") if "bf16" in GPUS[name].peak_flops_per_s]


def test_an_h200_offers_what_torch_reports() -> None:
    assert GPUS["h200"].usable_bytes / GIB == pytest.approx(139.80, abs=0.02)


@pytest.mark.parametrize(("given", "price"), [(None, 4.59), (2.0, 2.0), (0.0, 0.0)])
def test_a_users_price_overrides_the_catalogs(given: float | None, price: float) -> None:
    assert machine_of(Hardware(gpu="h200", count=4, price_per_hour=given)).price_per_hour == price


def test_links_count_one_direction() -> None:
    assert load.link("nvlink4").bytes_per_s == 450e9  # The sheet's 900 GB/s is both directions.
    assert load.link("nvlink5").bytes_per_s == 900e9
    assert load.link("ici-v5e").bytes_per_s == 200e9


def test_an_unknown_accelerator_lists_near_names() -> None:
    for name, near in (("H1000", "h100-sxm"), ("rtx4099", "rtx-4090"), ("mi300", "mi300x")):
        with pytest.raises(InputError, match=f"hardware.gpu = '{name}'.*{near}"):
            load.gpu(name)


@pytest.mark.parametrize("name", load.recipes())
def test_a_shipped_recipe_is_valid_and_names_known_things(name: str) -> None:
    recipe = load_recipe(load.recipes()[name])
    assert load.model_config(recipe.model.config)["model_type"]
    assert machine_of(recipe.hardware).row.name == recipe.hardware.gpu


@pytest.mark.processes
def test_the_catalog_needs_no_torch() -> None:
    code = "import sys; from trainfit.catalog import load; load.gpus(); load.models(); "
    code += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
