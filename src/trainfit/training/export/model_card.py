"""The model card of an export: README.md with the Hub's front matter and the run's figures."""

import statistics
from pathlib import Path
from typing import Any

import yaml

import trainfit
from trainfit.spec.objective import Policy
from trainfit.spec.provenance import installed_version
from trainfit.spec.units import format_bytes, format_count, format_seconds
from trainfit.training import durable
from trainfit.training.corpus import INDEX
from trainfit.training.export.saved_run import SavedRun
from trainfit.training.folder import DATA
from trainfit.training.options import HubData, SyntheticData, TextData

CARD = "README.md"
LIBRARIES = ("transformers", "peft", "safetensors")
CODE = {
    "model": """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained({folder!r})
tokenizer = AutoTokenizer.from_pretrained({folder!r})
tokens = tokenizer("Once upon a time", return_tensors="pt", return_token_type_ids=False)
print(tokenizer.decode(model.generate(**tokens, max_new_tokens=40)[0]))""",
    "adapter": """from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({base!r})
model = PeftModel.from_pretrained(base, {folder!r})""",
}


def model_card(
    run: SavedRun, *, name: str, kind: str, base: str | None, notes: tuple[str, ...], num_parameters: int,
    dtype: str,
) -> str:  # fmt: skip
    """Return the text of README.md.

    Args:
        name: of the folder.
        kind: ``model`` or ``adapter``.
        base: name or folder of the weights that the run began with; None: random ones.
        notes: for users of the weights.
    """
    adapter = run.recipe.adapter
    model, size = run.recipe.model.display_name, f"{format_count(num_parameters)} parameters in {dtype}"
    what = f"{model}, {size}"
    if kind == "adapter" and adapter is not None:
        what = f"Adapter ({adapter.kind}) of {model}, {size} of its own"
    start = "random weights, so it knows only what this run taught it" if base is None else f"`{base}`"
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(run, kind, base), sort_keys=False)}---\n",
        f"# {name}\n",
        f"{what}, trained with trainfit from {start}.\n",
        *(f"> {note}\n" for note in notes),
        f"## Use\n\n```python\n{CODE[kind].format(folder=name, base=base or 'BASE')}\n```\n",
        f"## Training\n\n{_table(_figures(run))}\n",
        f"## Recipe\n\n```yaml\n{_recipe(run)}```\n",
        f"## Versions\n\n{_table(_versions(run))}\n",
    ]
    return "\n".join(parts)


def _front_matter(run: SavedRun, kind: str, base: str | None) -> dict[str, Any]:
    adapter = run.recipe.adapter
    tags = ["trainfit"]
    if kind == "adapter":
        tags += [f"base_model:adapter:{base}"] * (base is not None)
    if adapter is not None:
        tags.append(adapter.kind)
    found: dict[str, Any] = {"library_name": "peft" if kind == "adapter" else "transformers"}
    found |= {"base_model": base} if base is not None else {}
    found |= {"pipeline_tag": "text-generation", "tags": tags}
    if isinstance(run.options.data, HubData):
        found["datasets"] = [run.options.data.name]
    return found


def _figures(run: SavedRun) -> list[tuple[str, str]]:
    """Return the run's figures, as far as its log has them."""
    recipe, log = run.recipe, run.log()
    steps = [entry for entry in log if entry.get("kind") == "step"]
    evaluations = [entry for entry in log if entry.get("kind") == "eval"]
    tokens_per_step = recipe.step_tokens
    found = [
        ("data", _data(run)),
        ("steps", f"{run.step:,}"),
    ]
    if not isinstance(recipe.objective, Policy):
        count = f"{format_count(run.step * tokens_per_step)} ({tokens_per_step:,} a step, "
        found.append(("tokens", f"{count}sequences of {recipe.batch.seq:,})"))
    if steps and not isinstance(recipe.objective, Policy):
        found.append(("epochs", f"{steps[-1]['epoch']:.3g}"))
    if run.state.loss is not None:
        found.append(("training loss, last step", f"{run.state.loss:.4f}"))
    if evaluations:
        last = evaluations[-1]
        if last.get("reward") is not None:
            value = f"{last['reward']:.4f} of {last['sequences']:,} held-out prompts"
            found.append((f"reward, after step {last['step']:,}", value))
        else:
            accuracy = last.get("reward_accuracy")
            more = f"perplexity {last['perplexity']:.4g}" if accuracy is None else f"accuracy {accuracy:.1%}"
            value = f"{last['loss']:.4f} ({more})"
            found.append((f"evaluation loss, after step {last['step']:,}", value))
    timed = [entry for entry in steps[1:] if not entry.get("held_back")]
    for key, title, text in (
        ("tokens_per_s", "tokens per second, median", lambda value: f"{value:,.0f}"),
        ("mfu", "MFU, median", lambda value: f"{value:.1%}"),
        ("hfu", "HFU, median", lambda value: f"{value:.1%}"),
        ("step_s", "time a step, median", format_seconds),
    ):
        values = [entry[key] for entry in timed if entry.get(key) is not None]
        if values:
            found.append((title, text(statistics.median(values))))
    peaks = [entry["peak_memory_bytes"] for entry in steps if entry.get("peak_memory_bytes")]
    if peaks:
        found.append(("peak memory", format_bytes(max(peaks))))
    ranks, device = run.environment.get("ranks", 1), run.environment.get("device", "")
    found.append(("device", f"{ranks} x {device}" if ranks > 1 else str(device)))
    return found


def _data(run: SavedRun) -> str:
    policy, data = run.recipe.objective, run.options.data
    if isinstance(policy, Policy):
        environment = Path(policy.environment).name
        return f"its own completions, rewarded by `{environment}`, {policy.completions:,} a rollout"
    if isinstance(data, SyntheticData):
        name = f"synthetic text of trainfit ({data.num_documents:,} documents, seed {data.seed})"
    elif isinstance(data, TextData):
        name = f"`{Path(data.path).name}`"
    else:
        name = f"`{data.name}`, split {data.split}"
    index = run.folder / DATA / INDEX
    if not index.is_file():
        return name
    sides = durable.read_json(index)
    train, held_out = sides["train"], sides["eval"]
    return (
        f"{name}: {format_count(train['tokens'])} tokens of {train['documents']:,} documents, and "
        f"{format_count(held_out['tokens'])} of {held_out['documents']:,} held out"
    )


def _recipe(run: SavedRun) -> str:
    content = run.recipe.model_dump(mode="json", exclude_defaults=True)
    return f"# id {run.recipe.id}\n{yaml.safe_dump(content, sort_keys=False, allow_unicode=True)}"


def _versions(run: SavedRun) -> list[tuple[str, str]]:
    installed = {name: installed_version(name) for name in LIBRARIES}
    found = {"trainfit": trainfit.__version__, "torch": run.environment.get("torch"), **installed}
    return [(name, str(version)) for name, version in found.items() if version]


def _table(rows: list[tuple[str, str]]) -> str:
    lines = [f"| {name} | {value.replace('|', chr(92) + '|')} |" for name, value in rows]
    return "\n".join(["| | |", "|---|---|", *lines])
