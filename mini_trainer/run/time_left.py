"""The time that a run still takes, estimated from its own steps and validations."""

from collections.abc import Callable

NUM_WARM_UP_STEPS = 3  # may compile, and fill caches and the allocator's memory
NUM_STEPS_MEASURED, SECONDS_MEASURED = 5, 30.0  # either is enough for an estimate


class TimeLeft:
    """Times the steps after the warm-up apart from validations, each of which is expected to take as long as the last.

    A validation before the first step may compile, so it counts at most as long as training on as many samples takes.
    Checkpoints and exports count as parts of the steps that they follow.

    `count_validations`: their number from the end of a step to the end of the run. `validation_steps`: the samples of
    one validation, in batches.
    """

    def __init__(
        self,
        *,
        first_step: int,
        num_steps: int | None,
        count_validations: Callable[[int], int],
        validation_steps: float = 0.0,
    ):
        self.first_step, self.num_steps = first_step, num_steps
        self.count_validations, self.validation_steps = count_validations, validation_steps
        self.measured_from: float | None = None  # the end of the warm-up, without the validations since
        self.validation_seconds, self.is_warm = 0.0, False  # of the last one; whether it came after the warm-up

    def validation_done(self, seconds: float) -> None:
        self.validation_seconds = seconds
        if self.measured_from is not None:
            self.measured_from += seconds
            self.is_warm = True

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
        step_seconds, validation_seconds = seconds / num_measured, self.validation_seconds
        if not self.is_warm:
            validation_seconds = min(validation_seconds, self.validation_steps * step_seconds)
        return (self.num_steps - step) * step_seconds + self.count_validations(step) * validation_seconds
