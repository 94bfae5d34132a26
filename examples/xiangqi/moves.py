"""Write positions and moves of random games of xiangqi as training data: one JSON row each.

    python examples/xiangqi/moves.py moves.jsonl --rows 300000 --workers 16

Each row has a position, written as the environment ``xiangqi`` writes it with ``squares``, and the legal move
that was played there. Games have other seeds than the tasks of a policy.
"""

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from trainfit.rl.environments.xiangqi import Board, Xiangqi

PLIES = 60
"""Moves of a game, at most: as many as of the environment's games."""


def rows_of(number: int) -> list[str]:
    """Return the rows of a game that both sides play at random."""
    choose, board, writer = random.Random(f"data {number}"), Board(), Xiangqi(squares=True)
    rows: list[str] = []
    while len(rows) < PLIES and board.outcome() is None:
        move = choose.choice(board.legal())
        rows.append(json.dumps({"prompt": writer.written(board.position), "completion": move}))
        board.push(move)
    return rows


def games(workers: int, count: int) -> Iterator[list[str]]:
    """Yield the rows of ``count`` games, in their order."""
    if workers == 0:
        yield from map(rows_of, range(count))
        return
    with ProcessPoolExecutor(workers) as pool:
        yield from pool.map(rows_of, range(count), chunksize=16)


def main() -> None:
    """Write the file."""
    arguments = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    arguments.add_argument("file")
    arguments.add_argument("--rows", type=int, default=300_000)
    arguments.add_argument("--workers", type=int, default=0, help="processes; 0: this one alone")
    given = arguments.parse_args()
    with open(given.file, "w") as file:
        left = given.rows
        # Games that end early give fewer rows.
        for rows in games(given.workers, 2 * -(-given.rows // PLIES)):
            for row in rows[:left]:
                file.write(row + "\n")
            left -= min(left, len(rows))
            if not left:
                break


if __name__ == "__main__":
    main()
