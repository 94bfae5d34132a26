"""Optional packages: imported on use; a missing one is reported with the extra's name."""

import importlib
import importlib.util
from types import ModuleType

from trainfit.spec.errors import InputError


def optional(module: str, extra: str, *, field: str = "", value: object = None) -> ModuleType:
    """Import ``module`` of a package that only the extra installs.

    Args:
        extra: the extra's name in pyproject.toml.
        field: what asks for it, such as ``adapter.kind``; ``value``: its value.

    Raises:
        InputError: it is not installed, or cannot be imported here.
    """
    package = module.partition(".")[0]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = isinstance(error, ModuleNotFoundError) and (error.name or "").partition(".")[0] == package
        raise _missing(package, extra, "" if missing else str(error), field, value) from error


def require(package: str, extra: str, *, field: str = "", value: object = None) -> None:
    """Refuse what needs a package that is not installed, without importing it.

    Raises:
        InputError: it is not installed.
    """
    if not is_installed(package):
        raise _missing(package, extra, "", field, value)


def is_installed(package: str) -> bool:
    """Whether the top-level ``package`` can be found; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # An import hook refuses it, or it is half-imported.
        return False


def _missing(package: str, extra: str, reason: str, field: str, value: object) -> InputError:
    problem = f"needs the package {package}, which " + (
        f"cannot be imported ({reason})" if reason else "is not installed"
    )
    return InputError(problem, f"pip install 'trainfit[{extra}]'", field=field, value=value)
