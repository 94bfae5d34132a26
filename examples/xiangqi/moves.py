"""Write positions of random games of xiangqi, and legal moves in them, as training data: one JSON row each.

    python examples/xiangqi/moves.py moves.jsonl --rows 300000 --workers 16

Positions are written as the environment ``xiangqi`` writes them with the arguments of ``grpo.yaml``; a move
is any legal one. Games have another seed than the tasks of a policy.
"""

import argparse
import json
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from trainfit.rl.environments.xiangqi import Xiangqi, legal_moves

SEED = 1_000_003
PLIES, CAPTURES = 120, 0.5
"""Moves of a game, at most, and the share of them at which one side captures: as in ``grpo.yaml``."""
EACH = 3
"""Rows of a position, with different moves if it has so many."""


def rows_of(number: int) -> list[str]:
    """Return the rows of a game."""
    choose = random.Random(f"data {number}")
    games = Xiangqi(seed=SEED, plies=PLIES, captures=CAPTURES, squares=True)
    rows = list[str]()
    for position in games.game(number):
        moves = legal_moves(position)
        for move in choose.sample(moves, min(EACH, len(moves))):
            rows.append(json.dumps({"prompt": games.written(position), "completion": move}))
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
        for rows in games(given.workers, 2 * -(-given.rows // (EACH * PLIES)) + 1):
            for row in rows[:left]:
                file.write(row + "\n")
            left -= min(left, len(rows))
            if not left:
                break


if __name__ == "__main__":
    main()
