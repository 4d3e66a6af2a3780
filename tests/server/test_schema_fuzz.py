"""Requests made from the server's own description: none of them is answered with a 5xx or an undescribed status."""

import pytest
from hypothesis import HealthCheck, given, seed, settings

schemathesis = pytest.importorskip("schemathesis", reason="the fuzzer needs schemathesis: pip install schemathesis")
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.checks import CHECKS, load_all_checks  # noqa: E402

from tests.waiting import PATIENCE, until  # noqa: E402

EXAMPLES = {GenerationMode.POSITIVE: 6, GenerationMode.NEGATIVE: 20}
"""Per endpoint: sound requests, which take long to make up, and unsound ones."""

load_all_checks()
NAMES = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
WANTED = [CHECKS.get_one(name) for name in NAMES]
ENDLESS = "/debug/steps"


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["sound", "unsound"])
def test_no_described_request_is_a_server_error(server, mode):
    schema = schemathesis.openapi.from_url(server.url + "/openapi.json").exclude(path=ENDLESS)
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 12
    for operation in operations:
        if mode is GenerationMode.NEGATIVE and not operation.body:
            continue

        @seed(1)
        @settings(max_examples=EXAMPLES[mode], deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(case=operation.as_strategy(generation_mode=mode))
        def run(case):
            if isinstance(case.body, dict) and type(case.body.get("max_tokens")) is int:
                case.body["max_tokens"] = min(case.body["max_tokens"], 50)
            case.call_and_validate(checks=WANTED, timeout=PATIENCE)

        run()
    assert until(server.is_idle)
