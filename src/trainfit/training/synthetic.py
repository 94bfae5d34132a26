"""Synthetic documents from a grammar (``data: stories``): deterministic, any number, with a known entropy.

The entropy of the choices behind a document bounds every model from below: on unseen documents, the mean
perplexity per token is at least 2 ** (bits / tokens). Names, pronouns and objects agree within a document, so
there is more to learn than word order.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

PEOPLE = tuple(
    (name, *pronouns)
    for names, pronouns in (
        ("Ada Bella Clara Dora Ella Fay Grace Hana Ines June Kira Lena Mia Nora Olga Pia", ("she", "her")),
        ("Adam Ben Carl Dan Emil Finn Gus Hugo Ivan Jack Karl Leo Max Noah Otto Paul", ("he", "his")),
    )
    for name in names.split()
)
"""Name, subject pronoun, possessive pronoun."""
TRAITS = tuple("brave careful cheerful clever curious gentle kind proud quiet shy stubborn tired".split())
ANIMALS = tuple("badger cat crow dog duck fox frog goat hedgehog horse mouse owl rabbit squirrel".split())
PLACES = (
    "a village by the sea", "a small town", "a house on a hill", "a farm near the forest",
    "a cabin by the lake", "a tall tower", "a street of bakers", "an old mill", "a boat on the river",
    "a city of bridges",
)  # fmt: skip
THINGS = tuple("ball basket bell book boot compass cup drum hat kite key lamp map ring scarf spoon".split())
COLOURS = tuple("black blue brown golden green grey orange purple red silver white yellow".split())
WEATHERS = ("sunny", "rainy", "windy", "cold", "foggy", "snowy", "hot", "cloudy")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
HIDDEN = (
    "under the bed", "behind the door", "in the garden", "beside the well", "at the top of a tree",
    "in the tall grass", "under a stone", "inside a barrel", "on the roof", "near the gate",
)  # fmt: skip
SEARCHES = ("looked", "searched", "walked", "ran", "asked", "waited")
FOODS = ("bread", "soup", "apples", "cake", "cheese", "honey", "nuts", "pancakes", "plums", "rice")
MORALS = (
    "It is good to share.", "A friend is better than any treasure.", "Small paws can do great things.",
    "Patience finds what hurry loses.", "Asking for help is not a weakness.", "Kind words open every door.",
    "Look twice before you worry.", "Every day has one good hour.",
)  # fmt: skip


@dataclass(frozen=True)
class SyntheticText:
    """``text`` without a final newline; ``bits``: the entropy of the choices behind it."""

    text: str
    bits: float


class _Choices:
    """Equally likely choices from the digits of a hash: independent of Python version and platform."""

    def __init__(self, seed: int, index: int):
        digest = hashlib.shake_256(f"trainfit story {seed} {index}".encode()).digest(64)
        self._left = int.from_bytes(digest, "big")
        self.bits = 0.0

    def of(self, options: Sequence[T]) -> T:
        self._left, pick = divmod(self._left, len(options))
        self.bits += math.log2(len(options))
        return options[pick]


def synthetic_text(seed: int, index: int) -> SyntheticText:
    """Return document ``index`` of ``seed``."""
    choose = _Choices(seed, index)
    paragraphs = _search(choose) if choose.of((True, False)) else _errand(choose)
    return SyntheticText("\n".join(paragraphs), choose.bits)


def _search(choose: _Choices) -> tuple[str, ...]:
    """Return a text in which a child loses a thing and an animal finds it."""
    opening = choose.of(("Once upon a time,", "Long ago,", "One year,", "Not long ago,"))
    name, they, their = choose.of(PEOPLE)
    trait, place, animal = choose.of(TRAITS), choose.of(PLACES), choose.of(ANIMALS)
    colour, thing, spot = choose.of(COLOURS), choose.of(THINGS), choose.of(HIDDEN)
    weather, day, food = choose.of(WEATHERS), choose.of(DAYS), choose.of(FOODS)
    return (
        f"{opening} this is what people told.",
        f"{name} was a {trait} child who lived in {place}. {they.capitalize()} had a {colour} {thing} "
        f"and {choose.of(('loved it', 'took it everywhere', 'slept beside it', 'showed it to everyone'))}.",
        f"On a {weather} {day}, the {thing} was gone. {name} {choose.of(SEARCHES)} all morning, "
        f"but the {colour} {thing} was not there.",
        f'Then a {animal} came. "Why are you so sad?" asked the {animal}. "I have lost my {thing}," said '
        f'{name}. "Follow me," said the {animal}, "I saw something {colour} {spot}."',
        f"They went together, and the {thing} was {spot}. {name} was happy and gave the {animal} some "
        f"{food}. From that {day} on, {name} and the {animal} were friends, and {they} never lost {their} "
        f"{thing} again. {choose.of(MORALS)}",
    )


def _errand(choose: _Choices) -> tuple[str, ...]:
    """Return a text in which a thing is sold to pay for a meal of two friends."""
    name, they, their = choose.of(PEOPLE)
    friend = choose.of([person for person in PEOPLE if person[0] != name])[0]
    food, place, thing = choose.of(FOODS), choose.of(PLACES), choose.of(THINGS)
    count, weather, day = choose.of(range(2, 10)), choose.of(WEATHERS), choose.of(DAYS)
    trait, colour = choose.of(TRAITS), choose.of(COLOURS)
    return (
        f"On {day} morning {name} wanted to cook for {friend}, who lived in {place}. "
        f"{name} needed some {food} and {count} coins, but {their} pocket was empty.",
        f"So {they} took {their} {colour} {thing} to the market. It was a {weather} day. "
        f'"I will give you {count} coins for the {thing}," said a {trait} man. '
        f"{name} {choose.of(('thought for a while', 'smiled', 'sighed', 'nodded at once'))} and sold the "
        f"{thing}.",
        f"With {count} coins in {their} hand, {name} bought some {food} and walked to {place}. "
        f"{friend} opened the door. The two friends ate some {food} until it was dark.",
        f'"Where is your {colour} {thing}?" asked {friend}. "I sold it on {day} for our meal," said {name}. '
        f"{friend} laughed and gave {name} a new {thing}. {choose.of(MORALS)}",
    )
