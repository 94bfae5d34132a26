"""Xiangqi (Chinese chess): the task is a position, the answer a move such as ``h3e3``.

Rules are Fairy-Stockfish's, through its binding pyffish (GPL-3, the extra ``xiangqi``), imported only here. A
call takes 1 to 4 ms, so positions and legal moves are cached; ``pool.Pool`` runs them in worker processes.

Positions come from games that both sides play at random, several of each game: task n is a position of game
n // POSITIONS.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, NamedTuple

from trainfit.spec.errors import InputError

VARIANT = "xiangqi"
SQUARE = re.compile(r"[a-i]\d+")
"""Such as ``h3`` and ``h10``, of which a move names two."""
POSITIONS = 8
"""Tasks of one game."""
VALUES = {"p": 1.0, "a": 2.0, "b": 2.0, "n": 4.0, "c": 4.5, "r": 9.0, "k": 0.0}
"""Of the pieces, in soldiers: a, b, n, c and r are advisor, elephant, horse, cannon and chariot."""
Mover = Callable[[str, list[str]], str]
"""(position, legal moves) -> the move that is played; one that is not legal loses the game."""


class Rewards(NamedTuple):
    """Rewards of a move, added.

    Attributes:
        illegal: text that is no legal move.
        legal: a legal move.
        soldier: a captured piece, for each soldier that it is worth.
        wins: a move that ends the game.
    """

    illegal: float = 0.0
    legal: float = 1.0
    soldier: float = 0.1
    wins: float = 2.0


class Xiangqi:
    """Positions of random games.

    Args:
        seed: games of another seed are others.
        plies: moves of a game before its last position, at most.
        mask: the prompt lists the legal moves.
        rewards: values of Rewards by name; those that are not given have their defaults.

    Raises:
        InputError: pyffish is not installed.
    """

    def __init__(
        self,
        seed: int = 0,
        plies: int = 60,
        mask: bool = False,
        rewards: Mapping[str, float] = MappingProxyType({}),
    ):
        self.seed, self.plies, self.mask, self.rewards = seed, plies, mask, Rewards(**rewards)
        _pyffish()

    def prompt(self, number: int) -> str:
        """Return board, side to move and, with ``mask``, the legal moves."""
        position = self.position(number)
        board, side = position.split()[:2]
        listed = f" [{' '.join(legal_moves(position))}]" if self.mask else ""
        return f"{board} {side}{listed} "

    def reward(self, number: int, completion: str) -> dict[str, float]:
        """Return the reward of a move: for being legal or not, for what it takes, and for a win."""
        position, move = self.position(number), completion.strip()
        if move not in legal_moves(position):
            return {"legal": self.rewards.illegal, "material": 0.0, "win": 0.0}
        won = not legal_moves(_after(position, move))  # Mate, and stalemate, which loses in xiangqi.
        piece = _piece_at(position, SQUARE.findall(move)[1])
        taken = VALUES[piece.lower()] if piece else 0.0
        material, win = self.rewards.soldier * taken, self.rewards.wins * won
        return {"legal": self.rewards.legal, "material": material, "win": win}

    def position(self, number: int) -> str:
        """Return the task's position (FEN)."""
        game = _game(self.seed, number // POSITIONS, self.plies)
        choose = random.Random(f"position {self.seed} {number}")
        return choose.choice(game)


class Game(NamedTuple):
    """A finished game.

    Attributes:
        result: 1 first player wins, -1 loses, 0 a draw (or too long).
        illegal: a player lost by a move that is not legal.
    """

    result: int
    moves: tuple[str, ...]
    illegal: bool


def play(red: Mover, black: Mover, *, limit: int = 200) -> Game:
    """Play a game from the start; ``limit`` moves without a result are a draw."""
    rules = _pyffish()
    start, moves = rules.start_fen(VARIANT), []
    for number in range(limit):
        legal = rules.legal_moves(VARIANT, start, moves)
        lost = 1 if number % 2 else -1  # For red, if the side to move loses.
        if not legal:
            return Game(lost, tuple(moves), False)
        ends, value = rules.is_optional_game_end(VARIANT, start, moves)
        if ends:  # Repetition: the value is that of the side to move.
            return Game(-lost * ((value > 0) - (value < 0)), tuple(moves), False)
        position = rules.get_fen(VARIANT, start, moves)
        move = (black if number % 2 else red)(position, legal)
        if move not in legal:
            return Game(lost, tuple(moves), True)
        moves.append(move)
    return Game(0, tuple(moves), False)


def random_mover(seed: int) -> Mover:
    """Return a player that plays any legal move."""
    choose = random.Random(seed)
    return lambda position, legal: choose.choice(legal)


@lru_cache(maxsize=1 << 16)
def legal_moves(position: str) -> tuple[str, ...]:
    """Return the legal moves of a position, sorted."""
    return tuple(sorted(_pyffish().legal_moves(VARIANT, position, [])))


@lru_cache(maxsize=1 << 12)
def _game(seed: int, number: int, plies: int) -> tuple[str, ...]:
    """Return the positions of a random game in which there is a legal move."""
    choose = random.Random(f"game {seed} {number}")
    position = _pyffish().start_fen(VARIANT)
    found = [position]
    for _ in range(plies):
        position = _after(position, choose.choice(legal_moves(position)))
        if not legal_moves(position):
            break
        found.append(position)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _after(position: str, move: str) -> str:
    return _pyffish().get_fen(VARIANT, position, [move])


def _piece_at(position: str, square: str) -> str:
    """Return the piece on a square such as ``h10``, empty if there is none."""
    row = position.split()[0].split("/")[10 - int(square[1:])]
    cells = "".join(" " * int(one) if one.isdecimal() else one for one in row)
    return cells["abcdefghi".index(square[0])].strip()


@lru_cache(maxsize=1)
def _pyffish() -> Any:
    try:
        import pyffish  # pyright: ignore[reportMissingImports]
    except ImportError:
        remedy = "install it by pip install trainfit[xiangqi], or use environment: arithmetic"
        raise InputError("the rules of xiangqi need pyffish", remedy, field="environment") from None
    return pyffish
