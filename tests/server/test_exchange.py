"""Each request has an id, a line in the access log, and a place in the metrics of HTTP."""

import asyncio
import json
import logging
import re
import urllib.request

import pytest

from forge.server.errors import CLIENT_LEFT
from forge.server.exchange import OTHER_ROUTE, Exchanges, WithRequestId, current_exchange
from forge.server.metrics import HttpMetrics, process_families, text_of
from tests.server.conftest import Server


async def ok(scope, receive, send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"x"})


async def leaves(scope, receive, send) -> None:
    """As where the client leaves: no answer is sent."""


async def fails(scope, receive, send) -> None:
    raise ZeroDivisionError


def exchange(app, path="/here", headers=(), log="off", ended=None) -> dict:
    """Run a request through `app`: the answer's headers, and the lines of the log."""
    sent, ended = [], [] if ended is None else ended
    scope = {"type": "http", "method": "GET", "path": path, "headers": list(headers), "client": ("10.0.0.1", 5)}

    async def send(message) -> None:
        sent.append(message)

    asyncio.run(Exchanges(app, log, ["/here"], ended.append)(scope, None, send))
    return dict(sent[0]["headers"]) if sent else {}


def test_an_id_that_comes_with_a_request_goes_back_with_the_answer():
    assert exchange(ok, headers=[(b"x-request-id", b"abc-1")])[b"x-request-id"] == b"abc-1"


@pytest.mark.parametrize("given", [b"", b"two words", b"line\nbreak", b"x" * 129, b'a"b', "ä".encode()])
def test_without_an_id_that_can_stand_in_a_line_a_request_gets_its_own(given):
    ids = {exchange(ok, headers=[(b"x-request-id", given)] if given else [])[b"x-request-id"] for _ in range(2)}
    assert len(ids) == 2 and all(re.fullmatch(rb"[0-9a-f]{24}", one) for one in ids)


@pytest.mark.parametrize(
    "app, path, status, route",
    [(ok, "/here", 200, "/here"), (ok, "/else\nwhere", 200, OTHER_ROUTE), (leaves, "/here", CLIENT_LEFT, "/here")],
)
def test_an_exchange_ends_with_a_status_and_a_route_that_exists(app, path, status, route):
    ended = []
    exchange(app, path, ended=ended)
    assert [(one.status, one.route) for one in ended] == [(status, route)]


def test_an_exchange_that_fails_is_counted_and_its_error_goes_on():
    ended = []
    with pytest.raises(ZeroDivisionError):
        exchange(fails, ended=ended)
    assert len(ended) == 1


def test_a_line_of_the_log_that_is_written_for_a_request_begins_with_its_id():
    lines = []

    async def logs(scope, receive, send) -> None:
        record = logging.LogRecord("forge", logging.INFO, "", 0, "a line", (), None)
        WithRequestId().filter(record)
        lines.append(record.request)
        assert current_exchange().id == "abc-1"

    exchange(logs, headers=[(b"x-request-id", b"abc-1")])
    assert lines == ["[abc-1] "]


def test_requests_that_the_server_ends_get_503_where_nothing_was_sent():
    async def end() -> list:
        sent = []

        async def send(message) -> None:
            sent.append(message)

        async def waits(scope, receive, send) -> None:
            await asyncio.sleep(60)

        exchanges = Exchanges(waits, "off", [], lambda one: None)
        scope = {"type": "http", "method": "GET", "path": "/", "headers": []}
        task = asyncio.create_task(exchanges(scope, None, send))
        await asyncio.sleep(0)
        assert exchanges.num_open == 1
        exchanges.end_all()
        await task
        return sent

    assert asyncio.run(end())[0]["status"] == 503


def test_statuses_are_told_apart_in_the_metrics():
    metrics = HttpMetrics()
    for status in (200, 200, 429, 500):
        metrics.take("/here", "GET", status, 0.1)
    text = text_of(metrics.families(3))
    for status, number in ((200, 2), (429, 1), (500, 1)):
        assert f'http_requests_total{{handler="/here",method="GET",status="{status}"}} {number}\n' in text
    assert "http_requests_in_progress 3\n" in text
    assert 'http_request_duration_seconds_count{handler="/here",method="GET"} 4\n' in text


def test_a_process_that_is_gone_has_no_figures():
    assert list(process_families({"engine": 2**22 + 1})) == []


@pytest.fixture(scope="module", params=["text", "json"])
def logging_server(request, model_path, alone, tmp_path_factory):
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("# two\nsk-one\n\nalice sk-two\n")
    one = Server(
        "-m", model_path, "--access-log", request.param, "--api-key-file", str(keys), "--max-body-bytes", "1000"
    )
    one.form, one.keys = request.param, keys
    yield one
    one.stop()


