"""Label smoothing and z-loss: standard and fused agree with the definition; evaluation leaves them out."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from loss_runs import family_recipe, gradients
from tiny_recipe import tiny_recipe
from tiny_training import Listener, options_for, tiny
from trainfit.kernels.cross_entropy.terms import Terms, cross_entropy_with_terms
from trainfit.spec.errors import InputError
from trainfit.spec.parsing.recipe_file import recipe_from
from trainfit.spec.recipe import LossTerms, Recipe
from trainfit.step import assemble
from trainfit.training.loop import train

CPU = torch.device("cpu")
BOTH_TERMS = LossTerms(label_smoothing=0.1, z_loss=1e-2)


def test_the_definition_is_the_papers():
    """The loss is -sum_j q_j log p_j plus z (log Z)^2, over labels not ignored.

    q is (1 - s) of the target and s / v of all.
    """
    torch.manual_seed(1)
    logits, targets = 3 * torch.randn(7, 11, dtype=torch.float64), torch.tensor([1, 2, -100, 10, 0, -100, 5])
    kept, right = logits[targets >= 0], targets[targets >= 0]
    q = 0.9 * F.one_hot(right, 11) + 0.1 / 11
    log_z = kept.exp().sum(1).log()
    expected = (-(q * (kept - log_z[:, None])).sum(1) + 1e-2 * log_z**2).mean()
    assert torch.allclose(cross_entropy_with_terms(logits, targets, Terms(0.1, 1e-2)), expected)


def test_if_all_is_ignored_the_loss_is_nan():
    for terms in (Terms(), Terms(0.1, 1e-2)):
        assert cross_entropy_with_terms(torch.randn(3, 5), torch.full((3,), -100), terms).isnan()


def with_terms(recipe: Recipe, terms: LossTerms = BOTH_TERMS) -> Recipe:
    return recipe.model_copy(update={"loss_terms": terms})


@pytest.mark.parametrize(
    ("family", "terms"),
    [
        ("llama", LossTerms(label_smoothing=0.1)),
        ("gemma2", LossTerms(z_loss=1e-2)),
        ("gemma2", BOTH_TERMS),
        ("cohere", BOTH_TERMS),
        ("native", BOTH_TERMS),
    ],
    ids=str,
)
def test_standard_and_fused_give_the_same_numbers(family: str, terms: LossTerms):
    """Soft-capped (Gemma 2) and scaled (Cohere) logits among them."""
    runs: list[Any] = []
    for loss in ("standard", "fused"):
        plain = tiny_recipe("native", loss=loss) if family == "native" else family_recipe(family, loss)
        step = assemble(with_terms(plain, terms), CPU)
        batch = step.random_batches()[0]
        runs.append((*gradients(step), step.loss(batch).item(), step.cross_entropy(batch).item()))
    (expected, wanted, *before), (found, got, *after) = runs
    assert found == pytest.approx(expected, rel=2e-6)
    assert after == pytest.approx(before, rel=2e-6)
    assert wanted.keys() == got.keys()
    for name, grad in wanted.items():
        assert (got[name] - grad).norm() <= 1e-4 * grad.norm() + 1e-7, name


@pytest.mark.parametrize("loss", ["standard", "fused"])
@pytest.mark.parametrize("code", ["hf", "native"])
def test_evaluation_is_the_plain_cross_entropy(code: Any, loss: Any):
    plain, step = (
        assemble(recipe, CPU) for recipe in (tiny_recipe(code), with_terms(tiny_recipe(code, loss=loss)))
    )
    batch = plain.random_batches()[0]
    expected = plain.loss(batch).item()
    assert plain.cross_entropy(batch).item() == expected
    assert step.cross_entropy(batch).item() == pytest.approx(expected, rel=1e-6)
    assert step.loss(batch).item() > 1.02 * expected


@pytest.mark.parametrize("loss", ["standard", "fused"])
def test_a_run_reports_both_and_says_so(tmp_path: Any, loss: str):
    listener = Listener()
    recipe = tiny(f"loss={loss}", "loss_terms.z_loss=1.0", "optimizer.lr=1e-9")
    summary = train(recipe, options_for(tmp_path, 2, eval_every=1), observers=[listener])
    assert summary.losses[0] > 35, "about log(384)^2 = 35.4 more"
    assert summary.evaluations[0].loss == pytest.approx(5.95, abs=0.2), "log(384)"
    assert listener.run.notes == (
        "the training loss includes z_loss 1; the evaluation loss is the cross-entropy alone",
    )


def test_a_loss_that_balances_experts_is_refused():
    recipe = family_recipe("mixtral", "standard")
    config = {**dict(recipe.model.config), "output_router_logits": True}  # pyright: ignore
    model = recipe.model.model_copy(update={"config": config})
    with pytest.raises(InputError, match="balances its experts"):
        assemble(with_terms(recipe.model_copy(update={"model": model})), torch.device("meta"))


def test_older_recipes_keep_their_id_and_numbers_are_strict():
    data = {"model": {"config": "llama-3.2-1b"}}
    assert recipe_from(data | {"loss_terms": {"z_loss": 0}}).id == recipe_from(data).id
    for bad in ({"label_smoothing": 1}, {"z_loss": -1e-4}, {"smoothing": 0.1}):
        with pytest.raises(InputError):
            recipe_from(data | {"loss_terms": bad})
