"""Private names of accelerate: the state that scripts leave in it, and its launcher's command line."""

from trainfit.spec.private_names import entry

# fmt: off
ACCELERATE = (
    entry("accelerate.state:PartialState._shared_state", "forgetting the devices of an earlier run", "dict"),
    entry(
        "accelerate.state:AcceleratorState._shared_state", "forgetting the devices of an earlier run", "dict",
    ),
    entry("accelerate.state:GradientState._shared_state", "forgetting the devices of an earlier run", "dict"),
    entry(
        "accelerate.commands.launch:_validate_launch_command", "the command line of accelerate launch",
        "(args)",
    ),
)
