"""A small multi-tenant RAG service: FastAPI, retrieval over local files, chunks as content parts.

    python rag_service.py --documents FOLDER --server http://localhost:30000 --port 8000

FOLDER holds one folder of text files a tenant. The tenant comes from a header that a gateway sets,
and becomes the namespace: one tenant's chunks are invisible to the others.
"""

import argparse
import re
from collections import Counter
from pathlib import Path

import openai
import uvicorn
from fastapi import FastAPI, Header, HTTPException
from pydantic import BaseModel

SYSTEM = "Answer from the passages. Say so if they do not contain the answer."
PASSAGE_CHARS = 600
NUM_PASSAGES = 3


class Question(BaseModel):
    """What a user asks."""

    question: str


class Passages:
    """A tenant's files in passages, ranked by the words they share with a question."""

    def __init__(self, folder: Path) -> None:
        texts = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
        self._passages = [
            text[start : start + PASSAGE_CHARS]
            for text in texts
            for start in range(0, len(text), PASSAGE_CHARS)
        ]

    def find(self, question: str) -> list[str]:
        """The passages that fit best."""
        asked = _words(question)
        ranked = sorted(self._passages, key=lambda p: -sum((asked & _words(p)).values()))
        return ranked[:NUM_PASSAGES]


def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def make_app(documents: Path, server: str) -> FastAPI:
    """The service over one SGLang server."""
    app = FastAPI()
    client = openai.AsyncOpenAI(base_url=f"{server}/v1", api_key="none")
    tenants = {folder.name: Passages(folder) for folder in documents.iterdir() if folder.is_dir()}

    @app.post("/ask")
    async def ask(asked: Question, x_tenant: str = Header()) -> dict[str, object]:
        if x_tenant not in tenants:
            raise HTTPException(404, f"no tenant {x_tenant!r}")
        texts = [*tenants[x_tenant].find(asked.question), f"Question: {asked.question}"]
        answer = await client.chat.completions.create(
            model="default",
            messages=[
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": [{"type": "text", "text": text} for text in texts]},
            ],
            max_tokens=48,
            temperature=0,
            extra_body={
                "return_meta_info": True,
                "custom_params": {"pic_namespace": x_tenant, "pic_n_avg": 16},
            },
        )
        choice = answer.choices[0]
        return {"answer": choice.message.content, "pic": choice.model_dump()["meta_info"]["pic"]}

    return app


def main() -> None:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=Path, required=True)
    parser.add_argument("--server", default="http://localhost:30000")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(make_app(args.documents, args.server), port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
