"""The one exception users are meant to read."""


class ContextReadyError(ValueError):
    """Bad input, said in one sentence: what is wrong and what to do. The command exits with code 2."""
