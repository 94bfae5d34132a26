"""Environments as users write them."""

from trainfit.rl.environments.protocol import Result


class Digits:
    def prompt(self, number):
        return f"{number % 7}:"

    def reward(self, number, completion):
        characters = [one for one in completion if one.isprintable()]
        return {"short": 1.0 - len(completion) / 10, "letters": len(characters) / 6 + 0.01 * (number % 3)}


class Higher(Digits):
    """A game of two answers: a longer one wins against chance."""

    def games(self, count, limit):
        first = yield ["1:"] * count
        second = yield ["2:"] * (count - 1)
        results = [Result(0, limit, False)]
        for one, other in zip(first[1:], second, strict=True):
            results.append(Result((len(one) > len(other)) - (len(one) < len(other)), 2, one == ""))
        return results
