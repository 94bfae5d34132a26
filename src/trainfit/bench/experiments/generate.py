"""``generate``: tokens a second of generation by batch, trainfit's rollouts against transformers' generate.

Both generate from random weights of the same shapes, as many tokens as asked, sampled at temperature 1: what
is generated takes no less time than text would. The time of a run includes the prompts.
"""

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trainfit.bench.harness.bench import Bench, Part, Point
from trainfit.bench.harness.experiment import Column, Experiment, Plot
from trainfit.bench.harness.timing import Lap, Rule
from trainfit.catalog.load import model_config
from trainfit.models.build import build_native
from trainfit.rl.rollout.generate import Generator, Sampling
from trainfit.spec.bench import BenchRow, Cell

MODEL = {"tiny": "tiny-llama-demo", "full": "qwen2.5-1.5b"}
BATCHES = {"tiny": (1, 4), "full": (1, 8, 64, 256)}
PROMPT, NEW = {"tiny": 8, "full": 128}, {"tiny": 8, "full": 128}
BODIES = ("trainfit", "transformers")
MBU = "bytes of weights and cache that must be read, over the data sheet's bandwidth"
MFU = "products with weights, keys and values, over the dense bf16 peak"
RULE = Rule(warmup=1, min_samples=2, max_samples=5, spread=0.05, cap_s=8.0, flush=False)


@dataclass(frozen=True)
class Work:
    """What one run computes and reads, by the model's shape.

    Attributes:
        weight_bytes: read by each step: every weight but an input embedding of its own.
        cache_bytes: keys and values of one position of one sequence.
        weight_flops: products of one token by the blocks' weights.
        head_flops: products of one token by the output layer.
        cache_flops: products of one token by the keys and values of one position.
    """

    weight_bytes: int
    cache_bytes: int
    weight_flops: int
    head_flops: int
    cache_flops: int

    @classmethod
    def of(cls, model: Any) -> "Work":
        """Return the work of a native decoder."""
        config, dtype_bytes = model.config, model.embed.weight.element_size()
        read = sum(one.numel() for one in model.parameters())
        if not config.tie_word_embeddings:
            read -= model.embed.weight.numel()
        head = config.vocab_size * config.hidden_size
        per_head = config.num_hidden_layers * config.head_dim
        return cls(
            read * dtype_bytes, 2 * per_head * config.num_key_value_heads * dtype_bytes,
            2 * (read - head), 2 * head, 4 * per_head * config.num_attention_heads,
        )  # fmt: skip

    def rates(self, bench: Bench, batch: int, seconds: float) -> Mapping[str, Cell]:
        """Return tokens a second, and the shares of the data sheet's bandwidth and peak that they take.

        The prompt's products count, its reads do not: it is read at once, and the output layer runs for its
        last token alone.
        """
        prompt, new = PROMPT[bench.form], NEW[bench.form]
        found: dict[str, Cell] = {
            "tokens_per_s": batch * new / seconds,
            "a_step_s": seconds / new,
            "per_sequence_per_s": new / seconds,
        }
        if bench.gpu is None or bench.gpu.memory_bytes_per_s is None:
            return found
        positions = sum(range(prompt, prompt + new))
        read = new * self.weight_bytes + batch * positions * self.cache_bytes
        fed = prompt + new - 1  # The last token is sampled, and not read.
        blocks = fed * self.weight_flops + sum(range(1, fed + 1)) * self.cache_flops
        flops = batch * (blocks + new * self.head_flops)
        found["mbu_share"] = read / seconds / bench.gpu.memory_bytes_per_s
        found["mfu_share"] = flops / seconds / bench.gpu.peak_flops_per_s["bf16"]
        return found


def run(bench: Bench) -> Iterator[BenchRow]:
    """Yield a row for each batch and body."""
    config = model_config(MODEL[bench.form])
    for body in BODIES:
        for batch in BATCHES[bench.form]:
            point: Point = {"model": MODEL[bench.form], "batch": batch, "body": body}
            part = Part(point, rates=partial(_rates, bench, config, batch))
            build = partial(_ours if body == "trainfit" else _theirs, bench, config, batch)
            yield from bench.time([part], build, RULE)
            gc.collect()


def _rates(bench: Bench, config: dict[str, Any], batch: int, seconds: float) -> Mapping[str, Cell]:
    model = build_native(config, dtype=_dtype(bench), device="meta", is_random=False)
    return Work.of(model).rates(bench, batch, seconds)


def _dtype(bench: Bench) -> torch.dtype:
    return torch.bfloat16 if bench.device.type == "cuda" else torch.float32


def _prompts(bench: Bench, config: dict[str, Any], batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(config["vocab_size"], (batch, PROMPT[bench.form]), generator=generator)


def _ours(bench: Bench, config: dict[str, Any], batch: int) -> Callable[[Lap], object]:
    prompt, new = PROMPT[bench.form], NEW[bench.form]
    model: Any = build_native(config, dtype=_dtype(bench), device=bench.device)
    generator = Generator(model, Sampling(max_new=new), slots=batch, positions=prompt + new)
    prompts = _prompts(bench, config, batch).tolist()

    def generate(lap: Lap) -> object:
        return generator(prompts)

    return generate


def _theirs(bench: Bench, config: dict[str, Any], batch: int) -> Callable[[Lap], object]:
    import transformers

    built = transformers.AutoConfig.for_model(**config)
    # No token ends a sequence.
    built.eos_token_id = built.bos_token_id = built.pad_token_id = None
    with bench.device:
        model: Any = transformers.AutoModelForCausalLM.from_config(built, dtype=_dtype(bench)).eval()
    ids = _prompts(bench, config, batch).to(bench.device)
    new = NEW[bench.form]

    def generate(lap: Lap) -> object:
        with torch.no_grad():
            return model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                do_sample=True, temperature=1.0, top_k=0, top_p=1.0, eos_token_id=None, pad_token_id=0,
            )  # fmt: skip

    return generate


EXPERIMENT = Experiment(
    title="Generation",
    question="How fast does a batch generate, and is it bound by memory?",
    run=run,
    limit_s=120,
    columns=(
        Column("tokens_per_s", "tokens/s", ",.0f"),
        Column("per_sequence_per_s", "a sequence", ",.1f"),
        Column("a_step_s", "a step"),
        Column("mbu_share", "MBU", note=f"MBU: {MBU}"),
        Column("mfu_share", "MFU", note=f"MFU: {MFU}"),
    ),
    plots=(
        Plot(
            x=("batch",), y="tokens_per_s", series="body", title="Tokens a second of generation",
            x_label="sequences", y_label="tokens/s", x_log=True, y_log=True,
        ),
    ),
)  # fmt: skip
