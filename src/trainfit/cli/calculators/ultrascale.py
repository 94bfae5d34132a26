"""``trainfit ultrascale``: the Ultrascale Playbook's memory calculator. Free of torch."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from trainfit.cli.options import Json, at_most, print_json

if TYPE_CHECKING:
    from trainfit.flops.calculators.ultrascale import WidgetMemory, WidgetSpec

PRESET_HELP = "Start from this preset of the page: 'Llama 3 Tiny', 8B, 70B or 405B; the sliders change it."
K_HELP = "Bytes of optimizer state a parameter; with mixed precision 4 more, of the fp32 weights."
MIXED_HELP = "16-bit weights, gradients and activations with fp32 weights beside them; else fp32."


def _slider(name: str, word: str, help: str, least: int = 1) -> Any:
    """Return the option of a slider: the page's letter, and a word."""
    return Option(f"--{name}", f"--{word}", min=least, callback=at_most, metavar="N", help=help)


Slider = int | None


def run(
    preset: Annotated[str | None, Option(metavar="NAME", help=PRESET_HELP)] = None,
    a: Annotated[Slider, _slider("a", "heads", "Attention heads.")] = None,
    b: Annotated[Slider, _slider("b", "batch", "Sequences of a micro-batch.")] = None,
    h: Annotated[Slider, _slider("h", "hidden", "Hidden size.")] = None,
    h_ff: Annotated[
        Slider,
        Option("--h-ff", "--h_ff", "--feed-forward", min=1, callback=at_most, metavar="N",
               help="Feed-forward size."),
    ] = None,
    layers: Annotated[Slider, _slider("L", "layers", "Layers.")] = None,
    s: Annotated[Slider, _slider("s", "seq", "Tokens of a sequence.")] = None,
    v: Annotated[Slider, _slider("v", "vocab", "Vocabulary.")] = None,
    k: Annotated[Slider, _slider("k", "optimizer", K_HELP, least=0)] = None,
    t: Annotated[Slider, _slider("t", "tensor", "Tensor-parallel ranks.")] = None,
    d: Annotated[Slider, _slider("d", "data", "Data-parallel ranks, which ZeRO shards over.")] = None,
    zero: Annotated[Slider, Option(min=0, max=3, metavar="STAGE", help="ZeRO's stage, 0 to 3.")] = None,
    mixed: Annotated[bool | None, Option("--mixed/--no-mixed", help=MIXED_HELP)] = None,
    recomputation: Annotated[
        Literal["none", "selective", "full"] | None, Option(help="Activation recomputation.")
    ] = None,
    ff_activation: Annotated[
        Literal["relu", "gelu", "swiglu"] | None, Option(help="Activation of the feed-forward block.")
    ] = None,
    sequence_parallel: Annotated[
        bool | None, Option("--sequence-parallel/--no-sequence-parallel", help="Shard norms and dropouts.")
    ] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Memory by the Ultrascale Playbook's calculator, with its sliders and its errors.

    For what a real model needs, use predict. Sliders that are not given are as the page opens, or the
    preset's.
    """
    from trainfit.flops.calculators import ultrascale
    from trainfit.spec.errors import InputError

    if preset is not None and preset not in ultrascale.PRESETS:
        known = ", ".join(repr(name) for name in ultrascale.PRESETS)
        raise InputError("no preset of the page", f"write one of {known}", field="--preset", value=preset)
    given = {
        "a": a, "b": b, "h": h, "h_ff": h_ff, "layers": layers, "s": s, "v": v, "k": k, "t": t, "d": d,
        "zero": zero, "mixed": mixed, "recomputation": recomputation, "ff_activation": ff_activation,
        "sequence_parallel": sequence_parallel,
    }  # fmt: skip
    start = ultrascale.OPENED if preset is None else ultrascale.PRESETS[preset]
    set_to = {name: value for name, value in given.items() if value is not None}
    spec = ultrascale.WidgetSpec.model_validate({**start.model_dump(), **set_to})
    memory = ultrascale.memory(spec)
    if json:
        print_json({**spec.model_dump(), **memory.model_dump(), "total": memory.total})
        return
    _show(spec, memory)


def _show(spec: "WidgetSpec", memory: "WidgetMemory") -> None:
    from trainfit.flops.calculators.ultrascale import parameters
    from trainfit.report.console import console, rows
    from trainfit.spec.units import format_bytes, format_count

    out = console()
    sliders = {"a": spec.a, "b": spec.b, "h": spec.h, "h_ff": spec.h_ff, "L": spec.layers, "s": spec.s,
               "v": spec.v, "k": spec.k, "t": spec.t, "d": spec.d}  # fmt: skip
    precision = "mixed precision" if spec.mixed else "fp32"
    choices = [precision, spec.ff_activation, f"ZeRO {spec.zero}", f"recomputation {spec.recomputation}"]
    choices += ["sequence parallel"] * spec.sequence_parallel
    out.print(", ".join(f"{name} {value}" for name, value in sliders.items()))
    out.print(", ".join(choices))
    count = format_count(parameters(spec))
    optimizer = f"k = {spec.k} bytes a parameter" + (" and fp32 weights" if spec.mixed else "")
    kept = "attention scores are kept" if spec.recomputation == "none" else "attention scores are recomputed"
    rows(out, [
        ["activations", format_bytes(memory.activations), kept],
        ["parameters", format_bytes(memory.parameters), f"{count}, counted as GPT-2's"],
        ["gradients", format_bytes(memory.gradients), ""],
        ["optimizer", format_bytes(memory.optimizer), optimizer],
        ["total", format_bytes(memory.total), "the page writes TB for TiB"],
    ], "left", "right", "wrap")  # fmt: skip
