"""Predict the default config of every causal language model of transformers, cut to four layers.

    python -m evidence.scripts.model_types evidence/records/model-types.jsonl

One H200, a sequence of 128 tokens, bf16. A line a model type: its outcome (predicted, refused, failed, too
slow, died, or no default config), the peak or the message, and the commit and versions. Types that a file has
are not predicted again.
"""

import argparse
import json
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from trainfit.spec.printable import say
from trainfit.spec.provenance import commit

LAYERS, SEQ, LIMIT_S = 4, 128, 300
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
BY_LAYER = ("layer_types", "block_types", "layers_block_type", "mlp_layer_types")
NOT_SET = ("transformers_version", "architectures", "_name_or_path")


def default_config(model_type: str) -> dict[str, Any]:
    """Return a type's default config, cut to four layers."""
    from transformers import CONFIG_MAPPING

    data = json.loads(CONFIG_MAPPING[model_type]().to_json_string(use_diff=False))
    data = {key: value for key, value in data.items() if value is not None and key not in NOT_SET}
    data |= {key: min(data[key], LAYERS) for key in DEPTHS if isinstance(data.get(key), int)}
    data |= {key: data[key][:LAYERS] for key in BY_LAYER if isinstance(data.get(key), list)}
    return data | {"model_type": model_type}


def outcome(model_type: str) -> dict[str, Any]:
    """Return what a prediction of the type's config comes to."""
    import trainfit
    from trainfit.spec.errors import InputError

    try:
        config = default_config(model_type)
    except Exception as error:
        return {"outcome": "no default config", "message": f"{type(error).__name__}: {error}"[:300]}
    recipe = {"model": {"config": config}, "batch": {"micro": 1, "seq": SEQ}, "hardware": {"gpu": "h200"}}
    try:
        found = trainfit.predict(recipe)
    except InputError as error:
        return {"outcome": "refused", "message": str(error)[:300]}
    except Exception as error:
        return {"outcome": "failed", "message": f"{type(error).__name__}: {error}"[:300]}
    return {"outcome": "predicted", "peak_allocated_bytes": found.peak_allocated_bytes}


def _send(model_type: str, pipe: Connection) -> None:
    pipe.send(outcome(model_type))


def outcome_in_process(model_type: str) -> dict[str, Any]:
    """Return the outcome of a type from a process of its own, which is killed if it is too slow."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(model_type, theirs))
    process.start()
    theirs.close()
    try:
        if not ours.poll(LIMIT_S):
            return {"outcome": "too slow", "message": f"over {LIMIT_S} s"}
        return ours.recv()
    except EOFError:
        process.join()
        return {"outcome": "died", "message": f"exit code {process.exitcode}"}
    finally:
        process.kill()
        process.join()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    out: Path = parser.parse_args().out
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import torch
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    said = {"commit": commit(), "torch": torch.__version__, "transformers": transformers.__version__}
    text = out.read_text(encoding="utf-8") if out.is_file() else ""
    done = {json.loads(line)["model_type"] for line in text.splitlines()}
    with out.open("a", encoding="utf-8") as file:
        for model_type in sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - done):
            found = outcome_in_process(model_type)
            file.write(json.dumps({"model_type": model_type, **found, **said}) + "\n")
            file.flush()
            say(f"{model_type}: {found['outcome']}")


if __name__ == "__main__":
    main()
