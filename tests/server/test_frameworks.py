"""LangChain's, instructor's and llama-index's own classes for OpenAI, unmodified."""

import asyncio
from typing import Literal

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field

from forge import LLM

QUESTION = "Tell me a story."
INSTRUCTOR_NEEDED = "needs instructor: pip install instructor"


@pytest.fixture(scope="module")
def library(model_path) -> LLM:
    return LLM(model_path, kv="prefix")


@pytest.fixture
def said(client) -> str:
    """What a greedy chat answers, in eight tokens."""
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 8, "temperature": 0}
    return client.chat.completions.create(model="small", **asked).choices[0].message.content


# LangChain


@pytest.fixture(scope="module")
def langchain():
    return pytest.importorskip("langchain_openai", reason="needs LangChain: pip install langchain-openai")


@pytest.fixture
def langchain_options(server) -> dict:
    return {"base_url": f"{server.url}/v1", "api_key": "none", "model": "small", "max_retries": 0}


@pytest.fixture
def langchain_chat(langchain, langchain_options):
    return langchain.ChatOpenAI(**langchain_options, temperature=0, max_tokens=8)


def test_langchain_chat_answers_and_says_what_it_used(langchain_chat, said):
    found = langchain_chat.invoke([("system", "Be brief."), ("human", "x")])
    assert found.usage_metadata["output_tokens"] <= 8 and found.response_metadata["finish_reason"]
    assert langchain_chat.invoke(QUESTION).content == said


def test_langchain_stream_says_the_same_and_ends_with_its_usage(langchain, langchain_options, said):
    chat = langchain.ChatOpenAI(**langchain_options, temperature=0, max_tokens=8, stream_usage=True)
    whole = None
    for chunk in chat.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.content == said and whole.usage_metadata["output_tokens"] <= 8


def test_langchain_batches_and_async_calls_say_the_same(langchain_chat, said):
    assert {one.content for one in langchain_chat.batch([QUESTION] * 6)} == {said}

    async def both() -> set[str]:
        streamed = "".join([chunk.content async for chunk in langchain_chat.astream(QUESTION)])
        return {streamed, (await langchain_chat.ainvoke(QUESTION)).content}

    assert asyncio.run(both()) == {said}


def test_langchain_stops_and_logprobs_are_passed_on(langchain_chat, said):
    found = langchain_chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = found.response_metadata["logprobs"]["content"]
    assert content and all(len(one["top_logprobs"]) == 2 for one in content)
    assert langchain_chat.invoke(QUESTION, stop=[said[2:4]]).content == said[: said.index(said[2:4])]


def test_langchain_completion_answers_whole_and_streamed(langchain, langchain_options):
    model = langchain.OpenAI(**langchain_options, temperature=0, max_tokens=8)
    assert model.invoke("Once upon") == "".join(model.stream("Once upon"))
    assert len(model.generate(["a", "b"]).generations) == 2


def test_langchain_embeddings_are_the_librarys(langchain, langchain_options, library):
    model = langchain.OpenAIEmbeddings(**langchain_options, check_embedding_ctx_length=False)
    assert np.allclose(model.embed_documents(["a fox", "x"]), library.embed(["a fox", "x"]), atol=0)
    assert np.allclose(model.embed_query("a fox"), library.embed("a fox")[0], atol=0)


class Weather(BaseModel):
    """The weather of a place."""

    model_config = ConfigDict(extra="forbid")  # random weights would add properties without end

    city: str = Field(max_length=4)
    day: Literal["today", "tomorrow"]


@pytest.fixture
def roomy_chat(langchain, roomy_server):
    options = {"base_url": f"{roomy_server.url}/v1", "api_key": "none", "model": "small", "max_retries": 0}
    return langchain.ChatOpenAI(**options, temperature=1, max_tokens=300, seed=3)


def test_langchain_binds_tools_and_gets_calls_whole_and_streamed(roomy_chat):
    bound = roomy_chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    called = bound.invoke(QUESTION)
    (call,) = called.tool_calls
    assert call["name"] == "Weather" and isinstance(Weather(**call["args"]), Weather)
    assert called.response_metadata["finish_reason"] == "tool_calls"
    whole = None
    for chunk in bound.stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert whole.tool_calls[0]["args"] == call["args"] and whole.tool_calls[0]["name"] == "Weather"


def test_langchain_goes_on_with_a_tools_result(roomy_chat):
    from langchain_core.messages import HumanMessage, ToolMessage

    bound = roomy_chat.bind_tools([Weather], tool_choice="Weather")
    called = bound.invoke(QUESTION)
    result = ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])
    answer = roomy_chat.bind_tools([Weather]).invoke([HumanMessage(QUESTION), called, result])
    assert answer.usage_metadata["input_tokens"] > called.usage_metadata["input_tokens"]


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_langchain_gives_structured_output(roomy_chat, method):
    asked = roomy_chat.with_structured_output(Weather, method=method, include_raw=True).invoke(QUESTION)
    if method == "json_mode":  # any object: the schema is a matter of the prompt
        assert asked["raw"].content.startswith("{")
    else:
        assert isinstance(asked["parsed"], Weather)


