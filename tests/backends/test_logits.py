"""The greatest logit of each row, wherever the logits are."""

import numpy as np

from forge.backends.logits import greatest


def test_the_greatest_of_each_row_is_the_first_of_equals_and_a_nan_before_all():
    logits = np.array([[0, 3, 3, 1], [np.nan, 9, np.nan, 1], [-np.inf, -np.inf, -5, -5]], np.float32)
    tokens, values = greatest(logits)
    assert tokens == [1, 0, 2]
    assert values[0] == 3 and np.isnan(values[1]) and values[2] == -5


def test_no_rows_have_no_greatest():
    assert greatest(np.empty((0, 7), np.float32)) == ([], [])


class _Elsewhere:
    """Logits that are not on the host: asking for the numbers themselves is a mistake."""

    shape = (1, 7)

    def __len__(self):
        return 1

    def __getitem__(self, rows):
        raise AssertionError("nobody needs the row")

    __array__ = __getitem__

    def let_go(self):
        pass

    def greatest(self):
        return [5], [1.5]


def test_logits_on_a_device_are_asked_for_their_greatest_and_not_fetched():
    assert greatest(_Elsewhere()) == ([5], [1.5])
