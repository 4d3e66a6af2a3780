import pytest

from forge.views import formatting


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "–"), (0.0, "0.0"), (0.042, "0.042"), (0.24, "0.24"), (0.97, "1.0"), (1.94, "1.9"), (1234.56, "1,234.6")],
)
def test_milliseconds_have_one_decimal_and_below_1_two_significant_digits(value, shown):
    assert formatting.ms(value) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (812, "812 B"),
        (1000, "1.0 kB"),
        (999_949, "999.9 kB"),
        (999_951, "1.0 MB"),
        (1.5e9, "1.5 GB"),
    ],
)
def test_sizes_are_in_powers_of_1000(value, shown):
    assert formatting.size(value) == shown


@pytest.mark.parametrize(("value", "shown"), [(24.56, "24.6"), (1540.2, "1,540")])
def test_rates_lose_their_decimal_when_it_says_nothing(value, shown):
    assert formatting.rate(value) == shown


def test_plurals():
    assert formatting.plural(1, "token") == "1 token"
    assert formatting.plural(1200, "token") == "1,200 tokens"
