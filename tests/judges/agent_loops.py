"""Observations of agents by pydantic-ai and by LangGraph: a question, a tool that they call, and the answer behind it.

`asked.json` has the question and the tool's `result`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from observing import place, write
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

WHERE = place()
ASKED = WHERE.asked
OPENAI = OpenAIProvider(base_url=f"{WHERE.url}/v1", api_key="none")


class Weather:
    """The tool, which notes how it was called."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, city: str, days: int) -> str:
        self.calls.append({"city": city, "days": days})
        return str(ASKED["result"])


def by_pydantic_ai(model: Any, *, is_stream: bool = False) -> dict[str, Any]:
    noted = Weather()
    agent = Agent(model)

    @agent.tool_plain
    def weather(city: str, days: int) -> str:
        """Tell the weather."""
        return noted(city, days)

    async def streamed() -> str:
        async with agent.run_stream(ASKED["question"]) as run:
            return "".join([piece async for piece in run.stream_text(delta=True)])

    answer = asyncio.run(streamed()) if is_stream else agent.run_sync(ASKED["question"]).output
    return {"answer": answer, "calls": noted.calls}


def by_langgraph() -> dict[str, Any]:
    noted = Weather()

    @tool
    def weather(city: str, days: int) -> str:
        """Tell the weather."""
        return noted(city, days)

    model = ChatOpenAI(model="chatty", base_url=f"{WHERE.url}/v1", api_key="none")
    state = create_agent(model, [weather]).invoke({"messages": [("user", ASKED["question"])]})
    return {"answer": state["messages"][-1].content, "calls": noted.calls}


def observations() -> Iterator[tuple[str, Callable[[], Any]]]:
    chat = OpenAIChatModel("chatty", provider=OPENAI)
    yield "pydantic_ai_chat", lambda: by_pydantic_ai(chat)
    yield "pydantic_ai_chat_stream", lambda: by_pydantic_ai(chat, is_stream=True)
    yield "pydantic_ai_responses", lambda: by_pydantic_ai(OpenAIResponsesModel("chatty", provider=OPENAI))
    anthropic = AnthropicModel("chatty", provider=AnthropicProvider(base_url=WHERE.url, api_key="none"))
    yield "pydantic_ai_anthropic", lambda: by_pydantic_ai(anthropic)
    yield "langgraph", by_langgraph


if __name__ == "__main__":
    write(WHERE, observations())
