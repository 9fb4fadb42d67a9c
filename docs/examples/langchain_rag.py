"""LangChain over a PIC server, through its OpenAI client: `python langchain_rag.py URL`."""

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI

PASSAGES = [
    "Salt lowers the freezing point of water, so it is strewn on icy roads. " * 5,
    "Yeast turns sugar into gas and alcohol, which makes dough rise. " * 5,
    "Lightning is hotter than the surface of the sun for a moment. " * 5,
]


def main(url: str) -> None:
    """Ask twice over the same passages in another order."""
    model = ChatOpenAI(
        model="default",
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=8,
        extra_body={"custom_params": {"pic_namespace": "langchain", "pic_n_avg": 8}},
    )
    for order in (PASSAGES, PASSAGES[::-1]):
        parts = [{"type": "text", "text": text} for text in [*order, "What makes dough rise?"]]
        answer = model.invoke([SystemMessage("Answer briefly."), HumanMessage(content=parts)])
        print(answer.content.strip() or "(nothing)")


if __name__ == "__main__":
    main(sys.argv[1])
