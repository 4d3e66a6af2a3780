"""How many engines: what has no meaning is refused in one line, before Ray is needed."""

import pytest

from forge.cli.main import main
from forge.cluster.options import ClusterOptions
from forge.cluster.routers import ROUTERS
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
        ({"upscale_delay": -1.0}, "--upscale-delay must be 0 or more"),
        ({"prefix_threshold": -1}, "--prefix-threshold must be 0 or more"),
        ({"name": "Big One"}, "--name is up to 40 small letters"),
        ({"name": "a", "attach": "b"}, "leave --name out"),
        ({"attach": "b", "replicas": 2}, "--attach takes the engines that run: leave --replicas out"),
        ({"keep_engines": True, "ray_address": "local"}, "--keep-engines needs a Ray that outlives"),
    ],
)
def test_an_option_without_a_meaning_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        ClusterOptions(**options)


@pytest.mark.parametrize("router", [name for name in ROUTERS if name != "prefix"])
def test_engines_that_hand_over_need_a_cache_with_every_router(router):
    apart = ClusterOptions(prefill_replicas=1, decode_replicas=1, router=router)
    for kv in ("basic", "paged", "prefix"):
        apart.check_cache(kv)
    with pytest.raises(UsageError, match="--prefill-replicas hand KV caches over: give --kv basic, paged or prefix"):
        apart.check_cache("off")
    ClusterOptions(replicas=2, router=router).check_cache("off")


def test_a_router_that_reads_cache_events_needs_prefix_caches():
    for kv in ("off", "basic", "paged"):
        with pytest.raises(UsageError, match="--router prefix reads what prefix caches tell: give --kv prefix"):
            ClusterOptions(router="prefix").check_cache(kv)
    ClusterOptions(router="prefix").check_cache("prefix")


def test_the_number_of_engines_follows():
    assert ClusterOptions(router="p2c").answering == 1
    apart = ClusterOptions(prefill_replicas=2, decode_replicas=3)
    assert (apart.answering, apart.most) == (3, 5)


def test_the_command_refuses_it_in_one_line(capfd):
    assert main(["serve", "--replicas", "0"]) == 2
    assert capfd.readouterr().err.strip() == "forge: --replicas must be at least 1, and not 0"
