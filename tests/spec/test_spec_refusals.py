"""Every mistake in a recipe is one line that names the file, the field, the value and the remedy."""

import random
from pathlib import Path

import pytest

from trainfit.spec.errors import InputError
from trainfit.spec.parsing.plain_data import MAX_FILE_BYTES, read_json, read_yaml
from trainfit.spec.parsing.recipe_file import load_recipe, recipe_from

MODEL = "model: {config: gpt2}\n"
BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n"
    for before, name in zip("abcdef", "bcdefg", strict=True)
)

# name: (text, what the line says)
REFUSED = {
    "unknown key": (MODEL + "bach: {micro: 2}", "bach = {'micro': 2}: unknown key; did you mean 'batch'?"),
    "NaN": (MODEL + "optimizer: {lr: .nan}", "lr = nan: not a finite number"),
    "NaN in a config": ("model: {config: {a: .nan}}", "model.config.a = nan: not a finite"),
    "unit": (MODEL + "recompute: {budget_gib: 4 GiB}", "should be a number; write the number of GiB alone"),
    "unit on a count": (
        MODEL + "batch: {micro: 4k}",
        "micro = '4k': should be a whole number; write the number al",
    ),
    "money": (MODEL + "hardware: {price_per_hour: $2}", "hardware.price_per_hour = '$2': should be a number"),
    "negative": (MODEL + "batch: {micro: -1}", "batch.micro = -1: should be greater than or equal to 1"),
    "quoted true": (
        MODEL + "optimizer: {in_backward: 'true'}",
        "optimizer.in_backward = 'true': should be one of false, true, block; write true without quotes",
    ),
    "no layers": (MODEL + "recompute: {layers: []}", "layers = []: has no entries; write at least one"),
    "part of a thousand": (
        MODEL + "batch: {seq: 8.5k}",
        "should be a whole number; write a whole number, or 8k",
    ),
    "too large": (MODEL + "batch: {seq: 999999999999}", "batch.seq = 999999999999: should be less than"),
    "too many tokens": (MODEL + "batch: {micro: 1000000, seq: 1000000}", "of 1000000 x 1000000 tokens"),
    "quoted number": (
        MODEL + "optimizer: {lr: '1e-4'}",
        "should be a number; write the number without quotes",
    ),
    "float for int": (MODEL + "batch: {micro: 2.0}", "micro = 2.0: should be a whole number; write 2"),
    "fraction for int": (MODEL + "batch: {micro: 2.5}", "batch.micro = 2.5: should be a whole number"),
    "bool for int": (MODEL + "batch: {micro: true}", "batch.micro = true: should be a whole number"),
    "null part": (
        MODEL + "batch: null",
        "should be a mapping with micro, seq, accumulate, not null; leave the",
    ),
    "unknown choice": (
        MODEL + "precision: bf-16",
        "precision = 'bf-16': should be one of fp32, bf16, bf16-master, amp-bf16",
    ),
    "near choice": (MODEL + "recompute: fulll", "did you mean full?"),
    "union range": (
        MODEL + "recompute: {budget: 2}",
        "recompute.budget = 2: should be less than or equal to 1",
    ),
    "union unknown": (MODEL + "recompute: {foo: 2}", "known keys here: every, budget, budget_gib, layers"),
    "union two": (
        MODEL + "recompute: {every: 2, budget: 1}",
        "does not go together with 'every'; keep one of",
    ),
    "union neither": (
        MODEL + "recompute: 3",
        "should be one of none, full, selective, fit, or a mapping with",
    ),
    "text for mapping": (
        "model: [gpt2]",
        "['gpt2']: should be a mapping with config, implementation, name, weights; write its",
    ),
    "missing": ("seed: 1", "model: missing; add 'model'"),
    "missing nested": (MODEL + "adapter: {}", "adapter.kind: missing; add 'kind'"),
    "item of a list": (
        MODEL + "adapter: {kind: lora, targets: [a, 1]}",
        "targets.1 = 1: should be text; quote it",
    ),
    "counts": (
        MODEL + "hardware: {count: 4}\nparallel: {shard: 2}",
        "count = 4: parallel (pipeline x replicate x shard x context x tensor) is 2",
    ),
    "quantised, nothing trains": (MODEL + "quantize: nf4", "quantize = 'nf4': a quantised base is frozen"),
    "duplicate key": (MODEL + "seed: 1\nseed: 2", "duplicate key 'seed' at line 3; keep one of them"),
    "alias bomb": (BOMB, "aliases expand without end; write at most 100,000 values"),
    "alias of itself": ("model: &a {config: *a}", "aliases expand without end"),
    "undefined alias": ("model: *nowhere", "found undefined alias 'nowhere' at line 1"),
    "merge key": ("<<: {seed: 3}\n" + MODEL, "merge key '<<' at line 1; write the keys out, or use extends"),
    "two documents": (MODEL + "---\nseed: 1", "a second document starts at line 2; keep one document a file"),
    "only a comment": ("# nothing\n", "the file is empty"),
    "a list": ("- 1", "not a mapping"),
    "deep": ("model: {config: " + "[" * 100 + "]" * 100 + "}", "nested too deeply; nest at most 64 levels"),
    "very deep": ("model: {config: " + "[" * 5000 + "]" * 5000 + "}", "nested too deeply"),
    "code": (MODEL + "seed: !!python/object:os.system x", "could not determine a constructor"),
    "date": ("model: {config: 2020-01-01}", "a date is not a recipe's value"),
    "impossible date": ("model: {config: 2020-99-99}", "quote it"),
    "number as key": ("1: 2\n" + MODEL, "(top) = 1: key is not text"),
    "endless number": (MODEL + "seed: " + "9" * 5000, "a number is too long"),
    "seed over 63 bits": (MODEL + "seed: 9223372036854775808", "9223372036854775808: should be less than"),
    "tab": ("model:\n\tconfig: x", "at line 2"),
    "control character": ("model: \x01", "unacceptable character"),
    "lone surrogate": ('model: {config: "\\ud800"}', "not Unicode text"),
    "no such config": (
        "model: {config: nope/config.json}",
        "model.config = 'nope/config.json': no such file",
    ),
    "NUL in a path": ('model: {config: "a\\0/b"}', "model.config = 'a\\x00/b': not a path"),
    "extends a number": ("extends: 3", "extends = 3: not a path"),
    "extends nothing": ("extends: ''", "extends = '': not a path"),
    "extends a folder": ("extends: .", "extends = '.': no such file"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_one_line(name: str, tmp_path: Path) -> None:
    text, says = REFUSED[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        load_recipe(path)
    line = str(caught.value)
    assert says in line
    assert line.startswith(str(path))
    assert len(line.splitlines()) == 1
    assert caught.value.remedy


def test_all_unknown_keys_are_named_in_one_line() -> None:
    data = {"model": {"config": "gpt2"}, "nmae": "x", "deepspeed": "ds.json", "fizz": {"buzz": 1}}
    with pytest.raises(InputError) as caught:
        recipe_from({**data, "loader": {"wrkrs": 1}}, file="r.yaml")
    line = str(caught.value)
    assert line.startswith(
        "r.yaml: loader.wrkrs = 1: unknown key; did you mean 'workers'?; also unknown: nmae"
    )
    assert "deepspeed (here it is parallel.strategy: zero1 for ZeRO-1, " in line
    assert line.endswith(", fizz")
    assert "seed" not in line  # Half of its letters are deepspeed's.
    with pytest.raises(InputError, match=r"also unknown: k1, .*, k20, and 79 more$"):
        recipe_from({"model": {"config": "gpt2"}} | {f"k{i}": i for i in range(100)})


def test_files_that_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    with pytest.raises(FileNotFoundError):
        load_recipe(path)
    path.write_text(MODEL + "#" + "x" * MAX_FILE_BYTES)
    with pytest.raises(InputError, match="over 1 MB"):
        load_recipe(path)
    path.write_text(MODEL + "#" + "x" * (MAX_FILE_BYTES - len(MODEL) - 1))
    assert load_recipe(path).model.config == "gpt2"
    path.write_bytes(b"model: {config: caf\xe9}")
    with pytest.raises(InputError, match="not UTF-8"):
        load_recipe(path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a": NaN}', "NaN is not JSON"),
        ('{"a": -Infinity}', "-Infinity is not JSON"),
        ('{"a": 1e999}', "a = inf: not a finite number"),
        ('{"a": 1, "a": 2}', "a: duplicate key"),
        ('{"a": 1', "not JSON"),
        ('{"a": ' + "9" * 5000 + "}", "a number is too long"),
        ('{"a": ' + "[" * 100_000 + "}", "nested too deeply"),
        ('{"a": "\\ud800"}', "not Unicode text"),
        ("", "not JSON"),
    ],
)
def test_json_refused(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        read_json(path)
    assert says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


WORDS = ["model", "config", "batch", "&a ", "*a", "{", "}", "[", "]", ":", ": ", "\n", "- ", "'", '"',
    "!!int ", "!!set ",
         "<<", "---\n", "%YAML 1.1\n", "1e-4", ".nan", "2020-99-99", "\x00", "\t", "é", "\u2028", "9" * 30,
         "null", "|\n", "? "]  # fmt: skip
WHOLE = """extends: base.yaml
model: {config: {model_type: llama, layers: [1, 2, &x {a: 1e-4}], more: *x}, implementation: hf}
batch: {micro: 4, seq: 2048, accumulate: 1}
recompute: {budget: 0.5}
optimizer: {name: adamw, implementation: fused, lr: 1e-4}
adapter: {kind: lora, rank: 16, targets: [q, v]}
parallel: {replicate: 1, shard: 1, tensor: 1}
hardware: {gpu: h200, count: 1}
"""


@pytest.mark.parametrize("seed", range(4))
def test_mutated_recipes_never_crash(seed: int, tmp_path: Path) -> None:
    """Random edits either still parse or are refused with one line; nothing else may leave load_recipe."""
    dice = random.Random(seed)
    (tmp_path / "base.yaml").write_text("seed: 3\n")
    path = tmp_path / "mutated.yaml"
    refused = 0
    for _ in range(60):
        text = WHOLE
        for _ in range(dice.randint(1, 4)):
            at, length = dice.randrange(len(text)), dice.choice([0, 0, 1, 3, 12])
            text = text[:at] + dice.choice(WORDS) + text[at + length :]
        path.write_text(text, encoding="utf-8")
        try:
            load_recipe(path)
        except InputError as error:
            refused += 1
            assert len(str(error).splitlines()) == 1, text
            assert error.problem, text
            assert error.remedy, text
    assert refused > 20


def test_mutated_values_never_crash(tmp_path: Path) -> None:
    """Kinds of fields given every kind of wrong value through --set."""
    path = tmp_path / "recipe.yaml"
    path.write_text(WHOLE.replace("extends: base.yaml\n", ""))
    fields = (
        "model model.config model.config.layers batch.micro precision recompute compile recompute.budget "
        "optimizer.lr adapter adapter.targets adapter.targets.0.x hardware.gpu nothing model.config.a.b"
    )
    values = [
        "", "null", "true", "3", "2.5", "1e999", ".nan", "text", "'1'", "[]", "[1, a]", "{}", "{a: 1}",
        "{every: 2}", "4 GiB", "*a", "&a [*a]", "---", "!!binary x", "[", "9" * 400, '"\\0/"', "%",
    ]  # fmt: skip
    for field in fields.split():
        for value in values:
            try:
                load_recipe(path, [f"{field}={value}"])
            except InputError as error:
                assert len(str(error).splitlines()) == 1
                assert error.remedy


def test_a_wide_list_within_the_limits_is_read(tmp_path: Path) -> None:
    path = tmp_path / "wide.yaml"
    path.write_text("model: {config: {a: [" + ", ".join(["1"] * 15_000) + "]}}")
    assert len(read_yaml(path)["model"]["config"]["a"]) == 15_000
