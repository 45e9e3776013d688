"""Error and warning classes of bitslab, and imports of optional packages."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


class BitslabError(Exception):
    """Base class of every error that bitslab raises on purpose."""


class ArgumentError(BitslabError, ValueError):
    """An argument's value is not accepted; the message says what was given and what is accepted."""


class ArgumentTypeError(BitslabError, TypeError):
    """An argument has the wrong type, dtype or device."""


class IndexRangeError(BitslabError, IndexError):
    """A row index is out of range."""


class CorruptedDataError(BitslabError, ValueError):
    """Packed data, or a file, is damaged, truncated, foreign or written by a newer version."""


class ModifiedInPlaceError(BitslabError, RuntimeError):
    """A tensor that the backward pass needs was changed in place after it was saved."""


class MissingExtraError(BitslabError, ImportError):
    """An optional package is not installed; the message says what to install."""


class DecodedCopyWarning(UserWarning):
    """A compressed feature was read as a whole, and the decoded copy is kept; once a feature.

    Copies under 1 MiB raise no warning.
    """


def add_note(error: BaseException, note: str) -> None:
    """Add a line to what an error says, which tracebacks show from Python 3.11 on.

    Parameters
    ----------
    error : BaseException
        Any; before 3.11 too the note is in its `__notes__`.
    note : str
        The line.
    """
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        vars(error)["__notes__"] = [*getattr(error, "__notes__", []), note]


def load_optional(module: str, *, extra: str | None, purpose: str) -> ModuleType:
    """Import `module` on first use, or raise an error that names the pip extra to install.

    Parameters
    ----------
    module : str
        Dotted name of the module to import.
    extra : str or None
        The pip extra that installs it; None for a base dependency of bitslab.
    purpose : str
        What it is needed for, for the message.

    Raises
    ------
    MissingExtraError
        When the module's package is not installed. An installed package that fails while it
        loads raises its own error, which is not hidden.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = module.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        what = f'"bitslab[{extra}]"' if extra else package
        raise MissingExtraError(
            f"{purpose} needs the package {package!r}, which is not installed: pip install {what}"
        ) from error
