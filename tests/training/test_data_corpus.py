"""Tokenizer, packed sequences and their order."""

from itertools import combinations

import numpy as np
import pytest
import torch

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.parse import parse
from trainfit.training import documents, durable
from trainfit.training.corpus import Corpora, open_corpora
from trainfit.training.options import SyntheticData, TextData, TrainOptions
from trainfit.training.order import learning_rate, permuted, sequence_numbers
from trainfit.training.synthetic import synthetic_text
from trainfit.training.tokenizer import end_token, load_tokenizer, train_tokenizer

TEXTS = [synthetic_text(0, index).text for index in range(200)]


def options_of(tmp_path, **more) -> TrainOptions:
    default = {"out": str(tmp_path), "data": SyntheticData(num_documents=200), "eval_fraction": 0.1}
    return TrainOptions(**default | more)


def opened(tmp_path, given: TrainOptions, vocabulary: int = 400, seq: int = 32) -> Corpora:
    return open_corpora(tmp_path / "data", given, vocabulary=vocabulary, seq=seq)


def test_the_tokenizer_keeps_every_text_and_its_bound():
    tokenizer = train_tokenizer(TEXTS, 400)
    assert tokenizer.get_vocab_size() == 400
    for text in [*TEXTS[:5], "žluťoučký kůň 🐎\n\ttabs"]:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert train_tokenizer(TEXTS, 400).to_str() == tokenizer.to_str(), "training is deterministic"
    # 100,000 is an upper bound: these texts do not have so many pairs that repeat.
    assert train_tokenizer(TEXTS, 100_000).get_vocab_size() < 5_000
    with pytest.raises(InputError, match="257"):
        train_tokenizer(TEXTS, 256)


def test_not_a_tokenizer(tmp_path):
    path = tmp_path / "tokenizer.json"
    for content in ("{}", "no json", '{"model": 3}'):
        path.write_text(content)
        with pytest.raises(InputError, match=r"not a tokenizer\.json"):
            load_tokenizer(path)


def test_packing_is_the_documents_with_ends_between(tmp_path):
    corpora = opened(tmp_path, options_of(tmp_path), vocabulary=500, seq=64)
    tokenizer = load_tokenizer(tmp_path / "data" / "tokenizer.json")[0]
    end = end_token(tokenizer)
    for corpus, held_out in ((corpora.train, False), (corpora.eval, True)):
        pieces = np.split(corpus.tokens, np.flatnonzero(corpus.tokens == end) + 1)
        texts = [tokenizer.decode(piece.tolist(), skip_special_tokens=True) for piece in pieces if len(piece)]
        assert texts == [text for text in TEXTS if documents.for_evaluation(text, 0.1) == held_out]
    rows = corpora.train.sequences(np.array([3, 0]))
    assert rows.shape == (2, 64)
    assert rows.dtype == np.int64
    assert rows[0].tolist() == corpora.train.tokens[3 * 64 : 4 * 64].tolist()
    assert isinstance(corpora.train.tokens, np.memmap)
    assert corpora.train.tokens.dtype == np.uint16


def test_ids_above_the_model_vocabulary_are_refused(tmp_path):
    path = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS, 600).save(str(path))
    with pytest.raises(InputError, match="vocabulary has 500"):
        opened(tmp_path, options_of(tmp_path, tokenizer=str(path)), vocabulary=500)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("content", "more", "says"),
    [
        ("", {}, "no text"),
        ("only a few words", {"eval_fraction": 0.0}, "training text are fewer than one sequence"),
        ("words " * 2000, {"eval_fraction": 0.001}, "evaluation text are fewer"),
    ],
)
def test_too_little_data(tmp_path, content, more, says):
    path = tmp_path / "a.txt"
    path.write_text(content)
    with pytest.raises(InputError, match=says):
        opened(tmp_path, options_of(tmp_path, data=TextData(path=str(path)), **more), vocabulary=300, seq=64)
    assert not (tmp_path / "data").exists()


