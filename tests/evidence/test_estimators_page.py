"""The page on pre-flight estimators: its sentences, and that the kept answers are of measured recipes."""

from evidence.scripts.estimators import question
from evidence.scripts.tables import estimators
from page_claims import check

PAGE = "evidence/pages/estimators.md"


def test_every_answer_is_of_a_measured_recipe_that_the_inputs_express() -> None:
    pairs = {one.recipe.id: one for one in estimators.measured()}
    for rows in estimators.answers().values():
        assert all(question(pairs[of]) is not None for of in rows)
    assert len(estimators.answers()) == 5


def test_the_sentences_are_those_of_the_table() -> None:
    scores = estimators.scores()
    check(PAGE, r"can express: # recipes", [len(estimators.measured())])
    shares = sorted(100 * one.within_10 / len(one.errors) for one, _ in scores)
    check(PAGE, r"Between # and # % of", [shares[0], shares[-1]])
    assert all(mine.wrong_fits == mine.wrong_refusals == 0 for _, mine in scores)
