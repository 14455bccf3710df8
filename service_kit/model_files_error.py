"""What everything that reads model files raises."""


class ModelFilesError(Exception):
    """Files of a model that cannot be used; the text names the file and the reason."""
