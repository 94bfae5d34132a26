"""Muon: which weights it takes, and what its products count as."""

import torch

from tiny_recipe import wide_recipe
from tiny_step import step_of
from trainfit.prediction.trace import trace
from trainfit.spec.recipe import Optimizer
from virtual_runs import recipe_of, steady_sum, with_layers


def test_muon_takes_the_blocks_matrices_and_adamw_the_rest():
    step = step_of(optimizer=Optimizer(name="muon"))
    muon, adamw = step.optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(p): name for name, p in step.model.named_parameters()}
    by_muon = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert len(by_muon) == 2 * 7
    assert all(".layers." in name and "norm" not in name for name in by_muon)
    assert {names[id(p)] for p in adamw.param_groups[0]["params"]} == set(names.values()) - by_muon
    assert muon.defaults["momentum"] == 0.95


def test_newton_schulz_is_hardware_flops_and_no_model_flops():
    """Five steps of three products, for n x m with n <= m: 4 n^2 m + 2 n^3 each."""
    control = wide_recipe(2)
    # qkv, attention's output, gate and up in one, down.
    a_block = [(64, 128), (64, 64), (64, 192), (64, 96)]
    expected = 2 * 5 * sum(4 * n * n * m + 2 * n**3 for n, m in a_block)
    plain = trace(control)
    for in_backward in (False, "block"):
        muon = control.model_copy(update={"optimizer": Optimizer(name="muon", in_backward=in_backward)})
        other = trace(muon)
        assert steady_sum(other, "flops") - steady_sum(plain, "flops") == expected
        assert steady_sum(other, "model_flops") == steady_sum(plain, "model_flops")


def test_muons_own_products_are_no_recomputation():
    """They run within the backward, and count for no model FLOPs either."""
    asked = Optimizer(name="muon", momentum=0.95, in_backward=True)
    recipe = recipe_of(with_layers("llama-3.2-1b", 2), precision="bf16", optimizer=asked)
    ledger = trace(recipe)
    assert any(op.is_update and op.causal_flops for op in ledger.ops)
    assert not any(ledger.recomputes(op) for op in ledger.ops)
    again = trace(recipe.model_copy(update={"recompute": "full"}))
    assert any(again.recomputes(op) for op in again.ops)
