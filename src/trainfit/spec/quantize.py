"""Quantised frozen bases: the values of a recipe's ``quantize``."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Tag, model_validator

from trainfit.spec.outside import Extensible
from trainfit.spec.value import Value, disagreement

Kind = Annotated[Literal["nf4", "int8", "fp8"], Extensible("quantize")]
Library = Literal["trainfit", "bitsandbytes", "torchao"]
Names = Annotated[
    tuple[str, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
]


class Quantized(Value):
    """How the decoder blocks' linear weights are stored, and in what their products are computed.

    Attributes:
        double: nf4: the blocks' magnitudes are quantised as well, to 8 bits in groups of 256.
        block: nf4: weights of one magnitude.
        compute: dtype that a layer casts its input to, and its result back from, as bitsandbytes'
            ``Linear4bit`` does; None: the input's, autocast's under autocast. ``fp8``, for codes in fp8:
            inputs and gradients are rounded to e4m3 by one scale a token, and multiplied with the codes.
        library: whose layout and kernels nf4 has. With bitsandbytes PEFT's layers for it are used as well.
        skip_modules: names of linear layers of the blocks that are not quantised. Those outside never are.
    """

    kind: Kind
    double: bool = True
    block: Literal[32, 64, 128, 256, 512, 1024, 2048, 4096] = 64
    compute: Literal["bf16", "fp16", "fp32", "fp8"] | None = None
    library: Library = "trainfit"
    skip_modules: Names = ()

    @model_validator(mode="after")
    def _blocks_are_of_nf4(self) -> Self:
        for name in ("double", "block"):
            if self.kind != "nf4" and getattr(self, name) != type(self).model_fields[name].default:
                problem = f"{self.kind} has one scale a row, and no blocks"
                raise disagreement(problem, f"leave {name} out, or use kind: nf4", field=f"quantize.{name}")
        if self.library != "trainfit" and self.kind != "nf4":
            problem = f"{self.kind} is trainfit's own: {self.library}'s 4-bit layout is nf4"
            raise disagreement(problem, "leave library out, or use kind: nf4", field="quantize.library")
        if self.compute == "fp8" and self.kind != "fp8":
            problem = f"products in fp8 multiply codes in fp8, and these are {self.kind}"
            raise disagreement(problem, "use kind: fp8, or compute: bf16", field="quantize.compute")
        if self.library == "torchao" and not self.double:
            problem = "torchao's NF4Tensor always quantises its magnitudes"
            raise disagreement(problem, "leave double out, or use another library", field="quantize.double")
        return self

    @classmethod
    def of(cls, value: "str | Quantized") -> "Quantized":
        """Return the value that a recipe's ``quantize`` stands for."""
        return value if isinstance(value, Quantized) else cls.model_construct(kind=value)

    def __str__(self) -> str:
        details = [f"blocks of {self.block}"] * (self.block != 64) + ["fp32 magnitudes"] * (not self.double)
        details += [f"products in {self.compute}"] * (self.compute is not None)
        details += [f"by {self.library}"] * (self.library != "trainfit")
        details += [f"without {', '.join(self.skip_modules)}"] * bool(self.skip_modules)
        return f"{self.kind} ({', '.join(details)})" if details else self.kind


WORDS: dict[str, dict[str, Any]] = {
    "nf4-dq": {},
    "bnb-nf4": {"library": "bitsandbytes", "double": False},
    "bnb-nf4-dq": {"library": "bitsandbytes"},
    "torchao-nf4": {"library": "torchao"},
}
"""Words for nf4 in a layout, dq: with double quantisation -> the fields that they stand for."""


def _short(value: Any) -> Any:
    """Return the mapping of a word, and the kind alone for a mapping with nothing but defaults.

    So equivalent recipes are equal.
    """
    word = value.lower().replace("_", "-") if isinstance(value, str) else None
    if word in WORDS:
        value = {"kind": "nf4", **WORDS[word]}
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        return value
    defaults = {name: field.default for name, field in Quantized.model_fields.items()}
    lists = {key: tuple(one) if isinstance(one, list) else one for key, one in value.items()}
    rest = {key: one for key, one in lists.items() if key != "kind"}
    is_short = all(
        key in defaults and type(one) is type(defaults[key]) and one == defaults[key]
        for key, one in rest.items()
    )
    return value["kind"] if is_short else value


Quantize = Annotated[
    Annotated[Kind, Tag("name")] | Annotated[Quantized, Tag("Quantized")],
    Discriminator(lambda value: "Quantized" if isinstance(value, dict | Quantized) else "name"),
    BeforeValidator(_short),
]
"""A kind alone, or a mapping with more."""
