"""Reports while nothing happens. Times are those of any clock, in seconds."""

FIRST_REPORT, LONGEST_PAUSE = 30.0, 300.0  # before a log names the awaited clients; between two such reports


class Silence:
    """Says when to report: after half a minute, then after twice as long each time. `due` is the time of the next."""

    def __init__(self, now: float) -> None:
        self.pause = FIRST_REPORT
        self.due = now + self.pause

    def is_due(self, now: float) -> bool:
        if now < self.due:
            return False
        self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.due = now + self.pause
        return True
