"""The environment of xiangqi, by pyffish's rules."""

from collections.abc import Callable
from functools import partial

import pyffish  # pyright: ignore[reportMissingImports]
import pytest

from trainfit.rl.environments.pool import Pool
from trainfit.rl.environments.protocol import Result
from trainfit.rl.environments.xiangqi import Board, Xiangqi, legal_moves

START = pyffish.start_fen("xiangqi")


def perft(position: str, depth: int) -> int:
    """Number of sequences of so many legal moves."""
    moves = legal_moves(position)
    if depth == 1:
        return len(moves)
    return sum(perft(pyffish.get_fen("xiangqi", position, [move]), depth - 1) for move in moves)


@pytest.mark.parametrize(("depth", "count"), [(1, 44), (2, 1920), (3, 79666)])
def test_perft(depth: int, count: int) -> None:
    """Published numbers of the start position."""
    assert perft(START, depth) == count


def test_positions_are_functions_of_their_number() -> None:
    tasks = Xiangqi(seed=2, plies=12)
    positions = [tasks.position(number) for number in range(24)]
    assert positions == [Xiangqi(seed=2, plies=12).position(number) for number in range(24)]
    assert positions != [Xiangqi(seed=3, plies=12).position(number) for number in range(24)]
    assert len(set(positions)) > 12
    assert all(legal_moves(position) for position in positions)
    board, side = tasks.prompt(3).split()
    assert positions[3].startswith(f"{board} {side} ")
    listed = Xiangqi(seed=2, plies=12, mask=True).prompt(3)
    assert listed == f"{board} {side} [{' '.join(legal_moves(positions[3]))}] "


def test_rewards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cannon takes a horse from the start; a chariot gives mate; what is no legal move."""
    tasks = Xiangqi(rewards={"illegal": -1, "legal": 1, "soldier": 0.5, "wins": 3})
    monkeypatch.setattr(tasks, "position", lambda number: START)
    given = {"h3h10": 1 + 0.5 * 4, " h3e3 ": 1, "h3e4": -1, "": -1, "h3e3 h3h10": -1, "H3E3": -1}
    assert {text: sum(tasks.reward(0, text).values()) for text in given} == given
    mate = "3k5/8R/9/9/9/9/9/9/9/R4K3 w - - 0 1"
    assert "a1a10" in legal_moves(mate)
    monkeypatch.setattr(tasks, "position", lambda number: mate)
    assert [tasks.reward(0, move) for move in ("a1a10", "a1a2")] == [
        {"legal": 1, "material": 0, "win": 3},
        {"legal": 1, "material": 0, "win": 0},
    ]


def test_every_legal_move_has_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those from the tenth row, such as c10e8."""
    tasks = Xiangqi(seed=5, plies=30)
    position = START
    for number in range(20):
        moves = legal_moves(position)
        monkeypatch.setattr(tasks, "position", lambda number, position=position: position)
        assert all(tasks.reward(0, move)["legal"] == 1 for move in moves)
        position = pyffish.get_fen("xiangqi", position, [moves[number % len(moves)]])


def played(answer: Callable[[str], str], count: int, limit: int) -> list[Result]:
    """Play games in which the model's answer is a function of the prompt."""
    games = Xiangqi(seed=1).games(count, limit)
    try:
        prompts = next(games)
        while True:
            prompts = games.send([answer(prompt) for prompt in prompts])
    except StopIteration as ended:
        return ended.value


def test_games() -> None:
    """The first legal move is no good plan; a move that is not legal loses at once."""

    def first(prompt: str) -> str:
        return legal_moves(f"{prompt}- - 0 1")[0]

    results = played(first, 4, 60)
    assert results == played(first, 4, 60)
    assert all(one.outcome in (-1, 0, 1) and not one.illegal and one.moves <= 60 for one in results)
    assert played(lambda prompt: "a1a1", 2, 60) == [Result(-1, 0, True), Result(-1, 1, True)]


def test_how_a_game_ends() -> None:
    board = Board()
    for move in ("h3h10", "i10h10", "b3b10", "a10b10"):
        assert board.outcome() is None
        board.push(move)
    assert board.moves[-1] == "a10b10"
    shuffled = Board()
    for move in ["a1a2", "a10a9", "a2a1", "a9a10"] * 4:
        shuffled.push(move)
    assert shuffled.outcome() == 0
    mated = Board()
    mated.position = "3k5/8R/9/9/9/9/9/9/9/R4K3 w - - 0 1"
    mated.push("a1a10")
    assert mated.outcome() == -1


def test_a_board_square_by_square() -> None:
    board, side = Xiangqi(squares=True).written(START).split()
    rows = board.split("/")
    assert side == "w"
    assert [len(row) for row in rows] == [9] * 10
    assert rows[2] == ".c.....c."


def test_workers() -> None:
    make, numbers = partial(Xiangqi, plies=6), list(range(12))
    with Pool(make, 1) as there:
        prompts = there.prompts(numbers)
        here = Xiangqi(plies=6)
        assert prompts == [here.prompt(number) for number in numbers]
        assert there.rewards(numbers, ["h3e3"] * 12) == [here.reward(number, "h3e3") for number in numbers]