def lines_of(server: Server, request_id: str) -> list[dict]:
    """The facts of the access log's lines about a request, by name."""
    from tests.waiting import until

    assert until(lambda: any(request_id in line for line in server.log))
    lines = [line for line in server.log if request_id in line]
    if server.form == "json":
        return [{name: str(value) for name, value in json.loads(line).items()} for line in lines]
    heads = [re.match(r"INFO \S+ \S+ (?P<method>\S+) (?P<route>\S+) (?P<status>\d+) ", line) for line in lines]
    return [head.groupdict() | dict(re.findall(r"(\w+)=(\S+)", line)) for head, line in zip(heads, lines, strict=True)]


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True], ids=["whole", "streamed"])
def test_the_access_log_has_one_line_for_a_request_with_tokens_and_times(logging_server, stream):
    request_id = f"mine-{stream}"
    headers = {"x-request-id": request_id, "authorization": "Bearer sk-two"}
    body = {"prompt": "abc", "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": stream}
    assert logging_server.request("/v1/completions", body, headers)[0] == 200
    (line,) = lines_of(logging_server, request_id)
    assert (line["method"], line["route"], line["status"]) == ("POST", "/v1/completions", "200")
    assert (line["prompt_tokens"], line["output_tokens"], line["finish"]) == ("3", "10", "length")
    assert line["key"] == "alice" and line["answer"].startswith("cmpl-") and line["client"] == "127.0.0.1"
    assert 0 < float(line["first_byte_ms"]) <= float(line["total_ms"])


@pytest.mark.parametrize(
    "headers, body, status",
    [
        ({"authorization": "Bearer sk-no"}, b"{}", 401),
        ({"authorization": "Bearer sk-one"}, b"x" * 2000, 413),
        ({"authorization": "Bearer sk-one"}, b"{", 400),
    ],
)
def test_what_is_refused_has_its_line_and_is_counted(logging_server, headers, body, status):
    request_id = f"refused-{status}"
    count = rf'http_requests_total{{handler="/v1/completions",method="POST",status="{status}"}} (\d+)'

    def counted() -> int:
        found = re.search(count, logging_server.request("/metrics", headers={"authorization": "Bearer sk-one"})[1])
        return int(found[1]) if found else 0

    before = counted()
    assert logging_server.request("/v1/completions", body, headers | {"x-request-id": request_id})[0] == status
    (line,) = lines_of(logging_server, request_id)
    assert line["status"] == str(status) and line["route"] == "/v1/completions" and "key" not in line
    assert counted() == before + 1


def test_embeddings_have_prompt_tokens_and_no_output(logging_server):
    headers = {"x-request-id": "embedded", "authorization": "Bearer sk-one"}
    assert logging_server.request("/v1/embeddings", {"input": ["ab", "c"]}, headers)[0] == 200
    (line,) = lines_of(logging_server, "embedded")
    assert line["prompt_tokens"] == "3" and "output_tokens" not in line


def test_both_processes_tell_their_memory(logging_server):
    _, text = logging_server.request("/metrics", headers={"authorization": "Bearer sk-one"})
    for name in ("server", "engine"):
        found = re.search(rf'process_resident_memory_bytes{{process="{name}"}} (\d+)', text)
        assert found and int(found[1]) > 1 << 20


def test_keys_are_read_again_at_sighup_and_a_broken_file_changes_none(logging_server):
    import signal

    from tests.waiting import until

    def opens(key: str) -> bool:
        return logging_server.request("/v1/models", headers={"authorization": f"Bearer {key}"})[0] == 200

    before = logging_server.keys.read_text()
    logging_server.keys.write_text(before + "sk-three\n")
    assert not opens("sk-three")
    logging_server.process.send_signal(signal.SIGHUP)
    assert until(lambda: opens("sk-three")) and opens("sk-two")
    logging_server.keys.write_text("a b c\n")
    logging_server.process.send_signal(signal.SIGHUP)
    assert until(lambda: any("the keys stay as they were" in line for line in logging_server.log))
    assert opens("sk-three") and not opens("c")
    logging_server.keys.write_text(before)


def test_an_id_that_comes_with_an_answer_of_any_kind(server):
    for path in ("/health", "/nowhere", "/metrics"):
        try:
            with urllib.request.urlopen(server.url + path) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as error:
            headers = error.headers
        assert re.fullmatch(r"[0-9a-f]{24}", headers["x-request-id"])


def test_a_stored_response_belongs_to_the_name_of_the_key_that_it_was_made_with(logging_server):
    alice, nameless = ({"authorization": f"Bearer {key}"} for key in ("sk-two", "sk-one"))
    body = {"input": "Hi", "max_output_tokens": 2}
    found = logging_server.request("/v1/responses", body, alice)[1]
    assert logging_server.request(f"/v1/responses/{found['id']}", headers=alice)[1] == found
    assert logging_server.request(f"/v1/responses/{found['id']}", headers=nameless)[0] == 404
    following = body | {"previous_response_id": found["id"]}
    refused = logging_server.request("/v1/responses", following, nameless)[1]["error"]
    assert refused["code"] == "previous_response_not_found"
    assert logging_server.request("/v1/responses", following, alice)[0] == 200


def test_the_key_is_taken_from_the_header_of_anthropics_client(logging_server):
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    for key, status in (("sk-two", 200), ("sk-carol", 401)):
        assert logging_server.request("/v1/messages", body, {"x-api-key": key})[0] == status
