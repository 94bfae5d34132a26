"""Generate completions of prompts, several sequences at a time, each as long as it takes.

A sequence occupies a slot of the cache. When it ends, its slot takes the next prompt while the others go on
(continuous batching), so a short sequence does not wait for a long one. On a GPU one step of decoding is
recorded once as a CUDA graph and replayed: it is hundreds of small kernels, which the host would launch more
slowly than they run.

Example: two slots and three prompts, whose completions have 2, 5 and 2 tokens::

    step      1  2  3  4  5
    slot 0    a  a. c  c.
    slot 1    b  b  b  b  b.        c begins when a has ended, 5 steps instead of 7

The host reads which sequences have ended every few steps, not every step, as reading waits for the GPU.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from pydantic import Field
from torch import Tensor

from trainfit.kernels.sampling.op import least_kept, row_keys, sample_tokens
from trainfit.models.native.decoder import NativeDecoder
from trainfit.rl.rollout import forward
from trainfit.rl.rollout.cache import KVCache
from trainfit.rl.rollout.schedule import READ_EVERY, padded
from trainfit.spec.errors import InputError
from trainfit.spec.value import Count, Value


class Sampling(Value):
    """How tokens are sampled.

    Attributes:
        max_new: tokens of a completion at most.
        temperature: 0 takes the likeliest token.
        top_p: the fewest likeliest tokens that sum to it are sampled from.
        stop: tokens that end a completion, itself included.
        seed: of the noise, which also depends on the prompt's number and the position.
    """

    max_new: Count = 512
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: tuple[int, ...] = ()
    seed: Annotated[int, Field(ge=0)] = 0


class Completion(NamedTuple):
    """What was generated after one prompt.

    Attributes:
        logs: log-probability of each token at the sampling's temperature, over the whole vocabulary.
        stopped: ended by a stop token, not by ``max_new``.
    """

    tokens: list[int]
    logs: list[float]
    stopped: bool


@dataclass
class _Slots:
    """State of all slots on the device.

    Attributes:
        next: int64 [b], token to append in the next step.
        lengths: int64 [b], tokens in the cache.
        made: int64 [b], tokens of the completion so far, ``next`` included.
        numbers: int64 [b], of the prompts.
        alive: bool [b].
        tokens, logs: [b, max_new], the completion.
    """

    next: Tensor
    lengths: Tensor
    made: Tensor
    numbers: Tensor
    alive: Tensor
    tokens: Tensor
    logs: Tensor

    @classmethod
    def allocate(cls, b: int, max_new: int, device: torch.device) -> _Slots:
        whole = [torch.zeros(b, dtype=torch.int64, device=device) for _ in range(4)]
        return cls(
            *whole,
            alive=torch.zeros(b, dtype=torch.bool, device=device),
            tokens=torch.zeros(b, max_new, dtype=torch.int64, device=device),
            logs=torch.zeros(b, max_new, dtype=torch.float32, device=device),
        )


class Generator:
    """Generates completions with one model, cache and recorded step.

    The cache and the graph are kept between calls, while the model's weights may change in place. A
    completion is a function of the model, its prompt and number and the sampling; only rounding depends on
    the other sequences of its batch.
    """

    def __init__(
        self,
        model: NativeDecoder,
        sampling: Sampling,
        *,
        slots: int,
        positions: int,
        cache_dtype: torch.dtype | None = None,
        autocast: Callable[[], AbstractContextManager[object]] = nullcontext,
        graph: bool | None = None,
        device: torch.device | None = None,
    ):
        """Allocate the cache.

        Args:
            slots: sequences that are generated at a time.
            positions: tokens of a prompt and its completion at most.
            cache_dtype: None: the embedding's.
            autocast: context of every forward.
            graph: replay a recorded step; None: on CUDA.
            device: of the cache; None: the embedding's.

        Raises:
            InputError: more positions than the model has, or a model with a trained prefix.
        """
        forward.check(model)
        most = model.config.max_position_embeddings
        if model.embed_positions is not None and positions > most:
            raise InputError(
                f"the model has {most} learned positions", "use shorter sequences", value=positions
            )
        self.model, self.sampling, self._autocast = model, sampling, autocast
        weight = model.embed.weight
        self.device = device or weight.device
        room = padded(positions) if model.embed_positions is None else min(padded(positions), most)
        self.cache = KVCache.allocate(
            model.config, slots, room, dtype=cache_dtype or weight.dtype, device=self.device
        )
        self._slots = _Slots.allocate(slots, sampling.max_new, self.device)
        self._stop = torch.tensor(sampling.stop, dtype=torch.int64, device=self.device)
        self._uses_graph = self.device.type == "cuda" if graph is None else graph
        self._graph: torch.cuda.CUDAGraph | None = None
        self._side: torch.cuda.Stream | None = None

    def read(self, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts into the first slots, as a call does first; for measuring this part alone."""
        self._begin([(number, number) for number in range(len(prompts))], prompts, 0)

    def record(self) -> None:
        """Record the step of decoding, as the first token of a call does; without a graph do nothing."""
        if not self.is_recorded:
            self._record()

    @property
    def is_recorded(self) -> bool:
        """Whether the step needs no recording: it is recorded, or runs without a graph."""
        return self._graph is not None or not self._uses_graph

    def append(self, *, recorded: bool = True) -> None:
        """Append a token to every slot; not ``recorded``: kernel by kernel, as while it is recorded."""
        if recorded:
            self._step()
        else:
            self._decode()

    @property
    def state_tensors(self) -> tuple[Tensor, ...]:
        """The cache's tensors and those of the slots."""
        return (self.cache.keys, self.cache.values, *vars(self._slots).values(), self._stop)

    def forget(self) -> None:
        """Record the next step anew, as the weights have moved to other addresses."""
        self._graph = None

    @torch.no_grad()
    def __call__(self, prompts: Sequence[Sequence[int]]) -> list[Completion]:
        """Return a completion of each prompt; prompt i has number i."""
        return list(self.completions(prompts))

    @torch.no_grad()
    def completions(
        self,
        prompts: Sequence[Sequence[int]],
        first: int = 0,
        at_steps: Callable[[], None] = lambda: None,
        lengths: Sequence[int] | None = None,
    ) -> Iterator[Completion]:
        """Yield the completions in the prompts' order.

        Args:
            first: the number of the first prompt, on which its noise depends.
            at_steps: called every few steps; an exception that it raises ends the generation.
            lengths: tokens of each completion, which ends at the first look at that many; None: at a stop
                token. For measuring.

        Raises:
            InputError: an empty prompt, or one that leaves no room for ``max_new`` tokens.
        """
        room = self.cache.num_positions - self.sampling.max_new
        for number, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= room:
                problem = f"prompt {number} has {len(prompt)} tokens, the cache takes 1 to {room}"
                raise InputError(problem, "raise the cache's positions, or shorten the prompt")
        was_training = self.model.training
        self.model.eval()
        try:
            yield from self._run(prompts, first, at_steps, lengths)
        finally:
            self.model.train(was_training)

    def _run(
        self,
        prompts: Sequence[Sequence[int]],
        first: int,
        at_steps: Callable[[], None],
        lengths: Sequence[int] | None,
    ) -> Iterator[Completion]:
        waiting = deque(range(len(prompts)))
        running: dict[int, int] = {}  # Slot -> prompt
        done: dict[int, Completion] = {}
        given = 0
        while waiting or running:
            at_steps()
            free = [slot for slot in range(self.cache.num_slots) if slot not in running]
            begun = [(slot, waiting.popleft()) for slot in free[: len(waiting)]]
            if begun:
                self._begin(begun, prompts, first)
                running |= dict(begun)
            for _ in range(min(READ_EVERY, self.sampling.max_new - 1)):
                self._step()
            if lengths is not None:
                self._end({slot: lengths[number] for slot, number in running.items()})
            for slot, completion in self._ended(running):
                done[running.pop(slot)] = completion
            while given in done:
                yield done.pop(given)
                given += 1

    def _begin(self, begun: list[tuple[int, int]], prompts: Sequence[Sequence[int]], first: int) -> None:
        """Read prompts into their slots, and sample the first token of each."""
        taken = [prompts[number] for _, number in begun]
        lengths = torch.tensor([len(prompt) for prompt in taken], device=self.device)
        longest = min(padded(max(map(len, taken))), self.cache.num_positions)
        ids = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in taken])
        slots = torch.tensor([slot for slot, _ in begun], device=self.device)
        with self._autocast():
            logits = forward.prefill(self.model, self.cache, slots, ids.to(self.device), lengths)
        numbers = torch.tensor([first + number for _, number in begun], device=self.device)
        state = self._slots
        state.lengths[slots], state.numbers[slots], state.made[slots] = lengths, numbers, 0
        state.alive[slots] = True
        self._take(slots, *self._sampled(logits, numbers, lengths))

    def _sampled(self, logits: Tensor, numbers: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        sampling = self.sampling
        logits = logits.float()
        cut = sampling.temperature > 0 and sampling.top_p < 1
        return sample_tokens(
            logits,
            row_keys(sampling.seed, numbers, position_ids),
            temperature=sampling.temperature,
            least=least_kept(logits, sampling.temperature, sampling.top_p) if cut else None,
        )

    def _take(self, slots: Tensor, tokens: Tensor, logs: Tensor) -> None:
        """Append sampled tokens to the completions of these slots, and mark those that end."""
        state = self._slots
        alive, made = state.alive[slots], state.made[slots]
        at = made.clamp(max=self.sampling.max_new - 1)
        state.tokens[slots, at] = torch.where(alive, tokens, state.tokens[slots, at])
        state.logs[slots, at] = torch.where(alive, logs, state.logs[slots, at])
        state.next[slots] = tokens
        state.made[slots] = made + alive
        stops = (tokens[:, None] == self._stop).any(dim=1)  # torch.isin may wait for the device.
        state.alive[slots] = alive & ~stops & (made + 1 < self.sampling.max_new)

    def _step(self) -> None:
        """Append a token to every slot; those that have ended or are empty compute and keep nothing."""
        if not self._uses_graph:
            self._decode()
            return
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()

    def _decode(self) -> None:
        state = self._slots
        # A slot that has ended stays where it is, inside the cache.
        position_ids = state.lengths.clamp(max=self.cache.num_positions - 1)
        with self._autocast():
            logits = forward.decode(self.model, self.cache, state.next, position_ids)
        state.lengths.add_(state.alive.long())
        every = torch.arange(self.cache.num_slots, device=self.device)
        self._take(every, *self._sampled(logits, state.numbers, state.lengths))

    def _record(self) -> None:
        """Record a step; what it changes is put back, so that recording leaves no trace."""
        state = self._slots
        before = {name: value.clone() for name, value in vars(state).items()}
        # One for all recordings: libraries keep a workspace for each stream that they ran on.
        side = self._side = self._side or torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):  # Libraries allocate their workspaces at a first call.
            self._decode()
        torch.cuda.current_stream(self.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        # Calls of other threads, such as a loader's that pins memory, do not end the recording.
        with torch.cuda.device(self.device), torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            self._decode()
        for name, value in before.items():
            getattr(state, name).copy_(value)

    def _end(self, lengths: dict[int, int]) -> None:
        """End the completions of slots that have as many tokens, and cut them."""
        made = self._slots.made.tolist()
        ended = [slot for slot, length in lengths.items() if made[slot] >= length]
        if ended:
            self._slots.alive[ended] = False
            kept = [lengths[slot] for slot in ended]
            self._slots.made[ended] = torch.tensor(kept, device=self.device)

    def _ended(self, running: dict[int, int]) -> list[tuple[int, Completion]]:
        """Return the completions of the slots that have ended."""
        state = self._slots
        alive = state.alive.tolist()
        ended = [slot for slot in running if not alive[slot]]
        if not ended:
            return []
        made = state.made.tolist()
        tokens, logs = state.tokens[ended].tolist(), state.logs[ended].tolist()
        found = []
        for row, slot in enumerate(ended):
            mine = tokens[row][: made[slot]]
            stopped = bool(mine) and mine[-1] in self.sampling.stop
            found.append((slot, Completion(mine, logs[row][: made[slot]], stopped)))
        return found
