"""``trainfit`` without a command: what it answers, and three commands to begin with."""

import trainfit

COMMANDS = (
    (
        "trainfit predict llama-3.1-8b --gpu h100-sxm",
        "Does it fit? Memory, speed and cost of a training step, in seconds.",
    ),
    (
        "trainfit plan llama-3.1-8b --gpu h100-sxm",
        "The fastest recipe that fits, written to plan.yaml for trainfit train.",
    ),
    (
        "trainfit explain llama-3.1-8b --gpu h100-sxm",
        "Which tensors hold the memory at the peak.",
    ),
)
"""Commands that work as they stand, with what each answers."""


def show() -> int:
    """Print the commands to begin with, in lines of less than 80 columns; return the exit code."""
    from rich.text import Text

    from trainfit.spec.terminal import Terminal

    out = Terminal(soft_wrap=True)
    out.print(Text(f"trainfit {trainfit.__version__}", style="bold"))
    out.print("Will this training run fit, how fast will it go, what will it cost?")
    out.print("\nTo begin with, no GPU needed:\n")
    for command, answer in COMMANDS:
        out.print(Text(f"  {command}", style="bold cyan"))
        out.print(f"      {answer}")
    out.print("\nIn place of the name: a config.json, its folder, or a recipe of your own.")
    out.print("All commands: trainfit --help. Options of one: trainfit predict --help.")
    return 0
