"""A frontend-language program over recurring passages: `python frontend_program.py URL`.

The two branches of the fork and the second run reuse the chunks of the first.
"""

import sys

import sglang as sgl

from sglang_ext.lang import PicRuntimeEndpoint, chunk, pic_gen, pic_report

PASSAGES = {
    "tides": "Tides are caused by the pull of the moon and the sun on the sea. " * 6,
    "bees": "Honey bees tell each other where flowers are by dancing in the hive. " * 6,
    "iron": "Iron rusts when it meets oxygen and water, which is why ships are painted. " * 6,
}


@sgl.function
def answer(s, names, question):
    """Answer a question from passages, then say it in two ways."""
    s += "Answer from the passages.\n"
    for name in names:
        s += chunk(PASSAGES[name])
    s += chunk(f"Question: {question}\nAnswer:")
    s += pic_gen("answer", max_tokens=16, temperature=0, pic_n_avg=8)
    branches = s.fork(2)
    for branch, style in zip(branches, ("short", "long"), strict=True):
        branch += chunk(f"\nNow in a {style} sentence:")
        branch += pic_gen("again", max_tokens=16, temperature=0, pic_store="none")
    s["reports"] = [pic_report(branch, "again") for branch in branches]


def main(url: str) -> None:
    """Run the program twice over the same passages in another order."""
    backend = PicRuntimeEndpoint(url, pic_namespace="examples")
    for names in (["tides", "bees", "iron"], ["iron", "tides", "bees"]):
        state = answer.run(names=names, question="What moves the sea?", backend=backend)
        report = pic_report(state, "answer")
        print(report["outcome"], report["reused_tokens"] + report["recomputed_tokens"])


if __name__ == "__main__":
    main(sys.argv[1])
