"""Expert ids of rollouts as clients take them: arrays, and the two encodings in JSON.

An array is [rows, layers, N]: a row for each token that was computed, from the first that was asked
for to the one before the last; a column for each layer of the model, zeros for dense ones; N ids in
the router's order. No torch here: the server encodes too.
"""

import base64
import io

import numpy as np

from limelight.types import RoutedExperts

# What an envelope may be made of, the least first.
ENVELOPE_TYPES = (np.uint8, np.int16, np.int32)


def array(routed: RoutedExperts) -> np.ndarray:
    """The ids, of the type in which they were kept; read-only."""
    return np.frombuffer(routed.data, dtype=routed.dtype).reshape(routed.shape)


def envelope(ids: np.ndarray) -> dict[str, object]:
    """SkyRL's: base64 of the bytes in C order, then shape and type.

    Its reader demands the least type that holds the largest id there is, and `data` first.
    """
    largest = int(ids.max(initial=0))
    kind = next(one for one in ENVELOPE_TYPES if largest <= np.iinfo(one).max)
    return packed(ids.astype(kind, copy=False))


def packed(numbers: np.ndarray) -> dict[str, object]:
    """An array in SkyRL's form, of the type that it has."""
    plain = np.ascontiguousarray(numbers)
    return {
        "data": base64.b64encode(plain.tobytes()).decode(),
        "shape": list(plain.shape),
        "dtype": plain.dtype.name,
    }


def npy(ids: np.ndarray) -> str:
    """vLLM's in its OpenAI routes: base64 of a .npy file, of unsigned integers."""
    file = io.BytesIO()
    kind = np.uint8 if ids.dtype == np.uint8 else np.uint16
    np.save(file, ids.astype(kind, copy=False), allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()
