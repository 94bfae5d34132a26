"""Xiangqi (Chinese chess): the task is a position, the answer a move such as ``h3e3``.

Rules are Fairy-Stockfish's, through its binding pyffish (GPL-3, the extra ``xiangqi``), imported only here. A
call takes 1 to 4 ms, so positions and legal moves are cached; ``pool.Pool`` runs them in worker processes.

Positions come from games that are played at random, several of each game: task n is a position of game
n // ``positions``. One of the two sides may play better than that, so that it is ahead in some.
"""

from __future__ import annotations

import random
import re
from collections.abc import Generator, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

from trainfit.rl.environments.protocol import Result
from trainfit.spec.errors import InputError

VARIANT = "xiangqi"
SQUARE = re.compile(r"[a-i]\d+")
"""Such as ``h3`` and ``h10``, of which a move names two."""
VALUES = {"p": 1.0, "a": 2.0, "b": 2.0, "n": 4.0, "c": 4.5, "r": 9.0, "k": 0.0}
"""Of the pieces, in soldiers: a, b, n, c and r are advisor, elephant, horse, cannon and chariot."""
QUIET = 60
"""Half-moves without a capture from which the rules may end a game."""


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
        captures: share of the moves at which one side, another in every second game, takes the most valuable
            piece that it can.
        positions: tasks of one game.
        mask: the prompt lists the legal moves.
        squares: the board is written square by square, empty ones as dots, instead of as FEN's counts.
        rewards: values of Rewards by name; those that are not given have their defaults.

    Raises:
        InputError: pyffish is not installed.
    """

    def __init__(
        self,
        seed: int = 0,
        plies: int = 60,
        captures: float = 0.0,
        positions: int = 8,
        mask: bool = False,
        squares: bool = False,
        rewards: Mapping[str, float] = MappingProxyType({}),
    ):
        self.seed, self.plies, self.captures = seed, plies, captures
        self.neighbours = positions
        self.mask, self.squares = mask, squares
        self.rewards = Rewards(**rewards)
        _pyffish()

    def prompt(self, number: int) -> str:
        """Return board, side to move and, with ``mask``, the legal moves."""
        return self.written(self.position(number))

    def written(self, position: str) -> str:
        """Return the prompt of a position (FEN)."""
        board, side = position.split()[:2]
        if self.squares:
            board = "".join("." * int(one) if one.isdecimal() else one for one in board)
        listed = f" [{' '.join(legal_moves(position))}]" if self.mask else ""
        return f"{board} {side}{listed} "

    def reward(self, number: int, completion: str) -> dict[str, float]:
        """Return the reward of a move: for being legal or not, for what it takes, and for a win."""
        position, move = self.position(number), completion.strip()
        if move not in legal_moves(position):
            return {"legal": self.rewards.illegal, "material": 0.0, "win": 0.0}
        material = self.rewards.soldier * _taken(position, move)
        win = self.rewards.wins * _wins(position, move)
        return {"legal": self.rewards.legal, "material": material, "win": win}

    def games(self, count: int, limit: int) -> Generator[list[str], Sequence[str], list[Result]]:
        """Play games against a player that plays any legal move; the model is red in every second.

        A draw is a repetition, or ``limit`` moves. An answer that is no legal move loses.
        """
        boards = [Board() for _ in range(count)]
        choose = [random.Random(f"opponent {self.seed} {number}") for number in range(count)]
        results: dict[int, Result] = {}

        def note(number: int, outcome: int, *, illegal: bool = False) -> None:
            results[number] = Result(outcome, len(boards[number].moves), illegal)

        for ply in range(limit):
            turns = []
            for number, board in enumerate(boards):
                if number in results:
                    continue
                mine = (number + ply) % 2 == 0
                ended = board.outcome()
                if ended is not None:  # Of the side to move.
                    note(number, ended if mine else -ended)
                elif mine:
                    turns.append(number)
                else:
                    board.push(choose[number].choice(board.legal()))
            answers = (yield [self.written(boards[number].position) for number in turns]) if turns else ()
            for number, answer in zip(turns, answers, strict=True):
                move = answer.strip()
                if move in boards[number].legal():
                    boards[number].push(move)
                else:
                    note(number, -1, illegal=True)
            if len(results) == count:
                break
        for number in range(count):
            if number not in results:
                note(number, 0)
        return [results[number] for number in range(count)]

    def position(self, number: int) -> str:
        """Return the task's position (FEN)."""
        game = self.game(number // self.neighbours)
        choose = random.Random(f"position {self.seed} {number}")
        return choose.choice(game)

    def game(self, number: int) -> tuple[str, ...]:
        """Return the positions of a game in which there is a legal move."""
        return _game(self.seed, number, self.plies, self.captures)


class Board:
    """A game in progress, from the start."""

    def __init__(self) -> None:
        self.position: str = _pyffish().start_fen(VARIANT)
        self.moves: list[str] = []
        self._seen = {self._placed(): 1}

    def legal(self) -> tuple[str, ...]:
        """Return the legal moves of the side to move."""
        return legal_moves(self.position)

    def push(self, move: str) -> None:
        """Play a legal move."""
        self.position = _after(self.position, move)
        self.moves.append(move)
        self._seen[self._placed()] = self._seen.get(self._placed(), 0) + 1

    def outcome(self) -> int | None:
        """Return how the game has ended for the side to move, 1, 0 or -1; None: it goes on."""
        if not self.legal():
            return -1  # Mate, and stalemate, which loses in xiangqi.
        # Rules of repetition and of moves without a capture need all moves, which takes longer.
        if self._seen[self._placed()] < 2 and int(self.position.split()[4]) < QUIET:
            return None
        rules = _pyffish()
        ends, value = rules.is_optional_game_end(VARIANT, rules.start_fen(VARIANT), self.moves)
        return (value > 0) - (value < 0) if ends else None

    def _placed(self) -> str:
        return " ".join(self.position.split()[:2])


@lru_cache(maxsize=1 << 16)
def legal_moves(position: str) -> tuple[str, ...]:
    """Return the legal moves of a position, sorted."""
    return tuple(sorted(_pyffish().legal_moves(VARIANT, position, [])))


@lru_cache(maxsize=1 << 12)
def _game(seed: int, number: int, plies: int, captures: float) -> tuple[str, ...]:
    choose = random.Random(f"game {seed} {number}")
    position = _pyffish().start_fen(VARIANT)
    found = [position]
    for ply in range(plies):
        moves = legal_moves(position)
        move = ""
        if captures and ply % 2 == number % 2 and choose.random() < captures:
            move = max(moves, key=partial(_taken, position))
        if not move or not _taken(position, move):
            move = choose.choice(moves)
        position = _after(position, move)
        if not legal_moves(position):
            break
        found.append(position)
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _wins(position: str, move: str) -> bool:
    """Return whether a legal move mates, or leaves no move, which loses in xiangqi."""
    return not _pyffish().legal_moves(VARIANT, position, [move])


def _taken(position: str, move: str) -> float:
    """Return the value of the piece that a legal move takes, in soldiers."""
    piece = _piece_at(position, SQUARE.findall(move)[1])
    return VALUES[piece.lower()] if piece else 0.0


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
