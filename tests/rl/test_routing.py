"""Both encodings of routed experts are what their readers expect."""

import base64
import io

import msgspec
import numpy as np
import pytest

from limelight.rl.routing import array, envelope, npy
from limelight.types import RoutedExperts


@pytest.mark.parametrize(
    ("largest", "expected"), [(0, "uint8"), (255, "uint8"), (256, "int16"), (70_000, "int32")]
)
def test_an_envelope_has_the_least_type_for_its_largest_id(largest, expected):
    ids = np.zeros((3, 2, 2), dtype=np.int64)
    ids[1, 1] = largest
    made = envelope(ids)
    assert made["dtype"] == expected
    back = np.frombuffer(base64.b64decode(made["data"]), dtype=made["dtype"])
    assert np.array_equal(back.reshape(made["shape"]), ids)


def test_an_envelope_in_json_is_compact_and_begins_with_its_data():
    ids = np.zeros((0, 2, 2), dtype=np.uint8)
    text = msgspec.json.encode({"routed_experts": envelope(ids)}).decode()
    assert text == '{"routed_experts":{"data":"","shape":[0,2,2],"dtype":"uint8"}}'


@pytest.mark.parametrize(("kept", "told"), [("uint8", "uint8"), ("int16", "uint16")])
def test_an_npy_file_holds_unsigned_ids(kept, told):
    ids = np.arange(12, dtype=kept).reshape(3, 2, 2)
    back = np.load(io.BytesIO(base64.b64decode(npy(ids))), allow_pickle=False)
    assert back.dtype == told and np.array_equal(back, ids)


def test_rows_cross_a_process_border_and_can_be_cut():
    ids = np.arange(24, dtype=np.int16).reshape(4, 3, 2)
    routed = RoutedExperts(data=ids.tobytes(), shape=ids.shape, dtype="int16")
    back = msgspec.msgpack.decode(msgspec.msgpack.encode(routed), type=RoutedExperts)
    assert np.array_equal(array(back), ids)
    for rows in (4, 3, 0):
        assert np.array_equal(array(back.first(rows)), ids[:rows])
    none = back.first(-1)
    assert array(none).shape == (0, 3, 2) and none.first(-1) is none and back.first(9) is back
