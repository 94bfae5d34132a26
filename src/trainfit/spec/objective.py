"""The objective of a recipe: what the step's loss is, and where its sequences come from."""

import difflib
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, JsonValue, Tag, model_validator

from trainfit.spec.value import Count, FromPercent, PositiveInt, Value, disagreement

NAMES = ("pretrain", "sft", "dpo", "grpo", "ppo")
Share = Annotated[float, Field(gt=0, le=1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

StopToken = Annotated[str, Field(min_length=1)] | Annotated[int, Field(ge=0)]


def _several(value: Any) -> Any:
    """Return a list, or one word or number, as a tuple."""
    if isinstance(value, list):
        return tuple(value)
    return (value,) if isinstance(value, str | int) and not isinstance(value, bool) else value


class Pretrain(Value):
    """Next-token prediction of the recipe's ``data``; ``sft`` is another word for it.

    Which tokens count, all or those of answers, is decided by the data.
    """

    sequences: ClassVar[int] = 1
    """Sequences of an example, of which a micro-batch holds ``batch.micro``."""

    name: Literal["pretrain"] = "pretrain"


class Preference(Value):
    """Direct preference optimization of the pairs of answers in ``data``; defaults as of TRL's DPOTrainer.

    Attributes:
        beta: how strongly the model is held to the reference.
        loss: of a pair: ``sigmoid`` (DPO), ``ipo`` (of answers' mean log-probabilities) or ``hinge``.
        label_smoothing: of ``sigmoid``: the share of pairs whose labels are taken to be wrong.
        reference: what the rewards are measured from: the model without its adapter, a copy of what trains
            as it was at the start, or nothing; ``auto``: the first with an adapter, else the second.
    """

    sequences: ClassVar[int] = 2

    name: Literal["dpo"]
    beta: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.1
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5), FromPercent] = 0.0
    reference: Literal["auto", "adapter-off", "copy", "none"] = "auto"

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.label_smoothing and self.loss != "sigmoid":
            problem = f"loss: {self.loss} has no labels that are smoothed"
            raise disagreement(
                problem, "leave it out, or use loss: sigmoid", field="objective.label_smoothing"
            )
        return self


class Rollout(Value):
    """How completions are generated.

    Attributes:
        kv_cache: dtype of the cached keys and values.
        batch: sequences that are generated at a time.
        temperature: also of the log-probabilities in the loss.
        top_p: the fewest likeliest tokens that sum to it are sampled from.
        stop: tokens that end a completion, by text or id, beside those that tokenizer and model name.
    """

    kv_cache: Literal["bf16", "fp16", "fp32"] = "bf16"
    batch: Count = 64
    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    top_p: Share = 1.0
    stop: Annotated[tuple[StopToken, ...], BeforeValidator(_several)] = ()


class Policy(Value):
    """Reinforcement learning from rewards: GRPO, or PPO's clipped loss without a critic.

    Attributes:
        environment: ``arithmetic``, ``xiangqi``, or ``file.py:Class`` of one's own, whose code runs.
        arguments: of the environment, by name. Its ``seed`` is the recipe's unless it is here.
        workers: processes that compute prompts and rewards; 0: the training process itself.
        group: completions of a prompt.
        prompts: of a rollout.
        max_prompt, max_new: tokens of a prompt and of a completion, at most.
        kl: weight of the divergence from the reference.
        clip: how far the ratio of new to old probability may move a token.
        updates_per_rollout: updates into which a rollout's completions are divided.
        reference: what ``kl`` is measured from: the model without its adapter, a copy of what trains as it
            was at the start, or nothing.
        per: whether all tokens or all completions weigh equally.
    """

    sequences: ClassVar[int] = 1

    name: Literal["grpo", "ppo"]
    environment: Annotated[str, Field(min_length=1)] = "arithmetic"
    arguments: dict[str, JsonValue] = {}
    workers: Annotated[int, Field(ge=0, le=512)] = 0
    group: PositiveInt = 8
    prompts: PositiveInt = 16
    max_prompt: PositiveInt = 512
    max_new: PositiveInt = 512
    kl: NotNegative = 0.04
    clip: Share = 0.2
    updates_per_rollout: PositiveInt = 1
    reference: Literal["adapter-off", "copy", "none"] = "adapter-off"
    per: Literal["token", "sequence"] = "token"
    rollout: Rollout = Rollout()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.name == "grpo" and self.group < 2:
            problem = "grpo compares the completions of a prompt"
            raise disagreement(problem, "use 2 or more, or name: ppo", field="objective.group")
        if self.completions < 2:
            problem = "one completion has no other to be compared with"
            raise disagreement(problem, "use 2 or more", field="objective.prompts")
        if self.completions % self.updates_per_rollout:
            problem = f"a rollout's {self.completions} completions do not divide into so many updates"
            raise disagreement(problem, "use a divisor of it", field="objective.updates_per_rollout")
        return self

    @property
    def completions(self) -> int:
        """Completions of a rollout."""
        return self.group * self.prompts

    @property
    def max_tokens(self) -> int:
        """Tokens of a prompt and its completion, at most."""
        return self.max_prompt + self.max_new

    @property
    def measures_reference(self) -> bool:
        """Whether the loss has a divergence from a reference."""
        return self.kl > 0 and self.reference != "none"


def _kind(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else getattr(value, "name", None)
    return {"pretrain": "pretrain", "dpo": "preference"}.get(str(name), "policy")


def _named(value: Any) -> Any:
    """Return the mapping that a name alone stands for."""
    name = value.get("name") if isinstance(value, dict) else value
    if isinstance(name, str) and name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1)
        remedy = f"use one of {', '.join(NAMES)}" + (f"; did you mean {near[0]}?" if near else "")
        raise disagreement("no such objective", remedy, field="objective.name")
    if name == "sft":
        return {**(value if isinstance(value, dict) else {}), "name": "pretrain"}
    return {"name": value} if isinstance(value, str) else value


Objective = Annotated[
    Annotated[Pretrain, Tag("pretrain")]
    | Annotated[Preference, Tag("preference")]
    | Annotated[Policy, Tag("policy")],
    Discriminator(_kind),
    BeforeValidator(_named),
]