def test_data_is_made_once_checked_and_not_swapped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("\n\n".join(TEXTS))
    given = options_of(tmp_path, data=TextData(path=str(path)))
    first, again = opened(tmp_path, given), opened(tmp_path, given)
    assert np.array_equal(first.train.tokens, again.train.tokens)
    path.write_text("\n\n".join(TEXTS[1:]))
    with pytest.raises(InputError, match="other data"):
        opened(tmp_path, given)
    tokens = tmp_path / "data" / "train.bin"
    content = bytearray(tokens.read_bytes())
    content[1000] ^= 1
    tokens.write_bytes(content)
    with pytest.raises(InputError, match=r"train\.bin"):
        opened(tmp_path, given)
    with pytest.raises(FileExistsError), durable.new_folder(tmp_path / "data"):
        pass


def test_an_epoch_visits_every_sequence_once():
    for count in (1, 2, 3, 4, 5, 17, 256, 1000, 4097):
        order = permuted(np.arange(count), count, seed=0, epoch=0)
        assert sorted(order.tolist()) == list(range(count))


def test_epochs_and_seeds_differ_and_look_shuffled():
    count = 10_000
    keys = ((0, 0), (0, 1), (1, 0), (2**63 - 1, 0))
    orders = [permuted(np.arange(count), count, seed, epoch) for seed, epoch in keys]
    for one, other in combinations(orders, 2):
        # Two random permutations agree at about one index (Poisson, mean 1): 12 has p < 1e-9.
        assert (one == other).sum() < 12
    # Spearman's correlation of a random permutation with its index has standard deviation 1/sqrt(n-1) = 0.01.
    assert abs(np.corrcoef(np.arange(count), orders[0])[0, 1]) < 0.05
    # Neighbours are not kept together either: a random permutation has about 2 successions.
    assert (np.diff(orders[0]) == 1).sum() < 15


def test_order_is_a_function_of_the_step_alone_across_epochs():
    count, per_step = 10, 4
    steps = [sequence_numbers(7, step, per_step, count) for step in range(5)]
    flat = np.concatenate(steps).tolist()
    assert sorted(flat[:10]) == list(range(10))
    assert sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:]
    assert sequence_numbers(7, 3, per_step, count).tolist() == steps[3].tolist()
    assert len(sequence_numbers(7, 10**12, 3, 10**9 + 7)) == 3, "a billion sequences cost no memory"


@pytest.mark.parametrize(
    ("name", "options", "theirs"),
    [
        ("constant", {}, {}),
        ("constant_with_warmup", {"warmup_steps": 4}, {}),
        ("linear", {"warmup_steps": 4}, {}),
        ("cosine", {"warmup_ratio": 0.03}, {}),
        ("cosine_with_min_lr", {"warmup_steps": 4, "min_lr_share": 0.2}, {"min_lr_rate": 0.2}),
        ("polynomial", {"lr_power": 2.0}, {"power": 2.0, "lr_end": 0.0}),
        ("inverse_sqrt", {"warmup_steps": 7}, {}),
        ("warmup_stable_decay", {"warmup_steps": 4, "decay_steps": 30}, {"num_decay_steps": 30}),
    ],
)
def test_rates_are_those_of_transformers_by_the_same_name(tmp_path, name, options, theirs):
    """The warm-up of transformers begins at 0: its step i + 1 is step i here."""
    from transformers import get_scheduler

    given = options_of(tmp_path, steps=101, schedule=name, **options)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler = get_scheduler(name, optimizer, given.warmup, 101, scheduler_specific_kwargs=theirs)
    expected = [scheduler.lr_lambdas[0](step + (step < given.warmup)) for step in range(101)]
    assert [learning_rate(2.0, step, given) for step in range(101)] == pytest.approx(
        [2 * x for x in expected]
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"schedule": "cosine", "warmup_steps": 100}, "leaves no step of 100 to the cosine schedule"),
        ({"warmup_steps": 3, "warmup_ratio": 0.1}, "both set the warm-up"),
        ({"min_lr_share": 0.1}, "constant does not fall"),
        ({"schedule": "wsd", "warmup_steps": 60, "decay_steps": 50}, "over the run's 100"),
        ({"schedule": "linear", "decay_steps": 5}, "no stretch of decay"),
        ({"patience": 2}, "set eval_every"),
        ({"keep_best": True, "eval_fraction": 0.0}, "no data is held out"),
    ],
)
def test_options_that_contradict_each_other(tmp_path, given, says):
    with pytest.raises(InputError, match=says):
        parse(TrainOptions, {"out": str(tmp_path), **given})
