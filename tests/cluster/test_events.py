"""Cache events: what they tell adds up to what the prefix index has, whatever the cache does."""

import random

from forge.cache.prefix import PrefixKvCache
from forge.cluster.events import CacheEvents, EventLog


def test_the_events_add_up_to_the_index_after_any_operations():
    random_ = random.Random(3)
    cache, log, held = PrefixKvCache(12, 4), EventLog(), set()
    log.observe(cache.index)
    running = []
    for number in range(3000):
        if running and (len(running) > 3 or random_.random() < 0.4):
            cache.remove(running.pop(random_.randrange(len(running))))
        else:
            tokens = [random_.choice((1, 2)) for _ in range(random_.randint(1, 16))]
            cached = cache.add(number, tokens, salt=random_.choice(("", "x")), max_cached=len(tokens) - 1)
            if cache.blocks_needed(number, len(tokens) - cached) > cache.num_available:
                cache.remove(number)
                continue
            cache.reserve(number, len(tokens) - cached)
            cache.commit(number, tokens[cached:])
            running.append(number)
        if not running and random_.random() < 0.3:
            cache.clear()
        if random_.random() < 0.5:
            events = log.take()
            assert not held & set(events.published) and held >= set(events.evicted), "an event that changes nothing"
            held = (held | set(events.published)) - set(events.evicted)
            assert held == set(cache.index.nodes)
    assert held


def test_what_came_and_went_between_two_looks_is_not_told():
    log = EventLog()
    log.published(1)
    log.evicted(1)
    assert log.take() == CacheEvents() and not log.take()


def test_the_keys_are_those_of_a_prompt():
    cache, log = PrefixKvCache(8, 4), EventLog()
    log.observe(cache.index)
    tokens = list(range(10))
    cache.add(0, tokens)
    cache.reserve(0, 10)
    cache.commit(0, tokens)
    assert log.take().published == cache.prefix_keys(tokens)
