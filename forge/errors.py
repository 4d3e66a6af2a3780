"""The one base class of every error that is a user's to mend, and nothing else.

A `ForgeError` carries a message that fits on one line and says what to do next. The command line prints it without a
traceback; a library caller can catch it. Anything else that escapes is a bug in forge and keeps its traceback.
"""

INTERRUPTED = 130
"""The exit status of a run that Ctrl-C ended."""


class ForgeError(Exception):
    """A mistake in what forge was given: a file, an option, a prompt. `str(error)` is one complete line."""

    exit_code = 1
    """Process exit status when the command line ends on this error."""


class UsageError(ForgeError):
    """The command or the call itself is wrong: an unknown mode, a value out of range, an empty prompt."""

    exit_code = 2


def file_error(message: str, error: OSError) -> ForgeError:
    """Return the error of a file that cannot be read or written: `UsageError` if another path would do (it is missing,
    a folder, or may not be opened), else, as for a full disk, a plain `ForgeError`."""
    another_path = isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError | PermissionError)
    return (UsageError if another_path else ForgeError)(f"{message}: {error.strerror or error}")
