"""Error of a result where it is largest among the segments of packed rows."""

import numpy as np


def find_largest_error(actual: np.ndarray, expected: np.ndarray, segment_BL: np.ndarray) -> float:
    """Relative root mean square error of the segment where it is largest.

    Padding of a row counts as a segment. The base is the root mean square of the expected values,
    in the segment or in all segments, whichever is larger. Infinite if a value is NaN.

    Args: segment_BL: number of each token's segment; negative at padding.
    """
    overall = _root_mean_square(expected[segment_BL >= 0])
    relative_errors = []
    for row, segment_L in enumerate(segment_BL):
        for segment in np.unique(segment_L):
            tokens = row, segment_L == segment
            base = max(_root_mean_square(expected[tokens]), overall)
            error = _root_mean_square(actual[tokens] - expected[tokens])
            relative_errors.append(error / base)
    return float(np.nan_to_num(np.max(relative_errors), nan=np.inf))


def _root_mean_square(x: np.ndarray) -> np.floating:
    return np.sqrt(np.mean(np.square(x, dtype=np.float64)))
