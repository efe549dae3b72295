"""What a worker answers to the replica that has started it."""

import msgspec
import pytest

from prefill_node.engine_setup import PreemptionSupport
from slo.predict.pass_shape import PassShape


@pytest.mark.parametrize(
    "shape", [PassShape.of([3, 1], [0, 1]), PassShape(())], ids=["it stops", "it cannot"]
)
def test_where_a_pass_stops_is_read_from_the_plain_list_that_a_call_makes_of_it(shape):
    said = PreemptionSupport(shape.done, shape.pair_work, 0, "layer", "why")
    (answer,) = msgspec.msgpack.decode(msgspec.msgpack.encode([said]))
    assert type(answer) is list
    heard = PreemptionSupport(*answer)
    assert heard.shape() == shape
    assert (heard.granularity, heard.why_not) == ("layer", "why")
