"""Host memory while a folder of weights is read and quantised, such as Qwen3-14B's read as nf4.

    python -m evidence.scripts.reading_memory OUT.jsonl [--model qwen3-14b] [--layers N] [--device cuda]

Generates weights in bf16 in shards (four million random values, repeated), reads them in a process of its
own into a QLoRA recipe's model, and appends a line. On a CPU the model itself is host memory too: its bytes
are told apart. --layers shortens the model; 40 layers of Qwen3-14B need 30 GB of disk.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from trainfit.catalog.load import model_config
from trainfit.models.build import build_model
from trainfit.models.weights.folder import INDEX
from trainfit.models.weights.layout import layout
from trainfit.spec.provenance import commit, now
from trainfit.spec.recipe import ModelSpec

MEASURE = """
import json, sys, time
from pathlib import Path
import torch
from trainfit.spec.recipe import Adapter, Hardware, ModelSpec, Recipe
from trainfit.step import assemble
folder, implementation, device = sys.argv[1:]

def resident(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))

def step(config, weights):
    model = ModelSpec(config=config, implementation=implementation, weights=weights)
    recipe = Recipe(model=model, adapter=Adapter(kind="lora"), quantize="nf4", hardware=Hardware(gpu="h200"))
    return assemble(recipe, torch.device(device))

config = json.loads((Path(folder) / "config.json").read_text())
small = {**config, "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "vocab_size": 1024}
step(small, "random")  # Imports, kernels and CUDA's context
before = resident("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # Forget the highest so far
begin = time.monotonic()
made = step(config, folder)
tensors = {one.data_ptr(): one for one in (*made.model.parameters(), *made.model.buffers())}
print(json.dumps({
    "read_s": time.monotonic() - begin, "before_bytes": before, "highest_bytes": resident("VmHWM"),
    "model_bytes": sum(one.nbytes for one in tensors.values()) if device == "cpu" else 0,
    "bytes_read": made.weights.bytes_read,
}))
"""
GIB = 2**30


def generate(folder: Path, config: dict[str, Any], max_shard_bytes: int) -> None:
    """Write random weights in the layout of the model's folder."""
    spec = ModelSpec(config=config)
    stored = layout(build_model(spec, dtype=torch.bfloat16, device="meta"))
    drawn = torch.randn(2**22).mul_(0.02).bfloat16()
    shards: list[list[Any]] = [[]]
    size = 0
    for one in stored:
        num_bytes = 2 * torch.Size(one.shape).numel()
        if shards[-1] and size + num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        weight_map |= {one.name: name for one in shard}
        save_file({one.name: repeated(drawn, one.shape) for one in shard}, folder / name, {"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config))


def repeated(values: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of the shape that is filled with the values again and again."""
    count = torch.Size(shape).numel()
    return values.repeat(-(-count // len(values)))[:count].reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="qwen3-14b")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--implementation", default="hf", choices=("hf", "native"))
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--shard-gib", type=float, default=4.0)
    parser.add_argument("--folder", type=Path, help="of the temporary files; default: the system's")
    options = parser.parse_args()
    config = model_config(options.model)
    config["num_hidden_layers"] = options.layers or config["num_hidden_layers"]
    config.pop("layer_types", None)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        generate(Path(folder), config, int(options.shard_gib * GIB))
        words = [sys.executable, "-c", MEASURE, folder, options.implementation, options.device]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
        shards = [file.stat().st_size for file in Path(folder).glob("*.safetensors")]
    found = json.loads(done.stdout.splitlines()[-1])
    above = found["highest_bytes"] - found["before_bytes"] - found["model_bytes"]
    line = {
        "created_at": now(), "commit": commit(), "model": options.model, "torch": torch.__version__,
        "layers": config["num_hidden_layers"], "implementation": options.implementation,
        "device": options.device, "folder_bytes": sum(shards), "largest_shard_bytes": max(shards), **found,
        "above_model_bytes": above, "within_limit": above < max(shards) + 4 * GIB,
    }  # fmt: skip
    with options.out.open("a") as file:
        file.write(json.dumps(line) + "\n")
    print(line)


if __name__ == "__main__":
    main()