def test_langchain_speaks_to_responses(langchain, roomy_server):
    options = {"base_url": f"{roomy_server.url}/v1", "api_key": "none", "model": "small", "max_retries": 0}
    chat = langchain.ChatOpenAI(**options, temperature=1, max_tokens=300, use_responses_api=True)
    assert isinstance(chat.with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)
    (call,) = chat.bind_tools([Weather], tool_choice="Weather").invoke(QUESTION).tool_calls
    assert isinstance(Weather(**call["args"]), Weather)
    whole = None
    for chunk in chat.bind_tools([Weather], tool_choice="Weather").stream(QUESTION):
        whole = chunk if whole is None else whole + chunk
    assert isinstance(Weather(**whole.tool_calls[0]["args"]), Weather)


# instructor


class PartialWeather(BaseModel):
    """The weather of a day."""

    model_config = ConfigDict(extra="forbid")

    day: Literal["today", "tomorrow"]


@pytest.fixture(scope="module")
def instructor():
    return pytest.importorskip("instructor", reason=INSTRUCTOR_NEEDED)


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor_gives_pydantic_objects(instructor, roomy_client, mode):
    client = instructor.from_openai(roomy_client, mode=getattr(instructor.Mode, mode))
    asked = {"model": "small", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300}
    found = client.chat.completions.create(**asked, response_model=Weather, max_retries=0)
    assert isinstance(found, Weather)


def test_instructor_fills_a_partial_object_as_its_arguments_come(instructor, roomy_client):
    client = instructor.from_openai(roomy_client, mode=instructor.Mode.TOOLS)
    asked = {"model": "small", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 300, "seed": 5}
    parts = list(client.chat.completions.create_partial(**asked, response_model=PartialWeather, max_retries=0))
    days = [part.day for part in parts]
    assert days[0] is None and days[-1] in ("today", "tomorrow")
    whole = client.chat.completions.create(**asked, response_model=PartialWeather, max_retries=0)
    assert parts[-1].model_dump() == whole.model_dump()


# llama-index


def test_llama_indexs_agent_calls_a_function_with_its_arguments(like, roomy_server):
    from llama_index.core.agent.workflow import FunctionAgent
    from llama_index.core.tools import FunctionTool

    called = []

    def weather(city: str, day: Literal["today", "tomorrow"]) -> str:
        """The weather of a place."""
        called.append((city, day))
        return "sunny"

    options = {"api_base": f"{roomy_server.url}/v1", "api_key": "none", "max_retries": 0, "context_window": 4096}
    options |= {"is_chat_model": True, "is_function_calling_model": True, "temperature": 1, "max_tokens": 300}
    required = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 3}
    tool = FunctionTool.from_defaults(weather, return_direct=True, fn_schema=Weather)
    agent = FunctionAgent(tools=[tool], llm=like(**options, model="small", additional_kwargs=required))

    async def run() -> str:
        return str(await agent.run(QUESTION))

    assert "sunny" in asyncio.run(run())
    ((city, day),) = called
    assert len(city) <= 4 and day in ("today", "tomorrow")


@pytest.fixture(scope="module")
def like():
    name = "llama_index.llms.openai_like"
    return pytest.importorskip(name, reason="needs llama-index: pip install llama-index-llms-openai-like").OpenAILike


@pytest.fixture
def llama_options(server) -> dict:
    return {"api_base": f"{server.url}/v1", "api_key": "none", "max_retries": 0}


@pytest.fixture
def llama_chat(like, llama_options):
    return like(**llama_options, model="small", is_chat_model=True, temperature=0, max_tokens=8, context_window=512)


def test_llama_index_chat_says_the_same_whole_streamed_and_async(llama_chat, said):
    from llama_index.core.llms import ChatMessage

    messages = [ChatMessage(role="user", content=QUESTION)]
    assert llama_chat.chat(messages).message.content == said
    assert "".join(part.delta or "" for part in llama_chat.stream_chat(messages)) == said
    assert asyncio.run(llama_chat.achat(messages)).message.content == said


def test_llama_index_completion_answers_whole_and_streamed(like, llama_options):
    model = like(**llama_options, model="small", is_chat_model=False, temperature=0, max_tokens=8)
    assert model.complete("Once upon").text == "".join(part.delta for part in model.stream_complete("Once upon"))


def test_llama_index_embeddings_are_the_librarys(llama_options, library):
    module = pytest.importorskip(
        "llama_index.embeddings.openai", reason="needs llama-index: pip install llama-index-embeddings-openai"
    )
    model = module.OpenAIEmbedding(**llama_options, model_name="small")
    assert np.allclose(model.get_text_embedding("a fox"), library.embed("a fox")[0], atol=0)
    assert len(model.get_text_embedding_batch(["a fox", "x"])) == 2
