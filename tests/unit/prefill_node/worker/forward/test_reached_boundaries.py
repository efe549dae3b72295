"""From which boundary on a pass reports, votes, and bounds its launch-ahead."""

from layered_model import warmed_up


def test_a_resumed_pass_reports_and_votes_from_its_boundary_on():
    model = warmed_up()
    model.board.stop_at = [5]
    _, stop = model.run()
    model.board.reached.clear()
    model.run(resume=stop.checkpoint)
    assert model.forward.resumed_from == 5
    assert [boundary for _, boundary in model.board.reached] == [5, 6, 7]
    model.run()
    assert model.forward.resumed_from == 0


class Watched:
    """Notes the calls that bound the launch-ahead."""

    def __init__(self):
        self.calls = []

    def start(self, at_s):
        self.calls.append(("start", at_s))

    def reach(self, boundary):
        self.calls.append(boundary)


def test_the_launch_ahead_is_bounded_at_each_boundary_that_is_reached():
    watched = Watched()
    model = warmed_up(launch_ahead=watched)
    watched.calls.clear()
    model.board.stop_at = [5]
    _, stop = model.run()
    assert watched.calls == [("start", ()), *range(6)]
    watched.calls.clear()
    model.run(resume=stop.checkpoint)
    assert watched.calls == [("start", ()), *range(5, 8)]
