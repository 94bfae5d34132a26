"""Command lines that start a training script: ``train.py``, ``-m module``, ``python``, ``torchrun`` and
``accelerate launch``."""

import re
import shutil
from argparse import Namespace
from collections.abc import Sequence
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from trainfit.spec.errors import InputError

PYTHON = re.compile(r"(.*/)?python(\d(\.\d+)?)?$")
WITH_VALUE = ("-W", "-X")
"""Python's own options that take a value."""
TORCHRUN_MODULES = ("torch.distributed.run", "torch.distributed.launch")
ACCELERATE_MODULES = ("accelerate.commands.launch", "accelerate.commands.accelerate_cli")
NOT_TRACED = {
    "deepspeed": "DeepSpeed",
    "mpirun": "MPI",
    "srun": "Slurm",
    "ray": "Ray",
    "horovodrun": "Horovod",
}
OPTIONS = "correct its options"
ALL_OF_HOST = ("gpu", "auto")
"""Values of --nproc-per-node that mean one process for each GPU of the host."""


class Launch(NamedTuple):
    """A parsed command line: the script, its arguments and its launcher."""

    target: str  # A file, or a module's name
    is_module: bool
    arguments: list[str]
    ranks: int | None = None  # None: as many as --world-size says, else one process
    nodes: int | None = None
    environment: dict[str, str] = {}  # noqa: RUF012 - never changed

    @property
    def file(self) -> Path | None:
        """Path of the script's file; None: known only once it runs."""
        if not self.is_module:
            return Path(self.target)
        path = Path(*self.target.split("."))
        return next(
            (file for file in (path.with_suffix(".py"), path / "__main__.py") if file.is_file()), None
        )


def launch_of(words: Sequence[str], gpus_per_host: int) -> Launch:
    """Parse a command line into the script that it starts and the launcher.

    Args:
        words: a script and its arguments, or a launcher's command line.
        gpus_per_host: of ``torchrun --nproc-per-node gpu``.

    Raises:
        InputError: no such file, or a launcher that is not traced.
    """
    first, rest = words[0], list(words[1:])
    if first == "-m" and rest:
        return _module(rest[0], rest[1:], gpus_per_host)
    if Path(first).is_file():
        return Launch(first, False, rest)
    if PYTHON.match(first):
        return _python(rest, gpus_per_host)
    if first == "torchrun":
        return _torchrun(rest, gpus_per_host)
    if first == "accelerate" and rest[:1] == ["launch"]:
        return _accelerate(rest[1:])
    if first in NOT_TRACED:
        problem = f"scripts that {NOT_TRACED[first]} starts cannot be traced"
        raise InputError(problem, "trace the script itself, with --world-size N", field="SCRIPT", value=first)
    installed = shutil.which(first) if Path(first).name == first else None
    if installed is not None and _is_python(Path(installed)):
        return Launch(installed, False, rest)
    raise InputError("no such file", "name a Python file that trains", field="SCRIPT", value=first)


def _is_python(path: Path) -> bool:
    """Return whether a command is a Python script, as pip writes for a package's entry point."""
    with path.open("rb") as file:
        # Of a long path the second line names the interpreter, for a shell.
        first = file.readline(), file.readline()
    return first[0].startswith(b"#!") and any(b"python" in line for line in first)


def _python(words: list[str], gpus_per_host: int) -> Launch:
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c", "-"):
        words = words[2 if words[0] in WITH_VALUE else 1 :]
    if not words or words[0] in ("-c", "-"):
        raise InputError("no script", "name a Python file that trains", field="SCRIPT", value="python")
    if words[0] != "-m" and not Path(words[0]).is_file():
        raise InputError("no such file", "name a Python file that trains", field="SCRIPT", value=words[0])
    return launch_of(words, gpus_per_host)


def _module(name: str, arguments: list[str], gpus_per_host: int) -> Launch:
    if name in TORCHRUN_MODULES:
        return _torchrun(arguments, gpus_per_host)
    if name in ACCELERATE_MODULES:
        return _accelerate(arguments[1:] if arguments[:1] == ["launch"] else arguments)
    return Launch(name, True, arguments)


def _torchrun(words: list[str], gpus_per_host: int) -> Launch:
    from torch.distributed.run import get_args_parser

    args = _parsed(get_args_parser(), words, "torchrun")
    # Of an elastic job (1:4) the fewest hosts.
    nodes = _count(str(args.nnodes).partition(":")[0], "--nnodes")
    each = args.nproc_per_node
    each = gpus_per_host if each in ALL_OF_HOST else _count(each, "--nproc-per-node")
    launch = _of_training_script(args.training_script, args.module, args.training_script_args)
    return launch._replace(ranks=each * nodes, nodes=nodes)


def _accelerate(words: list[str]) -> Launch:
    from trainfit.virtual import torch_internals

    torch_internals.require("accelerate")
    try:
        from accelerate.commands.launch import _validate_launch_command, launch_command_parser
        from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
    except ImportError:
        problem = "accelerate is not installed here"
        raise InputError(
            problem, "install it, or trace the script", field="SCRIPT", value="accelerate"
        ) from None
    args: Any = _parsed(launch_command_parser(), words, "accelerate launch")
    try:
        args.num_processes = args.num_processes or (1 if args.config_file is None else None)
        args = _validate_launch_command(args)[0]
        if args.use_deepspeed or args.use_megatron_lm or args.tpu:
            kind = "DeepSpeed" if args.use_deepspeed else "Megatron-LM" if args.use_megatron_lm else "a TPU"
            raise ValueError(f"{kind} is not traced")
        several = args.multi_gpu or args.use_fsdp or args.num_processes > 1
        values = prepare_multi_gpu_env(args) if several else prepare_simple_launcher_cmd_env(args)[1]
    except (ValueError, OSError) as error:
        raise InputError(
            str(error), "correct its options", field="SCRIPT", value="accelerate launch"
        ) from None
    named = {name: value for name, value in values.items() if name.startswith(("ACCELERATE_", "FSDP_"))}
    launch = _of_training_script(args.training_script, args.module, args.training_script_args)
    nodes = args.num_machines or 1
    if not several:
        return launch._replace(environment=named)
    return launch._replace(environment=named, ranks=args.num_processes, nodes=nodes)


def _of_training_script(script: str, is_module: bool, arguments: list[str]) -> Launch:
    if not is_module and not Path(script).is_file():
        raise InputError("no such file", "name a Python file that trains", field="SCRIPT", value=script)
    return Launch(script, is_module, arguments)


def _parsed(parser: Any, words: list[str], name: str) -> Namespace:
    """Parse a launcher's command line with its own parser.

    Raises:
        InputError: what the parser refuses.
    """
    errors = StringIO()
    try:
        with redirect_stderr(errors):
            return parser.parse_args(words)
    except SystemExit as error:
        if not error.code:
            raise
        lines = errors.getvalue().strip().splitlines()
        problem = lines[-1].partition("error: ")[2] if lines else "wrong options"
        raise InputError(problem, OPTIONS, field="SCRIPT", value=name) from None


def _count(text: str, option: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError("not a number of processes", "use 1 or more", field=option, value=text)
    return int(text)
