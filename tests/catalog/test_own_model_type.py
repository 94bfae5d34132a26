"""A model type of one's own: one row in a folder that TRAINFIT_CATALOG names."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trainfit.catalog import model_types, names
from trainfit.flops.closed_form import multiplied_params
from trainfit.spec.errors import InputError

CONFIG = {
    "model_type": "ours", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
PRODUCTS = 2 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 1000


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("TRAINFIT_CATALOG", str(tmp_path))
    forget()
    yield tmp_path
    forget()


def forget() -> None:
    names.rows.cache_clear()
    names._read.cache_clear()
    model_types.model_types.cache_clear()


def test_a_row_is_all_that_a_model_type_takes(folder: Path) -> None:
    with pytest.raises(InputError, match="no closed form"):
        multiplied_params(CONFIG)
    forget()
    (folder / "model_types.toml").write_text('[ours]\nfeed_forward = "gated"\nlogits = "plain"\n')
    assert multiplied_params(CONFIG) == PRODUCTS
    assert model_types.model_type("ours").logits == "plain"


def test_a_wrong_value_is_named(folder: Path) -> None:
    (folder / "model_types.toml").write_text('[ours]\nfeed_forward = "wide"\n')
    with pytest.raises(InputError, match="feed_forward"):
        multiplied_params(CONFIG)
