"""The world around a simulated engine, as a test gives it."""


class ProcessExitedError(Exception):
    pass


class World:
    """A clock that sleeping moves; exiting raises."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        if len(self.slept) > 1000:
            raise TimeoutError("sleeps for ever")

    def exit(self, code: int) -> None:
        raise ProcessExitedError(code)
