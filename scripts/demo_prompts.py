"""The prompts of the demos, and how one is sent with PIC and without.

Knows what a request of each kind looks like. Does not know which servers there are, or what is
shown. A plain request (`pic: false`) is split and tokenized like its partner and has SGLang's own
prefix cache, under an `extra_key`, so that no PIC request finds its own prompt there.
"""

from __future__ import annotations

from itertools import islice

from sglang_ext.scripts.server import Client, Result, load_encoder
from sglang_ext.scripts.workload import Passage, Prompt, cut_passages, python_topics

DELIMITER = "<|chunk|>"
N_AVG = 16
PASSAGE_TOKENS = (200, 260)
PROMPT_PASSAGES = (5, 16)
NEW_TOKENS = 8
SEED = 7
OPTIONS = ("--enable-pic", "--pic-delimiter", DELIMITER, "--pic-n-avg", str(N_AVG))
"""Of every server of a demo."""


def draw_passages(model: str, num_passages: int) -> list[Passage]:
    """Passages of Python's documentation, the same each time.

    Raises:
        ServerFailed: There is no model folder with a tokenizer.
    """
    encode = load_encoder(model)
    cut = cut_passages(python_topics(), lambda text: len(encode(text)), *PASSAGE_TOKENS)
    return list(islice(cut, num_passages))


def send_plain(client: Client, prompt: Prompt) -> Result:
    """The answer without PIC; raises `ServerFailed`."""
    params = {"pic": False}
    text = DELIMITER.join(prompt.chunks)
    return client.generate(text, params, extra_key="plain", max_new_tokens=NEW_TOKENS)


def send_pic(client: Client, prompt: Prompt) -> Result:
    """The answer with PIC; raises `ServerFailed`."""
    return client.generate(DELIMITER.join(prompt.chunks), max_new_tokens=NEW_TOKENS)


def send_pair(client: Client, prompt: Prompt, *, pic_first: bool) -> tuple[Result, Result]:
    """Answers without and with PIC; raises `ServerFailed`."""
    if pic_first:
        pic = send_pic(client, prompt)
        return send_plain(client, prompt), pic
    return send_plain(client, prompt), send_pic(client, prompt)
