"""How many engines: what has no meaning is refused in one line, before Ray is needed."""

import pytest

from forge.cli.main import main
from forge.cluster.options import ClusterOptions
from forge.errors import UsageError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replicas": 0}, "--replicas must be at least 1, and not 0"),
        ({"router": "best"}, "unknown router 'best'; there are round-robin"),
        ({"prefill_replicas": 1}, "--prefill-replicas and --decode-replicas go together"),
        ({"replicas": 2, "prefill_replicas": 1, "decode_replicas": 1}, "--decode-replicas says how many engines"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas 2 is less than the 3 engines"),
        ({"target_requests": 0.0}, "--target-requests must be above 0"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ClusterOptions(**options)


def test_the_number_of_engines_follows():
    assert ClusterOptions(router="p2c").answering == 1
    apart = ClusterOptions(prefill_replicas=2, decode_replicas=3)
    assert (apart.answering, apart.most) == (3, 5)


def test_the_command_refuses_it_in_one_line(capfd):
    assert main(["serve", "--replicas", "0"]) == 2
    assert capfd.readouterr().err.strip() == "forge: --replicas must be at least 1, and not 0"
