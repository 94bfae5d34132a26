"""Sequences of ``seq`` tokens from documents: which pieces of which documents each sequence holds.

- ``pack: true``: sequence i is tokens [i*s, (i+1)*s) of all documents in a row.
- ``pack: documents``: whole documents, each in the sequence that it fills best (best-fit decreasing, as in
  Ding et al., arXiv:2404.10830). Only documents longer than a sequence are cut, at multiples of s.
- ``pack: false``: the first s tokens of one document.

Of seq = 8 and documents of 5, 11 and 3 tokens at 0, 5 and 16: the pieces are (0, 5), (5, 8), (13, 3) and
(16, 3). Best fit gives the sequences [(5, 8)], [(0, 5), (13, 3)], [(16, 3)], the last padded by 5.
"""

from dataclasses import dataclass

import numpy as np

from trainfit.spec.data import Pack


@dataclass(frozen=True)
class Pieces:
    """Pieces of documents in the order of the sequences that hold them.

    Sequence i holds the pieces ``[first[i], first[i + 1])``; piece j is ``length[j]`` tokens from
    ``start[j]``.
    """

    start: np.ndarray  # int64 [pieces]
    length: np.ndarray  # int64 [pieces]
    first: np.ndarray  # int64 [sequences + 1]

    def __len__(self) -> int:
        return len(self.first) - 1

    def kept(self, which: np.ndarray) -> "Pieces":
        """Return the sequences of which ``which`` (bool [sequences]) is true."""
        sizes = np.diff(self.first)
        pieces = np.repeat(which, sizes)
        first = np.concatenate(([0], np.cumsum(sizes[which])))
        return Pieces(self.start[pieces], self.length[pieces], first)


def pieces_of(starts: np.ndarray, num_tokens: int, seq: int, pack: Pack) -> Pieces:
    """Return the pieces of every sequence.

    Args:
        starts: first token of each document, int64 [documents], ascending.
        num_tokens: of all documents.
    """
    lengths = np.diff(np.append(starts, num_tokens))
    if pack is False:
        return Pieces(starts, np.minimum(lengths, seq), np.arange(len(starts) + 1))
    counts = -(-lengths // seq)  # Pieces of each document
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    start = np.repeat(starts, counts) + within * seq
    length = np.minimum(np.repeat(starts + lengths, counts) - start, seq)
    return _best_fit(start, length, seq)


def _best_fit(start: np.ndarray, length: np.ndarray, seq: int) -> Pieces:
    """Put the pieces, longest first, each into the fullest sequence with enough room."""
    owner = np.empty(len(length), dtype=np.int64)
    order = np.argsort(-length, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(seq + 1)]  # Room -> sequences
    rooms = 0  # Bit r: some sequence has room r
    num_sequences = 0
    for index in order.tolist():
        needed = int(length[index])
        fitting = rooms >> needed
        if fitting:
            room = needed + (fitting & -fitting).bit_length() - 1
            sequence = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            sequence, room, num_sequences = num_sequences, seq, num_sequences + 1
        owner[index] = sequence
        if left := room - needed:
            with_room[left].append(sequence)
            rooms |= 1 << left
    # By sequence; within one, in the documents' order.
    order = np.lexsort((start, owner))
    first = np.searchsorted(owner[order], np.arange(num_sequences + 1))
    return Pieces(start[order], length[order], first)
