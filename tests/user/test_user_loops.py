"""Loops of user code that end on a value of the device, under ``trainfit.trace``."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trainfit
from trainfit.spec.errors import InputError
from trainfit.user import loops
from user_training import inside, mlp, steps


def test_generation_ends_at_its_length() -> None:
    """A sequence is finished where its last token ends it, which is not known, or at the greatest length."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, vocab_size=128, eos_token_id=7, pad_token_id=0,
    )  # fmt: skip
    lengths, forwards = [], []

    def train() -> None:
        model: Any = AutoModelForCausalLM.from_config(config).cuda()
        model.register_forward_pre_hook(lambda *_: forwards.append(1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            ids = torch.randint(8, 128, (2, 5), device="cuda")
            lengths.append(model.generate(ids, max_new_tokens=6, do_sample=True).shape[1])
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()

    assert trainfit.trace(train, steps=2).fits
    assert lengths == [11, 11]
    assert len(forwards) == 2 * 6 + 2


def test_a_known_value_decides() -> None:
    def check() -> None:
        unknown = torch.randn(4, device="cuda") > 0
        yes, no = torch.ones(4, device="cuda", dtype=torch.bool), torch.zeros((), device="cuda") > 1
        assert (unknown | yes).all()
        assert not (unknown | no).any()  # Unknown, so it reads False.
        assert ((unknown & no) == 0).all()
        assert torch.logical_or(yes, unknown).all()
        kept = yes.clone()
        kept &= unknown
        assert not kept.all()
        kept |= yes
        assert kept.all()

    inside(check)


def test_assumed_values_agree() -> None:
    """Unknown values equal no others; what follows from them is computed."""

    def check() -> None:
        tokens = torch.randint(0, 9, (3, 5), device="cuda")
        is_end = torch.isin(tokens, torch.tensor([0, 2], device="cuda"))
        end = torch.full((3,), 5, device="cuda")
        end[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
        mask = torch.arange(5, device="cuda").expand(3, -1) <= end.unsqueeze(1)
        assert mask.cpu().all()
        assert (tokens != 0).sum().item() == 15
        loss = torch.randn((), device="cuda")
        assert torch.isfinite(loss)
        assert not torch.isnan(loss)
        assert loss.item() == 0
        assert torch.equal(torch.ones_like(loss), torch.tensor(1.0, device="cuda"))
        assert not torch.equal(loss, torch.zeros_like(loss))
        assert torch.equal(loss, loss)
        assert len(tokens[is_end]) == 15  # For the size of a result, all is selected.

    inside(check)


def finished(x: Tensor) -> bool:
    return bool((x.argmax(-1) == 3).all())


def test_loop_that_cannot_end_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_FORWARDS", 10)

    def tested(model: nn.Module, x: Tensor) -> None:
        while not finished(x):
            x = model(x)

    def broken(model: nn.Module, x: Tensor) -> None:
        while True:
            x = model(x)
            if finished(x):
                break

    for loop in (tested, broken):
        with pytest.raises(InputError, match=r"test_user_loops.py:\d+: .* did not end in 10 forwards"):
            inside(lambda loop=loop: loop(mlp().cuda(), torch.randn(4, 256, device="cuda")))


def test_loop_with_another_end_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_FORWARDS", 10)
    seen = []

    def train() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        number = 0
        while number < 2:
            for _ in range(30):
                if finished(model(torch.randn(8, 256, device="cuda"))):
                    seen.append("finished")
            seen.append("epoch")
            steps(model, optimizer, 1)
            number += 1

    trainfit.trace(train, steps=2)
    assert seen == ["epoch", "epoch"]


def test_an_evaluation_of_many_batches_ends_a_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches are counted by a ``for`` loop, and its value decides the loop around it."""
    monkeypatch.setattr(loops, "MOST_FORWARDS", 10)

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        total = 0.0
        for _ in range(30):
            total += model(torch.randn(8, 256, device="cuda")).sum().item()
        return total

    def train() -> None:
        model = mlp().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        while True:
            steps(model, optimizer, 1)
            if evaluate(model) < 0.5:
                break

    assert trainfit.trace(train, steps=1).code.other_phases[0].num_forwards == 30  # pyright: ignore

    def endless() -> None:
        model = mlp().cuda()
        while True:
            if evaluate(model) < -1:
                break

    with pytest.raises(InputError, match="did not end in 200 forwards"):
        inside(endless)


def test_loop_whose_condition_reads_in_a_for_loop_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MOST_FORWARDS", 10)

    def ended(x: Tensor) -> bool:
        num_ended = 0
        for row in x:
            num_ended += finished(row[None])
        return num_ended == len(x)

    def check() -> None:
        model, x = mlp().cuda(), torch.randn(4, 256, device="cuda")
        while not ended(x):
            x = model(x)

    with pytest.raises(InputError, match="did not end in 10 forwards"):
        inside(check)
