"""Errors for people: one line that says what to do. The CLI prints the text and no traceback."""


class UserError(Exception):
    """Something that the person in front of the terminal can act on."""
