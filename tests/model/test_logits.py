"""The argmax of each row of logits, on the host or on a device."""

import numpy as np

from forge.engine.sampler import argmax_rows


def test_the_argmax_of_a_row_is_the_first_of_equals_and_a_nan_before_all():
    logits = np.array([[0, 3, 3, 1], [np.nan, 9, np.nan, 1], [-np.inf, -np.inf, -5, -5]], np.float32)
    tokens, values = argmax_rows(logits)
    assert tokens == [1, 0, 2]
    assert values[0] == 3 and np.isnan(values[1]) and values[2] == -5


def test_no_rows_have_no_argmax():
    assert argmax_rows(np.empty((0, 7), np.float32)) == ([], [])


class _Elsewhere:
    """Logits that are not on the host: asking for the numbers themselves is a mistake."""

    shape = (1, 7)

    def __len__(self):
        return 1

    def __getitem__(self, rows):
        raise AssertionError("the row is not needed")

    __array__ = __getitem__

    def release(self):
        pass

    def argmax_rows(self):
        return [5], [1.5]


def test_the_device_finds_the_argmax_of_its_logits_and_copies_no_row():
    assert argmax_rows(_Elsewhere()) == ([5], [1.5])
