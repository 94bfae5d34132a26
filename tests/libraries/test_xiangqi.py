"""The environment of xiangqi, by pyffish's rules."""

from functools import partial

import pyffish  # pyright: ignore[reportMissingImports]
import pytest

from trainfit.rl.environments.pool import Pool
from trainfit.rl.environments.xiangqi import Xiangqi, legal_moves, play, random_mover

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


def test_games() -> None:
    first = play(random_mover(1), random_mover(2), limit=60)
    assert first == play(random_mover(1), random_mover(2), limit=60)
    assert (first.result, len(first.moves)) == (0, 60)
    lost = play(random_mover(1), lambda position, legal: "a1a1")
    assert (lost.result, lost.illegal, len(lost.moves)) == (1, True, 1)
    finished = [play(random_mover(n), random_mover(n + 50), limit=400) for n in range(3)]
    for game in finished:
        rest = pyffish.legal_moves("xiangqi", START, list(game.moves))
        # Mated, or ended by repetition or its like.
        assert not game.illegal
        assert game.result in (-1, 0, 1)
        if not rest:
            assert game.result == (1 if len(game.moves) % 2 else -1)


def test_workers() -> None:
    make, numbers = partial(Xiangqi, plies=6), list(range(12))
    with Pool(make, 1) as there:
        prompts = there.prompts(numbers)
        here = Xiangqi(plies=6)
        assert prompts == [here.prompt(number) for number in numbers]
        assert there.rewards(numbers, ["h3e3"] * 12) == [here.reward(number, "h3e3") for number in numbers]
