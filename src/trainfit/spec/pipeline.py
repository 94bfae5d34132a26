"""Pipeline parallel: the blocks of each stage, and a GPU's order of micro-batches. No torch here.

With v virtual stages a model is cut into P v stages, and the GPU at position r of the pipeline holds stages
r, r + P, r + 2 P ... (arXiv:2104.04473, section 2.2).
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from trainfit.spec.recipe import Parallel


class Stage(NamedTuple):
    """Consecutive blocks of a model."""

    first_block: int
    num_blocks: int
    is_first: bool
    """It holds the embedding and takes the tokens."""
    is_last: bool
    """It holds the final norm and the output layer, and computes the loss."""


class Action(NamedTuple):
    """One micro-batch's forward or backward through one of a GPU's stages."""

    is_forward: bool
    chunk: int
    """Number of the stage among the GPU's own."""
    micro_batch: int


def stages(num_blocks: int, num_stages: int) -> tuple[Stage, ...]:
    """Return the stages of a model, equal in blocks where that is possible.

    Else the embedding and the output layer count as a block each and the first stages get what is left over,
    as in torchtitan (``generate_llm_fqn_per_model_part``): 126 blocks over 16 stages are 7, 14 x 8, and 7.
    """
    if num_blocks % num_stages == 0:
        sizes = [num_blocks // num_stages] * num_stages
    else:
        each, extra = divmod(num_blocks + 2, num_stages)
        sizes = [each + (index < extra) for index in range(num_stages)]
        sizes[0] -= 1
        sizes[-1] -= 1
    starts = [sum(sizes[:index]) for index in range(num_stages)]
    return tuple(
        Stage(start, size, is_first=index == 0, is_last=index == num_stages - 1)
        for index, (start, size) in enumerate(zip(starts, sizes, strict=True))
    )


def warm_up(parallel: "Parallel", rank: int, num_micro_batches: int) -> int:
    """Return the forwards that a GPU runs before its first backward, less one."""
    ranks, chunks = parallel.pipeline, parallel.stages_per_rank
    most = num_micro_batches * chunks
    if parallel.schedule == "gpipe":
        return most - 1
    if parallel.schedule == "1f1b":
        return min(ranks - rank, most) - 1
    return min((ranks - rank - 1) * 2 + (chunks - 1) * ranks, most - 1)


def order(parallel: "Parallel", rank: int, num_micro_batches: int) -> list[Action]:
    """Return the forwards and backwards of the GPU at a position of the pipeline.

    Forwards alone first, then a forward and a backward in turn, then backwards alone, as in Megatron-LM
    (``schedules.py``) and ``torch.distributed.pipelining``. Interleaved, P micro-batches go through one of
    the GPU's stages before the next one's turn.
    """
    ranks, chunks = parallel.pipeline, parallel.stages_per_rank
    forwards, backwards = list[Action](), list[Action]()
    for index in range(num_micro_batches * chunks):
        group, within = divmod(index, ranks * chunks)
        chunk, number = divmod(within, ranks)
        forwards.append(Action(True, chunk, group * ranks + number))
        backwards.append(Action(False, chunks - 1 - chunk, group * ranks + number))
    ahead = warm_up(parallel, rank, num_micro_batches)
    pairs = [action for pair in zip(forwards[ahead:], backwards, strict=False) for action in pair]
    return [*forwards[:ahead], *pairs, *backwards[len(forwards) - ahead :]]


def in_flight(actions: list[Action]) -> int:
    """Return the most forwards that wait for their backwards."""
    most = now = 0
    for action in actions:
        now += 1 if action.is_forward else -1
        most = max(most, now)
    return most
