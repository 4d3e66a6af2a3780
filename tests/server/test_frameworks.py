"""LangChain's and llama-index's own OpenAI classes, unmodified.

llama-index is not among the development requirements: it brings 115 MB and wants an older `openai` than the others.
"""

import asyncio

import numpy as np
import pytest

from forge import LLM

QUESTION = "Tell me a story."


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


def test_langchain_tools_are_refused_as_its_typed_exception(langchain_chat):
    import openai

    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(openai.BadRequestError, match="tools"):
        langchain_chat.bind_tools([tool]).invoke(QUESTION)


# llama-index


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
