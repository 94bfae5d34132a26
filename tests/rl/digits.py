"""An environment as a user writes it: any digits are rewarded, even ones more."""


class Digits:
    def prompt(self, number):
        return f"{number % 7}:"

    def reward(self, number, completion):
        characters = [one for one in completion if one.isprintable()]
        return {"short": 1.0 - len(completion) / 10, "letters": len(characters) / 6 + 0.01 * (number % 3)}
