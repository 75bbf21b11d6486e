"""The one exception type that means "your input is wrong", with a one-line message.

The command line prints it and exits with status 2; anything else that escapes is a bug of ours.
"""


class JaxLlamaError(ValueError):
    """Bad input: the message names the file, key or value and what to do about it."""


class WeightWarning(UserWarning):
    """A checkpoint that loads but may not be right, with what is odd by name: NaN or infinite
    weights, a head that its config denies, keys of another architecture."""


class SpeedWarning(UserWarning):
    """A choice that works but makes this machine slower, with the reason."""
