"""What steps of a decode engine take, as if learned."""

from slo.decode.step_time import StepTimes


def times(fixed_s=0.005, stream_s=0.001, context_s=0.0, moved_s=0.0):
    known = StepTimes()
    known.fixed_s, known.stream_s, known.context_s = fixed_s, stream_s, context_s
    known.moved_s = moved_s
    known._steps = 1000
    return known
