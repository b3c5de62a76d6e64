"""Errors a user can meet: one class per cause, each with what to try and an exit code.

Exit codes (docs/design): 1 ran and the answer is no, 2 bad usage or unreadable input,
3 needs hardware or a package that is absent. Anything else that escapes is our bug (70).
"""

from __future__ import annotations


class IkboError(Exception):
    """Base of every error that the command line prints as one clear message.

    Args:
        message: What failed, in the user's terms.
        hint: What to try next, or None.
        node: Name of the graph node concerned, or None.
        source: The user's own `file:line`, or None.
    """

    exit_code = 2

    def __init__(
        self, message: str, *, hint: str | None = None, node: str | None = None, source: str | None = None
    ) -> None:
        """Store the parts; `str(error)` is the message alone."""
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.node = node
        self.source = source


class UsageError(IkboError):
    """The options contradict each other or name something that does not exist."""


class NegativeAnswer(IkboError):
    """The command ran, and the answer is no."""

    exit_code = 1


class MissingRequirement(IkboError):
    """A package or a piece of hardware is absent."""

    exit_code = 3


class ModelNotFound(IkboError):
    """No file at the given path."""


class TruncatedModel(IkboError):
    """The archive ends early."""


class CorruptModel(IkboError):
    """A checksum or a record of the archive is wrong."""


class ForeignModel(IkboError):
    """A file of another kind: a state dict, a pickle, an AOTInductor package, something unknown."""


class NewerModel(IkboError):
    """Written with a schema that the installed torch does not know."""


class UnsafeModel(IkboError):
    """Loading the file would execute code from it."""


class MissingOperator(IkboError):
    """The program calls an operator that is not registered in this process."""


class UnsupportedProgram(IkboError):
    """The program is valid, but its form cannot be handled; the node says where."""


class OutputExists(IkboError):
    """The output path is taken and `--force` was not given."""


class ManifestError(IkboError):
    """The manifest is missing, or does not match the original that was found."""


class InvalidInput(IkboError):
    """An input tensor, a sample or an index does not fit the program."""


class ShapeError(IkboError):
    """Shapes or dtypes of an operator's arguments do not fit together."""
