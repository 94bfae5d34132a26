"""Environments: tasks and rewards are functions of the task's number; the rules of xiangqi."""

from functools import partial

from trainfit.rl.environments.arithmetic import Arithmetic
from trainfit.rl.environments.pool import Pool


def test_arithmetic() -> None:
    tasks = Arithmetic(largest=20, seed=1)
    assert tasks.prompt(5) == Arithmetic(largest=20, seed=1).prompt(5) != tasks.prompt(6)
    for number in range(40):
        left, right = tasks.prompt(number).removesuffix("=").replace("-", "+-").split("+")
        answer = int(left) + int(right)
        rewards = [tasks.reward(number, text) for text in (f" {answer}", str(answer + 1), "x", "")]
        assert rewards[:2] == [{"number": 0.1, "right": 0.9}, {"number": 0.1, "right": 0}]
        assert rewards[2:] == [{"number": 0, "right": 0}] * 2
    assert {tasks.prompt(number).count("-") for number in range(40)} == {0, 1}


def test_workers_give_the_same() -> None:
    make, numbers = partial(Arithmetic, seed=3), list(range(20))
    with Pool(make, 0) as here, Pool(make, 2) as there:
        prompts = here.prompts(numbers)
        assert there.prompts(numbers) == prompts
        answers = [str(eval(prompt[:-1])) if number % 2 else "?" for number, prompt in enumerate(prompts)]
        rewards = here.rewards(numbers, answers)
        assert there.rewards(numbers, answers) == rewards
        assert [sum(one.values()) for one in rewards] == [0.0, 1.0] * 10
