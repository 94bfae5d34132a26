"""bitsandbytes' AdamW, by its own classes: 8-bit moments in blocks of 256, and paged moments.

Dettmers et al., arXiv:2110.02861. Weights under 4,096 elements keep fp32 moments. Paged moments are CUDA
managed memory: the driver moves their pages between device and host.
"""

from typing import Any

from trainfit.spec.optional import optional
from trainfit.spec.recipe import Recipe
from trainfit.techniques.base import Draw, OptimizerFacts, StateKind, Technique, refusal
from trainfit.techniques.draft import Draft
from trainfit.techniques.optimizer.adamw import (
    OPTIMIZER_FIELDS,
    describe_optimizer,
    in_words,
    refuse_momentum,
)

CLASSES = {
    "bnb-adamw8bit": ("AdamW8bit", 1),
    "paged-adamw8bit": ("PagedAdamW8bit", 1),
    "paged-adamw": ("PagedAdamW32bit", 4),
}
"""Value of ``optimizer.name`` -> class of bitsandbytes, bytes of each moment."""
IN_32_BITS: dict[str, StateKind] = {"step": "number", "state1": "weight", "state2": "squares"}
IN_8_BITS: dict[str, StateKind] = {
    "step": "number", "state1": "codes", "state2": "codes", "absmax1": "scales", "absmax2": "scales",
}  # fmt: skip
PAGED = (
    "paged optimizer states of bitsandbytes: managed memory, counted as memory of the host; on a GPU they "
    "stay on the device as long as there is room, and PyTorch's allocator does not count them there"
)
LIBRARY = ("bitsandbytes.optim", "bitsandbytes")  # Module, extra of pyproject.toml


def is_paged(recipe: Recipe) -> bool:
    """Return whether the recipe's moments are managed memory."""
    return recipe.optimizer.name.startswith("paged-")


def check(recipe: Recipe) -> None:
    """Refuse momentum, implementations, rounding and offloading that its classes do not have."""
    refuse_momentum(recipe)
    options = recipe.optimizer
    if options.implementation != "fused":
        problem, remedy = f"{options.name} is one kernel a weight", "use fused or leave it out"
        raise refusal(recipe, "optimizer.implementation", problem, remedy)
    if options.stochastic_rounding:
        problem = "bitsandbytes' kernels round to nearest"
        remedy = "use optimizer.name: adamw8bit, or set stochastic_rounding: false"
        raise refusal(recipe, "optimizer.stochastic_rounding", problem, remedy)
    if is_paged(recipe) and recipe.offload.weights:
        problem = "paged moments are in the host's memory already"
        raise refusal(recipe, "optimizer.name", problem, "use bnb-adamw8bit, or offload.weights: false")


def check_device(recipe: Recipe, device_type: str) -> None:
    """Refuse paged moments on a real GPU."""
    if is_paged(recipe) and device_type == "cuda":
        problem = "paged optimizers are predicted, not run: managed memory can hang a GPU that others use"
        remedy = "use optimizer.name: bnb-adamw8bit, with offload.optimizer: true for states on the host"
        raise refusal(recipe, "optimizer.name", problem, remedy)


def apply(recipe: Recipe, draft: Draft) -> None:
    """Set the class of bitsandbytes."""
    from trainfit.offload.paged_states import made

    options = recipe.optimizer
    module = optional(*LIBRARY, field="optimizer.name", value=options.name)
    kind, _ = CLASSES[options.name]
    settings: dict[str, Any] = {"lr": options.lr, "weight_decay": options.weight_decay}
    draft.make_optimizer = lambda parameters: made(getattr(module, kind), parameters, **settings)


def _moments(recipe: Recipe, _: float = 0.0) -> tuple[float, ...]:
    return (CLASSES[recipe.optimizer.name][1],) * 2


def _describe_state(recipe: Recipe, _: float) -> str:
    bits = 8 * CLASSES[recipe.optimizer.name][1]
    where = " of managed memory" if is_paged(recipe) else ""
    return in_words(f"bitsandbytes' {bits}-bit AdamW", _moments(recipe)) + where


TECHNIQUE = Technique(
    name="adamw_bitsandbytes",
    order=252,
    title="AdamW of bitsandbytes",
    fields=OPTIMIZER_FIELDS,
    covers={"optimizer.name": tuple(CLASSES)},
    check=check,
    check_device=check_device,
    apply=apply,
    describe=describe_optimizer,
    library=LIBRARY,
    assumes=lambda recipe: (PAGED,) if is_paged(recipe) else (),
    variants=tuple({"optimizer": {"name": name}} for name in ("paged-adamw8bit", "paged-adamw")),
    examples=({"optimizer": {"name": "bnb-adamw8bit"}},),
    draw=Draw(alone=lambda chance, _: {"optimizer": {"name": "bnb-adamw8bit"}}),
    optimizer=OptimizerFacts(
        moments=_moments,
        states=(IN_32_BITS, IN_8_BITS),
        constants=("qmap1", "qmap2"),
        describe=_describe_state,
    ),
)
