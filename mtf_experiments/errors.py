"""The two kinds of failure that commands turn into an exit code instead of a traceback."""


class UserError(Exception):
    """A mistake of the user's; the text is the whole message: what is wrong, where, and what would be legal."""


class NonFiniteError(Exception):
    """The loss or a gradient became NaN or infinite; the run stopped before damaging its checkpoints."""
