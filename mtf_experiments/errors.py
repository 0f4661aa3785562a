"""The two kinds of failure that commands turn into an exit code instead of a traceback."""

import re

# Gin appends one such line per configurable that an exception passes through; they say nothing to a user.
_GIN_CALLS = re.compile(r"\n  In call to configurable '[^']*' \(.*\)(?: in scope '[^']*')?")


class UserError(Exception):
    """A mistake of the user's; the text is the whole message: what is wrong, where, and what would be legal."""


class NonFiniteError(Exception):
    """The loss or a gradient became NaN or infinite; the run stopped before damaging its checkpoints."""


def is_user_error(error: BaseException) -> bool:
    """Tell whether the text of `error` is meant for the user: a `UserError`, or marked by `user_error = True`."""
    return isinstance(error, UserError) or getattr(type(error), "user_error", False) is True


def message_of(error: BaseException) -> str:
    """Return the text of `error` without the call lines that Gin added on its way up."""
    return _GIN_CALLS.sub("", str(error))
