"""An agent loop with tools whose system prompt changes in the middle: `python agent_loop.py URL`.

The system prompt is instructions, the current state, and a long manual. The state changes every
step, so a prefix cache would lose the manual; as content parts it is reused wherever it stands.
"""

import json
import sys

import openai

INSTRUCTIONS = "You run a small warehouse. Use the tools. Be brief."
MANUAL = "Every delivery is counted, written down and put on the shelf of its kind. " * 25
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "count",
            "description": "How many pieces of an article are on the shelf.",
            "parameters": {"type": "object", "properties": {"article": {"type": "string"}}},
        },
    }
]
STOCK = {"bolts": 12, "nuts": 30, "washers": 7}


def run_step(client: openai.OpenAI, state: str, history: list[dict]) -> dict:
    """One call of the model; returns what PIC did."""
    system = [{"type": "text", "text": text} for text in (INSTRUCTIONS, state, MANUAL)]
    answer = client.chat.completions.create(
        model="default",
        messages=[{"role": "system", "content": system}, *history],
        tools=TOOLS,
        max_tokens=24,
        temperature=0,
        extra_body={"return_meta_info": True, "custom_params": {"pic_n_avg": 8}},
    )
    choice = answer.choices[0]
    history.append({"role": "assistant", "content": choice.message.content or "..."})
    return choice.model_dump()["meta_info"]["pic"]


def main(url: str) -> None:
    """Three steps, each with another state."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    history = [{"role": "user", "content": "Is there enough of everything?"}]
    for step, (article, number) in enumerate(STOCK.items()):
        report = run_step(client, f"State: step {step}, shelf {article}.", history)
        hits = report["exact_tokens"] + report["reused_tokens"] + report["recomputed_tokens"]
        print(f"step {step}: {hits} of {report['prompt_tokens']} tokens were there")
        history.append({"role": "user", "content": json.dumps({article: number})})


if __name__ == "__main__":
    main(sys.argv[1])
