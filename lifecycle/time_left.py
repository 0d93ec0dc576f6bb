"""The time that a run still takes, estimated from its own steps and validations."""

from collections.abc import Callable

NUM_WARM_UP_STEPS = 3  # may compile, and fill caches and the allocator's memory
NUM_STEPS_MEASURED, SECONDS_MEASURED = 5, 30.0  # either is enough for an estimate


class TimeLeft:
    """Times the steps after the warm-up apart from validations, each of which is expected to take as long as the last.

    Checkpoints and exports count as parts of the steps that they follow. `count_validations`: their number from the end
    of a step to the end of the run.
    """

    def __init__(self, *, first_step: int, num_steps: int | None, count_validations: Callable[[int], int]):
        self.first_step, self.num_steps, self.count_validations = first_step, num_steps, count_validations
        self.measured_from: float | None = None  # the end of the warm-up, without the validations since
        self.validation_seconds = 0.0  # of the last one

    def validation_done(self, seconds: float) -> None:
        self.validation_seconds = seconds
        if self.measured_from is not None:
            self.measured_from += seconds

    def after(self, step: int, now: float) -> float | None:
        """Seconds to the end of the run at the end of `step`; None for a run without an end, and until enough is known.

        `now`: seconds on a clock that never goes back. Every step has to be reported.
        """
        num_measured = step - self.first_step - NUM_WARM_UP_STEPS
        if self.num_steps is None or num_measured < 0:
            return None
        if self.measured_from is None:
            self.measured_from = now
        seconds = now - self.measured_from
        if num_measured == 0 or (num_measured < NUM_STEPS_MEASURED and seconds < SECONDS_MEASURED):
            return None
        steps = (self.num_steps - step) * seconds / num_measured
        return steps + self.count_validations(step) * self.validation_seconds
