"""Optional packages: imported on use; a missing one is reported with the extra's name."""

import importlib
import importlib.util
import logging
from types import ModuleType

from trainfit.spec.errors import InputError


def optional(module: str, extra: str, *, field: str = "", value: object = None) -> ModuleType:
    """Import ``module`` of a package that only the extra of pyproject.toml installs.

    What the package logs meanwhile, such as kernels of a GPU that is not there, is left out.

    Raises:
        InputError: it is not installed, or cannot be imported; names the ``field`` and value that need it.
    """
    package = module.partition(".")[0]
    logger = logging.getLogger(package)
    level = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        why = "is not installed" if missing else f"cannot be imported ({error})"
        raise _refusal(package, extra, why, field, value) from error
    finally:
        logger.setLevel(level)


def require(package: str, extra: str, *, field: str = "", value: object = None) -> None:
    """Raise an InputError if the package is not installed; it is not imported."""
    if not is_installed(package):
        raise _refusal(package, extra, "is not installed", field, value)


def is_installed(package: str) -> bool:
    """Return whether the top-level ``package`` can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # An import hook refuses it, or it is half-imported.
        return False


def _refusal(package: str, extra: str, why: str, field: str, value: object) -> InputError:
    problem = f"needs the package {package}, which {why}"
    return InputError(problem, f"pip install 'trainfit[{extra}]'", field=field, value=value)
